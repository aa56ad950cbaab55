"""Speed of steps, tokenization and the command line."""

"""Speed of optimizer steps, tokenization and the start of the command line."""

"""Text and figures for loggers, files and the terminal."""

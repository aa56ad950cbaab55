"""Ends of a run: signals, failed ranks and lost nodes."""

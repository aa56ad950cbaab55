"""Controlled end of a run after signals, failed ranks and lost nodes."""

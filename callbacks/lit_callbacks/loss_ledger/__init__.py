"""Losses of single samples over a run."""

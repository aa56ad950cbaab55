"""Isolation of the samples of a packed batch: none of them influences the results of another."""

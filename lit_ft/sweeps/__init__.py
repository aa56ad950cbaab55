"""Sweeps: the options of each trial, its process and its result."""

"""Attention over packed batches: within each sample, with sliding windows and attention sinks."""

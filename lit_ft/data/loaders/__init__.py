"""Tokenized samples to packed batches of each rank."""

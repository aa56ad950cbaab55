"""Tensors that a strategy has sharded: full weights, and norms of gradients."""

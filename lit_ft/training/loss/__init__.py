"""Forward pass over packed batches, and the losses of its tokens."""

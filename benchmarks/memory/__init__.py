"""Memory of optimizers, quantized bases and sharded models."""

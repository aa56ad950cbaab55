"""Memory of optimizer states, quantized base models and sharded models."""

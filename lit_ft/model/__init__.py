"""Base model: loading, quantization, and its computation on packed batches."""

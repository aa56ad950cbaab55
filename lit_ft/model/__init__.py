"""The base model: loading, quantization, and how its parts compute on packed batches."""

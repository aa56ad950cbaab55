"""The data path, from files to packed batches: sources, formats, rendering, samples, batching, text_data."""

"""Formats of checkpoints: Hugging Face folders, and Megatron's legacy and ``torch_dist`` formats."""

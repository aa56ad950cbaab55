"""Conversion of model checkpoints between Hugging Face and Megatron-Core, on a CPU."""

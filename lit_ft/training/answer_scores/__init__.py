"""Callbacks that score answers to held-out prompts before and after training."""

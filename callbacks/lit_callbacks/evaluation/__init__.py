"""Evaluation during training, without side effects on training."""

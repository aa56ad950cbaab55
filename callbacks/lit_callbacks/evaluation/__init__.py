"""Evaluation in the middle of training, without side effects on it."""

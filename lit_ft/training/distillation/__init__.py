"""Distillation: a model learns the probabilities of another one."""

"""Checkpoints that survive kills and damage, and runs that are resumed from them."""

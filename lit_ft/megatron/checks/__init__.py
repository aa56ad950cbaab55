"""Verification of a conversion: bit by bit, and by logits."""

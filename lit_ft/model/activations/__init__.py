"""Activations between the forward and the backward pass: recomputed, or kept in host memory."""

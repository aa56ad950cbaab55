"""Decoder layers as graphs of torch.compile: how they are compiled, and attention as an operator in them."""

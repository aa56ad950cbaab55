"""Runners of the contestants, each for its own environment; of the peers, only ``bare_loop`` needs lit_ft."""

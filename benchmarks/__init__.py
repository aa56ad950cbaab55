"""Benchmarks behind the figures in the docs; each figure comes from a command here."""

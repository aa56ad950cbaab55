"""Checkpoints on the disk: formats, checksums and atomic replacement."""

"""Checkpoints: atomic writes, checksums, selection of the newest good one, and resumption of runs."""

"""Checkpoints that survive kills and damage: atomic replacement, checksums, and the newest good one."""

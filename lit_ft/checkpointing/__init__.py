"""Checkpoints that survive kills and damage, and runs that go on from one as if they had not stopped."""

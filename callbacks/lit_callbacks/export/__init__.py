"""Adapters and merged models written by a callback."""

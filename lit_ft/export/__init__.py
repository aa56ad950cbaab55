"""Adapters and merged models as Hugging Face folders."""

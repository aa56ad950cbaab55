"""Answers of a trained model after the run: opening it, one conversation, streamed text."""

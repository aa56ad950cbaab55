"""Commands that answer with a trained model."""

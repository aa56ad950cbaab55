"""Policy optimization: the model trains on answers that it gives itself, by rewards of them."""

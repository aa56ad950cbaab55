"""Full weights and gradient norms of models that a strategy has sharded."""

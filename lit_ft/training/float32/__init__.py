"""What is computed in float32 whatever the precision of a run."""

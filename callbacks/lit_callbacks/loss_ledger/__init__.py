"""Per-sample losses over a run."""

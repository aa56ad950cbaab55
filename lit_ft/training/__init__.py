"""What happens in the steps of a run."""

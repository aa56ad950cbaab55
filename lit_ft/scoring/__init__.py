"""Scores of a trained model beside its base: tasks of lm-evaluation-harness, held-out data, a judge."""

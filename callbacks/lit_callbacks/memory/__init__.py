"""Memory of a run by phase and purpose."""

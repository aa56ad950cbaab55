"""Memory by phase and purpose."""

"""A run: its folder, the lock on the folder, and its processes."""

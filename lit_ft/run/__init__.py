"""One run: its folder, the lock on the folder, and the processes that are started for it."""

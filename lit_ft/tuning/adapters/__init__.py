"""Files of adapters: those that a run writes, and those that it goes on with."""

"""Cost of a parallel layout, computed without processes: memory, communication, and the pipeline's timeline."""

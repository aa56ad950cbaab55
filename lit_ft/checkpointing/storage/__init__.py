"""Storage of checkpoints on disk: formats, checksums and atomic replacement."""

"""Text segments to token ids and labels, cached on the disk."""

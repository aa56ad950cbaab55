"""Cost of parallel layouts: pipeline bubbles, bytes sent, memory and overhead."""

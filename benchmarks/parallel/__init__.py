"""Costs of parallel layouts: pipeline bubbles, bytes sent, memory and overhead."""

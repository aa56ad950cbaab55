"""Throughput: tokens per second, FLOPs and the time of each part of a step."""

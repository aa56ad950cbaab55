"""Throughput: tokens per second, FLOPs and where a step's time goes."""

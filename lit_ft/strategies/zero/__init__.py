"""DeepSpeed's ZeRO: the configuration, and the state of its flat partitions."""

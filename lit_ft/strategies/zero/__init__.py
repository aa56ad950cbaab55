"""DeepSpeed's ZeRO: checks of its configuration, and conversion of its flat partitions to full tensors."""

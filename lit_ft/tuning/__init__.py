"""Tuning methods: PEFT adapters around the base model, and full fine-tuning."""

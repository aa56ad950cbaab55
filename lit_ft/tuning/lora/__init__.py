"""LoRA as lit_ft computes it: on linear layers (`fused_lora`) and on fused experts (`expert_lora`)."""

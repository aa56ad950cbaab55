"""GGUF files of merged models and LoRA adapters, for llama.cpp and Ollama."""

from typing import Literal

WeightType = Literal["f32", "f16", "bf16", "q8_0"]
"""Types of weights in GGUF files: 32, 16, 16 and 8 bits."""

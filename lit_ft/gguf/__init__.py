"""GGUF files of merged models and LoRA adapters, for llama.cpp and Ollama."""

"""Model folders with changed weights, untied output heads or fewer layers."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def untied(model_folder: str, folder: Path) -> str:
    """Write the test model with an untied output head."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0).clone())
    model.config.tie_word_embeddings = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return str(folder)


def shallow(model_folder: Path, folder: Path, layers: int) -> str:
    """Write a model without its upper layers, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    del model.model.layers[layers:]
    model.config.num_hidden_layers = layers
    model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return str(folder)


def change(folder: Path, name: str = "model.layers.1.self_attn.v_proj.bias") -> None:
    """Change one small tensor of a base model, as training would."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 1e-3
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

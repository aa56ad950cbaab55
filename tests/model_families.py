"""Tiny models of the families that recipes are for, each with the published chat template, special tokens and ends.

The templates (``tests/data/chat_templates``) are those of the models that the recipes name, letter by letter, as far as
public copies show them: TRL 1.16.0 for qwen3, qwen3_5 (0.8B and 2B), llama3 (3.2), gemma3 and gpt_oss, its repository
for mistral (7B Instruct v0.3), llama.cpp's tests for deepseek_moe (DeepSeek-V2-Lite-Chat).
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from shared_fixtures import make_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForCausalLM

TEMPLATES = Path(__file__).parent / "data" / "chat_templates"
CHAT = [
    {"role": "system", "content": "the cup is red"},
    {"role": "user", "content": "红 book"},
    {"role": "assistant", "content": "a lamp"},
    {"role": "user", "content": "under"},
    {"role": "assistant", "content": "the <绿> cup 😀\n\nis blue"},
]
"""Conversation with a system prompt, two languages, and text that looks like markup."""


class Family(NamedTuple):
    """Architecture of a family and its tokens."""

    architecture: str
    config: dict[str, Any]
    special: str
    eos: str
    """The tokenizer's end-of-sequence token."""
    ends: str
    """Tokens that end an answer, by generation_config.json."""
    bos: str | None = None
    """Token that the tokenizer puts before a text, in addition to the one that the template writes."""


CHATML = "<|endoftext|> <|im_start|> <|im_end|>"
MOE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen3": Family("qwen3", {"head_dim": 12}, CHATML, "<|im_end|>", "<|im_end|> <|endoftext|>"),
    "qwen3_5": Family(
        "qwen3_5_text",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        CHATML,
        "<|im_end|>",
        "<|im_end|> <|endoftext|>",
    ),
    "llama3": Family(
        "llama",
        {},
        "<|begin_of_text|> <|end_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|>",
        "<|eot_id|>",
        "<|end_of_text|> <|eom_id|> <|eot_id|>",
        "<|begin_of_text|>",
    ),
    "gemma3": Family(
        "gemma3_text",
        {"head_dim": 12, "sliding_window": 16, "query_pre_attn_scalar": 12, "layer_types": None},
        "<bos> <eos> <start_of_turn> <end_of_turn>",
        "<eos>",
        "<eos> <end_of_turn>",
        "<bos>",
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {"head_dim": 12, "sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "<|startoftext|> <|endoftext|> <|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
        "<|return|>",
        "<|return|> <|endoftext|> <|call|>",
    ),
    "mistral": Family(
        "mistral",
        {"head_dim": 12, "sliding_window": None},
        "<s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS]",
        "</s>",
        "</s>",
        "<s>",
    ),
    "deepseek_moe": Family(
        "deepseek_v2",
        {
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **MOE,
        },
        "<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜begin▁of▁sentence｜>",
    ),
}
COMMON: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "dtype": "float32",
}


def family_tokenizer(name: str) -> Any:
    """Tokenizer with a family's special tokens and chat template."""
    family, tokenizer = FAMILIES[name], make_tokenizer()
    tokenizer.add_tokens(family.special.split(), special_tokens=True)
    tokenizer.eos_token = family.eos
    if family.bos is not None:
        tokenizer.bos_token = family.bos
        pair = (family.bos, tokenizer.convert_tokens_to_ids(family.bos))
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{family.bos} $A", pair=f"{family.bos} $A $B", special_tokens=[pair]
        )
    tokenizer.chat_template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def save_family(name: str, folder: Path) -> str:
    """Write a tiny model of a family with its tokenizer; returns the folder."""
    family, tokenizer = FAMILIES[name], family_tokenizer(name)
    ids = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.bos_token_id}
    ends = tokenizer.convert_tokens_to_ids(family.ends.split())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family.architecture, **{**COMMON, **ids, "eos_token_id": ends, **family.config})
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)

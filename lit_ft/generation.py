"""Greedy answers from a model that trains on packed rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lit_callbacks.gather import is_split
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.attention import PACKED


@contextmanager
def dense_attention(model: PreTrainedModel) -> Iterator[None]:
    """Padded batches and a KV cache instead of packed rows."""
    training = model.config._attn_implementation
    model.set_attn_implementation("sdpa" if training == PACKED else training)
    try:
        yield
    finally:
        model.set_attn_implementation(training)


@torch.no_grad()
def generate_answers(
    model: Any,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
) -> list[str]:
    """Answer prompts greedily, as one left-padded batch.

    Args:
        model: what generates: ``base`` or the PEFT model around it.
        base: the Hugging Face model.
        tokenizer: with a padding or end-of-sequence token.
        prompts: rendered, the opening of the assistant's turn included.
        max_new_tokens: most tokens of an answer.
    """
    lockstep = is_split(base)
    if not prompts and not lockstep:
        return []
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # A rank without prompts answers one that nobody asked: the others need its share of the weights.
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts or ["."]]
    longest = max(map(len, encoded))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in encoded], device=base.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded], device=base.device)
    was_training = model.training
    model.eval()
    with dense_attention(base):
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad_token_id,
            synced_gpus=lockstep,
        )
    model.train(was_training)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated[: len(prompts), longest:]]

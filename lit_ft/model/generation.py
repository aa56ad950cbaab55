"""Greedy generation with a model that trains on packed batches."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lit_callbacks.distributed.gather import is_split
from peft import PeftModel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import attention_implementation
from lit_ft.model.packed_attention import PACKED
from lit_ft.model.render_limits import render_chat


@contextmanager
def dense_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model takes padded batches and a KV cache instead of packed batches."""
    training = attention_implementation(model.config)
    model.set_attn_implementation("sdpa" if training == PACKED else training)
    try:
        yield
    finally:
        model.set_attn_implementation(training)


@contextmanager
def greedy_decoding(model: PreTrainedModel, stops: Sequence[int], pad_token_id: int | None) -> Iterator[None]:
    """Context of greedy decoding, without any sampling, penalty or constraint of the model's ``generation_config``.

    Args:
        model: Hugging Face model; its ``generation_config`` is replaced, because ``generate`` takes from it all values
            that its caller does not set.
        stops: token ids that end an answer.
        pad_token_id: token id that fills answers which end before others.
    """
    given = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=list(stops) or None, pad_token_id=pad_token_id, use_cache=given.use_cache
    )
    try:
        yield
    finally:
        model.generation_config = given


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids that end an answer: end tokens of model and tokenizer, and those that close a chat template's turn.

    A base model's own end token may never follow a turn of a conversation, because the template uses another one.
    """
    given = model.generation_config.eos_token_id
    stops = [given] if isinstance(given, int) else list(given or [])
    stops += [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*stops, *tokenizer.convert_tokens_to_ids(closing_tokens(tokenizer))]))


def closing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Special tokens that the chat template writes right after an answer; empty without a chat template."""
    if not tokenizer.chat_template:
        return []
    answer = "probe answer"
    turns = [{"role": "user", "content": "probe question"}, {"role": "assistant", "content": answer}]
    try:
        closing = render_chat(tokenizer, turns).rpartition(answer)[2]
    except RecipeError:
        raise
    except Exception:  # a foreign template may raise anything: then the end of its answers is unknown
        return []
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    one = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    run = re.match(rf"\s*((?:{one})+)", closing)
    return re.findall(one, run.group(1)) if run else []


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel | PeftModel,
    base: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    max_new_tokens: int,
) -> list[str]:
    """Answer prompts greedily, as one left-padded batch; an answer ends at any of ``stop_ids``.

    Args:
        model: model that generates: ``base``, or the PEFT model around it.
        base: Hugging Face model.
        tokenizer: tokenizer with a padding or end-of-sequence token.
        prompts: rendered prompts, with special tokens as text and the opening of the assistant's turn.
        max_new_tokens: largest number of tokens of an answer.
    """
    lockstep = is_split(base)
    if not prompts and not lockstep:
        return []
    pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # A rank without prompts answers a dummy prompt: the other ranks need its shards of the weights.
    encoded = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts or ["."]]
    longest = max(map(len, encoded))
    input_ids = torch.tensor([[pad_token_id] * (longest - len(ids)) + ids for ids in encoded], device=base.device)
    mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in encoded], device=base.device)
    was_training = model.training
    model.eval()
    with dense_attention(base), greedy_decoding(base, stop_ids(base, tokenizer), pad_token_id):
        generated = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            synced_gpus=lockstep,
        )
    model.train(was_training)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in generated[: len(prompts), longest:]]

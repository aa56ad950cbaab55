"""Answers generated together: the tokens of each alone, also where the KV cache holds one of them at a time."""

import asyncio
from dataclasses import replace

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import GenerationConfig, LogitsProcessor, MambaConfig, MambaForCausalLM, Qwen2Config

from lit_ft.inference.continuous_batching import (
    BatchedEngine,
    Generation,
    batching_obstacle,
    cache_tokens_in,
    score,
    start_engine,
)
from lit_ft.inference.opening import OpenedModel, open_model
from lit_ft.inference.text_stream import Decoding, stream_answer
from lit_ft.inference.token_choice import TokenChoice, TokenLogprob

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def opened(model_folder: str) -> OpenedModel:
    return open_model(model_folder)


async def answers(
    engine: BatchedEngine, asked: list[tuple[list[int], int]], seed: int | None = None
) -> list[list[int]]:
    async def answer(name: int, prompt: list[int], count: int) -> list[int]:
        temperature = 0 if seed is None else 1.5
        config = Decoding(count, temperature).generation_config(engine.opened)
        choice = TokenChoice(prompt, config, seed, None)
        generation = Generation(f"{seed}-{name}-{len(asked)}", prompt, count, [], choice)
        engine.submit(generation)
        return [token async for tokens in generation.tokens() for token in tokens]

    return list(await asyncio.gather(*(answer(i, *one) for i, one in enumerate(asked))))


def test_answers_wait_or_begin_again_where_the_cache_is_full(opened: OpenedModel, model_folder: str) -> None:
    engine = start_engine(open_model(model_folder), cache_tokens=288, max_requests=8)
    assert isinstance(engine, BatchedEngine)
    try:
        asked = [([5 + i] * count, 240 - count) for i, count in enumerate((200, 20, 130, 8))]
        together = asyncio.run(answers(engine, asked))
        drawn = asyncio.run(answers(engine, asked, seed=3))
        assert asyncio.run(answers(engine, asked[:1], seed=3)) == drawn[:1]
        assert engine.is_alive()
    finally:
        engine.stop()
    assert [len(one) for one in together] == [40, 220, 110, 232]
    for (prompt, count), got in zip(asked, together, strict=True):
        logits = opened.model(input_ids=torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == got
        assert count == len(got)


def test_scores_are_those_of_the_model(opened: OpenedModel) -> None:
    ids = [5, 9, 40, 7]
    logprobs = opened.model(input_ids=torch.tensor([ids])).logits[0].detach().log_softmax(-1)
    found = score(opened, ids, 2)
    assert [one.id for one in found] == ids[1:]
    assert [one.logprob for one in found] == pytest.approx([float(logprobs[i, t]) for i, t in enumerate(ids[1:])])
    assert [one.top[0][0] for one in found] == logprobs[:-1].argmax(-1).tolist()


def test_scores_beside_answers_are_those_without(model_folder: str) -> None:
    engine = start_engine(open_model(model_folder), cache_tokens=512, max_requests=4)
    assert isinstance(engine, BatchedEngine)
    ids = [5, 6, 7, 8] * 6

    async def scores_beside_answers() -> list[list[TokenLogprob]]:
        asked = asyncio.ensure_future(answers(engine, [([5, 6, 7], 180), ([7, 5], 180)]))
        found = []
        while not asked.done():
            found.append(await asyncio.to_thread(score, engine.opened, ids, 1))
        return found

    try:
        alone = score(engine.opened, ids, 1)
        beside = asyncio.run(scores_beside_answers())
    finally:
        engine.stop()
    assert len(beside) > 1
    assert [one for one in beside if one != alone] == []
    assert not hasattr(engine.opened.base.config, "is_causal")
    assert score(engine.opened, ids, 1) == alone


def test_scores_behind_virtual_tokens(model_folder: str) -> None:
    opened = open_model(model_folder)
    virtual = get_peft_model(opened.base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    ids = [5, 9, 40, 7]
    embedded = opened.base.get_input_embeddings()(torch.tensor([ids]))
    whole = torch.cat((virtual.get_prompt(1), embedded), 1)
    logprobs = opened.base(inputs_embeds=whole).logits[0, 3:].detach().log_softmax(-1)
    found = score(replace(opened, model=virtual), ids, 0)
    assert [one.logprob for one in found] == pytest.approx([float(logprobs[i, t]) for i, t in enumerate(ids[1:])])


def test_a_cache_s_tokens_follow_from_its_bytes(opened: OpenedModel) -> None:
    of_a_token = 2 * 2 * 2 * 12 * 4  # keys and values, layers, heads, head size, bytes
    assert cache_tokens_in(opened, 320 * of_a_token / 2**30) == 320
    assert cache_tokens_in(opened, 319 * of_a_token / 2**30) == 288


def test_a_model_without_heads_has_a_size_too(opened: OpenedModel) -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=16, num_hidden_layers=2, state_size=4))
    assert batching_obstacle(one := replace(opened, model=mamba, base=mamba)) is not None
    assert cache_tokens_in(one, 1) > 0  # which its engine does not ask for


def test_layers_without_attention_are_generated_one_at_a_time(opened: OpenedModel) -> None:
    assert batching_obstacle(opened) is None
    config = opened.base.config
    assert isinstance(config, Qwen2Config)
    given = config.layer_types
    config.layer_types = ["linear_attention", "full_attention"]
    try:
        assert batching_obstacle(opened) == "layers other than attention (linear_attention)"
    finally:
        config.layer_types = given
    opened.base.set_attn_implementation("eager")
    assert batching_obstacle(opened) == "attention is eager"
    opened.base.set_attn_implementation("sdpa")
    assert stream_answer(opened, "red", Decoding(3, 0), lambda _: None).tokens == 3


@pytest.mark.parametrize(
    ("options", "read"),
    [({"do_sample": True, "top_k": 3, "top_p": 0.9}, [0, 0]), ({"repetition_penalty": 1.3}, [4, 5])],
)
def test_the_sequence_is_copied_only_for_steps_that_read_it(options: dict[str, object], read: list[int]) -> None:
    class Reader(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            lengths.append(input_ids.shape[1])
            return scores

    lengths: list[int] = []
    choice = TokenChoice([5, 6, 7, 5], GenerationConfig(**options), 0, 2)
    choice._processors.append(Reader())
    scores: torch.FloatTensor = torch.arange(20.0)[None]  # type: ignore[assignment]
    for _ in range(2):
        choice(torch.empty(1, 0, dtype=torch.long), scores)  # type: ignore[arg-type]
    assert lengths == read

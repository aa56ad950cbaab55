"""First tokens that samples of a packed batch share: which they are, and what is computed of them."""

from typing import Any

import numpy as np
import pytest
import torch
from lit_callbacks.throughput.batch_counts import count_batch
from lit_callbacks.throughput.flops import TransformerFlops

from lit_ft import CausalLM
from lit_ft.model.attention.repeated import repeated
from lit_ft.packed_batch import PackedBatch, SharedPrefixes, pack_samples, pad_to_multiple, split

PROMPT = [5, 6, 7, 8]
SAMPLES = [[*PROMPT, 20, 21], [*PROMPT, 20, 22, 23], [5, 6, 30], [40, 41], [40, 41]]


def _arrays(samples: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids) for ids in samples]


def test_tokens_are_computed_where_no_sample_before_has_them() -> None:
    shared = SharedPrefixes.of(_arrays(SAMPLES))
    assert shared is not None
    assert shared.shared == [0, 5, 2, 0, 1]  # of equal samples, the last token is computed for each
    tokens = np.concatenate(_arrays(SAMPLES))
    assert tokens[shared.computed].tolist() == [*PROMPT, 20, 21, 22, 23, 30, 40, 41, 41]
    assert (tokens[shared.computed][shared.places] == tokens).all()
    assert shared.own_lengths == [6, 2, 1, 2, 1]
    # The tokens of a sample are in their order, those that are shared before its own.
    assert shared.places.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 6, 7, 0, 1, 8, 9, 10, 9, 11]


@pytest.mark.parametrize(
    "samples", [[], [[5, 6]], [[5, 6], [7, 8]], [[5], [5]], [[5, 6], []], [[9, *range(10, 30)], [9, *range(30, 50)]]]
)
def test_few_shared_tokens_are_not_worth_it(samples: list[list[int]]) -> None:
    assert SharedPrefixes.of(_arrays(samples)) is None


def _batch() -> PackedBatch:
    generator = np.random.default_rng(0)
    prompt = generator.integers(5, 300, 30)
    answers = [np.concatenate([prompt, generator.integers(5, 300, length)]) for length in (9, 4, 1)]
    return pack_samples([(ids, np.where(np.arange(len(ids)) < 30, -100, ids)) for ids in answers])


def _module(folder: str, **options: Any) -> CausalLM:
    module = CausalLM(folder, dtype="float32", **options)
    module.configure_model()
    return module.eval()


def test_results_are_those_of_all_tokens(model_folder: str) -> None:
    module, shared = _module(model_folder), _batch()
    found = []
    plain = {name: value for name, value in shared.items() if name != "shared_prefixes"}
    for batch in (shared, plain):
        module.zero_grad()
        hidden = module.hidden_states(batch)  # type: ignore[arg-type]
        loss = module.token_loss(hidden, batch).loss_sum  # type: ignore[arg-type]
        loss.backward()
        found.append([hidden, loss, *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
    assert shared["shared_prefixes"].is_used
    for one, all_tokens in zip(*found, strict=True):
        torch.testing.assert_close(one, all_tokens, atol=1e-5, rtol=1e-5)


def test_gradients_of_a_prompt_are_added_up_in_float32(model_folder: str) -> None:
    """In bf16 each of many answers would be rounded into the sum."""
    tokens = torch.ones(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    repeated(tokens, torch.tensor([0, 1] + [0] * 1000), 2).sum().backward()
    assert tokens.grad is not None
    assert tokens.grad.flatten().tolist() == [1000.0, 1.0]


@pytest.mark.parametrize("options", [{"neftune_alpha": 5.0}, {"compile": True}, {"attn_implementation": "sdpa"}])
def test_where_each_sample_must_be_seen_all_tokens_are_computed(model_folder: str, options: dict[str, Any]) -> None:
    assert not _module(model_folder, **options)._packed.shares_tokens
    assert _module(model_folder)._packed.shares_tokens


def test_parts_of_a_batch_share_nothing() -> None:
    batch = _batch()
    assert not any("shared_prefixes" in part for part in split(batch, 2))
    tokens = batch["input_ids"].numel()
    for multiple in (tokens, tokens - 1):  # ranks get equal parts of the tokens
        assert "shared_prefixes" not in pad_to_multiple(batch, multiple)
    assert "shared_prefixes" in pad_to_multiple(batch, 1)


def test_flops_are_those_of_computed_tokens(model_folder: str) -> None:
    """Rates of tokens count each sample's own."""
    module, batch = _module(model_folder), _batch()
    formula = TransformerFlops.of(module)
    assert formula is not None
    tokens = batch["input_ids"].numel()
    before = count_batch(batch)
    module(batch)
    counts = count_batch(batch)
    assert before.computed_tokens == before.non_padding_tokens == counts.non_padding_tokens == tokens
    own, lengths = batch["shared_prefixes"].own_lengths, batch["segment_lengths"]
    assert counts.computed_tokens == sum(own) == tokens - 60
    assert counts.pairs(None) == sum(a * b for a, b in zip(own, lengths, strict=True))
    assert counts.pairs(8) == 8 * sum(own)
    assert 0.3 < formula(counts) / formula(before) < 0.6  # type: ignore[operator]

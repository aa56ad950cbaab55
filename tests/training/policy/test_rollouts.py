"""Prompts of a batch of the data, and the batch that trains on answers to them."""

import numpy as np
import pytest
import torch
from lit_callbacks.throughput.batch_counts import BatchCounts, count_batch

from lit_ft import RecipeError
from lit_ft.packed_batch import (
    PackedBatch,
    dummy_batch,
    empty_batch,
    pack_samples,
    split,
    terms_in_batch,
    terms_of_mean,
)
from lit_ft.training.policy.rewards import SampledAnswer
from lit_ft.training.policy.rollouts import Asked, Rollouts, asked_of, batch_of

CPU = torch.device("cpu")


def _batch(*samples: tuple[list[int], list[int]]) -> PackedBatch:
    """Packed batch of samples, each with its tokens and the places of its supervised ones."""
    rows = []
    for ids, supervised in samples:
        labels = np.full(len(ids), -100)
        labels[supervised] = np.array(ids)[supervised]
        rows.append((np.array(ids), labels))
    return pack_samples(rows)


def test_the_last_supervised_run_is_the_known_answer() -> None:
    batch = _batch(
        ([5, 6, 7, 8], [2, 3]),
        ([1, 2, 3, 4, 5, 6, 7], [1 + 1, 5]),  # two answers, and a token behind the last
        ([9, 9, 9], []),
        ([1, 2, 3], [2]),
    )
    found = [(asked.prompt, asked.expected) for asked in asked_of(batch)]
    assert found == [([5, 6], [7, 8]), ([1, 2, 3, 4, 5], [6]), ([1, 2], [3])]


def test_samples_without_a_prompt_are_refused() -> None:
    with pytest.raises(RecipeError, match="supervised from its second token on: it has no prompt"):
        asked_of(_batch(([5, 6, 7], [1, 2])))


def test_seeds_depend_on_sample_step_and_answer_alone() -> None:
    one, same, other = (Asked(prompt, [4], source) for prompt, source in (([1, 2], 0), ([1, 2], 1), ([1, 3], 0)))
    seeds = [asked.seed(step, answer) for asked in (one, other) for step in (0, 1) for answer in (0, 1)]
    assert len(set(seeds)) == 8
    assert same.seed(0, 0) == one.seed(0, 0)


def _rollouts() -> Rollouts:
    asked = [Asked([1, 2], [9], 0), Asked([3], [9], 0)]
    ids = [[4, 5], [6], [7, 7, 7], [8]]
    sampled = [SampledAnswer("", "", "", len(one), "length" if len(one) > 2 else "stop") for one in ids]
    total = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    return Rollouts(asked, ids, sampled, total[None], total)


def test_some_of_the_answers_are_taken_in_their_order() -> None:
    rollouts = _rollouts()
    taken = rollouts.take([Asked([3], [9], 4), Asked([1, 2], [9], 5)])
    assert [list(ids) for ids in taken.ids] == [[7, 7, 7], [8], [4, 5], [6]]
    assert [one.source for one in taken.asked] == [4, 5]
    assert taken.total.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert taken.rewards.tolist() == [[[0.0, 0.0], [1.0, 0.0]]]
    assert taken.tokens.tolist() == [[3.0, 1.0], [2.0, 1.0]]
    assert taken.is_cut.tolist() == [[True, False], [False, False]]


def test_batch_of_answers() -> None:
    given = _batch(([1, 2, 9], [2]), ([3, 9], [1]))
    batch = batch_of(_rollouts(), torch.tensor([[0.5, -1.0], [0.0, 0.25]]), given, CPU, terms=4)
    assert batch["input_ids"].tolist() == [[1, 2, 4, 5, 1, 2, 6, 3, 8]]
    assert batch["targets"].tolist() == [4, 5, 6, 8]
    assert batch["target_weights"].tolist() == [0.5, 0.5, -1.0, 0.25]
    assert terms_of_mean(batch) == 4  # also the answer that is not in it
    assert terms_in_batch(batch) == 3  # without it: a router's loss is that of these tokens
    parts = split(batch, 4)
    assert [part["target_weights"].tolist() for part in parts] == [[0.5, 0.5], [-1.0], [0.25], []]
    assert [part["targets"].tolist() for part in parts] == [[4, 5], [6], [8], []]


def test_batch_of_answers_with_a_divergence() -> None:
    """It holds all that differ from the reference, also those of no advantage."""
    given = _batch(([1, 2, 9], [2]), ([3, 9], [1]))
    kl_weights = torch.tensor([[0.1, 0.1], [0.1, 0.0]])
    batch = batch_of(_rollouts(), torch.tensor([[0.5, -1.0], [0.0, 0.0]]), given, CPU, 4, kl_weights)
    assert batch["targets"].tolist() == [4, 5, 6, 7, 7, 7]
    assert batch["target_weights"].tolist() == [0.5, 0.5, -1.0, 0.0, 0.0, 0.0]
    torch.testing.assert_close(batch["target_kl_weights"], torch.full((6,), 0.1))


def test_a_batch_without_a_signal_computes_next_to_nothing() -> None:
    given = _batch(([1, 2, 9], [2]), ([3, 9], [1]))
    batch = batch_of(_rollouts(), torch.zeros(2, 2), given, CPU, terms=4)
    assert batch["input_ids"].numel() == 1
    assert count_batch(batch) == BatchCounts(0, 0, 0, 0, 0, [])
    assert (len(batch["targets"]), len(batch["target_weights"]), terms_of_mean(batch)) == (0, 0, 4)
    assert terms_in_batch(batch) == 0


def test_ranks_that_wait_and_batches_that_all_skip() -> None:
    nothing = Rollouts([], [], [], torch.zeros(1, 0, 2), torch.zeros(0, 2))
    for given, tokens in ((dummy_batch(CPU), 1), (empty_batch(), 0)):
        batch = batch_of(nothing, torch.zeros(0, 2), given, CPU, terms=0)
        assert batch["input_ids"].numel() == tokens
        assert terms_of_mean(batch) == 0

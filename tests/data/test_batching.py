"""Which samples go where: windows, joined micro-batches, packing, mixing."""

import random
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lit_callbacks.throughput.batch_counts import count_batch
from shared_fixtures import make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ft import RecipeError
from lit_ft.data.loaders import batching
from lit_ft.data.loaders.batching import BatchPlan, PackedBatchLoader, together
from lit_ft.data.loaders.mixing import Mixing, check_weights
from lit_ft.data.loaders.order import order_of_samples
from lit_ft.data.loaders.packing import best_fit
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.samples import ARRAYS, CHOSEN, ArrayFiles, Samples, collect, join, read_arrays, targets_of
from lit_ft.packed_batch import (
    PackedBatch,
    SharedPrefixes,
    as_packed_batch,
    from_padded,
    pack_samples,
    pad_to_multiple,
)
from lit_ft.packed_batch import split as split_batch


def samples_of(*sources: list[int]) -> Samples:
    """Samples of the given lengths, a list for each source."""
    parts = []
    for lengths in sources:
        ids = np.concatenate([np.arange(3, 3 + n, dtype=np.int32) for n in lengths])
        parts.append(collect(ids, ids, np.array(lengths)))
    return join(parts, [f"source{number}" for number in range(len(sources))])


def test_targets_are_counted_in_little_memory() -> None:
    """The first token of a sample is no target; a sample without tokens has none."""
    labels = np.array([7, 7, -100, 7, 7, -100, 7], dtype=np.int32)
    assert targets_of(labels, np.array([0, 3, 0, 1, 3, 0])).tolist() == [0, 1, 0, 0, 1, 0]
    assert targets_of(labels[:0], np.array([0, 0])).tolist() == [0, 0]
    many = np.zeros(2_000_000, dtype=np.int32)
    tracemalloc.start()
    assert targets_of(many, np.full(1000, 2000)).sum() == len(many) - 1000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * len(many)


def test_arrays_are_written_part_by_part(tmp_path: Path) -> None:
    parts = [np.full((10**5, 2), number) for number in range(12)]
    files = ArrayFiles(tmp_path, ["pairs", "none"])
    tracemalloc.start()
    for part in parts:
        files.add(pairs=part, none=part[:0, 0])
    files.close()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < parts[0].nbytes
    np.save(tmp_path / "whole.npy", np.concatenate(parts))
    assert (tmp_path / "pairs.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    assert np.load(tmp_path / "none.npy", mmap_mode="r").shape == (0,)


def test_samples_are_found_by_their_ids_without_the_ids_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, lengths = np.arange(400, dtype=np.int32), np.full(100, 4)
    halves = collect(ids, ids, lengths, np.repeat(np.arange(50), 2))  # two samples of each row
    samples, asked = join([halves, halves], ["a.1", "b"]), list[int]()
    every = samples.ids(range(len(samples)))
    all_ids = Samples.ids
    monkeypatch.setattr(Samples, "ids", lambda self, chosen: asked.append(len(chosen)) or all_ids(self, chosen))
    wanted = ["b:49.1", "a.1:7", "b:0", "b:50", "c:1", "b", "a.1:7.2"]
    assert samples.find(wanted) == {name: every.index(name) for name in wanted[:3]}
    assert asked == [16]  # of the rows 0, 1, 7 and 49
    assert samples.find([]) == {}


@pytest.mark.parametrize("packing", [None, 64])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("budget", [None, 64])
def test_every_sample_once_and_windows_agree(packing: Any, replicas: int, accumulate: int, budget: Any) -> None:
    rng = random.Random(0)
    lengths = [rng.randint(2, 30) for _ in range(47)]
    samples = samples_of(lengths)
    plan = BatchPlan(2, packing, budget, shuffle=True, seed=1, replicas=replicas)
    loaders = [PackedBatchLoader(samples, plan, replica=r, accumulate=lambda: accumulate) for r in range(replicas)]
    for epoch in range(2):
        dealt = [list(loader.micro_batches(epoch)) for loader in loaders]
        assert {len(micro_batches) for micro_batches in dealt} == {len(loaders[0])}
        members = [i for micro_batches in dealt for batch, _, _ in micro_batches for i in batch]
        assert sorted(members) == list(range(47))
        for start in range(0, len(loaders[0]), accumulate):
            window = [micro_batches[start : start + accumulate] for micro_batches in dealt]
            for share in window:
                supervised = sum(int(samples.supervised[batch].sum()) for batch, _, _ in share if batch)
                assert {said.tokens for _, said, _ in share} == {supervised}
            computes = [[compute for _, _, compute in share] for share in window]
            assert all(row == computes[0] for row in computes)  # all ranks skip the same micro-batches
            assert computes[0][-1]  # the one whose backward synchronizes gradients is never skipped
        if budget is not None and packing is None:
            assert all(sum(lengths[i] for i in batch) <= budget for share in dealt for batch, _, _ in share)
        assert sum(len(list(loader)) for loader in loaders) == len(loaders[0]) * replicas


@pytest.mark.parametrize(("micro_batch_size", "accumulate"), [(1, 1), (2, 3)])
def test_a_position_late_in_an_epoch_is_reached_without_the_steps_before(
    micro_batch_size: int, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = BatchPlan(micro_batch_size, token_budget=64, shuffle=True, seed=3, replicas=2)
    loader = PackedBatchLoader(
        samples_of([3 + i % 9 for i in range(200)]), plan, replica=1, accumulate=lambda: accumulate
    )
    whole = list(loader.micro_batches(5))
    assert [list(loader.micro_batches(5, at)) for at in range(len(whole) + 1)] == [
        whole[at:] for at in range(len(whole) + 1)
    ]
    dealt, windows = list[int](), BatchPlan.windows
    monkeypatch.setattr(
        BatchPlan, "windows", lambda self, units, *rest: dealt.append(len(units)) or windows(self, units, *rest)
    )
    assert next(loader.micro_batches(5, len(whole) - 1)) == whole[-1]
    assert dealt[0] <= 2 * micro_batch_size * accumulate


def test_the_samples_of_a_step_do_not_depend_on_the_split() -> None:
    samples = samples_of([5, 9, 4, 7, 8, 6, 3, 2, 5, 9, 4, 7])

    def steps(size: int, accumulate: int, replicas: int, budget: int | None) -> list[set[int]]:
        plan = BatchPlan(size, None, budget, shuffle=True, seed=5, replicas=replicas)
        loaders = [PackedBatchLoader(samples, plan, replica=r, accumulate=lambda: accumulate) for r in range(replicas)]
        dealt = [list(loader.micro_batches()) for loader in loaders]
        return [
            {i for share in dealt for batch, _, _ in share[start : start + accumulate] for i in batch}
            for start in range(0, len(dealt[0]), accumulate)
        ]

    wanted = steps(4, 1, 1, None)
    for split in ((1, 4, 1, None), (2, 2, 1, 18), (2, 1, 2, None), (1, 2, 2, 18), (1, 1, 4, None)):
        assert steps(*split) == wanted


def test_joined_micro_batches_keep_to_the_budget_and_come_last() -> None:
    loader = PackedBatchLoader(samples_of([5, 5, 5, 5]), BatchPlan(1, None, token_budget=10), accumulate=lambda: 4)
    assert [batch for batch, _, _ in loader.micro_batches()] == [[], [], [0, 1], [2, 3]]
    rows = list(loader)
    assert rows[0]["input_ids"].shape == (1, 0)
    assert rows[3]["segment_lengths"] == [5, 5]
    assert rows[3]["window_tokens"] == 16


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_do_not_depend_on_the_number_of_workers(workers: int) -> None:
    samples, plan = samples_of([5, 9, 4, 7], [8, 6, 3]), BatchPlan(2, None, 64, shuffle=True, seed=3)

    def rows(workers: int) -> list[Any]:
        loader = PackedBatchLoader(samples, plan, accumulate=lambda: 2, num_workers=workers)
        return [(row["input_ids"].tolist(), row["target_sources"].tolist(), row["window_tokens"]) for row in loader]

    assert rows(workers) == rows(0)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_window_names_the_sources_that_any_rank_has_supervised_tokens_of(replicas: int, accumulate: int) -> None:
    silent = collect(np.arange(3, 11, dtype=np.int32), np.full(8, -100), np.array([4, 4]))
    few, many = (np.arange(3, 3 + 5 * samples, dtype=np.int32) for samples in (2, 9))
    spoken = [collect(ids, ids, np.full(len(ids) // 5, 5)) for ids in (few, many)]
    samples = join([*spoken, silent], ["few", "many", "silent"])
    plan = BatchPlan(1, shuffle=True, seed=2, replicas=replicas)
    loaders = [PackedBatchLoader(samples, plan, replica=r, accumulate=lambda: accumulate) for r in range(replicas)]
    dealt = [list(loader) for loader in loaders]
    named = set()
    for start in range(0, len(loaders[0]), accumulate):
        rows = [row for share in dealt for row in share[start : start + accumulate]]
        wanted = {index for row in rows for index in row["target_sources"].tolist()}
        assert {row["window_sources"] for row in rows} == {tuple(sorted(wanted))}
        named.add(rows[0]["window_sources"])
    assert (1,) in named
    assert (0, 1) in named or (0,) in named
    assert not any(2 in window for window in named)


# --- packing ---------------------------------------------------------------------------------------


def test_best_fit_packs_long_samples_by_length_and_short_ones_in_order() -> None:
    assert best_fit(np.array([2, 4, 5, 1, 6, 3, 2]), 10) == [[4, 1], [2, 5, 0], [3, 6]]
    assert best_fit(np.array([4, 1, 4, 1, 4, 1]), 20) == [[0, 1, 2, 3, 4, 5]]


def test_packing_fills_rows() -> None:
    lengths = np.random.default_rng(0).lognormal(4.5, 0.8, 5000).astype(int).clip(5, 2048)
    bins = best_fit(lengths, 2048)
    assert lengths.sum() / (len(bins) * 2048) > 0.99
    assert sorted(i for members in bins for i in members) == list(range(5000))
    assert max(int(lengths[members].sum()) for members in bins) <= 2048


@pytest.mark.slow
def test_a_million_lengths_pack_in_seconds() -> None:
    lengths = np.random.default_rng(0).lognormal(5.0, 1.0, 1_000_000).astype(int).clip(5, 4096)
    started = time.process_time()
    bins = best_fit(lengths, 4096)
    assert time.process_time() - started < 5
    assert sum(map(len, bins)) == 1_000_000
    assert lengths.sum() / (len(bins) * 4096) > 0.99


def test_the_same_samples_with_and_without_packing() -> None:
    samples = samples_of([5, 9, 4, 7, 8], [6, 3, 2])
    for epoch in range(3):
        packed = BatchPlan(1, 16, shuffle=True, seed=2).units(samples, epoch)
        assert sorted(i for unit in packed for i in unit) == list(range(8))


def test_bins_without_shuffling_can_be_mixed_and_are_the_same_each_epoch() -> None:
    """Best fit begins with the longest samples, which a limit of batches would select."""
    lengths = list(range(1, 129))
    samples = samples_of(lengths)
    in_order, mixed = BatchPlan(1, 128), BatchPlan(1, 128, seed=1, mixes_bins=True)
    assert sorted(mixed.units(samples, 0)) == sorted(in_order.units(samples, 0))
    assert mixed.units(samples, 0) == mixed.units(samples, 1) != BatchPlan(1, 128, mixes_bins=True).units(samples, 0)
    longest = [[max(lengths[i] for i in unit) for unit in plan.units(samples)[:16]] for plan in (in_order, mixed)]
    assert longest[0] == lengths[:-17:-1]
    assert np.mean(longest[1]) == pytest.approx(96, rel=0.1)  # they are 65 to 128


def test_bins_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, plan, calls = samples_of([5, 9, 4, 7, 8]), BatchPlan(1, 16, shuffle=True, seed=2), []
    monkeypatch.setattr(batching, "best_fit", lambda *of: calls.append(of) or best_fit(*of))
    first, second = PackedBatchLoader(samples, plan), PackedBatchLoader(samples, plan)
    assert [*first, *first, *second]
    assert len(calls) == 1
    plan.units(samples_of([5, 9, 4, 7, 8]), 0)
    replace(plan, seed=3).units(samples, 0)
    assert len(calls) == 3


# --- mixing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1.0, 1.0, 2.0), (0.7, 0.2, 0.1), (1.0, 30.0, 3.0)])
@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ratios_hold_over_any_ten_thousand_draws(weights: Any, strategy: Any, shuffle: bool) -> None:
    source = np.repeat([0, 1, 2], [40_000, 90_000, 30_000])
    order = Mixing(strategy, weights).order(source, shuffle, seed=4)
    for start in range(0, len(order) - 10_000, 10_000):
        counts = np.bincount(source[order[start : start + 10_000]], minlength=3) / 10_000
        assert np.abs(counts - np.array(weights) / sum(weights)).max() < 0.01


def test_where_an_epoch_ends() -> None:
    sizes = [10, 40]
    assert Mixing("concatenate").draws(sizes) == [10, 40]
    assert Mixing("first_exhausted", (1.0, 1.0)).draws(sizes) == [10, 10]
    assert Mixing("all_exhausted", (1.0, 1.0)).draws(sizes) == [40, 40]
    assert Mixing("first_exhausted", (1.0, 8.0)).draws(sizes) == [5, 40]
    assert Mixing("first_exhausted").draws(sizes) == [10, 40]  # natural sizes, interleaved


def test_a_source_that_begins_again_repeats_no_sample_before_all_were_drawn() -> None:
    source = np.repeat([0, 1], [3, 9])
    order = Mixing("all_exhausted", (1.0, 1.0)).order(source, True, seed=0)
    small = order[source[order] == 0]
    assert [sorted(small[i : i + 3].tolist()) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert sorted(order[source[order] == 1].tolist()) == list(range(3, 12))


def test_other_samples_each_epoch_where_a_source_is_not_used_up() -> None:
    source = np.repeat([0, 1], [5, 500])
    plan = BatchPlan(1, shuffle=True, seed=1, mixing=Mixing("first_exhausted", (1.0, 1.0)))
    samples = samples_of([4] * 5, [4] * 500)
    one, two = ({i for (i,) in plan.units(samples, epoch) if source[i]} for epoch in (0, 1))
    assert len(one) == len(two) == 5
    assert not one & two


@pytest.mark.parametrize(
    ("weights", "strategy", "message"),
    [
        ([1.0, None], "first_exhausted", "1 of 2 sources with a weight; give one to each, or to none"),
        ([1.0, 0.0], "first_exhausted", "weight=0.0 must be above 0"),
        ([1.0, 2.0], "concatenate", "takes every sample once; set data.mixing to first_exhausted or all_exhausted"),
    ],
)
def test_weights_that_make_no_sense(weights: Any, strategy: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        check_weights(weights, strategy)


# --- rows ------------------------------------------------------------------------------------------


def test_a_row_is_shifted_once_and_never_across_samples() -> None:
    first, second = np.array([3, 4, 5]), np.array([6, 7])
    row = pack_samples([(first, first), (second, np.array([6, 7]))], [1, 0])
    assert row["input_ids"].tolist() == [[3, 4, 5, 6, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert row["predict_at"].tolist() == [0, 1, 3]
    assert row["targets"].tolist() == [4, 5, 7]
    assert row["target_sources"].tolist() == [1, 1, 0]


def test_a_padded_batch_without_labels() -> None:
    with pytest.raises(RecipeError, match=r"a batch has no 'labels' \(it has 'input_ids'\); CausalLM takes"):
        as_packed_batch({"input_ids": torch.tensor([[3, 4]])})


def test_a_padded_batch_without_a_token() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(RecipeError, match=r"shape \(2, 3\) has no token: its attention_mask is 0 everywhere"):
        from_padded(ids, ids, ids)


def test_a_padded_batch_becomes_the_same_row() -> None:
    ids = torch.tensor([[3, 4, 5], [0, 6, 7]])
    labels = torch.tensor([[3, 4, 5], [-100, 6, 7]])
    row = from_padded(ids, labels, torch.tensor([[1, 1, 1], [0, 1, 1]]))
    assert row["segment_lengths"] == [3, 2]
    assert row["targets"].tolist() == [4, 5, 7]


def test_a_row_of_several_samples_is_taken_apart_by_its_positions() -> None:
    """As transformers' ``DataCollatorWithFlattening`` writes them, and as padded batches have them."""
    ids, positions = torch.tensor([[3, 4, 5, 6, 7, 0]]), torch.tensor([[0, 1, 2, 0, 1, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])
    row = from_padded(ids, ids, mask, positions)
    assert row["segment_lengths"] == [3, 2]
    assert row["targets"].tolist() == [4, 5, 7]
    for wrong in ([[1, 2, 3, 0, 1, 1]], [[0, 1, 3, 0, 1, 1]], [[0, 0, 0, 0, 0, 0]]):
        with pytest.raises(RecipeError, match=r"position_ids of a row are \[.*: leave position_ids out"):
            from_padded(ids, ids, mask, torch.tensor(wrong))


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ((torch.zeros(2, 3), torch.zeros(2, 3)), "a batch is of type tuple; CausalLM takes mappings"),
        ({"input_ids": torch.arange(3), "labels": torch.arange(3)}, r"input_ids \(3,\), labels \(3,\); each must be"),
        ({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2, 2)}, r"input_ids \(2, 3\), labels \(2, 2\); each"),
    ],
)
def test_a_batch_of_another_form(batch: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        as_packed_batch(batch)


# --- pairs of preference data ----------------------------------------------------------------------

PAIR_FIELDS = ("target_answers", "pairs", "pair_sources")


def pairs_of(*sources: list[tuple[int, int]]) -> Samples:
    """Pairs of chosen and rejected conversations of the given lengths, a list for each source; all is supervised."""
    parts = []
    for lengths in sources:
        ids = np.arange(3, 3 + sum(map(sum, lengths)), dtype=np.int32)
        chosen = np.array([first for first, _ in lengths])
        parts.append(collect(ids, ids, np.array([sum(pair) for pair in lengths]), chosen=chosen))
    return join(parts, [f"source{number}" for number in range(len(sources))])


def test_the_packed_batch_of_pairs() -> None:
    samples = pairs_of([(2, 3), (4, 2)], [(3, 3)])
    assert samples.supervised.tolist() == [3, 4, 4]
    (batch,) = PackedBatchLoader(samples, BatchPlan(micro_batch_size=3))
    assert batch["segment_lengths"] == [2, 3, 4, 2, 3, 3]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 0, 1, 2]]
    assert batch["target_answers"].tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 4, 5, 5]
    assert batch["target_sources"].tolist() == [0] * 7 + [1] * 4
    assert (batch["pairs"].tolist(), batch["pair_sources"].tolist()) == ([0, 1, 2], [0, 0, 1])
    assert (batch["window_tokens"], batch["window_sources"]) == (3, (0, 1))
    assert batch["sample_ids"] == ["source0:0", "source0:1", "source1:0"]
    assert (batch["sample_sources"], batch["sample_targets"]) == (["source0", "source0", "source1"], [3, 4, 4])
    assert all(batch[name].dtype == torch.int64 for name in PAIR_FIELDS)  # type: ignore[literal-required]


def test_batches_of_ordinary_samples_have_no_field_of_pairs() -> None:
    (batch,) = PackedBatchLoader(samples_of([3, 4]), BatchPlan(micro_batch_size=2))
    assert not batch.keys() & set(PAIR_FIELDS)
    assert not any(part.keys() & set(PAIR_FIELDS) for part in split_batch(batch, 3))


@pytest.mark.parametrize("replica", [0, 1])
def test_batches_without_pairs_have_the_fields_too(replica: int) -> None:
    """Joined micro-batches leave empty ones; a rank without units computes one token."""
    plan = BatchPlan(micro_batch_size=1, token_budget=100, replicas=2)
    batches = list(PackedBatchLoader(pairs_of([(2, 3)] * 5), plan, replica=replica, accumulate=lambda: 2))
    assert [batch["pairs"].tolist() for batch in batches] == ([[], [0, 2], [4]] if replica == 0 else [[], [1, 3], []])
    assert [batch["window_tokens"] for batch in batches] == [2, 2, 1 - replica]
    assert [batch["input_ids"].numel() for batch in batches] == ([0, 10, 5] if replica == 0 else [0, 10, 1])
    assert [batch.get("is_dummy", False) for batch in batches] == [False, False, replica == 1]
    assert [count_batch(batch).total_tokens for batch in batches] == ([0, 10, 5] if replica == 0 else [0, 10, 0])
    for batch in batches:
        assert len(batch["target_answers"]) == len(batch["targets"])
        assert len(batch["pair_sources"]) == len(batch["pairs"])
        assert len(batch["segment_lengths"]) in (2 * len(batch["pairs"]), 1)


def test_a_step_is_the_same_pairs_however_it_is_split() -> None:
    samples = pairs_of([(n, n + 1) for n in range(2, 14)])
    steps = []
    for size, accumulate in ((4, 1), (2, 2), (1, 4)):
        plan = BatchPlan(micro_batch_size=size, token_budget=40, shuffle=True, seed=3)
        batches = list(PackedBatchLoader(samples, plan, accumulate=lambda count=accumulate: count))
        windows = [batches[at : at + accumulate] for at in range(0, len(batches), accumulate)]
        assert all(batch["window_tokens"] == 4 for batch in batches)
        steps.append([sorted(i for batch in window for i in batch["pairs"].tolist()) for window in windows])
    assert steps[0] == steps[1] == steps[2]


def test_packing_counts_the_tokens_of_both_conversations() -> None:
    samples = pairs_of([(n % 7 + 2, n % 5 + 2) for n in range(40)])
    batches = list(PackedBatchLoader(samples, BatchPlan(micro_batch_size=1, packing=24)))
    assert max(batch["input_ids"].numel() for batch in batches) <= 24
    assert sorted(i for batch in batches for i in batch["pairs"].tolist()) == list(range(40))


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("padded", [False, True])
def test_a_pair_is_never_parted(parts: int, padded: bool) -> None:
    (batch,) = PackedBatchLoader(pairs_of([(2, 9), (8, 2)], [(3, 3)]), BatchPlan(micro_batch_size=3))
    whole = pad_to_multiple(batch, 4) if padded else batch
    assert all(name in whole for name in PAIR_FIELDS)
    pieces: list[PackedBatch] = split_batch(whole, parts)
    assert len(pieces) == parts
    assert torch.cat([piece["pairs"] for piece in pieces]).tolist() == [0, 1, 2]
    assert torch.cat([piece["pair_sources"] for piece in pieces]).tolist() == [0, 0, 1]
    assert torch.cat([piece["targets"] for piece in pieces]).tolist() == batch["targets"].tolist()
    answers = 0
    for piece in pieces:
        own = piece["target_answers"]
        starts = np.cumsum([0, *piece["segment_lengths"]])
        assert (np.searchsorted(starts, piece["predict_at"].numpy(), side="right") - 1).tolist() == own.tolist()
        assert len(own) == len(piece["targets"])
        wanted = batch["target_answers"][(batch["target_answers"] >= answers)][: len(own)] - answers
        assert own.tolist() == wanted.tolist()
        answers += 2 * len(piece["pairs"])


def test_pairs_of_a_cache_entry(tmp_path: Path) -> None:
    samples = pairs_of([(2, 3), (4, 2)])
    (part,) = samples.parts
    files = ArrayFiles(tmp_path, [*ARRAYS, CHOSEN])
    files.add(**{name: getattr(part, name) for name in (*ARRAYS, CHOSEN)})
    files.close()
    read = join([read_arrays(tmp_path)], [])
    assert [[ids.tolist() for ids, _ in read.pair(i)] for i in range(2)] == [
        [ids.tolist() for ids, _ in samples.pair(i)] for i in range(2)
    ]
    assert read.take(np.array([1])).longest == 4


class Waits(TorchDispatchMode):
    """Counts calls for which a host waits on CUDA: those whose result is as long as a mask says."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = args[1] if func is torch.ops.aten.index.Tensor else ()
        self.count += func is torch.ops.aten.nonzero.default
        self.count += any(mask is not None and mask.dtype == torch.bool for mask in masks)
        return func(*args, **(kwargs or {}))


def test_a_part_of_a_packed_batch_is_waited_for_once() -> None:
    whole = pack_samples([(np.arange(3, 3 + n), np.arange(3, 3 + n)) for n in (5, 9, 4, 7)])
    whole["target_weights"] = torch.rand(len(whole["targets"]))
    with Waits() as waits:
        split_batch(whole, 4)
    assert waits.count == 4


def _conversations(counts: Sequence[int], length: int = 20) -> Samples:
    """Rows of several answers, each of them a sample; those of a row begin alike, and get longer."""
    generator = np.random.default_rng(0)
    ids, lengths, rows = [], [], []
    for row, count in enumerate(counts):
        whole = generator.integers(5, 400, length * count)
        for turn in range(1, count + 1):
            ids.append(whole[: length * turn])
            lengths.append(length * turn)
            rows.append(row)
    joined = np.concatenate(ids)
    return join([collect(joined, joined, np.array(lengths), np.array(rows))], [])


def test_answers_of_a_conversation_follow_one_another() -> None:
    """In another order in each epoch, and none is lost."""
    counts = [1, 3, 2, 4, 1, 2]
    samples = _conversations(counts)
    plan = BatchPlan(2, shuffle=True, seed=3)
    orders = [[i for unit in plan.units(samples, epoch) for i in unit] for epoch in range(2)]
    for order in orders:
        assert sorted(order) == list(range(13))
        rows = samples.rows[order]
        assert len(np.flatnonzero(np.diff(rows))) == len(counts) - 1
        assert all((np.diff(np.array(order)[rows == row]) > 0).all() for row in range(6))
    assert orders[0] != orders[1]
    apart = BatchPlan(2, shuffle=True, seed=3, keeps_beginnings=False).units(samples, 0)
    assert [i for unit in apart for i in unit] != orders[0]


@pytest.mark.parametrize("shuffle", [False, True])
def test_answers_of_a_conversation_are_packed_together(shuffle: bool) -> None:
    samples = _conversations([4, 1, 3, 4, 2])
    bins = BatchPlan(1, packing=128, shuffle=shuffle).units(samples, 0)
    assert sorted(i for one in bins for i in one) == list(range(14))
    assert all(samples.lengths[one].sum() <= 128 for one in bins)
    own = [SharedPrefixes.of([samples[i][0] for i in one]) for one in bins]
    assert sum(sum(one.shared) for one in own if one) >= 200  # of 620 tokens
    apart = BatchPlan(1, packing=128, shuffle=shuffle, keeps_beginnings=False).units(samples, 0)
    assert sorted(i for one in apart for i in one) == list(range(14))


def test_rows_whose_samples_begin_otherwise_are_in_any_order() -> None:
    """As the parts of a long text."""
    ids = np.random.default_rng(0).integers(5, 400, 200)
    assert join([collect(ids, ids, np.full(10, 20), np.repeat([0, 1], 5))], []).of_one_beginning is None
    assert _conversations([1, 1, 1]).of_one_beginning is None
    assert together(np.array([2, 0, 2]), np.array([0, 0, 1])).tolist() == [2, 0, 2]  # drawn several times


def test_another_order_of_answers_is_a_change_of_the_data() -> None:
    """A checkpoint of an earlier version points to other samples."""
    decides = order_of_samples(_conversations([2, 1]), Preparation(make_tokenizer()), Mixing()).saved()["decides"]
    assert decides["answers of a conversation"] == "one after the other"
    other = order_of_samples(_conversations([1, 1]), Preparation(make_tokenizer()), Mixing()).decides
    assert "answers of a conversation" not in other

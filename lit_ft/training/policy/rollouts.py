"""From a batch of the data to the answers that the model gives to its prompts, and the batch that trains on them."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import move_data_to_device
from lit_callbacks.distributed.all_reduce import all_reduce
from torch import Tensor

from lit_ft import process
from lit_ft.errors import RecipeError
from lit_ft.packed_batch import IGNORE_INDEX, PackedBatch, RowValues, dummy_batch, empty_batch, pack_samples
from lit_ft.training.policy.rewards import SampledAnswer


class Asked(NamedTuple):
    """A prompt of the data, and the answer that the data has to it."""

    prompt: list[int]
    """Tokens before the last supervised run of tokens of a sample."""
    expected: list[int]
    """Tokens of that run."""
    source: int
    """Source of the sample, an index into the batch's ``source_names``."""
    row: RowValues = RowValues()
    """What rewards read of the sample's row."""

    @property
    def key(self) -> tuple[tuple[int, ...], tuple[int, ...], str]:
        """Equal for equal prompts with equal known answers and rows."""
        return tuple(self.prompt), tuple(self.expected), repr(self.row)

    def seed(self, step: int, answer: int) -> int:
        """Seed of the draws of an answer in an optimizer step: it depends on no rank and no batch."""
        text = f"{step} {answer} {self.prompt} {self.expected}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def asked_of(batch: PackedBatch) -> list[Asked]:
    """Prompts of a batch's samples; a sample without supervised tokens asks nothing.

    Raises:
        RecipeError: a sample has no prompt before its answer.
    """
    ids, sources = batch["input_ids"][0].tolist(), batch["target_sources"].tolist()
    rows = batch.get("sample_rows", [RowValues()] * len(batch["segment_lengths"]))
    supervised, found, start = batch["predict_at"].cpu().numpy() + 1, [], 0
    for length, row in zip(batch["segment_lengths"], rows, strict=True):
        first, end = np.searchsorted(supervised, [start, start + length])
        if first < end:
            own = supervised[first:end]
            gaps = np.flatnonzero(np.diff(own) > 1)
            run = own[gaps[-1] + 1 :] if len(gaps) else own
            begins, ends = int(run[0]), int(run[-1]) + 1
            if begins == start + 1:
                raise RecipeError(
                    "the model answers prompts, and a sample of the data is supervised from its second token on: it "
                    "has no prompt; give conversations or instructions, and leave data.supervise=all out"
                )
            found.append(Asked(ids[start:begins], ids[begins:ends], sources[first], row))
        start += length
    return found


def with_known_answers(batch: PackedBatch) -> PackedBatch:
    """A batch of the data whose targets are those of samples that have a known answer."""
    rows = batch.get("sample_rows", ())
    if all(row.has_answer for row in rows):
        return batch
    is_known = np.repeat([row.has_answer for row in rows], batch["segment_lengths"])
    kept = torch.from_numpy(np.flatnonzero(is_known[batch["predict_at"].cpu().numpy()])).to(batch["targets"].device)
    found = batch.copy()
    found["predict_at"], found["targets"], found["target_sources"] = (
        one.index_select(0, kept) for one in (batch["predict_at"], batch["targets"], batch["target_sources"])
    )
    return found


def asked_in_window(batch: PackedBatch) -> list[Asked]:
    """Prompts of all samples of this rank in the optimizer step whose first micro-batch is given."""
    if not (members := batch.get("window_members", ())):
        return []
    window = pack_samples(members)
    if "window_rows" in batch:
        window["sample_rows"] = batch["window_rows"]
    return asked_of(window)


class Rollouts(NamedTuple):
    """Answers to P prompts, G to each, and what they are worth."""

    asked: Sequence[Asked]
    ids: Sequence[Sequence[int]]
    """Tokens of the ``P * G`` answers, those of a prompt together."""
    answers: Sequence[SampledAnswer]
    """The same as rewards see them."""
    rewards: Tensor
    """``(functions, P, G)``, fp32, by each reward function."""
    total: Tensor
    """``(P, G)``, fp32: weighted sum over functions."""

    def take(self, asked: Sequence[Asked]) -> "Rollouts":
        """The answers to some of the prompts."""
        places = {one.key: place for place, one in enumerate(self.asked)}
        chosen, each = [places[one.key] for one in asked], self.total.shape[1]
        answers = [place * each + k for place in chosen for k in range(each)]
        ids, sampled = [self.ids[i] for i in answers], [self.answers[i] for i in answers]
        return Rollouts(asked, ids, sampled, self.rewards[:, chosen], self.total[chosen])

    @property
    def tokens(self) -> Tensor:
        """Numbers of the answers' tokens, ``(P, G)``, fp32."""
        return torch.tensor([float(one.tokens) for one in self.answers]).view_as(self.total)

    @property
    def is_cut(self) -> Tensor:
        """Which answers ``max_new_tokens`` ended, ``(P, G)``."""
        return torch.tensor([one.finish_reason == "length" for one in self.answers]).view_as(self.total)


def packed_answers(rollouts: Rollouts, numbers: Sequence[int], given: PackedBatch, device: torch.device) -> PackedBatch:
    """Packed batch of answers after their prompts, whose tokens are supervised.

    Args:
        rollouts: answers to the prompts of a batch of the data.
        numbers: which of the ``P * G`` answers.
        given: the batch of the data. Where it is computed, so is the result, even if it holds no answer.
        device: device of the result.
    """
    each, samples, sources = rollouts.total.shape[1], [], []
    for number in numbers:
        asked, ids = rollouts.asked[number // each], np.array(rollouts.ids[number])
        labels = np.concatenate([np.full(len(asked.prompt), IGNORE_INDEX), ids])
        samples.append((np.concatenate([asked.prompt, ids]), labels))
        sources.append(asked.source)
    if samples:
        return move_data_to_device(pack_samples(samples, sources), device)
    return dummy_batch(device) if given["segment_lengths"] else move_data_to_device(empty_batch(), device)


def batch_of(
    rollouts: Rollouts,
    weights: Tensor,
    given: PackedBatch,
    device: torch.device,
    terms: int,
    kl_weights: Tensor | None = None,
    counts_tokens: bool = False,
) -> PackedBatch:
    """Packed batch that trains on answers, in place of the batch of the data.

    Answers whose weights are 0 have no gradient, and are left out.

    Args:
        rollouts: answers to the prompts of a batch of the data.
        weights: factor on the cross-entropy of each of an answer's tokens, ``(P, G)``, fp32.
        given: the batch of the data.
        device: device of the result.
        terms: what the loss of these rollouts is a mean over, or a part of it.
        kl_weights: factor on the divergence of each of an answer's tokens, ``(P, G)``, fp32; None has none.
        counts_tokens: whether terms are tokens of answers, in place of answers.
    """
    both = torch.stack([weights, torch.zeros_like(weights) if kl_weights is None else kl_weights], dim=-1)
    factors = both.view(-1, 2).numpy()
    held = np.flatnonzero(factors.any(1)).tolist()
    batch = packed_answers(rollouts, held, given, device)
    lengths = [len(rollouts.ids[number]) for number in held]
    of_targets = torch.from_numpy(factors[held].repeat(lengths, axis=0)).to(device)
    batch["target_weights"] = of_targets[:, 0].contiguous()
    if kl_weights is not None:
        batch["target_kl_weights"] = of_targets[:, 1].contiguous()
    batch["terms"], batch["terms_held"] = terms, len(batch["targets"]) if counts_tokens else len(held)
    return batch


def of_replicas_leader(trainer: Trainer, values: Tensor) -> Tensor:
    """Values of the rank that leads this rank's replica; a collective where ranks share a model.

    Rewards may differ from call to call, and ranks that share a model must train on the same ones.

    Args:
        trainer: trainer of the run.
        values: ``(k, n)`` on the CPU; n is the same on all ranks of a replica.
    """
    if process.model_parallel_size(trainer) == 1:
        return values
    (replicas, rank), device = process.data_parallel(trainer), trainer.strategy.root_device
    most = int(all_reduce(trainer, torch.tensor(values.shape[1], device=device), "max"))
    every = torch.zeros(replicas, len(values), most, device=device)
    if process.leads_replica(trainer):
        every[rank, :, : values.shape[1]] = values.to(device)
    return all_reduce(trainer, every, "sum")[rank, :, : values.shape[1]].cpu()

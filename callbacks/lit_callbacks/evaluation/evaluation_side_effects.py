"""Evaluation of the model during training without side effects on modes, random numbers or the run's success."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lit_callbacks.answering_weights import weights_that_answer
from lit_callbacks.distributed.gather import is_zero3, part_of_zero3, reshard
from lit_callbacks.internals import torch_internals

_Result = TypeVar("_Result")


@contextmanager
def evaluating(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Evaluation mode without gradients, in the run's precision; restores training modes and random states at exit.

    The random states are those of torch, NumPy and Python: data loaders without workers draw from all of them.
    Schedule-free optimizers give the weights that the trained model answers with, and at exit those of training again.
    """
    modes = {part: part.training for part in module.modules()}
    device = trainer.strategy.root_device
    module.eval()
    try:
        with (
            torch.random.fork_rng(devices=[device] if device.type == "cuda" else []),
            isolate_rng(include_cuda=False),  # NumPy's and Python's
            weights_that_answer(trainer, module),
            trainer.precision_plugin.forward_context(),
            torch.no_grad(),
        ):
            yield
    finally:
        for part, training in modes.items():
            part.training = training


def on_all_ranks(trainer: Trainer, what: str, do: Callable[[], _Result]) -> _Result | None:
    """Call ``do`` on every rank and return its result; None on all ranks if it raised on any. A collective.

    A rank on which it raised warns. An error of a model or a tokenizer in an evaluation must not end the run.

    Args:
        trainer: trainer of the run.
        what: text of the warning: what cannot be done.
        do: function without arguments, called once on each rank.
    """
    result: _Result | None = None
    try:
        result, went_well = do(), True
    except Exception as error:
        went_well = False
        warnings.warn(f"rank {trainer.global_rank}: {what} ({type(error).__name__}: {error})", stacklevel=2)
    return result if trainer.strategy.reduce_boolean_decision(went_well, all=True) else None


class EveryNSteps:
    """Tells when ``n`` optimizer steps have passed, for any number of optimizer steps per batch."""

    def __init__(self, n: int) -> None:
        """Count from step 0.

        Args:
            n: optimizer steps between two evaluations.

        Raises:
            ValueError: ``n`` is not positive.
        """
        if n < 1:
            raise ValueError(f"every_n_steps={n} must be 1 or more")
        self.n = n
        self.last = -1
        """Optimizer step of the last call of ``done``; -1 before the first."""

    def is_time(self, step: int) -> bool:
        """Whether a multiple of ``n`` was passed since ``done``: once, not on each accumulated micro-batch."""
        return step // self.n > max(self.last, 0) // self.n

    def done(self, step: int) -> None:
        """Record that the evaluation was done at this step."""
        self.last = step


class EvaluatedWeights:
    """Tells whether the trainable weights differ from the evaluated ones without a step between.

    At the end of training a callback may put averages into the model, as Lightning's ``WeightAveraging`` does.
    """

    def __init__(self) -> None:
        """Start without evaluated weights."""
        self._fingerprint: Tensor | None = None

    def remember(self, module: LightningModule) -> None:
        """Take the weights of a module as those that are evaluated; within ``evaluating``."""
        self._fingerprint = _fingerprint_of(module)

    def have_changed(self, trainer: Trainer, module: LightningModule) -> bool:
        """Whether the weights of a module, on any rank, are others than the remembered ones, if any. A collective."""
        with weights_that_answer(trainer, module):
            now = _fingerprint_of(module)
        is_same = self._fingerprint is None or torch.equal(now, self._fingerprint)
        return not trainer.strategy.reduce_boolean_decision(is_same, all=True)


def _fingerprint_of(module: LightningModule) -> Tensor:
    """Norm and sum of this rank's part of each trainable weight, ``(2 weights,)``, fp32; 0 where it is not a number."""
    reshard(module)
    weights = [p for p in module.parameters() if p.requires_grad and not is_lazy(p)]
    parts = [_part(weight).detach() for weight in weights]
    if not parts:
        return torch.zeros(0)
    values = [*torch_internals.norms(parts), *(part.real.sum(dtype=torch.float32) for part in parts)]
    return torch.stack([value.to(parts[0].device, torch.float32) for value in values]).nan_to_num()


def _part(weight: Tensor) -> Tensor:
    if is_zero3(weight):
        return part_of_zero3(weight)
    return weight.to_local() if isinstance(weight, DTensor) else weight

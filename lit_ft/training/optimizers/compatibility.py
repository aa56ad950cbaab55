"""Table of the situations in which each optimizer works, with the reasons where it does not.

``OPTIMIZERS`` has one row per class, or kind of classes. All refusals come from it, ``python -m
benchmarks.support_tables`` prints docs/optimizers.md from it, and tests are parametrized by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.internals.torch_internals import unscales_gradients_itself
from lit_callbacks.protocols import KeepsTwoWeightSets
from torch.optim import Optimizer

from lit_ft.errors import RecipeError, first_refusal, situation


@dataclass(frozen=True)
class OptimizerSupport:
    """Situations in which an optimizer's steps are those of one process.

    A situation is None where the optimizer works. Elsewhere it is the reason, as a sentence without its subject.
    """

    name: str
    """Class path, with ``*`` for any characters; or an option of the optimizer."""
    mark: Callable[[Optimizer], bool] | None = None
    """Whether an optimizer is meant, where its class does not say so."""
    shards: str | None = situation(
        "FSDP, model parallelism", "take one of torch.optim's {works}, or trainer.strategy=ddp"
    )
    zero: str | None = situation(
        "ZeRO",
        "ZeRO makes one flat vector of all weights: take one that treats each element alone, e.g. "
        "torch.optim.AdamW, or trainer.strategy=ddp",
    )
    scaled: str | None = situation(
        "16-mixed", "set fused of the optimizer to false, or trainer.precision to bf16-mixed"
    )

    def applies_to(self, optimizer: Optimizer) -> bool:
        """Whether the row is about an optimizer."""
        if self.mark is not None:
            return self.mark(optimizer)
        kind, parts = type(optimizer), self.name.split(".")
        return kind.__module__.split(".")[0] == parts[0] and fnmatchcase(kind.__name__, parts[-1])


_NOT_COMPARED = "was not compared with one process on sharded tensors"
_NO_OPERATOR = "computes with operators that sharded tensors (DTensor) do not have"
_MATRICES = "looks at whole matrices"
_NORMS = "scales steps by the norm of each weight"

OPTIMIZERS: Sequence[OptimizerSupport] = (
    OptimizerSupport(
        "fused",
        mark=unscales_gradients_itself,
        scaled="leaves gradients scaled until a fused optimizer's step, so that they cannot be measured or clipped",
    ),
    OptimizerSupport(
        "schedulefree.*",
        mark=lambda optimizer: isinstance(optimizer, KeepsTwoWeightSets),
        shards=_NOT_COMPARED,
        zero="keeps two sets of weights, of which ZeRO knows one",
    ),
    OptimizerSupport(
        "bitsandbytes.optim.*8bit",
        mark=lambda optimizer: getattr(getattr(optimizer, "args", None), "optim_bits", 32) == 8,
        shards=_NO_OPERATOR,
        zero="keeps its state in blocks, which ZeRO would split across weights",
    ),
    *(
        OptimizerSupport(f"bitsandbytes.optim.*{name}*", shards=_NO_OPERATOR)
        for name in ("Adam", "Lion", "SGD", "RMSprop", "Adagrad")
    ),
    *(OptimizerSupport(f"bitsandbytes.optim.*{name}*", shards=_NO_OPERATOR, zero=_NORMS) for name in ("LAMB", "LARS")),
    *(
        OptimizerSupport(f"torch.optim.{name}")
        for name in ("AdamW", "Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
    ),
    OptimizerSupport("torch.optim.Adadelta", shards=_NOT_COMPARED),
    OptimizerSupport("torch.optim.ASGD", shards=_NOT_COMPARED),
    OptimizerSupport("torch.optim.Rprop", shards=_NO_OPERATOR),
    OptimizerSupport(
        "torch.optim.Adafactor", shards=_NO_OPERATOR, zero="keeps its state by rows and columns of a matrix"
    ),
    OptimizerSupport("torch.optim.Muon", shards=_NOT_COMPARED, zero=_MATRICES),
    OptimizerSupport("lit_ft.optimizers.SplitOptimizer", shards=_NOT_COMPARED, zero=_MATRICES),
    OptimizerSupport("lit_ft.galore.GaLoreAdamW", shards=_NOT_COMPARED, zero=_MATRICES),
    OptimizerSupport("deepspeed.ops.adam.FusedAdam", shards=_NOT_COMPARED),
    OptimizerSupport("deepspeed.ops.adam.DeepSpeedCPUAdam", shards=_NOT_COMPARED),
)
NOT_LISTED = OptimizerSupport("any other", shards=_NOT_COMPARED)


def check_scaled_weights(optimizer: Optimizer) -> None:
    """Refuse weights that train in float16 under a gradient scaler, whose gradients it could not divide by its scale.

    Raises:
        RecipeError: there is one.
    """
    if any(p.dtype == torch.float16 for group in optimizer.param_groups for p in group["params"]):
        raise RecipeError(
            "trainer.precision=16-mixed computes in float16 with weights in float32, but weights in float16 are to "
            "train; set model.dtype=float32 (with an adapter, model.adapter_dtype=float32)"
        )


def check_situation(optimizer: Optimizer, name: str, value: str = "") -> None:
    """Refuse an optimizer in a situation in which its steps would fail, or be others.

    Args:
        optimizer: optimizer of the run, or one of its class on other weights.
        name: field of ``OptimizerSupport``.
        value: value of the recipe that makes the situation, e.g. ``trainer.precision=16-mixed``.

    Raises:
        RecipeError: the optimizer does not work; the message gives the reason and the fix.
    """
    path = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    rows = [row for row in OPTIMIZERS if row.applies_to(optimizer)]
    is_listed = any(row.mark is None for row in rows)
    if (first := first_refusal(rows if is_listed else [*rows, NOT_LISTED], name)) is not None:
        _, reason, fix = first
        works = [row.name.rpartition(".")[2] for row in OPTIMIZERS if row.mark is None and getattr(row, name) is None]
        raise RecipeError(
            f"optimizer={path} {reason}{f' ({value})' if value else ''}; {fix.format(works=', '.join(works))}"
        )
    if name == "zero" and not is_listed:
        rank_zero_warn(
            f"optimizer={path}: ZeRO makes one flat vector of all weights, so its steps are those of one process only "
            "if it treats each element alone"
        )

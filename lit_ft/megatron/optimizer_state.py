"""AdamW's state of a full fine-tuning, as Megatron-Core's distributed optimizer has it in any parallel layout.

Its form ``fully_reshardable`` has one tensor per weight for the fp32 weights and for each moment, in the weight's shape
and under its name with a prefix. These are elementwise, so the tables of weights hold for them too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_ft.megatron.formats.source import MegatronSource
from lit_ft.megatron.formats.torch_dist import TorchDistSource
from lit_ft.megatron.shape import ModelShape
from lit_ft.protocols import Checkpoint
from lit_ft.training.optimizers.initial_state import MODULE, MOMENTS

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
"""Settings of a parameter group that both sides know."""


class StateTensors:
    """Tensors in the shapes and under the names of a model's weights, in fp32: read like a Hugging Face folder."""

    def __init__(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Name tensors.

        Args:
            folder: where they come from, for messages.
            tensors: tensors by Hugging Face's name of the weight, mapped into memory.
        """
        self.folder = folder
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._tensors = tensors

    def read(self, name: str, dimension: int | None = None, first: int = 0, last: int = 0) -> Tensor:
        """Copy of a tensor, or of its rows or columns ``first`` to ``last`` (exclusive)."""
        tensor = self._tensors[name]
        part = tensor if dimension is None else tensor.narrow(dimension, first, last - first)
        return part.to(torch.float32, copy=True).contiguous()

    def dtype(self, name: str) -> torch.dtype:
        """Dtype that ``read`` gives."""
        return torch.float32


@dataclass(frozen=True)
class AdamState:
    """State of AdamW after a step of a run."""

    tensors: Mapping[str, StateTensors]
    """fp32 weights (``param``) and moments, by Megatron's name of the state."""
    step: int
    """Number of optimizer steps."""
    settings: Mapping[str, Any]
    """Learning rate, betas, epsilon and weight decay of the run's first parameter group."""

    @property
    def folder_name(self) -> str:
        """Name of Megatron's folder; in one named ``release`` it looks for no optimizer."""
        return f"iter_{self.step:07d}"

    def common(self) -> dict[str, Any]:
        """Entries of ``common.pt`` that the distributed optimizer reads."""
        group = {
            # Megatron finds its own groups by these; weights with decay have another one than norms and biases.
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            **self.settings,
            "bias_correction": True,
            "step": self.step,
        }
        return {
            "optimizer": {
                "optimizer": {"param_groups": [{**group, "wd_mult": wd_mult} for wd_mult in (1.0, 0.0)]},
                "param_state_sharding_type": FORM,
            },
            # Replaced by the command line's (--override-opt-param-scheduler); Megatron asks for the entries.
            "opt_param_scheduler": {
                "max_lr": self.settings["lr"],
                "min_lr": 0.0,
                "num_steps": 0,
                "lr_warmup_steps": 0,
                "lr_decay_steps": 1,
                "lr_decay_style": "constant",
                "start_wd": self.settings["weight_decay"],
                "end_wd": self.settings["weight_decay"],
                "wd_incr_steps": 0,
                "wd_incr_style": "constant",
            },
            "content_metadata": {"distrib_optim_sharding_type": FORM, "chained_optim_avoid_prefix": True},
        }


FORM = "fully_reshardable"
"""Megatron's name of the form (``--dist-ckpt-optim-fully-reshardable``)."""


def prefix_of(state: str) -> str:
    """Prefix of the name of a weight in ``torch_dist``: ``optimizer.state.exp_avg.`` and its like."""
    return f"optimizer.state.{state}."


def obstacle(checkpoint: Checkpoint, shape: ModelShape) -> str | None:
    """Reason why the optimizer's state in a checkpoint is not converted; None if it is.

    Args:
        checkpoint: Lightning's checkpoint of a run.
        shape: sizes of the model that the run trains.
    """
    if shape.experts:
        return "experts are fused in the run's weights, and single in Megatron's"
    states, names = checkpoint.get("optimizer_states", []), checkpoint.get("optimizer_names", [])
    if len(states) != 1 or len(names) != 1 or len(states[0]["state"]) != len(names[0]):
        return "the checkpoint does not hold one state for each weight"
    weights = {key.hugging_face(part) for key in shape.all_keys() for part in key.weight.parts}
    trained = {name.removeprefix(MODULE) for name in names[0]}
    if not weights & trained:
        return "an adapter's has nothing of the model's weights"
    if left_out := weights - trained:
        return f"{len(left_out)} of {len(weights)} weights do not train, and Megatron keeps a state of all"
    kept = set[str]().union(*states[0]["state"].values())
    if kept != {*MOMENTS, "step"}:
        return f"the optimizer keeps {', '.join(sorted(kept - {'step'}))}, and Megatron's {', '.join(MOMENTS)}"
    if len({int(state["step"]) for state in states[0]["state"].values()}) > 1:
        return "its weights are not all at the same step"
    return None


def state_of(checkpoint: Checkpoint, path: Path) -> AdamState:
    """AdamW's state in a checkpoint that has no ``obstacle``.

    Args:
        checkpoint: Lightning's checkpoint of a run.
        path: its file or folder, for messages.
    """
    states, (names,) = checkpoint["optimizer_states"][0], checkpoint["optimizer_names"]
    group = states["param_groups"][0]
    of_weights: dict[str, Mapping[str, Tensor]] = {"param": checkpoint["state_dict"]}
    of_weights |= {
        moment: {name: states["state"][number][moment] for number, name in enumerate(names)} for moment in MOMENTS
    }
    return AdamState(
        tensors={
            state: StateTensors(path, {name.removeprefix(MODULE): tensors[name] for name in names})
            for state, tensors in of_weights.items()
        },
        step=int(states["state"][0]["step"]),
        settings={
            "lr": group.get("initial_lr", group["lr"]),  # before the schedule
            **{name: group[name] for name in _SETTINGS[1:]},
        },
    )


def settings_in(source: MegatronSource) -> dict[str, Any] | str:
    """Step and settings of the optimizer in a Megatron checkpoint; a reason in words if its state is not converted.

    Args:
        source: checkpoint that holds an optimizer's state.
    """
    if not isinstance(source, TorchDistSource):
        return "the format torch divides it among ranks, --ckpt-format torch_dist does not"
    if not all(source.has_like_weights(prefix_of(moment)) for moment in MOMENTS):
        return "it is not stored by weight; save with --dist-ckpt-optim-fully-reshardable"
    state = source.common.get("optimizer", {})
    state = state.get("optimizer", state)  # the distributed optimizer has one within
    groups = state.get("param_groups") or [{}]
    step = groups[0].get("step", state.get("state", {}).get("common_step"))
    if step is None:
        return "it does not say how many steps were taken"
    return {"step": int(step), **{name: groups[0][name] for name in _SETTINGS if name in groups[0]}}

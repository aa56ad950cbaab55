"""NaN and infinite numbers end a run before they are saved: in losses and gradient norms, in weights, in the base."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lit_callbacks import SpikeGuard
from torch import Tensor, nn

from lit_ft.checkpointing.selection import newest_of
from lit_ft.errors import RecipeError
from lit_ft.gradients import local


class NotFinite(RuntimeError):
    """Raised out of ``trainer.fit``, on all ranks together, once a loss, a gradient norm or a weight is not finite."""


class _Watched(NamedTuple):
    step: int
    what: str
    value: Tensor
    """On the host, once ``arrived``."""
    arrived: Any
    """CUDA event; None where the value is there."""


class FiniteCheck:
    """Finds values that are not finite, without making the host wait for a GPU.

    On a CPU at once. On a GPU a value travels to the host while the next step is queued, and is looked at one step
    later, or before anything is saved: all ranks look at the same time.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self._watched: list[_Watched] = []

    def watch(self, trainer: Trainer, what: str, value: Tensor) -> None:
        """Look at a value of the optimizer step that is under way.

        Args:
            trainer: of the run; where it has a ``SpikeGuard``, which skips such steps or ends the run, nothing is done.
            what: name of the value.
            value: scalar, the same on all ranks.

        Raises:
            NotFinite: it, or an earlier one, is not finite.
        """
        if any(isinstance(callback, SpikeGuard) for callback in getattr(trainer, "callbacks", [])):
            return
        step = trainer.global_step + 1
        self._look(trainer, [one for one in self._watched if one.step < step])
        self._watched = [one for one in self._watched if one.step == step]
        if value.device.type == "cuda":
            on_host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            on_host.copy_(value.detach(), non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
            self._watched.append(_Watched(step, what, on_host, arrived))
        else:
            self._look(trainer, [_Watched(step, what, value.detach(), None)])

    def look_at_all(self, trainer: Trainer) -> None:
        """Wait for the values that are on their way.

        Raises:
            NotFinite: one is not finite.
        """
        watched, self._watched = self._watched, []
        self._look(trainer, watched)

    @staticmethod
    def _look(trainer: Trainer, watched: list[_Watched]) -> None:
        for step, what, value, arrived in watched:
            if arrived is not None:
                arrived.synchronize()
            if not torch.isfinite(value):
                raise NotFinite(f"step {step}: {what} is {float(value)}; {_advice(trainer)}")


def check_trained_weights(trainer: Trainer, module: nn.Module) -> None:
    """Refuse to save weights that are not finite; a collective.

    Args:
        trainer: of the run.
        module: each rank looks at its part of what trains.

    Raises:
        NotFinite: a weight is not finite, on any rank.
    """
    bad = next(not_finite({n: p for n, p in module.named_parameters() if p.requires_grad}), None)
    if not trainer.strategy.reduce_boolean_decision(bad is None, all=True):
        where = f"{bad} is" if bad is not None else "weights of another rank are"
        raise NotFinite(f"after step {trainer.global_step} {where} not finite: nothing is saved; {_advice(trainer)}")


def check_base(model: nn.Module, pretrained: str) -> None:
    """Refuse base weights that are not finite.

    Args:
        model: the base, as it was read.
        pretrained: its name.

    Raises:
        RecipeError: it names a tensor.
    """
    weights = model.state_dict(keep_vars=True)
    bad = next(not_finite(weights), None)
    split = [weight for weight in weights.values() if hasattr(weight, "ds_tensor")]
    # Where ZeRO-3 has split them as they were read, all ranks go on or none.
    if _on_any_rank(bad is not None, split[0].ds_tensor.device) if split else bad is not None:
        raise _of_base(pretrained, bad)


def _on_any_rank(is_so: bool, device: torch.device) -> bool:
    flag = torch.tensor(int(is_so), device=device)
    torch.distributed.all_reduce(flag)
    return bool(flag)


def check_split_base(strategy: Strategy, module: Any) -> None:
    """Refuse base weights that are not finite, where each rank has read a part; a collective.

    Args:
        strategy: that has split the weights.
        module: the LightningModule.

    Raises:
        RecipeError: it names a tensor, on the rank that has it.
    """
    packed = _packed_weights(module)
    bad = next(not_finite({n: p for n, p in module.named_parameters() if n not in packed}), None)
    if not strategy.reduce_boolean_decision(bad is None, all=True):
        raise _of_base(getattr(module, "pretrained", ""), bad)


def _of_base(pretrained: str, bad: str | None) -> RecipeError:
    what = "a weight of another rank has" if bad is None else f"the weight {bad} has"
    return RecipeError(
        f"model.pretrained={pretrained!r}: {what} values that are NaN or infinite, so every loss would be NaN; "
        "download the model again, or name another checkpoint"
    )


def _packed_weights(module: nn.Module) -> set[str]:
    """Names of weights whose bytes are no numbers: 4-bit codes, which may be stored as floats to be split."""
    from bitsandbytes.nn import Linear4bit

    return {f"{name}.weight" for name, part in module.named_modules() if isinstance(part, Linear4bit)}


def not_finite(tensors: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tensors that have NaN or infinite values; of DTensors and ZeRO's weights in the part here."""
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and not all(map(_is_finite, _numbers_of(tensor))):
            yield name


def _numbers_of(tensor: Any) -> Iterator[Tensor]:
    """The floating-point numbers that a tensor consists of: its own, or scales of its blocks."""
    state = getattr(tensor, "quant_state", None)  # bitsandbytes' 4 bits
    scales = [getattr(tensor, "SCB", None), getattr(state, "absmax", None), getattr(state, "offset", None)]
    scales.append(getattr(getattr(state, "state2", None), "absmax", None))
    part = local(getattr(tensor, "ds_tensor", tensor)).detach()
    inner = part.__tensor_flatten__()[0] if hasattr(part, "__tensor_flatten__") else []  # torchao's
    parts = [] if state is not None else [getattr(part, name) for name in inner] or [part]
    yield from (one for one in [*parts, *scales] if isinstance(one, Tensor) and one.is_floating_point())


def _is_finite(tensor: Tensor) -> bool:
    if tensor.device.type == "meta" or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:  # float8 has no order
        tensor = tensor.to(torch.float32)
    # Both pass NaN on. It takes no memory, and on a CPU a twentieth of the time of isfinite().
    low, high = tensor.aminmax()
    return bool(low.isfinite() & high.isfinite())


def _advice(trainer: Trainer) -> str:
    newest = _newest_checkpoint(trainer)
    good = f"{newest} is from before it: go on from there" if newest else "no checkpoint is from before it: start again"
    return (
        f"{good}, with a lower learning rate, trainer.gradient_clip_val=1.0, model.dtype=bfloat16 in place of float16, "
        "or lit_callbacks.SpikeGuard, which skips such steps"
    )


def _newest_checkpoint(trainer: Trainer) -> Path | None:
    """The newest checkpoint of the run, all of which had finite weights when they were written."""
    callbacks: list[Any] = list(trainer.checkpoint_callbacks)
    names = [getattr(one, name, "") for one in callbacks for name in ("last_model_path", "best_model_path")]
    names += [name for one in callbacks for name in getattr(one, "best_k_models", {})]
    names.append(str(trainer.ckpt_path or ""))
    return newest_of({Path(name) for name in names if name and Path(name).exists()})

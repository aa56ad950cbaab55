"""An account of every tensor storage that lives during a step: how large it is, and what it is for."""

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from lit_callbacks.phases import Phase

Purpose = Literal["parameters", "gradients", "optimizer_state", "activations", "other"]
PURPOSES: tuple[Purpose, ...] = ("parameters", "gradients", "optimizer_state", "activations", "other")


@dataclass
class Held:
    """One storage."""

    bytes: int
    phase: Phase
    """In which it was made."""
    module: str
    """Whose forward made it; empty outside of any."""
    width: int
    """Last dimension of the tensor that it was made for."""
    purpose: Purpose = "other"


def tensors_in(nested: Any) -> Iterator[Tensor]:
    """The tensors within mappings, lists and tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (Mapping, list, tuple)):
        for part in nested.values() if isinstance(nested, Mapping) else nested:
            yield from tensors_in(part)


def local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors of this rank that a tensor consists of: shards of a ``DTensor``, parts of a quantized one."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):
                yield from local_tensors(part)
    else:
        yield tensor


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this rank behind some tensors, each counted once."""
    storages = {}
    for tensor in tensors:
        for part in local_tensors(tensor):
            with suppress(NotImplementedError, RuntimeError):  # a layout without storage
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


class StorageLedger(TorchDispatchMode):
    """While it is entered, sees what every operation returns, and when that is freed.

    Not seen: what an operation uses within itself, and storages that are resized in place (FSDP's gathered weights). It
    costs some tens of microseconds an operation, so it is for a step now and then.
    """

    def __init__(self, device: torch.device, modules: nn.Module) -> None:
        """Start with nothing.

        Args:
            device: only what lies there is counted.
            modules: the names that storages are counted under are those of its modules.
        """
        super().__init__()
        self.device = device
        self.held: list[Held] = []
        self.events: list[tuple[int, bool]] = []
        """Place in ``held``, and True when it was made or False when it was freed, in order."""
        self.phases: list[tuple[int, Phase]] = [(0, "other")]
        """The event that each phase begins with."""
        self.layer_outputs: dict[str, int] = {}
        """Bytes of the output of each numbered module: the layers of a stack."""
        self._places: dict[int, int] = {}
        self._watched: list[Any] = []
        self._since_forward: set[int] = set()
        self._names = {id(module): name for name, module in modules.named_modules()}
        self._open_modules: list[str] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> "StorageLedger":
        self._hooks = [register_module_forward_pre_hook(self._begin), register_module_forward_hook(self._end)]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*error)

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._open_modules.append(self._names.get(id(module), ""))

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._open_modules.pop()
        if name.rpartition(".")[2].isdigit():
            self.layer_outputs[name] = local_bytes(islice(tensors_in(output), 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and look at what it returns."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            self._see(tensor)
        return output

    def _see(self, tensor: Tensor) -> list[int]:
        places = []
        for part in local_tensors(tensor):
            with suppress(NotImplementedError, RuntimeError):
                storage = part.untyped_storage()
                if storage.device.type == self.device.type:
                    places.append(self._place_of(storage, part))
        return places

    def _place_of(self, storage: Any, tensor: Tensor) -> int:
        place = self._places.get(id(storage))
        if place is None:
            place = self._places[id(storage)] = len(self.held)
            module = self._open_modules[-1] if self._open_modules else ""
            phase = self.phases[-1][1]
            self.held.append(Held(storage.nbytes(), phase, module, tensor.shape[-1] if tensor.ndim else 1))
            self.events.append((place, True))
            # Kept here and nowhere else: when the ledger goes, nobody is told any more.
            self._watched.append(weakref.ref(storage, partial(self._freed, id(storage), place)))
            if phase == "forward":
                self._since_forward.add(place)
        return place

    def _freed(self, key: int, place: int, _: Any) -> None:
        self._places.pop(key, None)
        self._since_forward.discard(place)
        self.events.append((place, False))

    def know(self, tensors: Iterable[Tensor], purpose: Purpose) -> None:
        """Say what some tensors are for, those that are here already and those that were made since."""
        for tensor in tensors:
            for place in self._see(tensor):
                self.held[place].purpose = purpose

    def switch(self, phase: Phase) -> None:
        """Another phase begins. What a forward pass leaves behind is activations."""
        if self.phases[-1][1] == "forward":
            for place in self._since_forward:
                if self.held[place].purpose == "other":
                    self.held[place].purpose = "activations"
            self._since_forward.clear()
        self.phases.append((len(self.events), phase))

    # --- what came of it -------------------------------------------------------------------------

    def timeline(self) -> Iterator[tuple[Phase, dict[Purpose, int]]]:
        """Phase and bytes by purpose after each event."""
        now: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
        phases = [*self.phases, (len(self.events) + 1, "other")]
        at = 0
        for index, (place, is_made) in enumerate(self.events):
            while index >= phases[at + 1][0]:
                at += 1
            held = self.held[place]
            now[held.purpose] += held.bytes if is_made else -held.bytes
            yield phases[at][1], dict(now)

    def live_at(self, event: int) -> list[Held]:
        """The storages that live after an event."""
        live: dict[int, Held] = {}
        for place, is_made in self.events[: event + 1]:
            if is_made:
                live[place] = self.held[place]
            else:
                live.pop(place, None)
        return list(live.values())


@dataclass(frozen=True)
class Breakdown:
    """What memory was for at the worst moment of a step, on this rank."""

    bytes: dict[Purpose, int]
    phase: Phase
    """In which that moment was."""
    peaks: dict[Phase, int]
    """The most bytes of tensors in each phase."""
    modules: list[tuple[str, int, int]]
    """Names with ``*`` for numbers, how many modules, and bytes of their activations then; the largest first."""
    vocabulary_bytes: int
    """Of logits and their like: storages as wide as the vocabulary that are no weights."""
    layer_outputs: dict[str, int]

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.bytes.values())

    @classmethod
    def of(cls, ledger: StorageLedger, vocabulary: int | None, measured: int | None = None) -> "Breakdown":
        """Look at a ledger's worst moment.

        Args:
            ledger: of a step, or of the part of it that an error ended.
            vocabulary: rows of the largest embedding, if there is one.
            measured: the device's own peak, where it tells: what it holds beyond known tensors is ``other``.
        """
        worst, total, peaks = -1, -1, dict[Phase, int]()
        for event, (phase, purposes) in enumerate(ledger.timeline()):
            now = sum(purposes.values())
            peaks[phase] = max(peaks.get(phase, 0), now)
            if now > total:
                worst, total, worst_phase = event, now, phase
        live = ledger.live_at(worst)
        by_purpose: Counter[Purpose] = Counter(dict.fromkeys(PURPOSES, 0))
        for held in live:
            by_purpose[held.purpose] += held.bytes
        if measured is not None:
            by_purpose["other"] += measured - total
        # Weights and their gradients are as wide as a vocabulary only by chance or where embeddings are transposed.
        wide = [held.bytes for held in live if held.width == vocabulary and held.purpose in ("activations", "other")]
        return cls(
            dict(by_purpose), worst_phase if live else "other", peaks, _by_module(live), sum(wide), ledger.layer_outputs
        )


def _by_module(live: Iterable[Held]) -> list[tuple[str, int, int]]:
    total: Counter[str] = Counter()
    members: dict[str, set[str]] = {}
    for held in live:
        if held.purpose == "activations":
            name = re.sub(r"\b\d+\b", "*", held.module) or "(outside of modules)"
            total[name] += held.bytes
            members.setdefault(name, set()).add(held.module)
    return [(name, len(members[name]), size) for name, size in total.most_common()]


def vocabulary_of(module: nn.Module) -> int | None:
    """Rows of the largest embedding within a module."""
    return max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=None)

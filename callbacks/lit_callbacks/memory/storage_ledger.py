"""Ledger of every tensor storage that is alive during a step: its size and its purpose."""

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from lit_callbacks.internals.torch_internals import TorchDispatchMode, is_traceable_wrapper_subclass
from lit_callbacks.phases import Phase

Purpose = Literal["parameters", "gradients", "optimizer_state", "activations", "other"]
PURPOSES: tuple[Purpose, ...] = ("parameters", "gradients", "optimizer_state", "activations", "other")


@dataclass
class Held:
    """One tensor storage."""

    bytes: int
    phase: Phase
    """Phase in which it was allocated."""
    module: str
    """Name of the module whose forward allocated it; empty outside of any."""
    width: int
    """Last dimension of the tensor that it was allocated for."""
    purpose: Purpose = "other"


def tensors_in(nested: object) -> Iterator[Tensor]:
    """The tensors within mappings, lists and tuples."""
    if isinstance(nested, Tensor):
        yield nested
    elif isinstance(nested, (Mapping, list, tuple)):
        for part in nested.values() if isinstance(nested, Mapping) else nested:
            yield from tensors_in(part)


def local_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Plain local tensors that a tensor consists of: the shard of a ``DTensor``, the parts of a quantized tensor."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            if isinstance(part := getattr(tensor, name), Tensor):
                yield from local_tensors(part)
    else:
        yield tensor


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the local storages of some tensors, each storage counted once."""
    storages = {}
    for tensor in tensors:
        for part in local_tensors(tensor):
            with suppress(NotImplementedError, RuntimeError):  # tensor layouts without a storage
                storages[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return sum(storages.values())


class StorageLedger(TorchDispatchMode):
    """Context manager that tracks the storages of all tensors that operations return, until they are freed.

    Not tracked: temporary memory within an operation, and storages that are resized in place (FSDP's gathered weights).
    It costs some tens of microseconds per operation, so it is meant for single steps. Compiled modules run without
    compilation meanwhile: torch never again compiles a function that it first sees within a dispatch mode, and raises
    an error if it was compiled with ``fullgraph=True``.
    """

    def __init__(self, device: torch.device, modules: nn.Module) -> None:
        """Start with an empty ledger.

        Args:
            device: device whose storages are counted, by its type.
            modules: root module; storages are counted under the names of its submodules.
        """
        super().__init__()
        self.device = device
        self.held: list[Held] = []
        self.events: list[tuple[int, bool]] = []
        """Index in ``held``, and True for an allocation or False for a release, in order of time."""
        self.phases: list[tuple[int, Phase]] = [(0, "other")]
        """Index of the first event of each phase."""
        self.layer_outputs: dict[str, int] = {}
        """Bytes of the output of each module with a number as its name, i.e. of each layer of a stack."""
        self._indices: dict[int, int] = {}
        """Index in ``held`` of each living storage, by its Python ``id``."""
        self._watched: list[weakref.ref[UntypedStorage]] = []
        self._since_forward: set[int] = set()
        self._names = {id(module): name for name, module in modules.named_modules()}
        self._open_modules: list[str] = []
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> "StorageLedger":
        self._stance = torch.compiler.set_stance("force_eager")
        self._hooks = [
            register_module_forward_pre_hook(self._begin),
            register_module_forward_hook(self._end, always_call=True),
        ]
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(kind, error, trace)
        self._stance.__exit__(kind, error, trace)

    def _begin(self, module: nn.Module, _: object) -> None:
        self._open_modules.append(self._names.get(id(module), ""))

    def _end(self, module: nn.Module, _: object, output: object) -> None:
        name = self._open_modules.pop()
        if output is not None and name.rpartition(".")[2].isdigit():  # None after an error, which a caller may catch
            self.layer_outputs[name] = local_bytes(islice(tensors_in(output), 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and record the storages of its results."""
        output = func(*args, **(kwargs or {}))
        for tensor in tensors_in(output):
            self._see(tensor)
        return output

    def _see(self, tensor: Tensor) -> list[int]:
        indices = []
        for part in local_tensors(tensor):
            with suppress(NotImplementedError, RuntimeError):
                storage = part.untyped_storage()
                if storage.device.type == self.device.type:
                    indices.append(self._index_of(storage, part))
        return indices

    def _index_of(self, storage: UntypedStorage, tensor: Tensor) -> int:
        index = self._indices.get(id(storage))
        if index is None:
            index = self._indices[id(storage)] = len(self.held)
            module = self._open_modules[-1] if self._open_modules else ""
            phase = self.phases[-1][1]
            self.held.append(Held(storage.nbytes(), phase, module, tensor.shape[-1] if tensor.ndim else 1))
            self.events.append((index, True))
            # The weak references are kept only here: their callbacks end with the ledger.
            self._watched.append(weakref.ref(storage, partial(self._freed, id(storage), index)))
            if phase == "forward":
                self._since_forward.add(index)
        return index

    def _freed(self, key: int, index: int, _: object) -> None:
        self._indices.pop(key, None)
        self._since_forward.discard(index)
        self.events.append((index, False))

    def know(self, tensors: Iterable[Tensor], purpose: Purpose) -> None:
        """Set the purpose of some tensors; a storage that is not in the ledger is added."""
        for tensor in tensors:
            for index in self._see(tensor):
                self.held[index].purpose = purpose

    def switch(self, phase: Phase) -> None:
        """Begin a phase. Storages that a forward pass leaves alive become activations."""
        if self.phases[-1][1] == "forward":
            for index in self._since_forward:
                if self.held[index].purpose == "other":
                    self.held[index].purpose = "activations"
            self._since_forward.clear()
        self.phases.append((len(self.events), phase))

    # --- results ---------------------------------------------------------------------------------

    def timeline(self) -> Iterator[tuple[Phase, dict[Purpose, int]]]:
        """Phase and bytes by purpose after each event."""
        now: dict[Purpose, int] = dict.fromkeys(PURPOSES, 0)
        phases = [*self.phases, (len(self.events) + 1, "other")]
        at = 0
        for event, (index, is_allocation) in enumerate(self.events):
            while event >= phases[at + 1][0]:
                at += 1
            held = self.held[index]
            now[held.purpose] += held.bytes if is_allocation else -held.bytes
            yield phases[at][1], dict(now)

    def live_at(self, event: int) -> list[Held]:
        """Storages that are alive after an event."""
        live: dict[int, Held] = {}
        for index, is_allocation in self.events[: event + 1]:
            if is_allocation:
                live[index] = self.held[index]
            else:
                live.pop(index, None)
        return list(live.values())


@dataclass(frozen=True)
class Breakdown:
    """Memory by purpose at the peak of a step, on this rank."""

    bytes: dict[Purpose, int]
    phase: Phase
    """Phase of the peak."""
    peaks: dict[Phase, int]
    """Peak bytes of tensors in each phase."""
    modules: list[tuple[str, int, int]]
    """Module name with ``*`` for numbers, number of modules, and bytes of their activations; the largest first."""
    vocabulary_bytes: int
    """Bytes of logits and similar tensors: storages as wide as the vocabulary, without weights and gradients."""
    layer_outputs: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(self.bytes.values())

    @classmethod
    def of(cls, ledger: StorageLedger, vocabulary: int | None, measured: int | None = None) -> "Breakdown":
        """Compute the breakdown at a ledger's peak.

        Args:
            ledger: ledger of a step, or of the part of it before an error.
            vocabulary: number of rows of the largest embedding; None without one.
            measured: peak bytes that the device's allocator reports, if it does; bytes beyond the tracked ones count as
                ``other``.
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
        # Weights and their gradients have the vocabulary's width only by chance or if embeddings are transposed.
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
    """Number of rows of the largest embedding within a module; None without one."""
    return max((m.num_embeddings for m in module.modules() if isinstance(m, nn.Embedding)), default=None)

"""Megatron's legacy format: one pickled file per tensor-, pipeline- and expert-parallel rank.

``mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`` holds ``args``, ``checkpoint_version``, ``iteration`` and the rank's state
dict as ``model``, or ``model0``, ``model1``, ... with virtual pipeline stages. A stage's layers are numbered from 0.
"""

import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_ft.checkpointing.storage.checksum import save_without_sum
from lit_ft.errors import RecipeError
from lit_ft.megatron.families import EMBEDDING, FINAL_NORM, HEAD, Key, layer_keys
from lit_ft.megatron.formats.names import Naming, extra_state, parse
from lit_ft.megatron.formats.safe_pickle import load
from lit_ft.megatron.layout import Layout, Rank
from lit_ft.megatron.shape import ModelShape

_MOST_MAPPED = 2**27
"""Bytes read of mapped files after which they are opened again: pages that were read stay in memory until then."""
FILE = "model_optim_rng.pt"
"""File of a rank."""


class LegacySource:
    """Checkpoint in the legacy format; the files of one pipeline and expert rank are open at a time."""

    def __init__(self, folder: Path) -> None:
        """Read the names in the files of the first tensor-parallel rank.

        Raises:
            RecipeError: a rank's file is missing or cannot be read, or the checkpoint is older than Megatron-Core.
        """
        first = next(iter(sorted(folder.glob(f"mp_rank_*/{FILE}"))), None)
        if first is None:
            raise RecipeError(f"{str(folder)!r} holds no mp_rank_*/{FILE}; copy the ranks' folders too")
        content = load(first)
        self.arguments: Namespace = content.get("args", Namespace())
        self.has_optimizer = "optimizer" in content or (first.parent / "distrib_optim.pt").is_file()
        self.layout = _layout_of(folder, self.arguments)
        self._folder, ranks = folder, self.layout.ranks()
        if missing := [file for rank in ranks if not (file := self._file(rank)).is_file()]:
            raise RecipeError(
                f"{len(missing)} of {len(ranks)} rank files missing, the first of them {missing[0]}; copy the "
                "files of all ranks"
            )
        self._mapped = 0
        self._opened: tuple[Rank, list[dict[str, Any]]] | None = None
        self._places: dict[str, tuple[Rank, str, str]] = {}
        self._find_weights()

    @property
    def rows(self) -> int:
        """Rows of the embedding, with those that pad the vocabulary."""
        return sum(len(part) for part in self.parts(Key(EMBEDDING)))

    def names(self) -> set[str]:
        """Names of the weights."""
        return set(self._places)

    def parts(self, key: Key) -> list[Tensor]:
        """One tensor per tensor-parallel rank, mapped into memory."""
        rank, module, name = self._places[key.megatron]
        parts: list[Tensor] = [content[module][name] for content in self._files_of(rank)]
        self._mapped += sum(part.nbytes for part in parts)
        return parts

    def dtype(self, key: Key) -> torch.dtype:
        """Dtype of a weight."""
        return self.parts(key)[0].dtype

    def _file(self, rank: Rank) -> Path:
        return self._folder / self.layout.folder_of(rank) / FILE

    def _files_of(self, rank: Rank) -> list[dict[str, Any]]:
        """Content of the files of all tensor-parallel ranks beside a rank."""
        if self._opened is None or self._opened[0] != rank or self._mapped > _MOST_MAPPED:
            self._opened, self._mapped = None, 0
            ranks = [rank._replace(tensor=tensor) for tensor in range(self.layout.tensor_parallel)]
            self._opened = rank, [load(self._file(one)) for one in ranks]
        return self._opened[1]

    def _find_weights(self) -> None:
        """Locate each weight; a stage's first layer is the number of layers in the stages before it."""
        names: dict[tuple[int, int, int], list[str]] = {}  # by virtual stage, pipeline rank and expert rank
        for pipeline in range(self.layout.pipeline_parallel):
            for expert in range(self.layout.expert_parallel):
                content = load(self._file(Rank(0, pipeline, expert)))
                for virtual, module in enumerate(_modules(content, self._folder)):
                    weights = [name for name, value in content[module].items() if isinstance(value, Tensor)]
                    names[virtual, pipeline, expert] = [name for name in weights if "_extra_state" not in name]
        has_stages = len({virtual for virtual, _, _ in names}) > 1
        first_layer = 0
        for (virtual, pipeline, expert), saved_names in sorted(names.items()):
            locations = [parse(name) for name in saved_names]
            experts = 1 + max((location.expert for location in locations if location.expert is not None), default=-1)
            for name, (own, layer, number) in zip(saved_names, locations, strict=True):
                full = own.format(expert=None if number is None else number + expert * experts)
                key = full if layer is None else f"decoder.layers.{layer + first_layer}.{full}"
                module = f"model{virtual}" if has_stages else "model"
                self._places.setdefault(key, (Rank(0, pipeline, expert), module, name))
            if expert == self.layout.expert_parallel - 1:
                first_layer += 1 + max(
                    (location.layer for location in locations if location.layer is not None), default=-1
                )


def _modules(content: dict[str, Any], folder: Path) -> list[str]:
    """Names of the state dicts in a file, one per virtual stage."""
    modules = sorted((name for name in content if re.fullmatch(r"model\d*", name)), key=lambda name: (len(name), name))
    if not modules or "language_model" in content[modules[0]]:
        raise RecipeError(
            f"{str(folder)!r} holds no weights of Megatron-Core's GPTModel; convert it with Megatron-LM's "
            "tools/checkpoint/convert.py to a mcore checkpoint first"
        )
    return modules


def _layout_of(folder: Path, arguments: Namespace) -> Layout:
    """Layout by the arguments in a checkpoint or, without them, by the names of its folders."""
    numbers = [[int(part) for part in path.name.split("_")[2:]] for path in folder.glob("mp_rank_*")]
    in_names = [1 + max(one[i] for one in numbers if len(one) > i) for i in range(max(map(len, numbers)))]
    tensor, pipeline, expert = [*in_names, 1, 1][:3]
    recorded = vars(arguments)
    layout = Layout(
        tensor_parallel=recorded.get("tensor_model_parallel_size") or tensor,
        pipeline_parallel=recorded.get("pipeline_model_parallel_size") or pipeline,
        expert_parallel=recorded.get("expert_model_parallel_size") or expert,
    )
    expert_tensor = recorded.get("expert_tensor_parallel_size") or layout.tensor_parallel
    if expert_tensor != layout.tensor_parallel:
        raise RecipeError(
            f"expert_tensor_parallel_size={expert_tensor} is not tensor_model_parallel_size={layout.tensor_parallel}, "
            "which files of the legacy format do not tell apart; save with --ckpt-format torch_dist"
        )
    return layout


def write_ranks(
    shape: ModelShape,
    layout: Layout,
    naming: Naming,
    arguments: Namespace,
    part: Callable[[Key, int, int], Tensor],
) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Rank files to write, as pairs of the path and the function that writes the file.

    Args:
        shape: sizes of the model.
        layout: parallel layout.
        naming: names in the files.
        arguments: arguments of Megatron.
        part: gives a weight's part by tensor-parallel rank and size.
    """
    for rank in layout.ranks():

        def write(path: Path, rank: Rank = rank) -> None:
            models = [
                _state_dict(shape, layout, naming, rank, virtual, part) for virtual in range(layout.virtual_pipeline)
            ]
            state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 0}
            named = {f"model{i}": model for i, model in enumerate(models)} if len(models) > 1 else {"model": models[0]}
            save_without_sum({**state, **named}, path)

        yield f"{layout.folder_of(rank)}/{FILE}", write


def _state_dict(
    shape: ModelShape, layout: Layout, naming: Naming, rank: Rank, virtual: int, part: Callable[[Key, int, int], Tensor]
) -> dict[str, Tensor | None]:
    """State dict of a rank's virtual stage."""
    state: dict[str, Tensor | None] = {}
    layers = layout.stages(shape.layers)[rank.pipeline, virtual]
    experts = layout.experts_of(rank, shape.experts)

    def add(name: str, key: Key) -> None:
        state[name] = part(key, rank.tensor, layout.tensor_parallel)
        if (extra := extra_state(name)) is not None:
            state[extra] = None  # present and empty: torch's strict loading asks for it

    is_first, is_last = layers.start == 0, layers.stop == shape.layers
    if is_first:
        add(EMBEDDING.megatron, Key(EMBEDDING))
    for layer in layers:
        for key in layer_keys(shape.family, layer, experts):
            own_expert = None if key.expert is None else key.expert - experts.start
            name = naming.within_layer(key.weight.megatron, own_expert)
            add(f"decoder.layers.{layer - layers.start}.{name}", key)
    if is_last:
        add(FINAL_NORM.megatron, Key(FINAL_NORM))
        # A tied head is a copy of the embedding on the last stage, if that is not the first one too.
        if not shape.is_tied or layout.pipeline_parallel > 1:
            add(HEAD.megatron, Key(EMBEDDING if shape.is_tied else HEAD))
        state["output_layer._extra_state"] = None
    return state

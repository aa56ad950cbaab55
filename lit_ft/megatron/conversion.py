"""The two conversions: write, verify, and only then give the result its name."""

import dataclasses
import json
import shutil
from argparse import Namespace
from functools import partial
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from lit_ft.errors import RecipeError
from lit_ft.megatron.arguments import check_arguments, command_line, saved_arguments
from lit_ft.megatron.checks.logits import Check, check_logits
from lit_ft.megatron.checks.verification import check_back, check_forth
from lit_ft.megatron.families import Key
from lit_ft.megatron.formats import legacy, torch_dist
from lit_ft.megatron.formats.hugging_face import HuggingFaceWeights, index_text, plan_files, write_file
from lit_ft.megatron.formats.names import Naming
from lit_ft.megatron.formats.source import TRACKER, MegatronSource, checkpoint_folder
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.mapping import AsHuggingFace, AsMegatron
from lit_ft.megatron.optimizer_state import AdamState, prefix_of, settings_in
from lit_ft.megatron.output_folder import OutputFolder
from lit_ft.megatron.progress import progress
from lit_ft.megatron.shape import ModelShape
from lit_ft.model.loading import load_config, load_tokenizer
from lit_ft.training.optimizers.initial_state import FOLDER, MOMENTS, SETTINGS

ARGUMENTS = "megatron_arguments.txt"
"""File with the options of ``pretrain_gpt.py`` that load a checkpoint."""
_RELEASE = "release"
"""Folder of a checkpoint that starts a training: Megatron looks for no optimizer state in it."""
_TEXTS = (
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tokenizer.model",
    "*.jinja",
    "additional_chat_templates/*.jinja",
)
"""Files beside the weights of a model folder that a conversion copies."""


def open_checkpoint(path: Path) -> MegatronSource:
    """Open a Megatron checkpoint of either format.

    Raises:
        RecipeError: there is none, it is incomplete, or it cannot be read.
    """
    folder = checkpoint_folder(path)
    if (folder / torch_dist.INDEX).is_file():
        return torch_dist.TorchDistSource(folder)
    return legacy.LegacySource(folder)


def local_folder(pretrained: str) -> Path:
    """Folder of a model: the folder itself, or the snapshot of a hub id that was downloaded before."""
    folder = Path(pretrained).expanduser()
    cached = None if folder.is_dir() else try_to_load_from_cache(pretrained, "config.json")
    return Path(cached).parent if isinstance(cached, str) else folder


def _shape_of(pretrained: str) -> ModelShape:
    """Sizes of a model, which has at least as many rows of embeddings as its tokenizer has tokens.

    Raises:
        RecipeError: it cannot be converted.
    """
    shape = ModelShape.of(load_config(pretrained), pretrained)
    if (local_folder(pretrained) / "tokenizer_config.json").is_file():
        tokens = len(load_tokenizer(pretrained))
        if tokens > shape.vocabulary:
            raise RecipeError(
                f"{pretrained}: the tokenizer has {tokens:,} tokens, and the model vocab_size={shape.vocabulary:,}; "
                "put back the tokenizer of the model, or resize the model's embeddings"
            )
    return shape


def to_megatron(
    pretrained: str,
    out: Path,
    layout: Layout,
    naming: Naming,
    check: Check | None,
    state: AdamState | None = None,
    adapter: Path | None = None,
    is_kept: bool = True,
) -> None:
    """Write a Hugging Face model as a Megatron checkpoint.

    Args:
        pretrained: folder or hub id of the model.
        out: folder to write, for Megatron's ``--load``.
        layout: parallel layout.
        naming: format and layer specification.
        check: how logits are compared; None takes the strictest that this machine can run.
        state: state of the model's optimizer, for the format ``torch_dist``; None for a checkpoint without one.
        adapter: folder on the same disk that becomes ``adapter`` in the checkpoint's; None adds none.
        is_kept: whether the next call continues an interrupted one: the model is there then, and unchanged.

    Raises:
        RecipeError: the model or the layout cannot be converted, or the result is not that of the source.
    """
    shape = _shape_of(pretrained)
    naming = dataclasses.replace(naming, has_experts=bool(shape.experts))
    layout.check(shape)
    weights = HuggingFaceWeights(local_folder(pretrained))
    as_megatron = AsMegatron(weights, shape, layout)
    dtype = as_megatron.dtype(shape.all_keys()[0])
    arguments = saved_arguments(shape, layout, naming, dtype, state.step if state else 0)
    command = _record(weights.folder, arguments) if is_kept else None
    with OutputFolder(out, command) as folder:
        if naming.format == "torch":
            _write_ranks(folder, layout, naming, arguments, as_megatron)
        else:
            _write_stacked(folder, naming, arguments, as_megatron, state)
        folder.text(TRACKER, str(state.step) if state else _RELEASE)
        _copy_texts(weights.folder, folder.temporary, (*_TEXTS, "config.json"))  # Pai-Megatron-Patch reads them there
        has_tokenizer = (folder.temporary / "tokenizer_config.json").is_file()
        tokenizer = str((out if has_tokenizer else weights.folder).absolute())
        folder.text(ARGUMENTS, command_line(shape, layout, naming, dtype, tokenizer, state is not None))
        report = _verified(folder.temporary, weights, shape, pretrained, state, check)
        if adapter is not None:
            shutil.rmtree(folder.temporary / "adapter", ignore_errors=True)  # of an interrupted call
            adapter.rename(folder.temporary / "adapter")
    rank_zero_info(f"{out}: {shape.model_type}, {naming.format}, every bit comes back from it; {report}")
    rank_zero_info(f"Megatron loads it with: pretrain_gpt.py --load {out} $(cat {out / ARGUMENTS})")


def _record(source: Path, arguments: Namespace) -> dict[str, object]:
    files = {name: (source / name).stat().st_mtime_ns for name in _names_of(source, ("*.safetensors",))}
    return {"source": str(source.absolute()), "files": files, "arguments": vars(arguments)}


def _verified(
    folder: Path,
    weights: HuggingFaceWeights,
    shape: ModelShape,
    pretrained: str,
    state: AdamState | None,
    check: Check | None,
) -> str:
    """Compare a written checkpoint with its source; says how logits were compared."""
    written, files_folder = open_checkpoint(folder), checkpoint_folder(folder)
    check_back(weights, AsHuggingFace(written, shape, str(folder), pretrained))
    for name, tensors in state.tensors.items() if state else ():
        of_state = torch_dist.TorchDistSource(files_folder, prefix_of(name))
        check_back(tensors, AsHuggingFace(of_state, shape, str(folder), pretrained))
    return check_logits(weights, written, files_folder, shape, check)


def _write_ranks(
    folder: OutputFolder, layout: Layout, naming: Naming, arguments: Namespace, source: AsMegatron
) -> None:
    with progress("writing", source.bytes) as advance:

        def part(key: Key, rank: int, ranks: int) -> Tensor:
            tensor = source.part(key, rank, ranks)
            advance(tensor.nbytes)
            return tensor

        for name, write in legacy.write_ranks(source.shape, layout, naming, arguments, part):
            folder.step(f"{_RELEASE}/{name}", write)


def _write_stacked(
    folder: OutputFolder, naming: Naming, arguments: Namespace, weights: AsMegatron, state: AdamState | None
) -> None:
    sources = {"": weights}
    for name, tensors in state.tensors.items() if state else ():
        sources[prefix_of(name)] = AsMegatron(tensors, weights.shape, weights.layout)
    to = state.folder_name if state else _RELEASE
    if not (folder.temporary / to / torch_dist.INDEX).is_file():
        with progress("writing", sum(source.bytes for source in sources.values())) as advance:
            for prefix, source in sources.items():

                def weight(key: Key, source: AsMegatron = source) -> Tensor:
                    tensor = source.part(key, 0, 1)
                    advance(tensor.nbytes)
                    return tensor

                rows = source.layout.padded(source.shape.vocabulary)
                parts = torch_dist.write_parts(source.shape, naming, rows, source.dtype, weight, prefix)
                for name, write in parts:
                    folder.step(f"{to}/{name}", write)
        torch_dist.join_parts(folder.temporary / to, arguments, state.common() if state else None)
    torch_dist.remove_parts(folder.temporary / to)


def to_hugging_face(path: Path, like: str, out: Path, check: Check | None) -> None:
    """Write a Megatron checkpoint as a Hugging Face model.

    Args:
        path: folder of the checkpoint, or the one that ``--save`` named.
        like: folder or hub id of a model with the same sizes, whose config and tokenizer are taken.
        out: folder to write.
        check: how logits are compared; None takes the strictest that this machine can run.

    Raises:
        RecipeError: the checkpoint cannot be converted, or the result is not that of the source.
    """
    shape = _shape_of(like)
    source, files = open_checkpoint(path), checkpoint_folder(path)
    check_arguments(source.arguments, shape, str(path), like)
    as_hugging_face = AsHuggingFace(source, shape, str(path), like)
    command = {
        "source": str(files.absolute()),
        "files": {str(file): file.stat().st_mtime_ns for file in sorted(files.rglob("*.*"))},
        "like": str(local_folder(like).absolute()),
    }
    with OutputFolder(out, command) as folder:
        dtype = _write_tensors(folder, "", as_hugging_face)
        del as_hugging_face  # its last tensor keeps a mapped file in memory
        _copy_texts(local_folder(like), folder.temporary, _TEXTS)
        folder.text("config.json", _config_text(local_folder(like) / "config.json", dtype))
        written = HuggingFaceWeights(folder.temporary)
        check_forth(source, AsMegatron(written, shape, Layout()), shape)
        report = check_logits(written, source, files, shape, check)
        if source.has_optimizer:
            _write_state(folder, source, files, shape, path)
    rank_zero_info(f"{out}: {shape.model_type}, every bit of {path} comes back from it; {report}")


def _write_state(folder: OutputFolder, source: MegatronSource, files: Path, shape: ModelShape, path: Path) -> None:
    """Write the moments of Megatron's AdamW in Hugging Face's names, and verify them; or say why not."""
    settings = settings_in(source)
    if isinstance(settings, str):
        rank_zero_warn(
            f"{path} also holds an optimizer's state, which is not converted: {settings}; a training here starts with "
            "a new one"
        )
        return
    for moment in MOMENTS:
        of_moment = torch_dist.TorchDistSource(files, prefix_of(moment))
        _write_tensors(folder, f"{FOLDER}/{moment}/", AsHuggingFace(of_moment, shape, str(path), moment))
        written = HuggingFaceWeights(folder.temporary / FOLDER / moment)
        check_forth(of_moment, AsMegatron(written, shape, Layout()), shape)
    folder.text(f"{FOLDER}/{SETTINGS}", json.dumps(settings, indent=1) + "\n")
    rank_zero_info(
        f"{FOLDER} holds AdamW's moments after {settings['step']:,} steps: a full fine-tuning starts with them by the "
        "callback lit_ft.InitialAdamState"
    )


def _write_tensors(folder: OutputFolder, to: str, source: AsHuggingFace) -> torch.dtype:
    """Write tensors as a Hugging Face folder ``to``; returns the dtype of the first."""
    tensors = source.tensors()
    files = plan_files(tensors)
    with progress(f"writing {to}", sum(tensor.bytes for tensor in tensors)) as advance:

        def read(name: str) -> Tensor:
            tensor = source.read(name)
            advance(tensor.nbytes)
            return tensor

        for name, contents in files:
            folder.step(f"{to}{name}", partial(write_file, tensors=contents, read=read))
    if len(files) > 1:
        folder.text(f"{to}{SAFE_WEIGHTS_INDEX_NAME}", index_text(files))
    return tensors[0].dtype


def _copy_texts(source: Path, to: Path, patterns: tuple[str, ...]) -> None:
    for name in _names_of(source, patterns):
        (to / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, to / name)


def _names_of(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted({file.relative_to(folder).as_posix() for pattern in patterns for file in folder.glob(pattern)})


def _config_text(path: Path, dtype: torch.dtype) -> str:
    """Text of a config, with the dtype of the weights."""
    config = json.loads(path.read_text(encoding="utf-8"))
    name = "dtype" if "dtype" in config or "torch_dtype" not in config else "torch_dtype"
    config[name] = str(dtype).removeprefix("torch.")
    return json.dumps(config, indent=2, sort_keys=True) + "\n"

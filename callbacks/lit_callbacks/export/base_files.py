"""Tensors that training does not use, and other files, which an exported model takes over from its base's folder.

Published models hold more than the model for text that is trained: heads for multi-token prediction (``mtp.*``), vision
towers, processors. Their tensors are copied bit by bit from the base's files into files beside the trained ones, one
of the base's files at a time, from memory-mapped tensors.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_callbacks.export.merge_check import MergeFailed, skeleton
from lit_callbacks.export.tokenizer_files import save_tokenizer
from lit_callbacks.export.weight_files import number, opened, weight_files
from lit_callbacks.internals.transformers_internals import (
    names_in_model,
    save_under_names_in,
    tied_tensors,
    ties_embeddings,
    was_read,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

LICENSE_FILES = ("LICENSE*", "NOTICE*", "USE_POLICY*")
"""Name patterns of files that must stay with a model."""

PROCESSOR_FILES = ("*processor_config.json", "chat_template.json")
"""Name patterns of the processors of images and videos, and of the template that old ones have."""

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.tiktoken"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "spiece.model", "sentencepiece.bpe.model"),
)
"""Name patterns of files that are taken over if training has not changed the tokenizer."""

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)
_NOTES = ("_name_or_path", "architectures", "model_type", "transformers_version", "use_cache", "quantization_config")
"""Entries of a config that are not compared: notes, and what is decided elsewhere."""


@dataclass(frozen=True)
class BaseFiles:
    """Folder of the files that a base model was read from."""

    folder: Path
    """Local folder; for a hub model, the snapshot in the cache."""
    tensors: dict[str, Path]
    """Weight file of each tensor, by its published name."""

    @classmethod
    def of(cls, model: "PreTrainedModel") -> "BaseFiles | None":
        """Files that a model was read from; None if it was not read from files.

        Args:
            model: model of transformers, with or without adapter layers; its name is the folder or hub id.
        """
        if not was_read(model) or not model.name_or_path:
            return None
        folder = Path(model.name_or_path)
        return cls.in_folder(folder if folder.is_dir() else _snapshot_of(model.name_or_path))

    @classmethod
    def in_folder(cls, folder: Path) -> "BaseFiles | None":
        """Files of a folder; None if it has no weights."""
        tensors = _tensors_in(folder)
        return cls(folder, tensors) if tensors else None

    def publish_names_of(self, model: "PreTrainedModel") -> None:
        """Let a model that was read from these files save its tensors under their names there."""
        save_under_names_in(model, skeleton(type(model), model.config), self.tensors)

    def largest_file(self) -> int | None:
        """Size in bytes of the largest weight file; None if there is only one."""
        sizes = [file.stat().st_size for file in set(self.tensors.values())]
        return max(sizes) if len(sizes) > 1 else None

    @property
    def is_quantized(self) -> bool:
        """Whether the weights in the files are quantized."""
        return _json(self.folder).get("quantization_config") is not None

    def float_dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the floating-point tensors by their published names; the tensors are not read."""
        dtypes: dict[str, torch.dtype] = {}
        for file in set(self.tensors.values()):
            with opened(file) as weights:
                dtypes |= {name: weights.tensor(name).dtype for name in weights.names}
        return {name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point}

    def unused_parts(self, model: "PreTrainedModel") -> list[str]:
        """Names of the tensors that a model does not read, without the scales of quantized weights that it reads.

        Args:
            model: model, which may be on the meta device.
        """
        plain = skeleton(type(model), model.config)
        own, names = plain.state_dict().keys(), names_in_model(plain, self.tensors)
        unused = [name for name in self.tensors if names[name] not in own]
        if not self.is_quantized:
            return unused
        modules = own | {name.rpartition(".")[0] for name in own} - {"", model.base_model_prefix}
        return [name for name in unused if modules.isdisjoint(_parents(names[name]))]

    def are_for_dense_models(self, names: list[str]) -> bool:
        """Whether some tensors can stand beside dense weights: a dense model's config describes no quantization."""
        if not self.is_quantized:
            return True
        with ExitStack() as stack:
            files = {file: stack.enter_context(opened(file)) for file in {self.tensors[name] for name in names}}
            return all(files[self.tensors[name]].tensor(name).dtype in _PLAIN for name in names)

    def summary(self, names: Iterable[str]) -> str:
        """Number and size of some tensors by the part of the model that they belong to, in brackets; empty for none."""
        names = list(names)
        parts = Counter(map(_part_of, names)).most_common()
        with ExitStack() as stack:
            files = {file: stack.enter_context(opened(file)) for file in {self.tensors[name] for name in names}}
            mib = sum(files[self.tensors[name]].tensor(name).nbytes for name in names) / 2**20
        listed = ", ".join(f"{part} {count:,}" for part, count in parts[:5]) + (", ..." if len(parts) > 5 else "")
        return f" ({listed}; {mib:,.1f} MiB)" if names else ""

    # --- what is taken over ----------------------------------------------------------------------

    def complete(self, folder: Path, model_class: type["PreTrainedModel"], unused: list[str]) -> str:
        """Add what a trained model's folder lacks of its base: tensors, config and processors.

        Args:
            folder: folder that ``save_pretrained`` has written, under the base's names.
            model_class: class of the trained model.
            unused: names of the tensors that it does not use.

        Returns:
            A message with the numbers of tensors.

        Raises:
            MergeFailed: the folder lacks a tensor that the model reads from the base's files, or a copy differs.
        """
        config, written = model_class.config_class.from_pretrained(folder), _tensors_in(folder).keys()
        is_quantized = "quantization_config" in _json(folder)
        if not self.is_quantized and not is_quantized:
            self._check_written(skeleton(model_class, config), written)
        scales = self.is_quantized * len(self.tensors.keys() - written - set(unused))
        changed, unchanged = self._compare(folder)
        self._copy_tensors(unused, folder)
        if not is_quantized:
            self._publish_config(folder, config)
        self._copy_generation_config(folder)
        copy_files(self.folder, folder, PROCESSOR_FILES + LICENSE_FILES)
        return (
            f"of the base's {len(self.tensors):,} tensors, training changed {changed:,}, {unchanged:,} are unchanged, "
            f"{len(unused):,} that it does not use are carried over{self.summary(unused)}"
            + (f", {scales:,} of its quantization are left out" if scales else "")
        )

    def _check_written(self, trained: "PreTrainedModel", written: Set[str]) -> None:
        read = trained.state_dict().keys() - tied_tensors(trained)
        names = names_in_model(trained, self.tensors.keys() - written)
        lost = [name for name, own in names.items() if own in read]
        if lost:
            raise MergeFailed(
                f"the merged files lack {', '.join(lost[:3])} of the base ({len(lost)} tensors), or hold them under "
                "other names; nothing was written"
            )

    def _compare(self, folder: Path) -> tuple[int, int]:
        """Numbers of a folder's tensors that differ from the base's, and that do not, rounded to the same dtype."""
        counts = Counter[bool]()
        with ExitStack() as stack:
            files = {file: stack.enter_context(opened(file)) for file in set(self.tensors.values())}
            for part in weight_files(folder):
                with opened(part) as weights:
                    for name in weights.names:
                        if name in self.tensors:
                            before, after = files[self.tensors[name]].tensor(name), weights.tensor(name)
                            counts[torch.equal(before.to(after.dtype), after)] += 1
        return counts[False], counts[True]

    def _copy_tensors(self, names: list[str], folder: Path) -> None:
        from safetensors.torch import save_file

        for index, file in enumerate(sorted({self.tensors[name] for name in names})):
            with opened(file) as base:
                own = {name: base.tensor(name).contiguous() for name in names if self.tensors[name] == file}
                copied = folder / f"rest-{index:05}.safetensors"  # sorted behind model-*
                save_file(own, copied, metadata={"format": "pt"})
                with opened(copied) as again:
                    if different := [name for name in own if not _same_bits(own[name], again.tensor(name))]:
                        raise MergeFailed(f"{different[0]} is not what it is in {file}; nothing was written")
        if names:
            number(folder)

    def _publish_config(self, folder: Path, config: "PretrainedConfig") -> None:
        """Write the base's ``config.json`` with the entries that training has changed."""
        from transformers import AutoConfig

        published = _json(self.folder)
        parts = [part for part in published.values() if isinstance(part, dict)]
        own = next((part for part in parts if part.get("model_type") == config.model_type), published)
        before, after = type(config).from_pretrained(self.folder).to_dict(), config.to_dict()
        before["dtype"] = before.get("dtype") or published.get("dtype", published.get("torch_dtype"))
        before["tie_word_embeddings"] = ties_embeddings(
            AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        )  # the whole model's
        changed = {name: value for name, value in after.items() if name not in _NOTES and before.get(name) != value}
        is_dense_now = "quantization_config" in published and "quantization_config" not in _json(folder)
        if not changed and not is_dense_now:
            shutil.copyfile(self.folder / "config.json", folder / "config.json")
            return
        for part in (published, own):
            part.pop("quantization_config", None)
            for name, value in _as_written(changed, part).items():
                name = "torch_dtype" if name == "dtype" and "torch_dtype" in part else name
                if name in part or part is own or name in ("dtype", "tie_word_embeddings"):
                    part[name] = value
        (folder / "config.json").write_text(json.dumps(published, indent=2, ensure_ascii=False) + "\n", "utf-8")
        again = type(config).from_pretrained(folder).to_dict()
        own_notes = (*_NOTES, "dtype", "tie_word_embeddings")  # a whole model may state these for its parts
        if wrong := [name for name in after if name not in own_notes and again.get(name) != after[name]]:
            raise MergeFailed(f"config.json cannot hold {wrong[0]}={after[wrong[0]]!r}; nothing was written")

    def _copy_generation_config(self, folder: Path) -> None:
        """Take over the base's ``generation_config.json``, unless the trained model has other settings."""
        from transformers import GenerationConfig

        name = "generation_config.json"
        if not (self.folder / name).is_file() or not (folder / name).is_file():
            return
        before, after = (GenerationConfig.from_pretrained(one).to_dict() for one in (self.folder, folder))
        if before | {"transformers_version": None} == after | {"transformers_version": None}:
            shutil.copyfile(self.folder / name, folder / name)

    # --- tokenizer -------------------------------------------------------------------------------

    def copy_tokenizer(self, tokenizer: "PreTrainedTokenizerBase", folder: Path) -> bool:
        """Copy the published files of the tokenizer, if it is what it was published as.

        Returns:
            Whether they were copied; otherwise tokens or a template were changed, or it is another tokenizer.

        Raises:
            ValueError: the published files cannot be read.
        """
        from transformers import AutoTokenizer

        if not any((self.folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
            return False
        with TemporaryDirectory() as own, TemporaryDirectory() as published:
            tokenizer.save_pretrained(own)
            try:
                AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False).save_pretrained(published)
            except Exception as error:  # tokenizers raises no more specific class for a file that does not parse
                reason = str(error).split("\n")[0]
                raise ValueError(
                    f"the base's tokenizer in {str(self.folder)!r} cannot be read ({type(error).__name__}: {reason}); "
                    "put back its files"
                ) from error
            is_published = _contents(Path(own)) == _contents(Path(published))
        if is_published:
            copy_files(self.folder, folder, TOKENIZER_FILES)
        else:
            (folder / "chat_template.json").unlink(missing_ok=True)  # of a processor, with the published template
        return is_published


def add_files(
    folder: Path,
    files: BaseFiles | None,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    text_only: bool = False,
) -> None:
    """Add to a trained model's folder what it takes over from its base, and the tokenizer; prints what it was.

    Args:
        folder: folder that ``save_pretrained`` has written.
        files: files of the base; None for a model that was not read from files.
        model: model that was read from them.
        tokenizer: tokenizer to save; None saves none.
        text_only: whether to leave out what the model does not use.
    """
    if files is not None:
        unused = files.unused_parts(model)
        if not text_only:
            rank_zero_info(files.complete(folder, type(model), unused))
        else:
            copy_files(files.folder, folder, LICENSE_FILES)
        if text_only and unused:
            rank_zero_info(f"{len(unused):,} tensors of the base are left out{files.summary(unused)}")
    if tokenizer is not None and not (files is not None and files.copy_tokenizer(tokenizer, folder)):
        save_tokenizer(tokenizer, folder)


def _snapshot_of(hub_id: str) -> Path:
    """Folder in the cache that a hub model was read from, completed by its small files."""
    from huggingface_hub import snapshot_download
    from transformers.utils import cached_file

    commit = Path(str(cached_file(hub_id, "config.json", local_files_only=True))).parent.name
    patterns = [*PROCESSOR_FILES, *TOKENIZER_FILES, *LICENSE_FILES, "generation_config.json"]
    return Path(snapshot_download(hub_id, revision=commit, allow_patterns=patterns))


def copy_files(source: Path, folder: Path, patterns: Iterable[str]) -> None:
    """Copy files whose names match one of several patterns."""
    for file in sorted({file for pattern in patterns for file in source.glob(pattern) if file.is_file()}):
        target = folder / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)


def _as_written(changed: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Entries with those of the rotary positions in the form of transformers 4 where it wrote ``config.json``.

    It, and servers that stand on it, pass over ``rope_parameters``: the model would run without its scaling. Scaled
    positions of layers with a sliding window have no such form.
    """
    if "rope_parameters" in part or not (rope := changed.get("rope_parameters")):
        return changed
    entries = {name: value for name, value in changed.items() if name != "rope_parameters"}
    if "rope_local_base_freq" in part and rope["sliding_attention"].get("rope_type") == "default":
        entries["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return changed
    scaling = dict(rope)
    entries |= {name: scaling.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    return entries | {"rope_scaling": None if scaling == {"rope_type": "default"} else scaling}


def _json(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def _tensors_in(folder: Path) -> dict[str, Path]:
    """Weight file of each tensor of a folder."""
    tensors: dict[str, Path] = {}
    for file in weight_files(folder):
        with opened(file) as weights:
            tensors.update(dict.fromkeys(weights.names, file))
    return tensors


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


def _part_of(name: str) -> str:
    """Part of a model that a tensor belongs to, e.g. ``model.visual``, ``mtp`` or ``model.layers.61``."""
    parts = name.split(".")
    length = 1 if parts[0] != "model" else 3 if parts[1:2] == ["layers"] else 2
    return ".".join(parts[:length])


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = (tensor.flatten().view(torch.uint8) for tensor in (one, other))
    return torch.equal(one, other)

"""Fingerprints of base models: a cheap check that an adapter or checkpoint is used with the base of its training."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, TypedDict, get_args

from huggingface_hub import try_to_load_from_cache
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lit_ft.errors import RecipeError, explained
from lit_ft.model.files.size_check import read_files
from lit_ft.model.loading import Dtype

FILE = "base.json"
"""File name of a fingerprint, in an adapter's folder."""
_SAMPLE_BYTES = 4096
_DRAWN = "drawn with seed "


class Fingerprint(TypedDict):
    """Fingerprint of a base model."""

    pretrained: str
    """Folder or hub id, as in the recipe."""
    commit: str | None
    """Commit of the hub repository; None for a local folder."""
    config: str
    """SHA-256 of ``config.json`` without ``_name_or_path`` and ``transformers_version``."""
    weights: str
    """SHA-256 of sizes, headers and samples of the weight files; for random weights, text with their seed."""


def fingerprint(pretrained: str, init: Literal["pretrained", "random"] = "pretrained", seed: int = 0) -> Fingerprint:
    """Compute a base model's fingerprint from 4 KiB of each tensor: 3 MB of a Llama of 70 billion parameters.

    A change elsewhere in a tensor is not detected; training and merging change all of a tensor.

    Args:
        pretrained: folder, or hub id of a model that was downloaded before.
        init: ``random`` for weights that are drawn, not read.
        seed: seed of random weights.
    """
    cached = try_to_load_from_cache(pretrained, "config.json") if not Path(pretrained).expanduser().is_dir() else None
    folder = Path(cached).parent if isinstance(cached, str) else Path(pretrained).expanduser()
    with explained(f"{folder / 'config.json'}", "put back the file"):
        config = dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    for name in ("_name_or_path", "transformers_version"):
        config.pop(name, None)
    weights = f"{_DRAWN}{seed}" if init == "random" else _digest_of(read_files(folder, str(folder)))
    return Fingerprint(
        pretrained=pretrained,
        commit=folder.name if isinstance(cached, str) else None,  # hub caches name a snapshot's folder by its commit
        config=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        weights=weights,
    )


def check_same_base(recorded: Fingerprint | None, now: Fingerprint | None, what: str) -> None:
    """Refuse a base model other than the one that an adapter or checkpoint was trained on.

    Args:
        recorded: fingerprint written during training; None if there is none, which prints a notice and passes.
        now: fingerprint of the current base model; None skips the check.
        what: name of the adapter or checkpoint, for the message.

    Raises:
        RecipeError: weights or config differ.
    """
    if now is None:
        return
    if recorded is None:
        rank_zero_info(f"{what} does not record its base: not compared with {now['pretrained']!r}")
        return
    if (recorded["weights"], recorded["config"]) == (now["weights"], now["config"]):
        return
    drawn, drawn_now = recorded["weights"], now["weights"]
    if drawn.startswith(_DRAWN) and drawn_now.startswith(_DRAWN) and drawn != drawn_now:
        seed = drawn.removeprefix(_DRAWN)
        raise RecipeError(
            f"{what} was trained on random weights of seed {seed}, not {drawn_now.removeprefix(_DRAWN)}; set "
            f"seed_everything to {seed}"
        )
    part, other = ("config.json", "another config.json") if drawn == drawn_now else ("weights", "other weights")
    revision = f" (revision {recorded['commit']} on the hub)" if recorded["commit"] else ""
    if recorded["pretrained"] == now["pretrained"]:
        raise RecipeError(
            f"{what} was trained on {now['pretrained']!r}, whose {part} changed since; bring back what it "
            f"was{revision}, or train anew"
        )
    raise RecipeError(
        f"{what} was trained on {recorded['pretrained']!r}{revision}, and {now['pretrained']!r} has {other}; "
        "name the base that it was trained on"
    )


@dataclass(frozen=True)
class BaseForm:
    """Form in which the base of an adapter was read for training, so that it is read in the same one again."""

    dtype: str | None = None
    """As ``model.dtype``; None where it is not recorded."""
    config_overrides: Mapping[str, object] | None = None
    """As ``model.config_overrides``, empty for none; None where they are not recorded."""
    quantization: str | None = None
    """Method by which the recipe quantized it, e.g. ``bitsandbytes``; None where it did not."""

    def plain(self) -> dict[str, Any]:
        """Fields by name, as JSON has them, for checkpoints."""
        return dict(json.loads(json.dumps(vars(self), default=dict)))


def check_same_form(recorded: Mapping[str, Any] | None, now: BaseForm) -> None:
    """Refuse a checkpoint whose base was read with other values of its config.

    Args:
        recorded: form in a checkpoint, by ``BaseForm.plain``; None in those of earlier versions, which pass.
        now: form in which the recipe reads the base.

    Raises:
        RecipeError: the values differ.
    """
    own = now.plain()["config_overrides"] or {}
    if recorded is not None and (trained := recorded["config_overrides"] or {}) != own:
        raise RecipeError(
            f"the checkpoint was trained with model.config_overrides={json.dumps(trained)}, and the recipe has "
            f"{json.dumps(own)}, with which the same weights compute something else; resume with those of the "
            "checkpoint"
        )


def warn_of_other_form(recorded: Mapping[str, Any] | None, now: BaseForm) -> None:
    """Warn where a run goes on with a base in another form; the arguments are as ``check_same_form``'s."""
    if recorded is not None and recorded["dtype"] != now.dtype:
        rank_zero_warn(
            f"model.dtype: the base is {now.dtype}, and was {recorded['dtype']} up to the checkpoint: its weights are "
            "rounded otherwise"
        )
    if recorded is not None and recorded["quantization"] != now.quantization:
        before, after = (
            f"quantized by {one}" if one else "not quantized" for one in (recorded["quantization"], now.quantization)
        )
        rank_zero_warn(
            f"model.quantization: the base is {after}, and was {before} up to the checkpoint: the adapter goes on, and "
            "its losses are those of another base"
        )


def write_fingerprint(base: Fingerprint, folder: Path, form: BaseForm) -> None:
    """Write the fingerprint of a base to an adapter's folder, with the form in which it was read for training."""
    recorded = {name: value for name, value in vars(form).items() if value is not None}
    content = {**base, **recorded}
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_form(folder: Path) -> BaseForm:
    """Form in which the base of an adapter was read for training, as far as its folder records it.

    Raises:
        RecipeError: the file is damaged.
    """
    path = folder / FILE
    if read_fingerprint(folder) is None:
        return BaseForm()
    content = json.loads(path.read_text(encoding="utf-8"))
    dtype, overrides, method = (content.get(name) for name in ("dtype", "config_overrides", "quantization"))
    if dtype not in (None, *get_args(Dtype)):
        raise RecipeError(f"{path}: dtype={dtype!r} must be one of {', '.join(get_args(Dtype))}; put back the file")
    if not isinstance(overrides, dict | None):
        raise RecipeError(f"{path}: config_overrides={overrides!r} must be a mapping; put back the file")
    if not isinstance(method, str | None):
        raise RecipeError(f"{path}: quantization={method!r} must be the name of a method; put back the file")
    return BaseForm(dtype, overrides, method)


def read_fingerprint(folder: Path) -> Fingerprint | None:
    """Read the fingerprint in an adapter's folder; None if there is none."""
    path = folder / FILE
    if not path.is_file():
        return None
    with explained(f"{path}", "put back the file, or remove it: then the base is compared by name and shapes alone"):
        content = json.loads(path.read_text(encoding="utf-8"))
        read = {name: content[name] for name in Fingerprint.__annotations__}
        if not all(isinstance(value, str) or (name == "commit" and value is None) for name, value in read.items()):
            raise ValueError("it holds other values than names and sums")
        return Fingerprint(**read)  # type: ignore[typeddict-item]


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        with explained(f"{path}", "put back the file"):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb") as file:
                for start in _places(path, file, size):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _places(path: Path, file: IO[bytes], size: int) -> list[int]:
    """Offsets of the samples in bytes: the header, and the middle of each tensor."""
    if path.suffix != ".safetensors":
        return list(range(0, size, max(_SAMPLE_BYTES, size // 256)))
    length = int.from_bytes(file.read(8), "little")
    if length > size:
        raise ValueError(f"its header claims {length} bytes, the file has {size}")
    header = json.loads(file.read(length))
    tensors = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    middles = [8 + length + max(begin, (begin + end - _SAMPLE_BYTES) // 2) for begin, end in tensors]
    return [*range(0, 8 + length, _SAMPLE_BYTES), *middles]

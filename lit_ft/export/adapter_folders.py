"""Adapters in folders: selection, comparison with a base model, and combination by weights into one adapter."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.atomic_folder import put_back
from lit_callbacks.export.manifest import ManifestError, read_manifest, verify_manifest
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError, base_may_have_moved, explained, option_called
from lit_ft.internals.hub import download_first
from lit_ft.model import embeddings, loading
from lit_ft.model.config.head import Head
from lit_ft.model.files import size_check
from lit_ft.model.files.fingerprint import FILE, check_same_base, read_fingerprint, read_form
from lit_ft.model.spec import ModelSpec
from lit_ft.tuning import bottleneck  # noqa: F401 (the method of bottleneck is known to PEFT once it is imported)
from lit_ft.tuning.compatibility import check_situation
from lit_ft.tuning.wrapping import give_values, takes_shapes_from_weights

Combination = Literal[
    "cat",
    "linear",
    "svd",
    "ties",
    "ties_svd",
    "dare_linear",
    "dare_ties",
    "dare_linear_svd",
    "dare_ties_svd",
    "magnitude_prune",
    "magnitude_prune_svd",
]
"""PEFT's methods to combine several adapters into one; only ``cat`` is their exact weighted sum."""


OVERRIDES = "model.config_overrides"


def adapter_folder(path: Path) -> Path | None:
    """Folder of the adapter that a path names: the path itself, or that of a run's adapter; None if there is none."""
    for folder in (path, path / "adapter"):
        put_back(folder)
        if (folder / "adapter_config.json").is_file():
            return folder
    return None


@dataclass(frozen=True)
class Adapter:
    """Adapter in a folder, with its weight in a combination."""

    folder: Path
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Adapter":
        """Parse ``PATH`` or ``PATH=WEIGHT``; the path of a run folder means its adapter.

        Raises:
            RecipeError: the path has no adapter, or the weight is not finite.
        """
        if (folder := adapter_folder(Path(text))) is not None:  # whose name may hold "=", too
            return cls(folder)
        path, _, number = text.rpartition("=")
        try:
            weight = float(number) if path else 1.0
        except ValueError:
            path, weight = "", 1.0
        if not math.isfinite(weight):
            raise RecipeError(f"adapter={text!r}: the weight {number} must be a finite number")
        named = Path(path or text)
        if (folder := adapter_folder(named)) is not None:
            return cls(folder, weight)
        raise RecipeError(
            f"adapter={text!r}: neither {str(named)!r} nor {str(named / 'adapter')!r} holds an adapter_config.json; "
            "name an adapter's folder or a run's, with =WEIGHT behind it where there are several"
            f"{download_first(str(named))}"
        )

    @property
    def config(self) -> PeftConfig:
        """PEFT config of the adapter.

        Raises:
            RecipeError: the file is damaged.
        """
        with explained(f"{self.folder / 'adapter_config.json'}", "put back the file"):
            return PeftConfig.from_pretrained(str(self.folder))

    @property
    def recorded_base(self) -> str | None:
        """Base model that the adapter was trained on, as its files record it."""
        base = read_fingerprint(self.folder)
        return base["pretrained"] if base else self.config.base_model_name_or_path

    @property
    def has_tokenizer(self) -> bool:
        """Whether the folder has a tokenizer of its own."""
        return (self.folder / "tokenizer_config.json").is_file()

    def check(self, base: ModelSpec) -> None:
        """Refuse an adapter that is damaged, or that belongs to another base model, before weights are read.

        Args:
            base: base model, with the tokenizer that the adapter is used with.

        Raises:
            RecipeError: a file, the recorded base, its config, a parameter name or a shape differs.
        """
        name = f"the adapter {str(self.folder)!r}"
        check_unchanged(self.folder)
        recorded, now = read_fingerprint(self.folder), base.fingerprint()
        if recorded is not None:
            check_same_base(recorded, now, name)
        else:
            _check_name(self.config.base_model_name_or_path, now["pretrained"], name)
        self._check_config(base, name)
        self._check_shapes(base, name)

    def _check_config(self, base: ModelSpec, name: str) -> None:
        """Refuse a base whose config was given other values than in the adapter's training."""
        trained = read_form(self.folder).config_overrides
        if trained is None:
            return
        with option_called(OVERRIDES, f"config_overrides in {self.folder / FILE}"):
            config = loading.load_config(base.pretrained, trained)
        if config.to_dict() != base.config.to_dict():
            raise RecipeError(
                f"{name} was trained with {OVERRIDES}={json.dumps(trained)}, and the base is read with "
                f"{json.dumps(dict(base.config_overrides or {}))}; use it with a base, and adapters, of the same values"
            )

    def _check_shapes(self, base: ModelSpec, name: str) -> None:
        skeleton = loading.skeleton(base.pretrained, overrides=base.config_overrides, head=base.head)
        resize_to_tokenizer(skeleton, base.tokenizer)
        config = self.config
        if isinstance(config, LoraConfig) and isinstance(config.init_lora_weights, str):
            config.init_lora_weights = True  # other inits read weights, which a skeleton does not have
        give_values(skeleton, config)
        with explained(f"{name} does not fit {type(skeleton).__name__}", "name its base, or put back its files"):
            model = get_peft_model(skeleton, config)
        if takes_shapes_from_weights(config):
            return
        file = self.folder / "adapter_model.safetensors"
        held = dict(size_check.shapes_of(file, name))
        for key, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items():
            if held.get(key) != tuple(tensor.shape):
                actual = f"is {held[key]}" if key in held else "is missing"
                raise RecipeError(
                    f"{name} was trained on another base: {key} {actual} there, and {tuple(tensor.shape)} on this one; "
                    "name the base that it was trained on"
                )


def base_of(adapter: Adapter, named: str | None) -> ModelSpec:
    """Base model of an adapter, in the dtype and with the values of its config that the adapter was trained with.

    A dtype that the adapter does not record is that of the base's files. The tokenizer is the adapter's own, if its
    folder has one.

    Args:
        adapter: adapter.
        named: folder or hub id of the base; None takes the one that the adapter records.

    Raises:
        RecipeError: neither names a base.
    """
    pretrained = named or adapter.recorded_base
    if not pretrained:
        raise RecipeError(f"the adapter {str(adapter.folder)!r} names no base; give it with --base")
    tokenizer = str(adapter.folder) if adapter.has_tokenizer else pretrained
    head: Head = "score" if adapter.config.task_type == "SEQ_CLS" else "logits"
    form = read_form(adapter.folder)
    dtype = cast(loading.Dtype, form.dtype or "auto")
    return ModelSpec(pretrained, tokenizer, dtype=dtype, config_overrides=form.config_overrides or None, head=head)


@contextmanager
def about_base(adapter: Adapter, named: str | None) -> Iterator[None]:
    """Context in which errors about an adapter's base say where it is named: in ``--base``, or in the adapter's files.

    Args:
        adapter: adapter.
        named: as ``base_of``.

    Raises:
        RecipeError: as raised within.
    """
    if named is not None:
        with option_called("model.pretrained", "--base"):
            yield
    else:
        recorded = option_called("model.pretrained", f"the base that {adapter.folder} records")
        with recorded, base_may_have_moved("name its place with --base"):
            yield


def check_base_config(base: ModelSpec, adapters: Sequence[Adapter]) -> None:
    """Read the config of a base, and say in what it is not as its files have it, or as in the training of an adapter.

    Args:
        base: base model, as ``base_of`` or a run gives it.
        adapters: adapters that are used with it; the first one gives its values.

    Raises:
        RecipeError: there is no such model.
    """
    config = loading.load_config(base.pretrained)
    dtype = loading.dtype_of_weights(config, base.dtype)
    if base.config_overrides:
        rank_zero_info(f"the base of {adapters[0].folder} is read with {OVERRIDES}={json.dumps(base.config_overrides)}")
    for adapter in adapters:
        form = read_form(adapter.folder)
        if form.dtype is None and base.dtype == "auto":
            rank_zero_info(
                f"{adapter.folder} does not record the dtype of its training: the base is read in that of its files"
            )
        trained = loading.dtype_of_weights(config, cast(loading.Dtype, form.dtype or base.dtype))
        if trained != dtype:
            rank_zero_info(
                f"{adapter.folder} was trained on a base in {loading.dtype_name(trained)}, and is used with it in "
                f"{loading.dtype_name(dtype)} here"
            )
        if form.quantization is not None and base.quantization is None:
            rank_zero_info(
                f"{adapter.folder} was trained on a base quantized by {form.quantization}, and is used with the "
                "unquantized one here, which answers a little differently; name the run in place of its adapter's "
                "folder for the quantized one"
            )


def resize_to_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add rows to a model's embeddings where the tokenizer has more tokens."""
    rows = model.get_input_embeddings().num_embeddings
    embeddings.resize_embeddings(model, tokenizer, max(0, len(tokenizer) - rows))


def check_unchanged(folder: Path, most_bytes: int | None = None) -> None:
    """Compare an exported folder with its manifest; a folder without one passes, as other programs write none.

    Args:
        folder: folder of an adapter or a model.
        most_bytes: size in bytes above which only file sizes are compared, not SHA-256 sums, and a message says so;
            None compares the sums of any folder.

    Raises:
        RecipeError: files are missing or have changed; texts (``*.md``) may change.
    """
    try:
        size = sum(entry.size for entry in read_manifest(folder).values())
        with_sums = most_bytes is None or size <= most_bytes
        differences = verify_manifest(folder, only=lambda name: not name.endswith(".md"), with_sums=with_sums)
    except FileNotFoundError:
        return
    except ManifestError as error:
        raise RecipeError(f"{error}; export the folder again") from error
    if differences.damaged:
        raise RecipeError(
            f"{str(folder)!r} is not what was exported ({differences}); export it again, or remove its manifest.json "
            "if it was changed on purpose"
        )
    if not with_sums:
        rank_zero_info(
            f"{folder}: {size / 2**30:,.1f} GiB are compared with manifest.json by size alone; python -m lit_ft verify "
            f"{folder} compares their bytes"
        )


def load_adapters(
    base: PreTrainedModel, adapters: list[Adapter], combination: Combination = "cat", density: float | None = None
) -> PeftModel:
    """Load adapters onto a base model, combined into one.

    Args:
        base: base model with weights.
        adapters: adapters with their weights, which ``check_combinable`` has accepted.
        combination: method that combines several adapters.
        density: fraction of an adapter's weights that ties, dare and magnitude_prune keep.

    Raises:
        RecipeError: the adapters cannot be combined.
    """
    if len(adapters) == 1:
        return _scaled(PeftModel.from_pretrained(base, str(adapters[0].folder)), adapters[0])
    names = [f"given{number}" for number in range(len(adapters))]
    model = PeftModel.from_pretrained(base, str(adapters[0].folder), adapter_name=names[0])
    for name, adapter in zip(names[1:], adapters[1:], strict=True):
        model.load_adapter(str(adapter.folder), adapter_name=name)
    _name_layers(model)
    # PEFT sets lora_alpha = r for the sum, a scaling of 1, which rsLoRA would turn into sqrt(r).
    cast(LoraConfig, model.peft_config[names[0]]).use_rslora = False
    weights = [adapter.weight for adapter in adapters]
    try:
        model.base_model.add_weighted_adapter(names, weights, "default", combination, density=density)
    except ValueError as error:
        raise RecipeError(f"combination={combination}: {error}") from error
    summed = (layer for layer in model.modules() if isinstance(layer, LoraLayer))
    assert all("default" in layer.r for layer in summed), "PEFT has left a layer out of the sum"
    model.set_adapter("default")
    for name in names:
        model.delete_adapter(name)
    rank = cast(LoraConfig, model.peft_config["default"]).r
    summands = " + ".join(f"{adapter.weight:g} x {adapter.folder}" for adapter in adapters)
    exact = "the weighted sum exactly" if combination == "cat" else "not the weighted sum exactly, as cat is"
    rank_zero_info(f"{summands} -> one adapter of rank {rank} ({combination}: {exact})")
    return model


def _name_layers(model: PeftModel) -> None:
    """Select the layers of each adapter by their full names: PEFT reads for the sum what else the first one selects by.

    Full names can be added up where some adapters have patterns and others lists, too.
    """
    layers = [(name, part) for name, part in model.base_model.model.named_modules() if isinstance(part, LoraLayer)]
    for adapter, config in model.peft_config.items():
        config.target_modules = {name for name, layer in layers if adapter in layer.r}
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


@torch.no_grad()
def _scaled(model: PeftModel, adapter: Adapter) -> PeftModel:
    """Multiply what an adapter adds by its weight.

    In the factors B: PEFT's ``add_weighted_adapter`` writes a config with one rank for all layers.
    """
    if adapter.weight == 1:
        return model
    for module in model.modules():
        if isinstance(module, LoraLayer):
            for factor in (*module.lora_B.parameters(), *module.lora_embedding_B.parameters()):
                factor.mul_(adapter.weight)
    rank_zero_info(f"{adapter.weight:g} x {adapter.folder}: its factors B are multiplied by {adapter.weight:g}")
    return model


def check_combinable(adapters: Sequence[Adapter], combination: Combination = "cat") -> None:
    """Refuse adapters that cannot be weighted, or combined by a method, before weights are read.

    Raises:
        RecipeError: they cannot.
    """
    if len(adapters) == 1 and adapters[0].weight == 1:
        return
    needs_one_rank = len(adapters) > 1 and combination != "cat" and not combination.endswith("svd")
    for adapter in adapters:
        config = adapter.config
        check_situation(config, "combined", option=f"adapter={str(adapter.folder)!r}")
        if needs_one_rank and config.rank_pattern:
            raise RecipeError(
                f"combination={combination} takes one rank for all layers, and adapter={str(adapter.folder)!r} has "
                f"rank_pattern={json.dumps(config.rank_pattern)}; take cat or svd"
            )
    ranks = [cast(LoraConfig, adapter.config).r for adapter in adapters]
    if needs_one_rank and len(set(ranks)) > 1:
        held = ", ".join(f"{rank} ({adapter.folder})" for rank, adapter in zip(ranks, adapters, strict=True))
        raise RecipeError(
            f"combination={combination} takes adapters of one rank, and these have {held}; take cat, the weighted sum, "
            f"or {'svd' if combination == 'linear' else f'{combination}_svd'}"
        )


def check_combination(combination: Combination, density: float | None) -> None:
    """Refuse a density where a method of combination takes none, its lack where one does, and one that is no share.

    Raises:
        RecipeError: combination and density do not fit each other.
    """
    if ("ties" in combination or "dare" in combination or "prune" in combination) != (density is not None):
        raise RecipeError(
            f"combination={combination} with density={density}: ties, dare and magnitude_prune keep a share of the "
            "weights, e.g. density 0.5; the others take none"
        )
    if density is not None and not 0 < density <= 1:
        raise RecipeError(f"density={density:g} must be over 0 and at most 1: it is the share of weights that is kept")


def _check_name(recorded: str | None, base: str, name: str) -> None:
    """Compare the last parts of base names, for adapters without a fingerprint (a folder may have a hub id's name).

    Raises:
        RecipeError: the names differ.
    """
    if recorded and Path(recorded).name != Path(base).name:
        raise RecipeError(
            f"{name} was trained on {recorded!r}, and the base is {base!r}; name the base that it was trained on"
        )
    rank_zero_info(
        f"{name} records no weights of its base ({recorded or 'nor a name'}): compared by name and shapes alone"
    )

"""The ``export`` command: write a run, or adapters from folders, as a Hugging Face folder."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.adapter_merger import Kind, save_adapter, save_merged
from lit_callbacks.export.atomic_folder import check_replaceable
from lit_callbacks.export.merging import check_quantized_base
from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.errors import RecipeError, check_installed
from lit_ft.export.adapter_folders import (
    Adapter,
    Combination,
    about_base,
    base_of,
    check_base_config,
    check_combinable,
    check_combination,
    check_unchanged,
    load_adapters,
    resize_to_tokenizer,
)
from lit_ft.export.folder_texts import (
    describe_step,
    dtype_to_name,
    generation_texts,
    has_more_tokens,
    notes_on_base,
    run_texts,
)
from lit_ft.export.model_card import Card
from lit_ft.export.restore_run import module_of, restore
from lit_ft.gguf import WeightType
from lit_ft.model.files.fingerprint import BaseForm, read_form, write_fingerprint
from lit_ft.model.files.text_part import text_class
from lit_ft.model.loading import DENSE
from lit_ft.model.spec import ModelSpec
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.run.output_place import writable
from lit_ft.training.console import show_progress_on_terminals_only
from lit_ft.tuning.compatibility import check_situation
from lit_ft.tuning.targets import unmerged

Check = Callable[[ModelSpec, Sequence[PeftConfig | None]], None]
"""Check of a base model and its adapters, before weights are read; None stands for full fine-tuning."""

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of dtypes."""


def run(arguments: list[str]) -> None:
    """Parse the options and export; option names may have dashes or underscores."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft export", description=(export.__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", metavar="RUN", help="Folder of the run, in place of --run RUN.")
    parser.add_function_arguments(export, as_group=False, skip={"merge", "adapter", "text_only", "gguf_adapter"})
    parser.add_argument("--merge", action="store_true", help=_MERGE)
    parser.add_argument("--text_only", action="store_true", help=_TEXT_ONLY)
    parser.add_argument("--gguf_adapter", action="store_true", help=_GGUF_ADAPTER)
    parser.add_argument("--adapter", action="append", default=[], metavar="PATH[=WEIGHT]", help=_ADAPTER)
    written = [re.sub(r"^--[a-z-]+", lambda name: "--" + name[0][2:].replace("-", "_"), one) for one in arguments[1:]]
    written = [re.sub(r"^--checkpoint(?=$|=)", "--ckpt_path", one) for one in written]  # its name in earlier versions
    options = parser.parse_args(written).as_dict()
    if (folder := options.pop("folder")) is not None:
        if options["run"] is not None:
            raise RecipeError(f"{folder!r} and --run {options['run']!r} both name a run; leave one out")
        options["run"] = folder
    export(**options)


_MERGE = "Merge the adapter into the base model; full fine-tuning needs it too."
_TEXT_ONLY = "Leave out of a merged model what training does not use of the base's files, e.g. a vision tower."
_GGUF_ADAPTER = "Write the LoRA adapter as GGUF, for llama.cpp and Ollama; with --gguf, the base model too."
_ADAPTER = "An adapter's folder, or a run's, in place of the run's own; may be given several times, with weights."


def export(
    run: str | None = None,
    adapter: list[str] | None = None,
    base: str | None = None,
    out: str | None = None,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16", "fp32", "bf16", "fp16"] | None = None,
    quantized_base: Literal["dequantize", "keep"] | None = None,
    combination: Combination = "cat",
    density: float | None = None,
    ckpt_path: str = LAST,
    text_only: bool = False,
    gguf: WeightType | None = None,
    gguf_adapter: bool = False,
) -> None:
    """Write an adapter, or a merged model that is verified against the trained one, as a Hugging Face folder or GGUF.

    Args:
        run: folder of the run; together with adapter, only its base model is used.
        adapter: folders of adapters or runs, each PATH or PATH=WEIGHT.
        base: base model of the adapters, a folder or hub id; by default that of the run or of the first adapter.
        out: output folder; by default RUN/adapter, RUN/merged, RUN/gguf-TYPE or RUN/gguf_adapter, with -best behind it
            for ckpt_path=best.
        merge: merge the adapter into the base model; also needed to export a full fine-tuning.
        dtype: dtype of the merged weights; by default that in which training read the base model.
        quantized_base: merge into a base in 4 or 8 bits: dequantize it, or keep it quantized and quantize the merged
            weights again; the error is measured and printed.
        combination: method that combines several adapters; cat is their exact weighted sum.
        density: fraction of the weights that ties, dare and magnitude_prune keep.
        ckpt_path: .ckpt file of the run, or last for the newest, or best for the best by the metric that the run's
            ModelCheckpoint monitors.
        text_only: leave out of a merged model what training does not use of the base's files, e.g. a vision tower.
        gguf: write the merged model as a GGUF file for llama.cpp and Ollama, with weights of this type; with
            gguf_adapter, the base model.
        gguf_adapter: write the LoRA adapter as a GGUF file; without gguf the base model is not written.
    """
    _check_options(merge, run, base, dtype=dtype, quantized_base=quantized_base, text_only=text_only or None)
    _check_gguf(merge, gguf, gguf_adapter, dtype, quantized_base)
    check_combination(combination, density)
    if combination != "cat" and len(adapter or []) < 2:
        raise RecipeError(f"combination={combination} is for several adapters; name them by --adapter, or leave it out")
    if adapter and ckpt_path != LAST:
        raise RecipeError(
            f"ckpt_path={ckpt_path!r} chooses a checkpoint of a run, and --adapter names what is exported in place of "
            "one; leave out --adapter for the run's own, or --ckpt_path"
        )
    folder = _run_folder(run) if run is not None else None
    if not adapter and folder is None:
        raise RecipeError("there is nothing to export; name a run with --run, or adapters with --adapter")
    kind = "gguf_adapter" if gguf_adapter else f"gguf-{gguf}" if gguf else "merged" if merge else "adapter"
    destination = writable(_destination(out, None if adapter else folder, kind, ckpt_path))
    with _as_recipe_errors():
        check_replaceable(destination)
    replaces = destination.is_dir() and any(destination.iterdir())

    def check(spec: ModelSpec, configs: Sequence[PeftConfig | None]) -> None:
        _check_form(spec, configs, destination, merge, bool(gguf) or gguf_adapter)
        if merge:
            for config in configs:
                check_situation(config, "merge", option="merge")
            with _as_recipe_errors():
                check_quantized_base(spec.is_quantized, dtype, quantized_base)

    if adapter:
        exported = _of_adapters([Adapter.parse(one) for one in adapter], folder, base, combination, density, check)
    else:
        assert folder is not None
        exported = _of_run(folder, ckpt_path, check)
    with _as_recipe_errors():
        if gguf_adapter:
            exported.save_gguf_adapter(destination, gguf)
        elif gguf:
            unmerged.check_merged(exported.model)
            exported.save_gguf(destination, gguf, quantized_base)
        elif merge:
            unmerged.check_merged(exported.model)
            exported.save_merged(destination, dtype, quantized_base, text_only)
        else:
            exported.save_adapter(destination)
    rank_zero_info(f"{exported.source} -> {destination}{', in place of the model that was there' if replaces else ''}")


def _check_options(merge: bool, run: str | None, base: str | None, **of_merged: object) -> None:
    for option, value in of_merged.items():
        if value is not None and not merge:
            raise RecipeError(f"{option}={value} is for merged weights; add --merge, or leave it out for the adapter")
    if run is not None and base is not None:
        raise RecipeError("run and base both name a base model; leave one out")


def _check_gguf(
    merge: bool, gguf: str | None, gguf_adapter: bool, dtype: str | None, quantized_base: str | None
) -> None:
    if gguf is None and not gguf_adapter:
        return
    if merge == gguf_adapter:
        raise RecipeError(
            f"gguf={gguf}: add --merge for the merged model as GGUF, or --gguf_adapter for the adapter beside its base"
            if not merge
            else "merge and gguf_adapter exclude each other; leave one out"
        )
    if dtype is not None:
        raise RecipeError(f"dtype={dtype} is for Hugging Face folders; the weights of a GGUF file have gguf={gguf}")
    if quantized_base == "keep":
        raise RecipeError("quantized_base=keep is for Hugging Face folders; use dequantize, and choose --gguf q8_0")
    check_installed("GGUF files need", "gguf", "gguf")


@contextmanager
def _as_recipe_errors() -> Iterator[None]:
    """Turn what ``lit_callbacks`` refuses into errors of the recipe."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _check_form(
    base: ModelSpec, adapters: Sequence[PeftConfig | None], destination: Path, merge: bool, is_gguf: bool
) -> None:
    """Refuse what cannot be written in the form that was asked for, before weights are read."""
    if not merge and None in adapters:
        form = "--merge --gguf TYPE" if is_gguf else "--merge for the model"
        raise RecipeError(f"the run trained all weights, so there is no adapter; add {form}")
    if destination.resolve() == Path(base.pretrained).resolve():
        raise RecipeError(f"out={str(destination)!r} is the base model itself; name another folder")
    if is_gguf:
        from lit_ft.gguf.folders import check_convertible
        from lit_ft.gguf.writing import check_lora

        if not merge:
            for adapter in filter(None, adapters):
                check_lora(adapter)
            if base.quantization is None and base.is_quantized:
                raise RecipeError(
                    f"the files of {base.pretrained!r} are quantized, and have no GGUF form; merge into them with "
                    "--merge --quantized-base dequantize --gguf TYPE"
                )
        check_convertible(base.skeleton(), base.tokenizer)


@dataclass(frozen=True)
class _Exported:
    """Model, tokenizer and texts to write."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    spec: ModelSpec
    texts: Callable[[Kind], Mapping[str, str]]
    write_adapter: Callable[[Path], None]

    def save_merged(
        self, to: Path, dtype: str | None, quantized_base: Literal["dequantize", "keep"] | None, text_only: bool
    ) -> None:
        torch_dtype = getattr(torch, DTYPES.get(dtype, dtype)) if dtype else None
        save_merged(self.model, to, self.tokenizer, torch_dtype, quantized_base, self.texts("merged"), text_only)

    def save_adapter(self, to: Path) -> None:
        save_adapter(self.model, to, self.tokenizer, self.texts("adapter"), self.write_adapter)

    def save_gguf(
        self, to: Path, weight_type: WeightType, quantized_base: Literal["dequantize", "keep"] | None
    ) -> None:
        from lit_ft.gguf.folders import write_merged_folder

        def write_merged(folder: Path, dtype: torch.dtype | None) -> None:
            texts = self.texts("merged")
            save_merged(self.model, folder, self.tokenizer, dtype, quantized_base, texts, text_only=True)

        write_merged_folder(to, _name_of(to), write_merged, self.tokenizer, weight_type)

    def save_gguf_adapter(self, to: Path, weight_type: WeightType | None) -> None:
        from lit_ft.gguf.folders import write_adapter_folder

        if self.spec.quantization is not None:
            rank_zero_info("the adapter was trained on a quantized base; here it is compared on the base's own weights")
        if weight_type is None and self.spec.config_overrides:
            rank_zero_info(
                f"the adapter was trained with model.config_overrides={json.dumps(self.spec.config_overrides)}: a GGUF "
                "file of the base holds them only if it was written with them; add --gguf TYPE for one that has them"
            )
        build = self.spec.build_unquantized
        write_adapter_folder(to, _name_of(to), self.write_adapter, build, self.tokenizer, weight_type)


def _run_folder(run: str) -> RunFolder:
    folder = RunFolder.at(run)
    if folder.config.is_file():
        return folder
    if (parent := RunFolder.of_checkpoint(folder.root)) is not None:
        raise RecipeError(f"run={run!r} is a checkpoint; give its run, {str(parent.root)!r}, and --ckpt_path {run}")
    if (folder.root / "adapter_config.json").is_file():
        raise RecipeError(f"run={run!r} is an adapter's folder; name it with --adapter {run}")
    raise RecipeError(
        f"run={run!r} holds no config.yaml; name the folder of a run, e.g. checkpoints/runs/quickstart/..."
    )


def _name_of(to: Path) -> str:
    """Name of a model, from its folder; RUN/gguf-TYPE has the run's."""
    path = to.resolve()
    return path.parent.name if path.name.startswith("gguf") else path.name


def _destination(out: str | None, folder: RunFolder | None, kind: str, ckpt_path: str) -> Path:
    if out is not None:
        return Path(out).expanduser()
    if folder is None:
        raise RecipeError("out is not set; say where to write with --out DIR")
    return folder.exported(kind, ckpt_path)


def _of_run(folder: RunFolder, ckpt_path: str, check: Check) -> _Exported:
    file = folder.chosen_checkpoint(ckpt_path)
    module = module_of(folder)
    check(module.spec.base, [module.spec.tuning.peft])
    restore(module, file)
    check_unchanged(Path(module.spec.base.pretrained).expanduser())
    for line in describe_step(folder, file, folder.recipe()["trainer"].get("max_steps", -1)):
        rank_zero_info(line)
    return _Exported(
        module.model,
        module.tokenizer,
        str(file),
        module.spec.base,
        texts=lambda kind: run_texts(kind, folder, module, {}, {}, file),
        write_adapter=module.save_adapter,
    )


def _of_adapters(
    adapters: list[Adapter],
    folder: RunFolder | None,
    named: str | None,
    combination: Combination,
    density: float | None,
    check: Check,
) -> _Exported:
    base = _base_of(adapters[0], folder, named)
    with about_base(adapters[0], named) if folder is None else nullcontext():
        check_base_config(base, adapters)
        check(base, [adapter.config for adapter in adapters])
        check_combinable(adapters, combination)
        check_unchanged(Path(base.pretrained).expanduser())
        tokenizer, now = base.tokenizer, base.fingerprint()
        for adapter in adapters:
            adapter.check(base)
        process.seed_torch(process.seed())  # for random weights, new embedding rows, and the random choice of dare
        model = base.build(DENSE)
    resize_to_tokenizer(model, tokenizer)
    wrapped = load_adapters(model, adapters, combination, density)
    notes = [f"{adapter.weight:g} x `{adapter.folder}`" for adapter in adapters]
    made_of = ", ".join(notes) + (f" ({combination})" if len(notes) > 1 else "")
    source = ", ".join(f"{adapter.weight:g} x {adapter.folder}" for adapter in adapters)
    form = _form(adapters, base)

    def texts(kind: Kind) -> Mapping[str, str]:
        card = Card(
            kind=kind,
            title=" + ".join(adapter.folder.name for adapter in adapters),
            base=base.pretrained,
            commit=now["commit"],
            text_class=text_class(base.pretrained),
            scores=base.head == "score",
            method=wrapped.active_peft_config.peft_type.value,
            notes=[
                *([f"Made of {made_of}."] if len(adapters) > 1 or adapters[0].weight != 1 else []),
                *(notes_on_base(form) if kind == "adapter" else []),
            ],
            dtype=dtype_to_name(form),
            grows=has_more_tokens(tokenizer, base),
        )
        return {"README.md": str(card)} | (generation_texts(model, tokenizer) if kind == "merged" else {})

    def write(to: Path) -> None:
        rows = wrapped.active_peft_config.to_dict().get("trainable_token_indices")
        wrapped.save_pretrained(to, save_embedding_layers=False if rows else "auto")
        write_fingerprint(now, to, form)

    return _Exported(wrapped, tokenizer, source, base, texts, write)


def _form(adapters: list[Adapter], base: ModelSpec) -> BaseForm:
    """Form of the base that is recorded for a sum: the first adapter's, quantized if that of any of them was."""
    forms = [read_form(adapter.folder) for adapter in adapters]
    method = next((form.quantization for form in forms if form.quantization), None)
    return replace(forms[0], config_overrides=base.config_overrides or {}, quantization=method)


def _base_of(first: Adapter, folder: RunFolder | None, named: str | None) -> ModelSpec:
    if folder is None:
        return base_of(first, named)
    spec = module_of(folder).spec.base
    tokenizer = str(first.folder) if first.has_tokenizer else spec.tokenizer_name
    return replace(spec, tokenizer_name=tokenizer, added_tokens=(), added_special_tokens=())

"""The ``export`` command: write a run, or adapters from folders, as a Hugging Face folder."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.adapter_merger import Kind, is_peft, save_adapter, save_merged
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.errors import RecipeError, option_called
from lit_ft.export.adapter_folders import (
    Adapter,
    Combination,
    base_of,
    check_unchanged,
    describe_base,
    load_adapters,
    make_room,
)
from lit_ft.export.folder_texts import describe_step, generation_texts, run_texts
from lit_ft.export.model_card import Card
from lit_ft.export.restore_run import module_of, rebuild
from lit_ft.model import loading
from lit_ft.model.files.fingerprint import write_fingerprint
from lit_ft.model.files.text_part import text_class
from lit_ft.model.spec import ModelSpec
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import BEST, LAST, RunFolder
from lit_ft.training.console import show_progress_on_terminals_only

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Short names of dtypes."""


def run(arguments: list[str]) -> None:
    """Parse the options and export; option names may have dashes or underscores."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft export", description=(export.__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", metavar="RUN", help="Folder of the run, in place of --run RUN.")
    parser.add_function_arguments(export, as_group=False, skip={"merge", "adapter", "text_only"})
    parser.add_argument("--merge", action="store_true", help=_MERGE)
    parser.add_argument("--text_only", action="store_true", help=_TEXT_ONLY)
    parser.add_argument("--adapter", action="append", default=[], metavar="PATH[=WEIGHT]", help=_ADAPTER)
    spelt = [re.sub(r"^--[a-z-]+", lambda name: "--" + name[0][2:].replace("-", "_"), one) for one in arguments[1:]]
    spelt = [re.sub(r"^--checkpoint(?=$|=)", "--ckpt_path", one) for one in spelt]  # its name in earlier versions
    options = parser.parse_args(spelt).as_dict()
    if (folder := options.pop("folder")) is not None:
        if options["run"] is not None:
            raise RecipeError(f"{folder!r} and --run {options['run']!r} both name a run; leave one out")
        options["run"] = folder
    export(**options)


_MERGE = "Merge the adapter into the base model; full fine-tuning needs it too."
_TEXT_ONLY = "Leave out of a merged model what training does not use of the base's files, e.g. a vision tower."
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
) -> None:
    """Write an adapter, or a merged model that is verified against the trained one, as a Hugging Face folder.

    Args:
        run: folder of the run; together with adapter, only its base model is used.
        adapter: folders of adapters or runs, each PATH or PATH=WEIGHT.
        base: base model of the adapters, a folder or hub id; by default that of the run or of the first adapter.
        out: output folder; by default RUN/adapter or RUN/merged, and with ckpt_path=best RUN/adapter-best or
            RUN/merged-best.
        merge: merge the adapter into the base model; also needed to export a full fine-tuning.
        dtype: dtype of the merged weights; by default that of the base model.
        quantized_base: merge into a base in 4 or 8 bits: dequantize it, or keep it quantized and quantize the merged
            weights again; the error is measured and printed.
        combination: method that combines several adapters; cat is their exact weighted sum.
        density: fraction of the weights that ties, dare and magnitude_prune keep.
        ckpt_path: .ckpt file of the run, or last for the newest, or best for the best by the metric that the run's
            ModelCheckpoint monitors.
        text_only: leave out of a merged model what training does not use of the base's files, e.g. a vision tower.
    """
    _check_options(merge, run, base, dtype=dtype, quantized_base=quantized_base, text_only=text_only or None)
    folder = _run_folder(run) if run is not None else None
    if adapter:
        exported = _of_adapters([Adapter.parse(one) for one in adapter], folder, base, combination, density)
    elif folder is not None:
        exported = _of_run(folder, ckpt_path)
    else:
        raise RecipeError("there is nothing to export; name a run, or adapters with --adapter")
    destination = _destination(out, None if adapter else folder, "merged" if merge else "adapter", ckpt_path)
    if destination.resolve() == Path(exported.base).resolve():
        raise RecipeError(f"out={str(destination)!r} is the base model itself; name another folder")
    try:
        if merge:
            exported.save_merged(destination, dtype, quantized_base, text_only)
        else:
            exported.save_adapter(destination)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    rank_zero_info(f"{exported.source} -> {destination}")


def _check_options(merge: bool, run: str | None, base: str | None, **of_merged: object) -> None:
    for option, value in of_merged.items():
        if value is not None and not merge:
            raise RecipeError(f"{option}={value} is for merged weights; add --merge, or leave it out for the adapter")
    if run is not None and base is not None:
        raise RecipeError("run and base both name a base model; leave one out")


@dataclass(frozen=True)
class _Exported:
    """Model, tokenizer and texts to write."""

    model: PreTrainedModel | PeftModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    base: str
    texts: Callable[[Kind], Mapping[str, str]]
    write_adapter: Callable[[Path], None]

    def save_merged(
        self, to: Path, dtype: str | None, quantized_base: Literal["dequantize", "keep"] | None, text_only: bool
    ) -> None:
        wanted = getattr(torch, DTYPES.get(dtype, dtype)) if dtype else None
        save_merged(self.model, to, self.tokenizer, wanted, quantized_base, self.texts("merged"), text_only)

    def save_adapter(self, to: Path) -> None:
        if not is_peft(self.model):
            raise RecipeError("the run trained all weights, so there is no adapter; add --merge for the model")
        save_adapter(self.model, to, self.tokenizer, self.texts("adapter"), self.write_adapter)


def _run_folder(run: str) -> RunFolder:
    folder = RunFolder(Path(run))
    if not folder.config.is_file():
        raise RecipeError(
            f"run={run!r} holds no config.yaml; name the folder of a run, e.g. checkpoints/runs/quickstart/..."
        )
    return folder


def _destination(out: str | None, folder: RunFolder | None, kind: Kind, ckpt_path: str) -> Path:
    if out is not None:
        return Path(out)
    if folder is None:
        raise RecipeError("out is not set; say where to write with --out DIR")
    path = folder.merged if kind == "merged" else folder.adapter
    return path.with_name(f"{path.name}-{BEST}") if ckpt_path == BEST else path


def _of_run(folder: RunFolder, ckpt_path: str) -> _Exported:
    file = folder.chosen_checkpoint(ckpt_path)
    config = folder.recipe()
    module = rebuild(config, file)
    check_unchanged(Path(module.spec.base.pretrained).expanduser())
    for line in describe_step(folder, file, config["trainer"].get("max_steps", -1)):
        rank_zero_info(line)
    return _Exported(
        module.model,
        module.tokenizer,
        str(file),
        module.spec.base.pretrained,
        texts=lambda kind: run_texts(kind, folder, module, {}, {}, file),
        write_adapter=module.save_adapter,
    )


def _of_adapters(
    adapters: list[Adapter],
    folder: RunFolder | None,
    named: str | None,
    combination: Combination,
    density: float | None,
) -> _Exported:
    base = _base_of(adapters[0], folder, named)
    of_run = "model.pretrained"
    with option_called(of_run, of_run if folder is not None else describe_base(adapters[0], named)):
        loading.load_config(base.pretrained)  # there is such a model
        check_unchanged(Path(base.pretrained).expanduser())
        tokenizer, now = base.tokenizer, base.fingerprint()
        for adapter in adapters:
            skeleton = loading.skeleton(base.pretrained, overrides=base.config_overrides)
            make_room(skeleton, tokenizer)
            adapter.check(skeleton, now)
        torch.manual_seed(process.seed())  # for random weights, new embedding rows, and the random choice of dare
        model = base.build("sdpa")
    make_room(model, tokenizer)
    wrapped = load_adapters(model, adapters, combination, density)
    notes = [f"{adapter.weight:g} x `{adapter.folder}`" for adapter in adapters]

    def texts(kind: Kind) -> Mapping[str, str]:
        card = Card(
            kind=kind,
            title=" + ".join(adapter.folder.name for adapter in adapters),
            base=base.pretrained,
            commit=now["commit"],
            text_class=text_class(base.pretrained),
            method=wrapped.active_peft_config.peft_type.value,
            notes=[f"Made of {', '.join(notes)} ({combination})."] if len(notes) > 1 else [],
        )
        return {"README.md": str(card)} | (generation_texts(model, tokenizer) if kind == "merged" else {})

    def write(to: Path) -> None:
        rows = wrapped.active_peft_config.to_dict().get("trainable_token_indices")
        wrapped.save_pretrained(to, save_embedding_layers=False if rows else "auto")
        write_fingerprint(now, to)

    return _Exported(wrapped, tokenizer, ", ".join(notes), base.pretrained, texts, write)


def _base_of(first: Adapter, folder: RunFolder | None, named: str | None) -> ModelSpec:
    if folder is None:
        return base_of(first, named)
    spec = module_of(folder.recipe()).spec.base
    tokenizer = str(first.folder) if first.has_tokenizer else spec.tokenizer_name
    return replace(spec, tokenizer_name=tokenizer, added_tokens=(), added_special_tokens=())

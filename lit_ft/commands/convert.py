"""The ``convert`` command: data as Megatron's .bin/.idx or as Parquet, and models as Megatron's checkpoints."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.atomic_folder import errors_of_the_disk, recover
from lit_callbacks.output.quantities import as_count

from lit_ft.checkpointing.storage.checkpoint_io import mapped
from lit_ft.commands.export import export
from lit_ft.data.text.formats import PREFERENCES, UNPAIRED
from lit_ft.data.text.rendering import Supervise
from lit_ft.data.text.sources import FormatName
from lit_ft.data.text_data import TextDataModule
from lit_ft.data.tokens.megatron_indexed import IndexedWriter
from lit_ft.data.tokens.preparation import MAY_BE_SKIPPED
from lit_ft.data.tokens.samples import Samples
from lit_ft.errors import RecipeError, option_called
from lit_ft.export.restore_run import module_of
from lit_ft.megatron.checks.logits import Check
from lit_ft.megatron.conversion import to_hugging_face, to_megatron
from lit_ft.megatron.formats.names import Format, LayerSpec, Naming
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.optimizer_state import AdamState, obstacle, state_of
from lit_ft.megatron.output_folder import check_free
from lit_ft.megatron.shape import ModelShape
from lit_ft.model.loading import load_config, load_tokenizer
from lit_ft.model.spec import ModelSpec
from lit_ft.process import return_freed_memory
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import RunFolder
from lit_ft.run.output_place import writable
from lit_ft.training.console import show_progress_on_terminals_only


def run(arguments: list[str]) -> None:
    """Parse the options and convert."""
    show_progress_on_terminals_only()
    what = arguments[1] if len(arguments) > 1 else ""
    if what in ("--help", "-h"):
        print(_HELP)
    elif what == "data":
        parser = _parser("data", convert_data.__doc__)
        parser.add_function_arguments(convert_data, as_group=False)
        options = parser.parse_args(arguments[2:]).as_dict()
        with errors_of_the_disk(Path(options["out"])):
            convert_data(**options)
    elif what == "model":
        parser = _parser("model", convert_model.__doc__)
        parser.add_argument("path", help="model, run or checkpoint to convert")
        for option in ("from", "to"):
            parser.add_argument(f"--{option}", type=Literal["hf", "megatron"], required=True, help=_SIDES[option])
        parser.add_function_arguments(convert_model, as_group=False, skip={"path", "source", "to", "layout"})
        sizes = parser.add_class_arguments(Layout, as_group=False)
        options = parser.parse_args(arguments[2:]).as_dict()
        return_freed_memory()
        layout = Layout(**{name: options.pop(name) for name in sizes})
        with errors_of_the_disk(Path(options["out"])):
            convert_model(source=options.pop("from"), layout=layout, **options)
    else:
        raise RecipeError(f"convert {what!r} is not known; {_HELP}" if what else _HELP)


_HELP = (
    "say `convert data --path FILE --tokenizer FOLDER --out PREFIX`, or `convert model --from hf --to megatron FOLDER "
    "--out FOLDER`; each takes --help"
)
_SIDES = {"from": "hf or megatron: what the path is", "to": "megatron or hf: what is written"}


def _parser(what: str, text: str | None) -> RecipeParser:
    return RecipeParser(prog=f"python -m lit_ft convert {what}", description=(text or "").split("\n")[0])


def convert_data(
    path: str,
    tokenizer: str,
    out: str,
    to: Literal["indexed", "parquet"] = "indexed",
    format: FormatName = "auto",
    columns: dict[str, str] | None = None,
    system: str | None = None,
    chat_template: str | None = None,
    supervise: Supervise = "assistant",
) -> None:
    """Tokenize data and write it for Megatron-LM, or as a table.

    Args:
        path: file, folder, glob, saved data set or hub id, like data.path of a recipe.
        tokenizer: folder or hub id of a model or tokenizer.
        out: path of OUT.bin and OUT.idx, or of OUT.parquet, without the suffix.
        to: output format: indexed (Megatron's, token ids only) or parquet (input_ids and labels).
        format: format of the rows; auto chooses by the columns of the first row.
        columns: column names of the data, by the names that the format needs, e.g. {instruction: question, output:
            answer}.
        system: system prompt for conversations that have none.
        chat_template: replacement for the tokenizer's chat template: Jinja text, a file of it, or a built-in name.
        supervise: supervised tokens: assistant, last or all.
    """
    prefix = writable(out)
    files = [Path(f"{prefix}{suffix}") for suffix in ((".parquet",) if to == "parquet" else (".bin", ".idx"))]
    if existing := [str(file) for file in files if file.exists()]:
        raise RecipeError(f"out={out!r}: {existing[0]} exists, and is not overwritten; name another, or remove it")
    with _data_options_called():
        of_rows = partial(TextDataModule, path, format=format, columns=columns, system=system)
        data = of_rows(chat_template=chat_template, supervise=supervise, max_length=None)
        _read(data, tokenizer)
    samples = data.splits["train"]
    with _folder_beside(prefix) as folder:
        if to == "parquet":
            _write_parquet(samples, folder / files[0].name)
        else:
            _write_indexed(samples, folder / prefix.name, len(data.splits.tokenizer))
        for file in files:
            (folder / file.name).rename(file)
    masked = int(samples.lengths.sum() - samples.supervised.sum() - len(samples))
    if to == "indexed" and masked:
        rank_zero_info(
            f"{as_count(masked, 'token')} not supervised; indexed data holds no labels, so that training on it "
            "supervises them too (--to parquet keeps them apart)"
        )
    names = ", ".join(map(str, files))
    rank_zero_info(f"{as_count(len(samples), 'document')}, {as_count(int(samples.lengths.sum()), 'token')}: {names}")


def _read(data: TextDataModule, tokenizer: str) -> None:
    """Tokenize data of which an output has all."""
    if data.has_pairs:
        form = UNPAIRED if data.is_unpaired else PREFERENCES
        raise RecipeError(
            f"format={form} holds answers that are compared or judged, for which no output has a place; give rows of "
            "the good answers alone, and leave format out"
        )
    with option_called("model.pretrained", "--tokenizer"):
        data.load(load_tokenizer(tokenizer))


@contextmanager
def _data_options_called() -> Iterator[None]:
    """Context in which errors about data name the options of this command in place of those of a recipe.

    Raises:
        RecipeError: as raised within, with the other names.
    """
    try:
        with option_called(MAY_BE_SKIPPED, "; correct the row, or remove it"):
            yield
    except RecipeError as error:
        options = r"(?:--)?\bdata\.(path|format|columns|system|chat_template|supervise)\b"
        raise RecipeError(re.sub(options, r"--\1", str(error))) from error


def convert_model(
    path: str,
    source: Literal["hf", "megatron"],
    to: Literal["hf", "megatron"],
    out: str,
    layout: Layout,
    like: str | None = None,
    format: Format | None = None,
    layer_spec: LayerSpec | None = None,
    moe_grouped_gemm: bool | None = None,
    adapter: Literal["merged", "apart"] | None = None,
    optimizer_state: bool | None = None,
    verify: Check | None = None,
) -> None:
    """Convert a model between Hugging Face and Megatron, and verify the result.

    Args:
        path: model folder, hub id or run's folder; or a Megatron checkpoint, as --load or --save name it.
        source: hf or megatron.
        to: megatron or hf.
        out: folder to write.
        layout: sizes of a parallel layout, for --to megatron.
        like: Hugging Face model with the config, sizes and tokenizer of the checkpoint; needed for --to hf.
        format: format of the checkpoint that is written: torch_dist (the default), or torch (the legacy one, a file per
            rank).
        layer_spec: Megatron's layers that load the checkpoint: te (Transformer Engine, the default) or local.
        moe_grouped_gemm: names of experts for Megatron's --moe-grouped-gemm (false by default); torch_dist fits both.
        adapter: adapter of a run: merged into the weights (the default), or apart in OUT/adapter beside the base model.
        optimizer_state: also convert AdamW's state of a run that trained all weights (torch_dist); true by default.
        verify: comparison of logits: megatron (Megatron-Core's own model) or reduced (first and last layer, in plain
            torch); by default megatron where it is installed and memory suffices.
    """
    destination = writable(out)
    check_free(destination)
    if source == to:
        raise RecipeError(f"--from {source} --to {to} converts nothing; name hf and megatron, in either order")
    if to == "hf":
        if like is None:
            raise RecipeError(
                "--to hf needs --like: a Hugging Face model with the sizes and tokenizer of the checkpoint"
            )
        if layout != Layout():
            raise RecipeError("sizes of a parallel layout are for --to megatron; a Hugging Face folder has none")
        written = {"format": format, "layer_spec": layer_spec, "moe_grouped_gemm": moe_grouped_gemm}
        _refuse("--to megatron", **written, adapter=adapter, optimizer_state=optimizer_state)
        with option_called("model.pretrained", "--like"):
            to_hugging_face(Path(path), like, destination, verify)
        return
    if like is not None:
        raise RecipeError(f"like={like!r} is for --to hf; the model's own config is read")
    naming = Naming(format or "torch_dist", layer_spec or "te", has_experts=False, grouped=bool(moe_grouped_gemm))
    if not (Path(path) / "config.yaml").is_file():
        _refuse("a run's folder", adapter=adapter, optimizer_state=optimizer_state)
        with option_called("model.pretrained", "path"):
            to_megatron(path, destination, layout, naming, verify)
    elif adapter == "apart":
        _refuse("--adapter merged", optimizer_state=optimizer_state)
        _convert_base(RunFolder(Path(path)), destination, layout, naming, verify)
    else:
        _convert_run(RunFolder(Path(path)), destination, layout, naming, verify, optimizer_state is not False)


def _refuse(what: str, **options: object) -> None:
    """Refuse options that have an effect only for something else."""
    for name, value in options.items():
        if value is not None:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise RecipeError(f"{name}={shown} is for {what}, and would change nothing here; leave it out")


def _convert_base(run: RunFolder, out: Path, layout: Layout, naming: Naming, verify: Check | None) -> None:
    """Convert the base model of a run, and write its adapter beside it."""
    base = module_of(run).spec.base
    if base.config_overrides:
        raise RecipeError(
            f"adapter=apart: the run was trained with model.config_overrides={json.dumps(base.config_overrides)}, "
            "which are not in its base model's files; use --adapter merged"
        )
    _check_base(base, layout)
    with _folder_beside(out) as folder:
        export(run=str(run.root), out=f"{folder}/adapter")  # first: it says what is wrong with the run
        to_megatron(base.pretrained, out, layout, naming, verify, adapter=folder / "adapter")


def _convert_run(
    run: RunFolder, out: Path, layout: Layout, naming: Naming, verify: Check | None, with_state: bool
) -> None:
    """Convert a run's model, its adapter merged, and the state of its optimizer where that can be."""
    base = module_of(run).spec.base
    if base.is_quantized:
        raise RecipeError(
            f"{run.root}: the base is quantized, and Megatron's checkpoints are not; merge by `export --run {run.root} "
            "--merge --quantized-base dequantize --out FOLDER`, and convert FOLDER"
        )
    _check_base(base, layout)
    with _folder_beside(out) as folder:
        model = f"{folder}/model"
        export(run=str(run.root), out=model, merge=True)
        state = _state(run, model, naming) if with_state else None
        to_megatron(model, out, layout, naming, verify, state, is_kept=False)


def _check_base(base: ModelSpec, layout: Layout) -> None:
    """Refuse what Megatron has no form for before weights are read."""
    layout.check(ModelShape.of(base.config, base.pretrained))


@contextmanager
def _folder_beside(out: Path) -> Iterator[Path]:
    """Context of a temporary folder on the disk of ``out``; those that killed processes left are removed."""
    path = out.absolute()
    recover(path)
    folder = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _state(run: RunFolder, model: str, naming: Naming) -> AdamState | None:
    """State of a run's optimizer; None, said with the reason, if it is not converted."""
    file = run.last_checkpoint()
    checkpoint = mapped(file)
    reason = obstacle(checkpoint, ModelShape.of(load_config(model), model))
    if naming.format == "torch":
        reason = "the format torch divides it among ranks, --format torch_dist does not"
    if reason is None:
        return state_of(checkpoint, file)
    rank_zero_info(f"{run.root}: the optimizer's state is not converted: {reason}; Megatron begins with a new one")
    return None


def _write_indexed(samples: Samples, prefix: Path, vocabulary: int) -> None:
    writer = IndexedWriter(prefix, vocabulary)
    for i in range(len(samples)):
        writer.add(samples[i][0])
    writer.close()


def _write_parquet(samples: Samples, file: Path) -> None:
    from datasets import Dataset, Features, Sequence, Value

    columns = {"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int32"))}
    rows = (
        (np.asarray(ids).tolist(), np.asarray(labels).tolist())
        for ids, labels in map(samples.__getitem__, range(len(samples)))
    )
    ids, labels = zip(*rows, strict=True)
    Dataset.from_dict({"input_ids": ids, "labels": labels}, features=Features(columns)).to_parquet(str(file))

"""The ``convert data`` command: write tokenized data as Megatron's .bin/.idx or as Parquet."""

from pathlib import Path
from typing import Literal

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.data.text.rendering import Supervise
from lit_ft.data.text.sources import FormatName
from lit_ft.data.text_data import TextDataModule
from lit_ft.data.tokens.megatron_indexed import IndexedWriter
from lit_ft.data.tokens.samples import Samples
from lit_ft.errors import RecipeError
from lit_ft.model.loading import load_tokenizer
from lit_ft.recipe.parser import RecipeParser
from lit_ft.training.console import show_progress_on_terminals_only


def run(arguments: list[str]) -> None:
    """Parse the options and convert."""
    show_progress_on_terminals_only()
    if arguments[1:2] not in (["data"], ["--help"], ["-h"]):
        what = f"convert {arguments[1]!r}" if arguments[1:] else "convert"
        raise RecipeError(f"{what} is not known; say `convert data --path FILE --tokenizer FOLDER --out PREFIX`")
    parser = RecipeParser(prog="python -m lit_ft convert data", description=(convert_data.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(convert_data, as_group=False)
    convert_data(**parser.parse_args([a for a in arguments[1:] if a != "data"]).as_dict())


def convert_data(
    path: str,
    tokenizer: str,
    out: str,
    to: Literal["indexed", "parquet"] = "indexed",
    format: FormatName = "auto",
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
        system: system prompt for conversations that have none.
        chat_template: replacement for the tokenizer's chat template: Jinja text, a file of it, or a built-in name.
        supervise: supervised tokens: assistant, last or all.
    """
    data = TextDataModule(
        path, format=format, system=system, chat_template=chat_template, supervise=supervise, max_length=None
    )
    data.load(load_tokenizer(tokenizer))
    samples = data.splits["train"]
    prefix = Path(out)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    if to == "parquet":
        written = [_write_parquet(samples, Path(f"{prefix}.parquet"))]
    else:
        written = _write_indexed(samples, prefix, len(data.preparation.tokenizer))
        masked = int(samples.lengths.sum() - samples.supervised.sum() - len(samples))
        if masked:
            rank_zero_info(
                f"{masked:,} tokens are not supervised; indexed data holds no labels, so that training on it "
                "supervises them too (--to parquet keeps them apart)"
            )
    names = ", ".join(str(file) for file in written)
    rank_zero_info(f"{len(samples):,} documents, {int(samples.lengths.sum()):,} tokens: {names}")


def _write_indexed(samples: Samples, prefix: Path, vocabulary: int) -> list[Path]:
    writer = IndexedWriter(prefix, vocabulary)
    for i in range(len(samples)):
        writer.add(samples[i][0])
    writer.close()
    return [Path(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]


def _write_parquet(samples: Samples, file: Path) -> Path:
    from datasets import Dataset, Features, Sequence, Value

    columns = {"input_ids": Sequence(Value("int32")), "labels": Sequence(Value("int32"))}
    rows = (
        (np.asarray(ids).tolist(), np.asarray(labels).tolist())
        for ids, labels in map(samples.__getitem__, range(len(samples)))
    )
    ids, labels = zip(*rows, strict=True)
    Dataset.from_dict({"input_ids": ids, "labels": labels}, features=Features(columns)).to_parquet(str(file))
    return file

"""Checks of the data module's options, and of the trainer's shares of the batches."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lit_ft.data.text.formats import OF_PAIRS
from lit_ft.data.text.sources import FormatName, Source
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.errors import RecipeError, check_counts
from lit_ft.protocols import RowNeeds

DEFAULT_SHUFFLE_BUFFER = 10_000
"""Rows that streaming shuffles at a time, where a recipe says nothing."""
OPTIONS_OF_SOURCES = frozenset(("path", "sources", "val_path", "val_sources", "test_path"))
"""Options whose types ``Source`` checks."""
MOST_WORKERS = 256
"""Maximum number of processes that load or tokenize data: a larger number is a mistake that would stop the machine."""


def check_numbers(
    val_fraction: float,
    max_length: int | None,
    packing: int | bool | Literal["off"] | None,
    micro_batch_size: int,
    micro_batch_tokens: int | None,
    shuffle_buffer: int,
    num_workers: int,
    tokenize_workers: int | None,
) -> None:
    """Refuse numbers out of range.

    Raises:
        RecipeError: a number is out of range; the message names its key.
    """
    if not 0 <= val_fraction < 1:
        raise RecipeError(f"data.val_fraction={val_fraction} must be at least 0 and below 1, e.g. 0.05")
    if packing is True:
        raise RecipeError(
            "data.packing=true says no size; give the token budget of a packed sequence, e.g. 2048, or off"
        )
    if isinstance(packing, int) and packing < 0:
        raise RecipeError(f"data.packing={packing} must be the token budget of a packed sequence, e.g. 2048, or off")
    check_counts("data", micro_batch_size=micro_batch_size, micro_batch_tokens=micro_batch_tokens)
    check_counts("data", shuffle_buffer=shuffle_buffer)
    for name, workers in (("num_workers", num_workers), ("tokenize_workers", tokenize_workers or 0)):
        if not 0 <= workers <= MOST_WORKERS:
            raise RecipeError(f"data.{name}={workers} must be 0 to {MOST_WORKERS} processes")
    if max_length is not None and max_length < 2:
        raise RecipeError(f"data.max_length={max_length} leaves nothing to predict; set it to 2 tokens or more")


def check_streaming(streaming: bool, sources: Sequence[Source], val_fraction: float, shuffle_buffer: int) -> None:
    """Refuse options and training data that streaming cannot follow, and an option that is for streaming alone.

    Raises:
        RecipeError: there is one.
    """
    if streaming and (indexed := next((source for source in sources if source.index_prefix is not None), None)):
        raise RecipeError(
            f"data.streaming=true reads rows of text, and {indexed.path!r} is indexed data, whose tokens are "
            "memory-mapped and may be larger than memory; leave data.streaming out"
        )
    if streaming and val_fraction:
        raise RecipeError(
            f"data.val_fraction={val_fraction} needs all rows at once, which data.streaming=true never has; set "
            "data.val_path"
        )
    if not streaming and shuffle_buffer != DEFAULT_SHUFFLE_BUFFER:
        raise RecipeError(
            f"data.shuffle_buffer={shuffle_buffer} has no effect without data.streaming=true, as all rows are shuffled "
            "at once; leave it out"
        )


def check_packed_stream(packing: int, max_length: int | None) -> None:
    """Refuse packed sequences that are too small for a sample that a stream may still have.

    Raises:
        RecipeError: a sample may be longer.
    """
    if max_length is None or max_length > packing:
        limit = "without data.max_length" if max_length is None else f"of data.max_length={max_length}"
        larger = "" if max_length is None else f", or data.packing to {max_length}"
        raise RecipeError(
            f"data.packing={packing} tokens may not hold a sample {limit} that data.streaming=true has still to read; "
            f"set data.max_length to {packing}{larger}"
        )


def check_read_by_training(
    trains_pairs: bool, streaming: bool, num_workers: int, join_micro_batches: bool, micro_batch_tokens: int | None
) -> None:
    """Refuse options that an evaluation would read and training does not, where no data is evaluated.

    Args:
        trains_pairs: whether samples are pairs, whose reference is computed as an evaluation is.
        streaming: ``data.streaming``.
        num_workers: ``data.num_workers``.
        join_micro_batches: ``data.join_micro_batches``.
        micro_batch_tokens: ``data.micro_batch_tokens``.

    Raises:
        RecipeError: one is set.
    """
    if streaming and num_workers:
        raise RecipeError(
            f"data.num_workers={num_workers} has no effect with data.streaming=true and without validation data: the "
            "number of processes that prepare a stream is data.tokenize_workers; leave it out"
        )
    if micro_batch_tokens is not None and not join_micro_batches and not trains_pairs:
        raise RecipeError(
            f"data.micro_batch_tokens={micro_batch_tokens} has no effect with data.join_micro_batches=false and "
            "without validation data; leave one of the two out"
        )


def check_prompts(**counted: int | None) -> None:
    """Refuse options that count tokens of the data, where the model trains on its own answers to its prompts.

    Raises:
        RecipeError: one is set.
    """
    for name, value in counted.items():
        if value is not None:
            raise RecipeError(
                f"data.{name}={value} counts tokens of the data's own answers, and the model trains on answers that it "
                "gives itself; leave it out: data.micro_batch_size is the number of prompts of a forward pass"
            )


def check_answered_stream(preparation: Preparation, needs: RowNeeds) -> None:
    """Refuse options of a stream whose prompts the model answers.

    Args:
        preparation: treatment of its rows.
        needs: what rewards read of rows.

    Raises:
        RecipeError: known answers would be cut, or a reward reads more than tokens.
    """
    if preparation.max_length is not None and preparation.overlong == "truncate":
        raise RecipeError(
            "data.overlong=truncate would cut known answers of the stream, whose prompts the model answers; set "
            "data.overlong=drop"
        )
    reads = [f"{reader} reads the column {name!r}" for name, reader in needs.columns.items()]
    reads += [f"{needs.messages} reads the turns of conversations"] if needs.messages else []
    if reads:
        raise RecipeError(f"model.rewards: {reads[0]}, and data.streaming=true gives tokens alone; set it to false")


def check_pairs(sources: Mapping[str, Sequence[Source]], supervise: str, streaming: bool) -> None:
    """Refuse preference data beside other data, and options that they cannot follow.

    Args:
        sources: data sets of each split.
        supervise: ``data.supervise``.
        streaming: ``data.streaming``.

    Raises:
        RecipeError: there is preference data, and other data or such an option.
    """
    every = [source for several in sources.values() for source in several]
    pairs = [source for source in every if source.format in OF_PAIRS]
    if not pairs:
        return
    if other := next((source for source in every if source.format != pairs[0].format), None):
        raise RecipeError(
            f"{pairs[0].path!r} holds preference data (format: {pairs[0].format}), {other.path!r} is read as "
            f"{other.format}; training, validation and test data are all of one kind: set "
            f"data.format={pairs[0].format} for all of them, or give the others a run of their own"
        )
    if indexed := next((source for source in pairs if source.index_prefix is not None), None):
        raise RecipeError(f"{indexed.path!r} is indexed data, which holds no preferences; leave its format out")
    if supervise != "assistant":
        raise RecipeError(
            f"data.supervise={supervise!r} has no effect on preference data, whose whole answers are compared; "
            "leave it out"
        )
    if streaming:
        raise RecipeError("data.streaming=true reads no preference data; leave it out")


def check_indexed(source: Source) -> None:
    """Refuse options of a source that its data, Megatron's indexed tokens, cannot follow.

    Raises:
        RecipeError: there is one.
    """
    if source.index_prefix is None:
        return
    for name in ("format", "columns", "split", "subset", "document"):
        # check_pairs says what to do about formats of preference data.
        if (value := getattr(source, name)) not in (getattr(Source, name), "indexed", *OF_PAIRS):
            raise RecipeError(
                f"{source.path}: {name}={value!r} has no effect on indexed data, which has tokens and no rows; leave "
                "it out"
            )


def check_fractions_of_stream(**options: object) -> None:
    """Refuse fractions of a stream's epoch, which Lightning would only do once the weights are loaded.

    Args:
        options: those of the trainer that may be a fraction, as a float, or a number of micro-batches, as an int.

    Raises:
        RecipeError: one is a fraction below 1.
    """
    for name, value in options.items():
        if isinstance(value, float) and 0 < value < 1:
            raise RecipeError(
                f"trainer.{name}={value} is a fraction of an epoch, whose length data.streaming=true does not know; "
                "give a number of micro-batches, e.g. 100"
            )


def check_system(system: str | None) -> None:
    """Refuse a system prompt that names a file, whose text is meant.

    Raises:
        RecipeError: it does.
    """
    if system and os.path.splitext(system)[1] and os.path.isfile(system):
        raise RecipeError(
            f"data.system={system!r} names a file, and its name would be the prompt; give the text: "
            f'--data.system "$(cat {shlex.quote(system)})"'
        )


def check_exclusive(**options: object) -> None:
    """Refuse options of the data module that are given together and mean the same.

    Raises:
        RecipeError: more than one is given.
    """
    given = [
        f"data.{name}={value!r}" if not isinstance(value, list) else f"data.{name}"
        for name, value in options.items()
        if value
    ]
    if len(given) > 1:
        raise RecipeError(f"{' and '.join(given)} exclude each other; keep one")


def check_no_weights(sources: Sequence[Source], option: str) -> None:
    """Refuse weights of sources that are not mixed.

    Raises:
        RecipeError: a source has one.
    """
    if (weighted := next((one for one in sources if one.weight is not None), None)) is not None:
        raise RecipeError(
            f"{option}: weight={weighted.weight:g} of {weighted.title!r} has no effect, as a validation takes every "
            "sample once; leave it out, or shorten the source with max_rows"
        )


def check_mixed(sources: Sequence[Source], mixing: str) -> None:
    """Refuse a mixture of one source.

    Raises:
        RecipeError: there is one, with a weight, or with a way to mix it.
    """
    if len(sources) != 1:
        return
    weight = sources[0].weight
    given = f"data.mixing={mixing}" if weight is None else f"data.sources: weight={weight:g} of {sources[0].title!r}"
    if weight is not None or mixing != "concatenate":
        raise RecipeError(
            f"{given} has no effect with one source, which is read once per epoch; leave it out, or give further "
            "data.sources"
        )


def sources_of(
    path: str | None,
    sources: Sequence[Source | Mapping[str, Any]] | None,
    format: FormatName,
    columns: dict[str, str] | None,
) -> list[Source]:
    """Sources of a split, with format and columns of the recipe where they name none.

    Args:
        path: a single data set.
        sources: several, in place of ``path``; mappings, as in a recipe, come from Python.
        format: format of sources that leave it to be detected.
        columns: column names of sources that map none.

    Raises:
        RecipeError: two sources have the same name, or one has options that its data cannot follow.
    """
    given = [Source(path)] if path is not None else list(sources or [])
    members = [one if isinstance(one, Source) else Source(**one) for one in given]
    for one in members:
        check_indexed(one)
    titles = [source.title for source in members]
    if doubled := [title for title in titles if titles.count(title) > 1]:
        raise RecipeError(f"two sources have the name {doubled[0]!r}; give each its own with name: ...")
    return [
        replace(one, format=format if one.format == "auto" else one.format, columns=one.columns or columns)
        for one in members
    ]


def check_limit(name: str, limit: int | float, batches: int, what: str) -> None:
    """Refuse a share of less than one batch, with which Lightning would stop once the weights are loaded.

    Args:
        name: option of the trainer.
        limit: its value; a float is a share of the batches, an int a number of them.
        batches: number of batches that there are.
        what: what they are, for the message.

    Raises:
        RecipeError: the share is less than one batch.
    """
    if isinstance(limit, float) and limit > 0 and int(batches * limit) == 0 < batches:
        raise RecipeError(
            f"trainer.{name}={limit} is less than one of the {batches:,} {what}; set at least "
            f"{_least_share(batches)}, or a number of them, e.g. 1"
        )


def check_overfitted_share(split: str, batches: int, share: int | float) -> None:
    """Refuse an ``overfit_batches`` of no whole batch: Lightning's message asks for limits that it overrides.

    Raises:
        RecipeError: the share is less than one of the ``batches`` of ``split``.
    """
    if isinstance(share, float) and batches and int(batches * share) == 0:
        raise RecipeError(
            f"trainer.overfit_batches={share} is less than one of the {batches} micro-batches of {split} data; it is "
            "a share of those of training, and of those of validation, or a number: set at least "
            f"{_least_share(batches)}, or 1"
        )


def _least_share(batches: int) -> float:
    """Smallest share, in thousandths, with a whole batch; 1.0, as a share is written, where there is one batch."""
    return -(-1000 // batches) / 1000

"""Statistics of tokenized data sets, and problems found in them; the data of ``check``."""

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_ft.data.loaders.batching import BatchPlan
from lit_ft.data.text.formats import Chat
from lit_ft.data.text.rendering import chat_samples
from lit_ft.data.tokens.preparation import Preparation, Prepared
from lit_ft.data.tokens.samples import Samples
from lit_ft.data.tokens.tokenization import Tokenization, check_encodable
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

ROUND_TRIP_ROWS = 200
"""Rows per source that are rendered and decoded again."""


@dataclass(frozen=True)
class SourceReport:
    """Statistics of one source of a split."""

    name: str
    format: str
    rows: int
    samples: int
    tokens: int
    supervised: int
    longest: int
    duplicates: int
    """Samples that equal an earlier one."""
    closed: float
    """Fraction of the samples whose last supervised token ends the turn; NaN where the format has no conversations."""
    lines: list[str]
    """Messages about its rows: truncated, dropped, skipped."""


@dataclass
class Report:
    """Report of ``check``."""

    sources: dict[str, list[SourceReport]] = field(default_factory=dict)
    """Statistics of the sources, by split."""
    histogram: list[tuple[int, int]] = field(default_factory=list)
    """Pairs of an upper bound in tokens (bounds double) and the training samples between the bound before and it."""
    facts: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Problems that would make training wrong."""
    examples: list[list[tuple[str, bool]]] = field(default_factory=list)
    """Samples as segments of text, each with whether it is supervised."""


def describe_source(
    name: str, prepared: Prepared, samples: Samples, number: int, tokenizer: PreTrainedTokenizerBase, form: str
) -> SourceReport:
    """Compute the statistics of one source."""
    mine = samples.take(np.flatnonzero(samples.source == number))
    digests = mine.digests()
    return SourceReport(
        name=name,
        format=form,
        rows=prepared.rows,
        samples=len(mine),
        tokens=int(mine.lengths.sum()),
        supervised=int(mine.supervised.sum()),
        longest=int(mine.lengths.max()) if len(mine) else 0,
        duplicates=len(digests) - len(np.unique(digests)),
        closed=_closed(mine, tokenizer) if form in _CONVERSATIONS else float("nan"),
        lines=prepared.lines,
    )


_CONVERSATIONS = ("alpaca", "sharegpt", "messages")


def _closed(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> float:
    special = [id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special]
    last = [
        ids[np.flatnonzero(labels != IGNORE_INDEX)[-1]] for ids, labels in map(samples.__getitem__, range(len(samples)))
    ]
    return float(np.isin(last, [*special, tokenizer.eos_token_id]).mean()) if last else float("nan")


def histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Number of samples by length: pairs of an upper bound in tokens, doubling from 16, and a count."""
    if not len(lengths):
        return []
    bounds = [16]
    while bounds[-1] < lengths.max():
        bounds.append(2 * bounds[-1])
    counts, _ = np.histogram(lengths, bins=[0, *(bound + 1 for bound in bounds)])
    return [(bound, int(count)) for bound, count in zip(bounds, counts, strict=True)]


def round_trip(tokenization: Tokenization, prepared: Prepared) -> tuple[int, int, str]:
    """Render conversations, tokenize them, and decode the tokens again.

    Returns:
        Number of samples that decode to the same text, number of samples, and the text of the first that does not.
    """
    right = count = 0
    first = ""
    for _, row in prepared.source.rows():
        try:
            example = tokenization.example(row)
            if not isinstance(example, Chat):
                return 0, 0, ""
            closing = tokenization.tokenizer.eos_token or ""
            pieces = chat_samples(example, tokenization.template, tokenization.supervise, closing, [])
            check_encodable(pieces)
        except BadRow:
            continue  # counted where the rows were read
        for sample in pieces:
            text = "".join(part for part, _ in sample)
            ids, _, _ = tokenization.encoder.encode([sample])
            decoded = tokenization.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            same = decoded.split() == text.split()  # some tokenizers add a space after a special token
            right, count = right + same, count + 1
            first = first or ("" if same else text)
        if count >= ROUND_TRIP_ROWS:
            break
    return right, count, first


def stretches(ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Split a sample into segments of text where supervision begins or ends; each with whether it is supervised."""
    supervised = labels != IGNORE_INDEX
    borders = np.flatnonzero(np.diff(supervised)) + 1
    boundaries = [0, *borders.tolist(), len(ids)]
    return [
        (tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False), bool(supervised[start]))
        for start, end in pairwise(boundaries)
        if end > start
    ]


def steps_of(samples: Samples, plan: BatchPlan, accumulate: int) -> dict[str, str]:
    """Optimizer steps and tokens of the first epoch, and how full packed bins are, as text by name."""
    units = plan.units(samples, 0)
    steps = -(-plan.length(len(units)) // accumulate)
    members = np.concatenate([np.array(unit) for unit in units])
    tokens, supervised = int(samples.lengths[members].sum()), int(samples.supervised[members].sum())
    facts = {
        "epoch": f"{steps:,} optimizer steps of {plan.micro_batch_size * plan.replicas * accumulate} "
        f"{'packed sequences' if plan.packing else 'samples'}",
        "tokens per epoch": f"{tokens:,}, {supervised:,} supervised ({supervised / tokens:.1%}); "
        f"{tokens / steps:,.0f} a step",
    }
    if plan.packing:
        facts["packing"] = (
            f"{len(units):,} packed sequences of {plan.packing:,} tokens, "
            f"{tokens / (len(units) * plan.packing):.2%} full"
        )
    return facts


def inspect_split(
    split: str, prepared: list[Prepared], samples: Samples, preparation: Preparation, report: Report
) -> None:
    """Add the statistics and problems of a split's sources to a report."""
    report.sources[split] = []
    for number, one in enumerate(prepared):
        is_indexed = one.source.index_prefix is not None
        tokenization = None if is_indexed else preparation.tokenization(one.source)
        form = "indexed" if tokenization is None else tokenization.format
        source = describe_source(one.source.title, one, samples, number, preparation.tokenizer, form)
        report.sources[split].append(source)
        report.warnings += [line for line in source.lines if line not in report.warnings]
        if source.duplicates:
            report.warnings.append(f"{source.name}: {source.duplicates:,} of {source.samples:,} samples repeat another")
        truncated_share = one.notes["truncated"] / max(source.samples, 1)
        if source.closed < 1 - truncated_share - 1e-9:
            report.problems.append(
                f"{source.name}: the end-of-turn token is supervised in {source.closed:.1%} of the samples; give "
                "another data.chat_template, or a tokenizer with an end-of-sequence token"
            )
        if tokenization is not None:
            right, count, first = round_trip(tokenization, one)
            if right < count:
                report.warnings.append(
                    f"{source.name}: {count - right:,} of {count:,} conversations decode to another text than the "
                    f"template wrote, e.g. {first[:200]!r}"
                )
            if count:
                report.facts[f"template round trip, {source.name}"] = f"{right:,} of {count:,} conversations"

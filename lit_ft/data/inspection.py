"""Statistics of tokenized data sets, and problems found in them; the data of ``check``."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import attrgetter

import numpy as np
from lit_callbacks.batch_tokens import SampleTokens
from lit_callbacks.output.quantities import as_count
from lit_callbacks.output.token_pieces import ShownSample, TokenPiece, show_sample
from transformers import PreTrainedTokenizerBase

from lit_ft.data.loaders.batching import BatchPlan
from lit_ft.data.template_check import compare_with_template
from lit_ft.data.text.columns import PREFERENCE
from lit_ft.data.text.formats import OF_PAIRS
from lit_ft.data.text.placeholders import placeholder_in
from lit_ft.data.tokens.preparation import Preparation, Prepared
from lit_ft.data.tokens.samples import Samples, TokenArrays
from lit_ft.data.tokens.tokenization import Tokenization, contents_of
from lit_ft.errors import BadRow
from lit_ft.packed_batch import IGNORE_INDEX

TRUNCATED_LIMIT = 0.03
"""Largest fraction of truncated answers that is no problem: a truncated answer ends amid a sentence, without the
end-of-turn token, and the model learns that too. A few very long rows are usual (99 % whole is a common choice of
max_length); more than three in a hundred are no outliers, but a max_length that does not fit the data."""
PLACEHOLDER_LIMIT = 0.01
"""Largest fraction of rows with unfilled placeholders that is no problem: single ones may be about templates."""
SHARED_LIMIT = 0.05
"""Largest fraction of validation samples that may be in the training data too: short answers coincide, and below it the
validation loss still measures mostly what is not trained on."""
END_TOKENS = 1000
"""Maximum number of tokens that are shown at either end of a sample."""
WHOLE = (0.95, 0.99, 1.0)
"""Fractions of samples for which the report gives the max_length that keeps them whole."""


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
    repeats: int
    """Number of times that the most frequent sample is there."""
    conversations_each: int
    """Conversations of each sample: 2 of a complete pair."""
    closed: float
    """Fraction of the samples whose last supervised token ends the turn; NaN where the format has no conversations."""
    ends: dict[str, int]
    """Samples by their last supervised token, of special ones; empty where the format has no conversations. Of pairs,
    both conversations count, here and above."""


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
    examples: list[ShownSample] = field(default_factory=list)
    """Some samples, of pairs both conversations."""
    titles: list[str] = field(default_factory=list)
    """What each of the examples is."""
    has_pairs: bool = False
    scores_texts: bool = False
    """Whether the model scores whole conversations."""
    is_answered: bool = False
    """Whether the model trains on answers of its own, and compares them with the last answers of the data."""
    compared: list[Prepared] = field(default_factory=list)
    """Sources that were compared with the template; one of which a part is held out is in two splits."""

    @property
    def marked(self) -> str:
        """What is marked in the examples."""
        if self.scores_texts:
            return "answer"
        return "known answer" if self.is_answered else "supervised tokens"


def describe_source(
    name: str, prepared: Prepared, samples: Samples, number: int, tokenizer: PreTrainedTokenizerBase, form: str
) -> SourceReport:
    """Compute the statistics of one source."""
    mine = samples.take(np.flatnonzero(samples.source == number))
    _, counts = np.unique(mine.digests(), return_counts=True)
    ends = _ends(prepared.arrays, mine.index, tokenizer) if form in _CONVERSATIONS else {}
    answers = mine.conversations_each * len(mine)
    return SourceReport(
        name=name,
        format=form,
        rows=prepared.rows,
        samples=len(mine),
        tokens=int(mine.lengths.sum()),
        supervised=int(mine.supervised.sum()),
        longest=int(mine.lengths.max()) if len(mine) else 0,
        duplicates=len(mine) - len(counts),
        repeats=int(counts.max(initial=0)),
        conversations_each=mine.conversations_each,
        closed=sum(ends.values()) / answers if form in _CONVERSATIONS and answers else float("nan"),
        ends=ends,
    )


_CONVERSATIONS = ("alpaca", "sharegpt", "messages", "prompt_completion", *OF_PAIRS)


def _ends(arrays: TokenArrays, chosen: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    special = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
    if tokenizer.eos_token_id is not None:
        special[tokenizer.eos_token_id] = str(tokenizer.eos_token)
    last = Counter(_last_supervised(arrays, chosen).tolist())
    return {special[id_]: count for id_, count in last.most_common() if id_ in special}


def _last_supervised(arrays: TokenArrays, chosen: np.ndarray) -> np.ndarray:
    """Last supervised token of each of some samples, of pairs of both conversations; few tokens come after it."""
    at = arrays.conversations(chosen)[:, 1] - 1
    before = np.arange(len(at))
    while len(before := before[arrays.labels[at[before]] == IGNORE_INDEX]):
        at[before] -= 1
    return arrays.ids[at]


def describe_ends(sources: list[SourceReport], are_known: bool = False) -> dict[str, str]:
    """Facts on the special tokens that close supervised answers; empty where no source has conversations.

    ``are_known`` says that they are known answers, and the model trains on its own.
    """
    ends: Counter[str] = sum((Counter(source.ends) for source in sources), Counter())
    of_conversations = [source for source in sources if source.format in _CONVERSATIONS]
    samples = sum(source.conversations_each * source.samples for source in of_conversations)
    what = "answer" if any(source.format in OF_PAIRS for source in sources) else "sample"
    counts = ", ".join(f"{token!r} in {count:,}" for token, count in ends.most_common()) or "none"
    name = "end tokens of known answers" if are_known else "end tokens that are trained on"
    return {name: f"{counts} of {as_count(samples, what)}"} if samples else {}


def histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """Number of samples by length: pairs of an upper bound in tokens, doubling from 16, and a count."""
    if not len(lengths):
        return []
    bounds = [16]
    while bounds[-1] < lengths.max():
        bounds.append(2 * bounds[-1])
    counts, _ = np.histogram(lengths, bins=[0, *(bound + 1 for bound in bounds)])
    return [(bound, int(count)) for bound, count in zip(bounds, counts, strict=True)]


def whole_lengths(lengths: np.ndarray) -> str:
    """Text with the ``max_length`` that keeps the fractions ``WHOLE`` of the samples whole.

    Args:
        lengths: tokens per sample before truncation, ``(samples,)``, at least one.
    """
    tokens = np.quantile(lengths, WHOLE, method="inverted_cdf")
    return ", ".join(f"{share:.0%} with {int(count):,}" for share, count in zip(WHOLE, tokens, strict=True))


def describe_lengths(prepared: list[Prepared], max_length: int | None) -> dict[str, str]:
    """Lengths of the samples before truncation, as text by name."""
    lengths = np.concatenate([one.full_lengths for one in prepared])
    middle = int(np.quantile(lengths, 0.5, method="inverted_cdf"))
    limit = "none" if max_length is None else f"{max_length:,}"
    # max_length holds for each conversation of a pair.
    what = "sample" if prepared[0].arrays.chosen is None else "conversation"
    return {
        f"tokens per {what} before truncation": f"half have up to {middle:,}, the longest {int(lengths.max()):,}",
        f"max_length that keeps {what}s whole": f"{whole_lengths(lengths)} (data.max_length is {limit})",
    }


def judge_truncation(name: str, prepared: Prepared, max_length: int | None) -> list[str]:
    """Problem of a source of which more than ``TRUNCATED_LIMIT`` of the answers are truncated."""
    truncated, samples = prepared.notes["truncated"], len(prepared.full_lengths)
    if truncated <= TRUNCATED_LIMIT * samples:
        return []
    return [
        f"{name}: {truncated:,} of {as_count(samples, 'answer')} truncated ({truncated / samples:.1%}; up to "
        f"{TRUNCATED_LIMIT:.0%} is fine): data.max_length={max_length} is too small for them. It keeps samples whole: "
        f"{whole_lengths(prepared.full_lengths)}; raise it"
    ]


def judge_bad_rows(name: str, prepared: Prepared) -> list[str]:
    """Problem of a source with rows that cannot be used, at which training would stop."""
    if not prepared.bad_rows:
        return []
    more = ", ..." if prepared.bad_rows > len(prepared.bad) else ""
    rows = as_count(prepared.rows, "row")
    return [f"{name}: {prepared.bad_rows:,} of {rows} cannot be used: {'; '.join(prepared.bad)}{more}"]


def judge_placeholders(name: str, prepared: Prepared, tokenization: Tokenization) -> list[str]:
    """Problem of a source of which more than ``PLACEHOLDER_LIMIT`` of the rows hold unfilled placeholders."""
    count = prepared.notes["placeholders"]
    if count <= PLACEHOLDER_LIMIT * prepared.rows:
        return []
    location, placeholder = _first_placeholder(prepared, tokenization)
    return [
        f"{name}: {count:,} of {as_count(prepared.rows, 'row')} with placeholders that nobody filled in, e.g. "
        f"{placeholder} ({location}); fill them in, or the model learns to say them"
    ]


def _first_placeholder(prepared: Prepared, tokenization: Tokenization) -> tuple[str, str]:
    for location, row in prepared.source.rows():
        try:
            texts = contents_of(tokenization.example(row))
        except BadRow:
            continue  # counted where the rows were read
        if placeholder := next(filter(None, map(placeholder_in, texts)), None):
            return location, placeholder
    raise AssertionError("a note counts a placeholder that no row has")


def judge_repetition(
    train: Samples, validation: Samples | None, shared: list[str], report: Report, is_held_out: bool = False
) -> None:
    """Add to a report with its sources what is in the training data more than once, or in the validation data too.

    ``is_held_out`` says that validation rows are those of the training data that ``data.val_fraction`` holds out.
    """
    digests = train.digests()
    within = sum(source.duplicates for source in report.sources["train"])
    if across := len(digests) - len(np.unique(digests)) - within:
        report.warnings.append(f"{across:,} of {len(train):,} training samples repeat one of another source")
    if validation is None:
        return
    known = int(np.isin(validation.digests(), digests).sum())
    files = f"; both are read from {', '.join(shared)}" if shared else ""
    line = (
        f"{known:,} of {len(validation):,} validation samples ({known / len(validation):.1%}) are in the training data "
        f"too{files}"
    )
    if known > SHARED_LIMIT * len(validation):
        # Rows that begin alike are held out together; what is left are further samples of a row.
        advice = "remove from the data what its rows repeat" if is_held_out else "remove them from one"
        other = "data.val_path" if is_held_out else "data.val_fraction"
        report.problems.append(f"{line}: val/loss would measure what was learned by heart; {advice}, or set {other}")
    elif known or shared:
        report.warnings.append(line)


def known_answer(labels: np.ndarray) -> np.ndarray:
    """Labels of the last answer of a sample alone, ``(T,)``: what comes before it is its prompt."""
    supervised = np.flatnonzero(labels != IGNORE_INDEX)
    gaps = np.flatnonzero(np.diff(supervised) > 1)
    first = supervised[gaps[-1] + 1] if len(gaps) else 0
    return np.where(np.arange(len(labels)) < first, IGNORE_INDEX, labels)


def titles_of(samples: Samples, chosen: Sequence[int]) -> list[str]:
    """What each conversation of some samples is."""
    if not samples.has_pairs:
        return [f"sample {number}" for number in range(1, len(chosen) + 1)]
    names = ("good", "bad") if samples.is_unpaired else PREFERENCE
    answers = [(number, zip(names, samples.pair(i), strict=True)) for number, i in enumerate(chosen, 1)]
    return [f"{samples.kind} {number}, {name}" for number, both in answers for name, (ids, _) in both if len(ids)]


def show_example(ids: np.ndarray, labels: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> ShownSample:
    """Texts of a sample's tokens, with which of them are supervised; ids and unshifted labels are ``(T,)``."""
    return show_sample(tokenizer, SampleTokens(ids.tolist(), (labels != IGNORE_INDEX).tolist()), END_TOKENS)


def stretches(pieces: Sequence[TokenPiece]) -> list[tuple[str, bool]]:
    """Join texts of tokens between the places where supervision begins or ends; each with whether it is supervised."""
    return [
        ("".join(piece.text for piece in group), is_supervised)
        for is_supervised, group in groupby(pieces, key=attrgetter("is_supervised"))
    ]


def steps_of(samples: Samples, plan: BatchPlan, accumulate: int) -> dict[str, str]:
    """Optimizer steps and tokens of the first epoch, and how full packed bins are, as text by name."""
    units = plan.units(samples, 0)
    steps = -(-plan.length(len(units)) // accumulate)
    members = np.fromiter(chain.from_iterable(units), dtype=np.int64)
    tokens, supervised = int(samples.lengths[members].sum()), int(samples.supervised[members].sum())
    kind = samples.kind
    facts = {
        "epoch": f"{as_count(steps, 'optimizer step')} of "
        + as_count(plan.micro_batch_size * plan.replicas * accumulate, "packed sequence" if plan.packing else kind),
        "tokens per epoch": f"{tokens:,}, {supervised:,} supervised ({supervised / tokens:.1%}); "
        f"{tokens / steps:,.0f} a step",
    }
    if plan.mixing.strategy != "concatenate":
        total, drawn = len(samples.lengths), len(np.unique(members))
        facts[f"{kind}s per epoch"] = f"{len(members):,}, from {drawn:,} of {as_count(total, kind)}"
    if plan.packing:
        facts["packing"] = (
            f"{as_count(len(units), 'packed sequence')} of {plan.packing:,} tokens, "
            f"{tokens / (len(units) * plan.packing):.2%} full"
        )
    return facts


def inspect_split(
    split: str,
    prepared: list[Prepared],
    samples: Samples,
    preparation: Preparation,
    report: Report,
    skips_bad_rows: bool = False,
) -> None:
    """Add the statistics and problems of a split's sources to a report.

    Args:
        split: name of the split.
        prepared: its sources, of which bad rows were skipped.
        samples: its samples.
        preparation: how its rows become samples.
        report: the report.
        skips_bad_rows: whether the recipe skips such rows too; else they are a problem.
    """
    report.sources[split] = []
    for number, one in enumerate(prepared):
        is_indexed = one.source.index_prefix is not None
        tokenization = None if is_indexed else preparation.tokenization(one.source)
        form = "indexed" if tokenization is None else tokenization.format
        source = describe_source(one.source.title, one, samples, number, preparation.tokenizer, form)
        report.sources[split].append(source)
        truncation = judge_truncation(source.name, one, preparation.max_length)
        placeholders = [] if tokenization is None else judge_placeholders(source.name, one, tokenization)
        bad_rows = [] if skips_bad_rows else judge_bad_rows(source.name, one)
        report.problems += [line for line in truncation + placeholders + bad_rows if line not in report.problems]
        judged = ["truncated"] * len(truncation) + ["placeholders"] * len(placeholders) + ["bad rows"] * len(bad_rows)
        lines = one.lines if tokenization is None else preparation.describe(one, tokenization, besides=judged)
        report.warnings += [line for line in lines if line not in report.warnings]
        if source.duplicates:
            report.warnings.append(
                f"{source.name}: {source.duplicates:,} of {as_count(source.samples, 'sample')}: repetition of another "
                f"({source.duplicates / source.samples:.1%}; the most frequent is there {source.repeats:,} times)"
            )
        truncated_share = one.notes["truncated"] / max(source.samples * source.conversations_each, 1)
        if source.closed < 1 - truncated_share - 1e-9:
            report.problems.append(
                f"{source.name}: the end-of-turn token is supervised in {source.closed:.1%} of the samples; give "
                "another data.chat_template, or a tokenizer with an end-of-sequence token"
            )
        if tokenization is not None and all(one is not other for other in report.compared):
            report.compared.append(one)
            compared = compare_with_template(tokenization, one.source.rows())
            report.facts |= compared.facts(source.name)
            report.warnings += compared.warnings(source.name)

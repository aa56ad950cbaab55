"""The ``check`` command: report the training data of a recipe and its problems, without training."""

import logging
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lit_callbacks.output.printable import printable
from lit_callbacks.output.quantities import as_count
from lit_callbacks.output.token_pieces import TokenPiece
from lit_callbacks.report.page import render_page
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from lit_ft.commands.train import RecipeCLI
from lit_ft.data.inspection import (
    Report,
    describe_ends,
    describe_lengths,
    histogram,
    inspect_split,
    judge_repetition,
    known_answer,
    show_example,
    steps_of,
    stretches,
    titles_of,
)
from lit_ft.data.text.sources import shared_content
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.model.architecture import Architecture
from lit_ft.model.generation import stop_ids
from lit_ft.model.loading import skeleton
from lit_ft.packed_batch import pack_samples
from lit_ft.protocols import ChecksData, LearnsFromTeacher, LearnsPreferences, SamplesAnswers
from lit_ft.recipe.allowed_code import as_options
from lit_ft.recipe.option_parser import OptionParser, whole_number
from lit_ft.recipe.trainer_checks import check_trainer, quiet_trainer
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.console import show_progress_on_terminals_only
from lit_ft.training.optimizers.schedules import WarmupSchedule
from lit_ft.training.policy.policy_lm import PolicyLM

STREAMED_ROWS = 10_000
"""Number of rows per source that are inspected where the recipe streams."""


def run(arguments: list[str]) -> None:
    """Parse the options, inspect the data and print the report; exit code 1 if there are problems."""
    show_progress_on_terminals_only()
    parser = OptionParser(
        prog="python -m lit_ft check",
        description="Look at the data of a recipe without training. Takes every option of fit "
        "(python -m lit_ft fit --help); exit code 1 when something would train wrong.",
    )
    parser.add_argument("--html", metavar="FILE", help="also write the report as a page")
    parser.add_argument("--samples", metavar="N", type=whole_number, default=3, help="samples shown (default: 3)")
    options, rest = parser.parse_known_args(arguments[1:])
    with _in_the_report_alone():
        cli = CheckCLI(["fit", *rest], options.samples)
    report = cli.report
    show(report, Console(width=None if Console().is_terminal else 120, highlight=False))
    if options.html:
        page = Path(options.html).expanduser()
        try:
            command = shlex.join(["python", "-m", "lit_ft", "fit", *rest]) + as_options()
            page.write_text(to_html(report, cli.recipe_name, command), encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: a null character in the name
            raise RecipeError(f"--html {options.html!r} cannot be written ({error}); name another file") from error
        print(printable(f"report: {page}"))
    if report.problems:
        raise SystemExit(1)


@contextmanager
def _in_the_report_alone() -> Iterator[None]:
    """Silence the messages of ``fit`` about the data, which the report has, but not those about long work."""
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or record.module in _MODULES_OF_PROGRESS

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)


_MODULES_OF_PROGRESS = ("heartbeat", "row_count", "cache")
"""Modules whose messages say how far long work is, or what it waits for."""


class CheckCLI(RecipeCLI):
    """``fit`` up to the loading of the data, which it then inspects instead of training."""

    def __init__(self, arguments: list[str], samples: int) -> None:
        """Parse the options and inspect the data.

        Args:
            arguments: command line of ``fit``.
            samples: number of samples to show.
        """
        self.samples = samples
        self.report = Report()
        self.skips_bad_rows = False
        super().__init__(arguments)

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Build a trainer without output on the CPU; the recipe's may need devices that this machine lacks."""
        check_trainer(self.options.trainer)
        return quiet_trainer(accelerator="cpu")

    def before_fit(self) -> None:
        """Load the data like ``fit``, but skip bad rows, to count them all."""
        if not isinstance(self.datamodule, TextDataModule):
            raise RecipeError(
                f"check looks at lit_ft.TextDataModule; the recipe's data is {type(self.datamodule).__name__}"
            )
        data = self.datamodule
        with self._as_problem():
            data.check_options_for(self.model, "fit")
        asked, sources = data.splits.preparation, data.splits.sources
        overlong = "drop" if asked.overlong == "error" else asked.overlong
        self.skips_bad_rows = asked.on_bad_row == "skip"
        data.splits.preparation = replace(asked, on_bad_row="skip", overlong=overlong)
        if data.streaming:
            data.streaming = False
            sources["train"] = [
                replace(source, max_rows=min(source.max_rows or STREAMED_ROWS, STREAMED_ROWS))
                for source in sources["train"]
            ]
            self.report.facts["streaming"] = f"looked at the first {STREAMED_ROWS:,} rows of each source"
        self._check("fit")
        if isinstance(self.model, CausalLM) and self.model.spec.base.init == "pretrained":
            base = self.model.spec.base
            if unused := base.unused_tensors(base.skeleton()):
                self.report.facts["base model"] = unused
        for prepared in [one for split in data.splits.prepared.values() for one in split]:
            if prepared.notes["dropped"] and asked.overlong == "error":
                count = as_count(prepared.notes["dropped"], "sample")
                self.report.problems.append(f"{count} over data.max_length={asked.max_length} (data.overlong=error)")

    def fit(self, **_: object) -> None:
        """Inspect the data and fill the report."""
        data, report = self.datamodule, self.report
        assert isinstance(data, TextDataModule)
        splits, tokenizer = data.splits, data.splits.tokenizer
        for split, samples in splits.items():
            inspect_split(split, splits.prepared[split], samples, splits.preparation, report, self.skips_bad_rows)
        train = splits["train"]
        report.histogram = histogram(train.lengths)
        trainer = self.options.trainer
        devices = trainer.devices if isinstance(trainer.devices, int) and trainer.devices > 0 else 1
        plan = data.plan(replicas=devices * trainer.num_nodes)
        report.facts |= steps_of(train, plan, trainer.accumulate_grad_batches)
        if isinstance(self.model, LearnsFromTeacher):
            report.facts["trained on"] = self.model.describe_objective()
        elif isinstance(self.model, SamplesAnswers):
            reads = not self.model.row_needs.may_lack_answers
            compared = "; the answers of the data are what rewards compare with" if reads else ""
            report.facts["trained on"] = f"{self.model.describe_policy()}{compared}"
        self._judge_samples(data)
        if isinstance(self.model, SamplesAnswers):
            report.is_answered = True
            prompts = plan.micro_batch_size * plan.replicas * trainer.accumulate_grad_batches
            report.facts["tokens per epoch"] += ", of prompts and known answers"
            answers = as_count(prompts * self.model.answers_per_prompt, "answer")
            most = as_count(self.model.max_new_tokens, "token")
            report.facts["answers per step"] = f"{answers} of up to {most} (model.max_new_tokens)"
        self._judge_warmup(trainer)
        report.facts |= {"judged answers": train.judgments} if train.is_unpaired else {}
        report.warnings += splits.notes_on_judgments()
        report.facts |= describe_lengths(splits.prepared["train"], data.max_length)
        # With val_fraction, one source is split by rows: that both read it is as it should be.
        shared = [] if data.val_fraction else shared_content(splits.sources["train"], splits.sources["val"])
        judge_repetition(train, splits.get("val"), shared, report, bool(data.val_fraction))
        if isinstance(self.model, CausalLM):
            self._judge_model(self.model, tokenizer)
        chosen = np.random.default_rng(0).permutation(len(train))[: self.samples]
        in_order = sorted(chosen.tolist())
        shown = [part for i in in_order for part in train.conversations(i)]
        report.has_pairs, report.titles = train.has_pairs, titles_of(train, in_order)
        marked = [(ids, known_answer(labels) if report.is_answered else labels) for ids, labels in shown]
        report.examples = [show_example(ids, labels, tokenizer) for ids, labels in marked]

    def _judge_model(self, model: CausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare ends of answers with those of generation, and see whether samples of a packed batch stay apart."""
        report = self.report
        report.scores_texts = isinstance(model, LearnsPreferences) and model.scores_texts
        if not report.scores_texts:
            report.facts |= describe_ends(report.sources["train"], report.is_answered)
            report.facts["end tokens that generation stops at"] = generation_ends(model, tokenizer)
        leak = leak_probe(model)
        report.facts["leak probe"] = (
            f"a sample's losses move by {leak:.1g} when its neighbor in the packed batch changes"
        )
        if leak > 0:
            report.problems.append("samples of one packed batch see each other; set model.attn_implementation to auto")

    def _judge_samples(self, data: TextDataModule) -> None:
        """Name what the recipe's model cannot train on, and try its rewards on known answers."""
        data.trainer = self.trainer
        with self._as_problem():
            data.check_samples_for(self.model, "fit")
            if isinstance(self.model, PolicyLM):
                rewards = self.model.rewards_of_known(data)
                means = [f"{name} {sum(one) / len(one):g} (of {len(one):,})" for name, one in rewards.items()]
                means += [f"{name} not tried" for name in self.model.reward_names if name not in rewards]
                if data.has_known_answers("train"):
                    self.report.facts["mean rewards of known answers"] = ", ".join(means)
            if isinstance(self.model, ChecksData):
                self.model.check_data(data, "validate")

    @contextmanager
    def _as_problem(self) -> Iterator[None]:
        """Report what the training would refuse, and go on."""
        try:
            yield
        except RecipeError as error:
            self.report.problems.append(str(error))

    def _judge_warmup(self, trainer: Namespace) -> None:
        """Say that the warm-up is longer than a run whose ``max_steps`` are set; ``fit`` says it of epochs as well."""
        if isinstance(self.schedule, WarmupSchedule) and trainer.max_steps > 0:
            self.schedule.total_steps = self.schedule.total_steps or trainer.max_steps
            self.report.warnings += [self.schedule.warning] if self.schedule.warning else []


def generation_ends(module: CausalLM, tokenizer: PreTrainedTokenizerBase) -> str:
    """Text with the tokens at which answers of the recipe's model end; its weights are not read."""
    base = module.spec.base
    model = skeleton(base.pretrained, base.dtype, base.config_overrides)
    with suppress(OSError):  # as transformers, which then goes by config.json
        model.generation_config = GenerationConfig.from_pretrained(base.pretrained)
    tokens = tokenizer.convert_ids_to_tokens(stop_ids(model, tokenizer))
    return ", ".join(map(repr, tokens)) or "none"


def leak_probe(module: CausalLM) -> float:
    """Largest change of a sample's token losses when the sample before it in the packed batch changes or gets longer.

    Measured on the recipe's architecture and attention with its first layers (two, and one of each kind), a small
    vocabulary and random weights. Where rotary frequencies change above a length, that length is lowered to the
    probe's, and the longer sample exceeds it.
    """
    spec = module.spec.base
    config = spec.config
    text = config.get_text_config()
    text.vocab_size = 64
    _keep_first_layers(text)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(text, token, None)
    _lower_length_limit(text, _PROBE_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        small = CausalLM(folder, init="random", dtype="float32", attn_implementation=spec.attn_implementation)
        small.configure_model()
    small.eval()  # without dropout and router noise, which would look like a leak
    ids = np.arange(1, _PROBE_TOKENS + 1) * 7 % 64
    own = (3 * ids + 2) % 64  # no first token is that of a sample before it, which would be computed once
    with torch.no_grad():
        one, *others = (
            small(pack_samples([(first, first), (own, own)])).per_token[len(first) - 1 :]
            for first in (ids, ids[::-1], np.tile(ids, 3))
        )
    return max(float((one - other).abs().max()) for other in others)


_PROBE_TOKENS = 24


def _keep_first_layers(config: PretrainedConfig) -> None:
    kinds, layers = Architecture.of(config).layer_kinds, config.num_hidden_layers
    kept = max([2, *(kinds.index(kind) + 1 for kind in set(kinds))])
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:kept])
    config.num_hidden_layers = min(kept, layers)


def _lower_length_limit(config: PretrainedConfig, tokens: int) -> None:
    """Set the length above which rotary frequencies change to ``tokens``."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    for kind in kinds:
        if "original_max_position_embeddings" in kind:
            kind["original_max_position_embeddings"] = tokens
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = tokens
    if any("dynamic" in str(kind.get("rope_type")) for kind in kinds):
        config.max_position_embeddings = tokens


# --- showing ---------------------------------------------------------------------------------------

_COLUMNS = ("source", "format", "rows", "samples", "tokens", "supervised", "longest", "duplicates", "ends supervised")


def _cells(report: Report) -> list[tuple[str, ...]]:
    return [
        (
            f"{split}: {one.name}",
            one.format,
            f"{one.rows:,}",
            f"{one.samples:,}",
            f"{one.tokens:,}",
            f"{one.supervised / max(one.tokens, 1):.1%}",
            f"{one.longest:,}",
            f"{one.duplicates:,}",
            "" if np.isnan(one.closed) else f"{one.closed:.1%}",
        )
        for split, sources in sorted(report.sources.items())  # train, val
        for one in sources
    ]


def show(report: Report, console: Console) -> None:
    """Print a report; supervised text is green."""
    table = Table(*_COLUMNS, box=None)
    for cells in _cells(report):
        table.add_row(*(Text(printable(cell, one_line=True)) for cell in cells))
    console.print(table)
    most = max((count for _, count in report.histogram), default=1)
    console.print("\ntokens per sample (training data)")
    for bound, count in report.histogram:
        console.print(f"  up to {bound:>7,} {'#' * round(50 * count / most):<50} {count:,}")
    console.print()
    for name, fact in report.facts.items():
        console.print(Text(printable(f"{name}: {fact}")), soft_wrap=True)
    for title, example in zip(report.titles, report.examples, strict=True):
        console.print(Text(f"\n{title} ({report.marked} in green, between » and «)"))
        console.print(Text.assemble(*_colored(example["head"])), soft_wrap=True)
        if left_out := example["left_out"]:
            console.print(
                f"({left_out:,} of {example['tokens']:,} tokens are left out here, "
                f"{example['left_out_supervised']:,} of them supervised)"
            )
            console.print(Text.assemble(*_colored(example["tail"])), soft_wrap=True)
    console.print()
    for line in report.warnings:
        console.print(Text(printable(f"note: {line}")), style="yellow", soft_wrap=True)
    for line in report.problems:
        console.print(Text(printable(f"wrong: {line}")), style="red", soft_wrap=True)
    console.print(_verdict(report))


def _colored(pieces: Sequence[TokenPiece]) -> list[tuple[str, str]]:
    """Pairs of a text and its style."""
    shown = [(printable(text), supervised) for text, supervised in stretches(pieces)]
    return [(f"»{text}«", "green") if supervised else (text, "") for text, supervised in shown]


def to_html(report: Report, recipe: str, command: str) -> str:
    """Write a report as an HTML page without external files.

    Args:
        report: the report.
        recipe: name of the recipe, the page's title.
        command: command that trains on the data.
    """
    page = render_page(
        Path(__file__).with_name("check.html.j2"),
        recipe,
        report=report,
        verdict=_verdict(report).capitalize() + ".",
        headline=_headline(report),
        command=command,
        columns=_COLUMNS,
        sources=_cells(report),
        lengths=[(f"up to {bound:,}", count, f"{count:,}") for bound, count in report.histogram],
    )
    return printable(page)


def _verdict(report: Report) -> str:
    return "something would train wrong" if report.problems else "nothing would train wrong"


def _headline(report: Report) -> list[tuple[str, str, str]]:
    """Label, value and note of the figures that the page shows first."""
    train = report.sources["train"]
    tokens, supervised = sum(one.tokens for one in train), sum(one.supervised for one in train)
    figures = [
        ("training samples", f"{sum(one.samples for one in train):,}", f"of {sum(one.rows for one in train):,} rows"),
        ("tokens", f"{tokens:,}", f"{supervised / max(tokens, 1):.1%} supervised"),
        ("longest sample", f"{max(one.longest for one in train):,} tokens", "after truncation"),
    ]
    if validation := report.sources.get("val"):
        figures.append(("validation samples", f"{sum(one.samples for one in validation):,}", ""))
    return [*figures, ("wrong", f"{len(report.problems)}", f"and {len(report.warnings)} to note")]

"""The ``evaluate`` command: scores of a trained model beside its base."""

import gc
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.printable import printable
from lit_callbacks.output.quantities import as_count
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from lit_ft.commands.inference.keys import API_KEY, JUDGE_API_KEY, given_key
from lit_ft.data.text_data import TextDataModule
from lit_ft.data.tokens.preparation import MAY_BE_SKIPPED
from lit_ft.errors import RecipeError, option_called
from lit_ft.inference.openai.client import OpenAIClient
from lit_ft.inference.opening import OpenedModel, base_opener, open_model, open_tokenizer
from lit_ft.internals.peft import virtual_tokens_of
from lit_ft.model.generation import GeneratedAnswer
from lit_ft.protocols import Question
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.run.predictions import check_prompts
from lit_ft.run.state import finished_step
from lit_ft.scoring import harness, harness_tasks, held_out, judging, results
from lit_ft.scoring.scores import COLUMNS, Cell, Score, compared
from lit_ft.training.answer_scores.rouge_and_bleu import bleu_tokenizer
from lit_ft.training.console import show_progress_on_terminals_only

Side = Literal["fine-tuned", "base"]
LONGEST = 256
"""Largest number of tokens of an answer, where ``--max_new_tokens`` gives none."""
TRIES = 8
"""Times that a server is asked the same, within about 90 seconds."""

_SECRETS = ("--api_key", "--judge_api_key")


def run(arguments: list[str]) -> None:
    """Score a trained model beside its base: tasks of lm-evaluation-harness, a data set, a judge of answers."""
    show_progress_on_terminals_only()
    options = _parser().parse_args(arguments[1:])
    how = _checked(options)
    tasks = harness_tasks.load_tasks(_names(options.tasks)) if options.tasks else []
    if options.apply_chat_template:
        _check_templates(options)
    evaluation = Evaluation(tasks, how, DataSets(options))
    with results.new_folder(options.path, options.out) as folder:
        judge = _judge(options)
        try:
            if options.url is None:
                evaluation.data.check()
                for side, path, opened in _sides(options):
                    evaluation.measure(side, path, opened, options)
                    del opened  # its weights may have to make room for those of the base
                    gc.collect()
            else:
                evaluation.ask(options)
            if judge is not None:
                evaluation.judge(judge, Path(options.questions).name)
        except BaseException as error:
            evaluation.notes.append(f"ended early, not all of it was measured: {error or type(error).__name__}")
            raise
        finally:  # what fails costs no figures, answers or judgments from before
            rows = compared(evaluation.scores["fine-tuned"], evaluation.scores["base"])
            if rows or evaluation.judgments:
                _show(rows, evaluation.notes)
                _write(folder, evaluation, rows, options, _without_secrets(arguments))


def _parser() -> RecipeParser:
    parser = RecipeParser(prog="python -m lit_ft evaluate", description=(run.__doc__ or ""))
    add = parser.add_argument
    add("path", help="a run's folder, an adapter's, a model's, or a hub id; with --url it gives the tokenizer")
    add("--ckpt_path", default=LAST, help="checkpoint of a run: last, best or a path")
    add("--base", type=str | None, help="base model of an adapter's folder")
    add("--no_base", action="store_true", help="score the model alone")
    add("--against", type=str | None, help="a run, adapter or model to compare with in place of the base")
    add("--chat_template", type=str | None, help="in place of the tokenizer's or the run's")
    add("--out", type=str | None, help="folder of the numbered results; RUN/evaluations by default")
    add("--max_new_tokens", type=int | None, help=f"longest answer of --data.path or --questions; by default {LONGEST}")
    add("--batch_size", type=int, default=8, help="answers or requests that are computed together")
    add("--tasks", nargs="+", default=[], help="names of tasks of lm-evaluation-harness, or YAML files")
    add("--limit", type=float | None, help="rows of each task, or a fraction of them, for trying")
    add("--num_fewshot", type=int | None, help="examples before each question of a task")
    add(
        "--apply_chat_template",
        type=bool | None,
        help="put tasks into the chat template; by default where the tokenizer has one",
    )
    add("--seed", type=int | None, help="seed of tasks; by default the harness's own")
    add("--unsafe_code", action="store_true", help="run tasks that execute code which the model writes")
    add("--url", type=str | None, help="run the tasks on a server with OpenAI's interface")
    add("--model", type=str | None, help="name of the model there")
    add("--base_model", type=str | None, help="name of the base there; by default `base`, if it has one")
    add("--api", choices=("completions", "chat"), help="interface that is asked there; completions by default")
    add("--api_key_file", type=str | None, help=f"file with the key that it asks for; or {API_KEY}")
    add("--api_key", type=str | None, help="the key itself")
    add("--data.path", type=str | None, help="data set whose loss, exact match, ROUGE and BLEU are measured")
    add("--data.format", type=str | None, help="its format, in place of the run's")
    add("--data.columns", type=dict[str, str] | None, help="its columns, in place of the run's")
    add("--data.system", type=str | None, help="system prompt, in place of the run's")
    add("--data.max_length", type=int | None, help="tokens of the longest sample, in place of the run's")
    add("--questions", type=str | None, help="data set of questions whose answers a judge compares")
    add("--judge_url", type=str | None, help="address of the judge, with OpenAI's interface")
    add("--judge_model", type=str | None, help="name of the judge there")
    add("--judge_api_key_file", type=str | None, help=f"file with its key; or {JUDGE_API_KEY}")
    add("--judge_api_key", type=str | None, help="the key itself")
    add("--judge_prompt", type=str | None, help="file with {question}, {answer_a}, {answer_b}")
    return parser


_IS_FOR = {
    "--tasks": ("limit", "num_fewshot", "apply_chat_template", "seed", "unsafe_code"),
    "--url": ("model", "base_model", "api", "api_key_file", "api_key"),
    "--data.path or --questions": ("data.format", "data.columns", "data.system", "max_new_tokens"),
    "--questions": ("judge_model", "judge_api_key_file", "judge_api_key", "judge_prompt"),
}
"""Options that have an effect only with another one."""


def _check_effect(options: Namespace) -> None:
    """Refuse options that would have no effect."""
    for needed, names in _IS_FOR.items():
        if any(options[one.removeprefix("--")] for one in needed.split(" or ")):
            continue
        for name in names:
            if options[name] is not None and options[name] is not False:
                raise RecipeError(f"--{name} is for {needed}, which is not given; add it, or leave --{name} out")


def _checked(options: Namespace) -> harness.HarnessOptions:
    if not (options.tasks or options.data.path or options.questions):
        raise RecipeError("nothing to evaluate; give --tasks, --data.path FILE or --questions FILE")
    if options.max_new_tokens is not None and options.max_new_tokens < 1:
        raise RecipeError(f"max_new_tokens={options.max_new_tokens} must be 1 or more")
    if options.url is not None and (options.data.path or options.questions or options.against):
        raise RecipeError("--url runs --tasks on a server; evaluate the other options in a command without it")
    if options.url is not None and not options.tasks:
        raise RecipeError("--url runs --tasks on a server; name them")
    if (options.questions is None) != (options.judge_url is None):
        raise RecipeError("--questions and --judge_url belong together; give both, or none")
    if options.no_base and (options.questions or options.against):
        raise RecipeError("--no_base leaves nothing to compare with, which --questions and --against do; leave it out")
    _check_effect(options)
    options.max_new_tokens = options.max_new_tokens or LONGEST
    names = ("limit", "num_fewshot", "batch_size", "seed", "unsafe_code")
    return harness.HarnessOptions(**{name: options[name] for name in names})


def _check_templates(options: Namespace) -> None:
    """Refuse a tokenizer without a chat template, before weights are loaded."""
    for path, base in ((options.path, options.base), (options.against, None)):
        if path is not None and open_tokenizer(path, options.chat_template, base)[1] is None:
            raise RecipeError(
                f"apply_chat_template=true, but the tokenizer of {path} has no chat template; give one with "
                "--chat_template"
            )


def _names(given: Sequence[str]) -> list[str]:
    """Names of tasks; the harness's own command separates them by commas."""
    return [name for text in given for name in text.split(",") if name]


class DataSets:
    """Data sets of an evaluation: each is read, and its notes are printed, once for all models of a path.

    What ``--against`` names reads the same rows, truncated and supervised alike, in its own chat template.
    """

    def __init__(self, options: Namespace) -> None:
        self._options = options
        self._paths = [options.path] if options.against is None else [options.path, options.against]
        self.run = next((path for path in self._paths if RunFolder.at(path).config.is_file()), options.path)
        """Path whose run gives the options of the data, and the precision."""
        self._modules: dict[tuple[str, str], TextDataModule] = {}

    def held_out(self, path: str, tokenizer: PreTrainedTokenizerBase) -> TextDataModule | None:
        """Data module with the rows of ``--data.path``, read as the model of ``path`` reads them; None without one."""
        return self._read(path, self._options.data.path, tokenizer, "test")

    def questions(self, path: str, tokenizer: PreTrainedTokenizerBase) -> list[Question] | None:
        """Questions of ``--questions``; None without one."""
        data = self._read(path, self._options.questions, tokenizer, "predict")
        return None if data is None else data.questions or []

    def check(self) -> None:
        """Read the data sets before weights are loaded."""
        if self._options.data.path is None and self._options.questions is None:
            return
        for path in self._paths:
            base = self._options.base if path == self._options.path else None
            tokenizer, template = open_tokenizer(path, self._options.chat_template or None, base)
            if template is not None:  # the stand-in for one is set when the model is opened
                self.held_out(path, tokenizer)
                self.questions(path, tokenizer)

    def _read(
        self, path: str, file: str | None, tokenizer: PreTrainedTokenizerBase, stage: Literal["test", "predict"]
    ) -> TextDataModule | None:
        if file is None:
            return None
        if (path, file) not in self._modules:
            self._modules[path, file] = held_out.data_of(self.run, path, _data_options(self._options, file))
        data = self._modules[path, file]
        if stage == "test" and data.is_unpaired:
            raise RecipeError(
                "data.format=unpaired_preference holds answers that are judged, and evaluate compares with right ones; "
                "give the good ones alone, without their label, and set --data.format auto"
            )
        if stage == "test" and data.has_pairs:
            raise RecipeError(
                "data.format=preference holds pairs of answers, and evaluate scores single ones; set --data.format "
                "auto, and of pairs take the chosen answers, e.g. --data.columns '{prompt: prompt, completion: chosen}'"
            )
        with option_called(MAY_BE_SKIPPED, "; correct the row, or remove it"):
            data.load(tokenizer, stage)
        return data


@dataclass
class Evaluation:
    """Results of an evaluation."""

    tasks: Sequence[Any]
    options: harness.HarnessOptions
    data: DataSets
    scores: dict[Side, list[Score]] = field(default_factory=lambda: {"fine-tuned": [], "base": []})
    harness: dict[Side, dict[str, Any]] = field(default_factory=dict)
    answers: dict[Side, list[dict[str, str]]] = field(default_factory=dict)
    """Answers to the rows of the data set."""
    replies: dict[Side, list[GeneratedAnswer]] = field(default_factory=dict)
    """Answers to the questions that a judge compares."""
    questions: list[Question] = field(default_factory=list)
    judgments: list[judging.Judgment] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(self, side: Side, path: str, opened: OpenedModel, options: Namespace) -> None:
        """Measure an opened model."""
        self.notes.append(f"{side}: {opened.pretrained if side == 'base' and not options.against else opened.name}")
        if self.tasks:
            self._run_tasks(side, opened, options.apply_chat_template)
        if (data := self.data.held_out(path, opened.tokenizer)) is not None:
            scores, self.answers[side] = held_out.held_out_scores(
                opened,
                data,
                Path(options.data.path).name,
                _precision(self.data.run),
                options.max_new_tokens,
                options.batch_size,
            )
            self.scores[side] += scores
            self._note_cut(side, options, options.data.path, [row["finish_reason"] for row in self.answers[side]])
            if side == "fine-tuned":
                self._note_texts(Path(options.data.path).name, [row["expected"] for row in self.answers[side]])
        if (questions := self.data.questions(path, opened.tokenizer)) is not None:
            virtual = virtual_tokens_of(opened.model)
            longest = options.max_new_tokens
            check_prompts(questions, opened.tokenizer, opened.base.config, longest, opened.name, virtual)
            replies = judging.answers_of(opened, questions, options.max_new_tokens, options.batch_size)
            self.replies[side] = replies
            self._note_cut(side, options, options.questions, [reply.finish_reason for reply in replies])
            self.questions = self.questions or questions

    def _note_texts(self, name: str, expected: Sequence[str]) -> None:
        if expected:
            self.notes.append(f"{name}: bleu is SacreBLEU's with tokenize={bleu_tokenizer(expected)}")
        else:
            self.notes.append(f"{name}: no row is a conversation, so there is no exact match, rouge or bleu")

    def _note_cut(self, side: Side, options: Namespace, path: str, ends: Sequence[str | None]) -> None:
        if cut := ends.count("length"):
            of = f"{cut:,} of {as_count(len(ends), 'answer')} to {Path(path).name}"
            self.notes.append(f"{side}: {of} cut at max_new_tokens={options.max_new_tokens}")

    def _run_tasks(self, side: Side, opened: OpenedModel, in_template: bool | None) -> None:
        has_chat = opened.has_template if in_template is None else in_template
        self._add(side, harness.run_opened(opened, self.tasks, self.options, has_chat))

    def _add(self, side: Side, results: dict[str, Any]) -> None:
        self.harness[side] = results
        self.scores[side] += harness.scores_of(results)

    def ask(self, options: Namespace) -> None:
        """Run the tasks on a server."""
        from lit_ft.scoring.harness_models import ServedLM

        tokenizer, template = open_tokenizer(options.path, options.chat_template, options.base)
        if options.apply_chat_template is False:
            template = None
        key = given_key("api_key", options.api_key, options.api_key_file, API_KEY)
        client = OpenAIClient(options.url, key, tries=TRIES)
        served = client.models()
        name = client.chosen(options.model, Path(options.path).resolve().name)
        base = options.base_model or ("base" if "base" in served and name != "base" else None)
        names: dict[Side, str | None] = {"fine-tuned": name, "base": None if options.no_base else base}
        for side, model in names.items():
            if model is None:
                continue
            client.chosen(model, option="--model" if side == "fine-tuned" else "--base_model")
            lm = ServedLM(client, model, tokenizer, template, self.options.batch_size, options.api or "completions")
            self._add(side, harness.run_harness(lm, self.tasks, self.options, template is not None))
            self.notes.append(f"{side}: {model} at {client.url}")
        if names["base"] is None:
            self.notes.append("no base: the server has none that --base_model names")

    def judge(self, judge: judging.Judge, name: str) -> None:
        """Let a judge compare the answers of both sides."""
        pairs = zip(self.questions, self.replies["fine-tuned"], self.replies["base"], strict=True)
        unjudged = [judging.Judgment(question["question"], own.text, other.text) for question, own, other in pairs]
        self.judgments = [*unjudged]
        for number, judgment in enumerate(judging.compare(self.questions, unjudged, judge)):
            self.judgments[number] = judgment
        wins, losses, note = judging.win_rates(f"{name} by {judge.model}", self.judgments)
        self.scores["fine-tuned"] += wins
        self.scores["base"] += losses
        self.notes.append(note)


def _sides(options: Namespace) -> Iterator[tuple[Side, str, OpenedModel]]:
    """The model, then its base or what it is compared with; both are in memory only where they share the base."""
    opening = partial(open_model, chat_template=options.chat_template, needs_template=False)
    opened = opening(options.path, options.ckpt_path, options.base)
    _say_what_is_opened(options, opened)
    can_switch_off = options.against is None and opened.can_switch_off
    open_other = base_opener(opened) if options.against is None else partial(opening, options.against)
    if not can_switch_off and open_other is None and not options.no_base:
        why = "changes its base's weights in memory" if opened.is_adapted else "has no adapter"
        message = f"{opened.name} {why} and is no run, so its base is not known; name one with --against"
        if options.questions is not None:
            raise RecipeError(message)
        rank_zero_info(message)
    yield "fine-tuned", options.path, opened
    if options.no_base:
        return
    if can_switch_off:
        with opened.without_adapter():
            yield "base", options.path, opened
    elif open_other is not None:
        del opened
        yield "base", options.against or options.path, open_other()


def _say_what_is_opened(options: Namespace, opened: OpenedModel) -> None:
    folder = RunFolder.at(options.path)
    if folder.config.is_file() and finished_step(folder.finished) is None:
        rank_zero_info(f"the run has not finished; its checkpoint {opened.name} is evaluated")
    if not opened.has_template and (options.data.path or options.questions):
        rank_zero_info(
            f"the tokenizer of {opened.name} has no chat template: conversations are written as `plain`; give another "
            "one with --chat_template"
        )


def _data_options(options: Namespace, path: str) -> dict[str, object]:
    names = ("format", "columns", "system", "max_length")
    given = {name: options.data[name] for name in names if options.data[name] is not None}
    if options.chat_template is not None:
        given["chat_template"] = options.chat_template
    return {"test_path": path, **given}


def _precision(path: str) -> str | None:
    run = RunFolder.at(path)
    if not run.config.is_file():
        return None
    precision = run.recipe()["trainer"].get("precision")
    return None if precision is None else str(precision)


def _judge(options: Namespace) -> judging.Judge | None:
    if options.judge_url is None:
        return None
    key = given_key("judge_api_key", options.judge_api_key, options.judge_api_key_file, JUDGE_API_KEY)
    client = OpenAIClient(options.judge_url, key, timeout=600, tries=TRIES)
    model = client.chosen(options.judge_model, option="--judge_model")
    return judging.Judge.with_prompt(client, model, options.judge_prompt, options.batch_size)


def _show(rows: Sequence[Sequence[Cell]], notes: Sequence[str]) -> None:
    console = Console(width=None if Console().is_terminal else 140, highlight=False)
    table = Table()
    for number, header in enumerate(COLUMNS):
        table.add_column(header, justify="left" if number < 2 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_text(cell, COLUMNS[number] == "change") for number, cell in enumerate(row)))
    if rows:
        console.print(table, markup=False)
    for note in notes:
        console.print(printable(note), markup=False, soft_wrap=True)


def _text(cell: Cell, is_change: bool) -> str:
    if cell is None:
        return "-"
    # Four digits behind the point, as the harness prints them.
    return printable(cell) if isinstance(cell, str) else f"{cell:{'+' if is_change else ''},.4f}"


def _write(
    folder: Path, evaluation: Evaluation, rows: Sequence[Sequence[Cell]], options: Namespace, command: str
) -> None:
    for side, content in evaluation.harness.items():
        results.write_json(folder / f"harness-{side}.json", content)
    for side, answers in evaluation.answers.items():
        results.write_lines(folder / f"answers-{side}.jsonl", answers)
    if evaluation.judgments:
        results.write_lines(folder / "judgments.jsonl", map(asdict, evaluation.judgments))
    table = {"command": command, "columns": COLUMNS, "rows": rows, "notes": evaluation.notes}
    results.write_json(folder / "scores.json", table)
    written = [folder]
    run = RunFolder.at(options.path)
    if rows and run.config.is_file():
        written += results.add_to_report(run.root, results.table_of(rows, evaluation.notes, command), "evaluation")
    rank_zero_info("written: " + ", ".join(map(str, written)))


def _without_secrets(arguments: Sequence[str]) -> str:
    """Command line without keys."""
    shown, is_key = [], False
    for argument in arguments:
        option, equals, _ = argument.partition("=")
        is_secret = option in _SECRETS
        shown.append("KEY" if is_key else f"{option}=KEY" if is_secret and equals else argument)
        is_key = is_secret and not equals
    return shlex.join(["python", "-m", "lit_ft", *shown])

"""The ``sweep`` command: train a recipe with several values of some options, one ``fit`` process after another."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count, as_number

from lit_ft.commands.train import RecipeCLI
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError, option_called
from lit_ft.recipe.callback_checks import log_own_metrics, losses_of_sources
from lit_ft.recipe.files import read_once
from lit_ft.recipe.option_parser import OptionParser
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.run.folder import RunFolder
from lit_ft.run.launching import rank_prefix
from lit_ft.run.lock import lock_run, release_runs
from lit_ft.sweeps import results, search
from lit_ft.sweeps.results import Goal
from lit_ft.sweeps.search_space import Range, Variation, combinations, described, parse_variations, probes
from lit_ft.sweeps.sweep_folder import SWEEPS, sweep_folder, write_definition
from lit_ft.sweeps.trial import Trial
from lit_ft.training.answer_scores.exact_match import ExactMatch
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.metrics import metric_names

_LOWER = ("loss", "perplexity", "cross_entropy", "divergence", "seconds", "gib")
_HIGHER = (
    *("accuracy", "exact_match", "rouge1", "rouge2", "rougeL", "bleu", "per_second", "mfu"),
    *("reward_margin", "reward_chosen", "log_prob_chosen"),
)
"""Endings of the names of metrics of which lower, or higher, values are better."""


def run(arguments: list[str]) -> None:
    """Parse the options and run the sweep."""
    options, fit = _parser().parse_known_args(arguments[1:])
    variations = parse_variations(options.vary)
    if rank_prefix():
        raise RecipeError("sweep starts the processes of each trial itself; run it once, without torchrun or srun")
    if given := [key for key in ("run_dir", "ckpt_path", "resume") if any(_names(one, key) for one in fit)]:
        raise RecipeError(
            f"--{given[0]}: sweep sets it for each trial; --sweep_dir DIR names the folder of all of them"
        )
    if (once := read_once(fit)) is not None:
        what = "the standard input" if once == "-" else "a pipe"
        raise RecipeError(f"--config {once}: each trial reads the recipe, {what} only one; name a file")
    count, propose = _plan(variations, options.trials)
    _check_comparable(variations, options.metric)
    first = _check(fit, variations, options.metric, is_grid=options.trials is None)
    goal = Goal(options.metric, options.mode or _mode(options.metric))
    definition: dict[str, object] = {"recipe": first.resolved, "vary": options.vary}
    if options.trials is not None:
        definition |= {"metric": goal.metric, "mode": goal.mode}
    try:
        with option_called("run_dir", "sweep_dir"):
            folder = sweep_folder(options.sweep_dir, first.recipe_name, definition)
            lock_run(folder)
        write_definition(folder, definition)
        rank_zero_info(f"sweep of {as_count(count, 'trial')}, by {goal.metric} ({goal.mode}): {folder}")
        trials = _train(folder, count, lambda trials: propose(trials, goal, first.seed), fit, goal)
    finally:
        release_runs()
    _conclude(folder, trials, goal)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="python -m lit_ft sweep",
        description="Train a recipe with several values of some options: each trial is a fit in a process and a run "
        "folder of its own. Takes every option of fit (python -m lit_ft fit --help). The same command again resumes "
        "the sweep: finished trials are kept, an unfinished one is resumed, failed ones start again.",
    )
    parser.add_argument(
        "--vary",
        action="append",
        required=True,
        metavar="KEY=A,B",
        help="an option of fit and its values, e.g. optimizer.lr=1e-4,2e-4; several --vary make a grid of all "
        "combinations; with --trials also a range, e.g. optimizer.lr=1e-5..1e-3",
    )
    parser.add_argument("--trials", type=int, metavar="N", help="let Optuna choose N trials, in place of the grid")
    parser.add_argument("--metric", default="val/loss", help="what trials are compared by (default: val/loss)")
    parser.add_argument(
        "--mode", choices=["min", "max"], help="whether lower or higher is better (default: by its name)"
    )
    parser.add_argument("--sweep_dir", metavar="DIR", help=f"folder of the sweep (default: {SWEEPS}/<recipe>/<time>)")
    return parser


def _names(argument: str, key: str) -> bool:
    return argument == f"--{key}" or argument.startswith(f"--{key}=")


def _mode(metric: str) -> Literal["min", "max"]:
    if "loss" in metric.split("/")[1:] or metric.endswith(_LOWER):  # also val/loss/SOURCE
        return "min"
    if metric.endswith(_HIGHER):
        return "max"
    raise RecipeError(
        f"--metric {metric}: its name does not say whether lower or higher is better; add --mode min or max"
    )


def _check_comparable(variations: list[Variation], metric: str) -> None:
    """Refuse a metric whose meaning differs between trials.

    Raises:
        RecipeError: it is the loss that an option varies, or a reward in its units.
    """
    part, name = metric.partition("/")[0], metric.partition("/")[2].partition("/")[0]
    for variation in variations:
        option = variation.key.replace("init_args.", "")
        if re.match(r"model\.objective\b", option) and (name == "loss" or re.match("reward_(?!accuracy)", name)):
            raise RecipeError(
                f"--metric {metric} with --vary {variation.key}: each trial has a loss and rewards of its own, which "
                f"do not compare; add --metric {part}/reward_accuracy, or one of answers (val/exact_match)"
            )
        if re.match(r"model\.token_weights\b", option) and metric.startswith("train/loss"):
            raise RecipeError(
                f"--metric {metric} with --vary {variation.key}: each trial has a training loss of its own, which do "
                "not compare; add --metric val/loss, which is without weights"
            )
        of_teacher = re.match(r"model\.(divergence|kd_ratio|on_policy|teacher)\b", option)
        if of_teacher is not None and metric.startswith(_CHANGED_BY[of_teacher[1]]):
            raise RecipeError(
                f"--metric {metric} with --vary {variation.key}: each trial measures another divergence, or on other "
                "answers, which do not compare; add --metric val/loss, which is that of known answers, or "
                "val/exact_match"
            )


_OF_TEACHER = ("train/loss", "train/divergence", "val/divergence")
_CHANGED_BY = {
    "divergence": _OF_TEACHER,
    "kd_ratio": ("train/loss",),
    "on_policy": ("train/loss", "train/divergence"),
    "teacher": _OF_TEACHER,
}
"""Metrics of distillation that mean something else where an option has another value."""
Propose = Callable[[list[Trial], Goal, int], dict[str, str]]
"""Values of the next trial, from the earlier ones, what they are compared by, and the seed of the recipe."""


def _plan(variations: list[Variation], trials: int | None) -> tuple[int, Propose]:
    """Number of trials, and the choice of their values."""
    if trials is None:
        grid = list(combinations(variations))
        return len(grid), lambda trials, *_: grid[len(trials)]
    if trials < 1:
        raise RecipeError(f"--trials {trials}: must be at least 1; leave it out for a grid")
    has_range = any(isinstance(variation.values, Range) for variation in variations)
    if not has_range and trials >= (size := len(list(combinations(variations)))):
        raise RecipeError(
            f"--trials {trials}: there are only {size} combinations; leave --trials out to train each once"
        )
    search.check_installed()
    return trials, lambda trials, goal, seed: search.propose(
        variations, [(trial.values, goal.value(trial)) for trial in trials], goal.mode, seed
    )


# --- before the first trial ------------------------------------------------------------------------


class TrialCLI(RecipeCLI):
    """``fit`` up to its classes, which are built without weights; the recipe of one trial is checked this way."""

    def __init__(self, arguments: list[str], builds: bool) -> None:
        """Parse a recipe.

        Args:
            arguments: options of ``fit``.
            builds: whether to build the recipe's classes too; a module other than ``CausalLM`` may read weights then.
        """
        self.builds = builds
        super().__init__(["fit", *arguments])

    @property
    def resolved(self) -> str:
        """Resolved recipe, as YAML."""
        return str(self.parser.dump(self.config, skip_none=False))

    @property
    def seed(self) -> int:
        """Seed of the recipe; 0 if it has none."""
        return int(self.options.seed_everything or 0)

    def _set_seed(self) -> None:
        """Leave the random numbers and the environment of this process, which the trials inherit, as they are."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Train nothing."""

    def instantiate_classes(self) -> None:
        """Build module, data and callbacks, if asked to."""
        if self.builds:
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Build a trainer without output on the CPU: devices are the trials' own."""
        return quiet_trainer(accelerator="cpu")

    def check_metric(self, metric: str) -> None:
        """Refuse a metric that the recipe does not log, as far as its classes are known.

        Raises:
            RecipeError: no trial would log it.
        """
        data, split = self.datamodule, metric.partition("/")[0]
        if not isinstance(self.model, CausalLM) or not isinstance(data, TextDataModule):
            return
        validates = data.splits.validates and self.options.trainer.limit_val_batches != 0
        if split == "val" and not validates:
            raise RecipeError(
                f"--metric {metric}: the recipe has no validation data; set data.val_path or data.val_fraction, or "
                "compare trials by --metric train/loss"
            )
        callbacks = self._given_callbacks()
        measured = self.model.measured, self.model.spec.token_weights is not None
        known = [name for split in ("train", "val")[: 1 + validates] for name in metric_names(split, *measured)]
        known += [f"val/{name}" for one in callbacks if isinstance(one, ExactMatch) for name in one.names]
        known += losses_of_sources(data)
        # What callbacks log has names of their own (throughput/...).
        is_free = "/" in metric and split not in ("train", "val", "test")
        is_free = is_free or log_own_metrics([self.model, *callbacks])
        if metric not in known and not is_free:
            near = get_close_matches(metric, known, n=1)
            advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise RecipeError(f"--metric {metric} is not logged by the recipe; {advice}")


def _check(fit: list[str], variations: list[Variation], metric: str, is_grid: bool) -> TrialCLI:
    """Parse the recipe of each trial, or with Optuna each value; returns the first, built.

    Raises:
        RecipeError: an option is unknown, a value is wrong, two trials are the same, or the metric is not logged.
    """
    first: TrialCLI | None = None
    resolved: dict[str, dict[str, str]] = {}
    for values in combinations(variations) if is_grid else probes(variations):
        arguments = [*fit, *(f"--{key}={value}" for key, value in values.items())]
        trial = TrialCLI(arguments, builds=first is None or isinstance(first.model, CausalLM))
        if (same := resolved.setdefault(trial.resolved, values)) is not values:
            raise RecipeError(f"--vary: {described(same)} and {described(values)} are the same trial; name each once")
        if first is None:
            first = trial
            first.check_metric(metric)
    assert first is not None
    return first


# --- the trials ------------------------------------------------------------------------------------


def _train(
    folder: Path, count: int, propose: Callable[[list[Trial]], dict[str, str]], fit: list[str], goal: Goal
) -> list[Trial]:
    """Train all trials that are not finished yet, and keep ``sweep.csv`` up to date."""
    trials: list[Trial] = []
    for number in range(1, count + 1):
        root = folder / f"trial-{number:03d}"
        trial = Trial.read(root) or Trial(RunFolder(root), propose(trials))
        trials.append(trial)
        label = f"{number}/{count} {described(trial.values)}"
        if trial.is_finished:
            rank_zero_info(f"{label}: finished already{_result(trial, goal)}")
            continue
        rank_zero_info(f"{label}: {trial.log}")
        trial.train(fit, goal.metric)
        results.write_csv(trials, goal, folder / "sweep.csv")
        if not trial.is_finished:
            if (error := trial.error_of_option("metric")) is not None:
                raise RecipeError(error)
            rank_zero_info(f"{label}: failed, {trial.failure}")
            continue
        if not trial.curve(goal.metric):
            logged = ", ".join(name for name in trial.metrics() if not name.startswith("throughput/run"))
            advice = f"it has logged {logged}; compare by one of these, or" if logged else "it has logged nothing;"
            raise RecipeError(
                f"--metric {goal.metric}: {trial.name} has not logged it in {as_count(trial.steps, 'optimizer step')}; "
                f"{advice} lower trainer.log_every_n_steps or trainer.val_check_interval"
            )
        rank_zero_info(f"{label}: {trial.seconds:,.0f} s{_result(trial, goal)}")
    return trials


def _result(trial: Trial, goal: Goal) -> str:
    """Last value of a finished trial, after a comma."""
    curve = trial.curve(goal.metric)
    return f", {goal.metric} {as_number(curve[-1][1])}" if curve else ""


def _conclude(folder: Path, trials: list[Trial], goal: Goal) -> None:
    """Print the table, write the files, and name the best run."""
    results.write_csv(trials, goal, folder / "sweep.csv")
    results.draw(trials, goal, folder / "sweep.png")
    results.show(trials, goal)
    ranked = goal.ranked(trials)
    if not ranked:
        why = trials[0].failure or f"{goal.metric} is not a number"
        raise RuntimeError(
            f"none of {as_count(len(trials), 'trial')} has a result; the first: {why}; see {trials[0].log}"
        )
    best = ranked[0]
    rank_zero_info(f"sweep: {folder / 'sweep.csv'}, {folder / 'sweep.png'}")
    rank_zero_info(f"best: {best}{_result(best, goal)}; see {best.run.root}")
    fallback = f"python -m lit_ft predict --config {best.run.config} --ckpt_path last"
    rank_zero_info(f"next: {best.next_command or fallback}")

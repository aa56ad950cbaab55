"""The commands ``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with lit_ft's defaults."""

import os
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, WeightAveraging
from lightning.pytorch.cli import (
    ArgsType,
    LightningArgumentParser,
    LightningCLI,
    ReduceLROnPlateau,
    SaveConfigCallback,
)
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks import AdapterMerger, GracefulStop, RankFailureWatchdog, RunReport, ThroughputMonitor
from lit_callbacks.export.atomic_folder import check_replaceable
from lit_callbacks.internals.lightning_internals import attributes_of
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.bounded_yaml import load_yaml
from lit_ft.checkpointing.last import LastCheckpoint
from lit_ft.checkpointing.selection import resumed_step
from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.checkpoint_io import (
    AnyCheckpointIO,
)
from lit_ft.commands.first_checks import FirstChecks
from lit_ft.errors import LIBRARY_ERRORS, RecipeError, explained
from lit_ft.export.folder_texts import texts_of
from lit_ft.model.generation import GREEDY, Sampling
from lit_ft.process import choose_threads_of_ranks, describe_threads, started_at
from lit_ft.recipe.allowed_code import as_options, check_unpickling
from lit_ft.recipe.callback_checks import FirstValidationCheck
from lit_ft.recipe.checks import check_something_runs, check_values
from lit_ft.recipe.files import check_files, expand_home, read_pipes
from lit_ft.recipe.option_parser import in_order
from lit_ft.recipe.parse_errors import unwrap_class_error
from lit_ft.recipe.parser import RecipeParser
from lit_ft.recipe.run_options import add_predict_options, add_run_options
from lit_ft.recipe.trainer_checks import check_max_time, check_plugins, check_ranks, check_strategy, explained_trainer
from lit_ft.run import choice, predictions
from lit_ft.run.choice import RunChoice
from lit_ft.run.folder import RunFolder
from lit_ft.run.launching import check_world_size, is_rank_zero, starts_ranks
from lit_ft.run.lock import lock_run, release_runs
from lit_ft.run.progress import RunProgressBar
from lit_ft.run.state import RunState, explained_full_disk
from lit_ft.training.answering import AnsweringModule
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.console import ConsoleSummary, show_progress_on_terminals_only
from lit_ft.training.loggers import beside_defaults
from lit_ft.training.optimizers.configure import configure_optimizers
from lit_ft.training.recipe_loggers import explained_starts, idle, log_recipe, placed

BUILD_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, MisconfigurationException)
"""Exceptions that classes of a recipe raise for bad arguments."""

DESCRIPTIONS = {
    "fit": "Train a model by a recipe; checkpoints, adapter and report are written to a run folder.",
    "validate": "Measure loss and accuracy on the validation data, with the weights of --ckpt_path if given.",
    "test": "Measure loss and accuracy on the test data, with the weights of --ckpt_path if given.",
    "predict": "Answer the prompts of the test data, with the weights of --ckpt_path if given, and write the answers.",
}
"""What each command does, as its ``--help`` begins."""


def run(arguments: list[str]) -> None:
    """Parse a recipe and run the command that ``arguments`` starts with."""
    show_progress_on_terminals_only()
    try:
        TrainingCLI(arguments)
    finally:
        release_runs()
        choice.forget()


def fit_parser() -> LightningArgumentParser:
    """Parser of the options of ``fit``, for those who show them in another way than ``--help``."""
    try:
        _ParserCLI(["fit"])
    except _ParserBuilt as built:
        return built.parser
    raise AssertionError("LightningCLI builds the parser of a subcommand before it parses")


def _missing(defaults: list[Callback], given: list[Callback]) -> list[Callback]:
    return [default for default in defaults if not any(isinstance(one, type(default)) for one in given)]


class SaveRecipe(SaveConfigCallback):
    """Write the resolved recipe to ``config.yaml`` in the run folder."""

    _is_due = False

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the recipe of a new run; that of a run that resumes is kept until its checkpoint has been read."""
        if stage == "fit":
            self._is_due = RunFolder(Path(self.config["run_dir"])).config.is_file()
            if not self._is_due:
                self._write(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the recipe of a run that resumes: a refused resume must not change it."""
        if self._is_due:  # on rank 0
            path = RunFolder(Path(self.config["run_dir"])).config
            before = path.read_bytes()
            self._write(trainer)
            if path.read_bytes() != before:
                kept = path.with_name(f"config-until-step-{trainer.global_step}.yaml")
                kept.write_bytes(before)
                rank_zero_info(f"{path} has the options of this resumption, {kept.name} those before")
            self._is_due = False

    def _write(self, trainer: Trainer) -> None:
        """Write the recipe without its resume options, so that the file can start a run or resume one."""
        config = self.config.clone()
        config["ckpt_path"] = config["resume"] = None
        config["resume_data"] = "same"
        path = RunFolder(Path(config["run_dir"])).config
        self.parser.save(config, path, skip_none=False, skip_validation=True, overwrite=True, multifile=False)
        log_recipe(trainer.loggers, load_yaml(path.read_text(encoding="utf-8")), path.parent)


class TrainingCLI(LightningCLI):
    """LightningCLI whose ``model`` and ``data`` may be any classes and default to lit_ft's."""

    _is_named_by_time = False
    _recipe_logger: object = None
    answers_path: Path | None = None
    """File of the answers of ``predict``, on rank 0."""

    def __init__(self, arguments: ArgsType) -> None:
        """Parse the recipe and run the command.

        Args:
            arguments: command line, subcommand first.
        """
        self.schedule: LRScheduler | ReduceLROnPlateau | None = None  # tried out on small tensors
        self._arguments = read_pipes(in_order([str(argument) for argument in arguments or []]))
        # Texts of attributes, such as those of a source, take a second for all classes.
        has_help = any(".help" in argument for argument in self._arguments)
        set_parsing_settings(
            subclasses_enabled=[QuantizationConfigMixin], docstring_parse_attribute_docstrings=has_help
        )
        try:
            self._parse_and_run()
        except BaseException:
            if self._is_named_by_time and is_rank_zero():
                self.run_folder.discard()
            raise

    def _parse_and_run(self) -> None:
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=SaveRecipe,
            save_config_kwargs={"save_to_log_dir": False},
            trainer_defaults={"enable_model_summary": False},
            seed_everything_default=42,
            parser_class=RecipeParser,
            args=self._arguments,
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # what an instance offers, not its class
        """The subcommand that the arguments start with: parsers of the others would take a tenth of a second."""
        every = super().subcommands()
        chosen = next(iter(self._arguments), "")
        return {chosen: every[chosen]} if chosen in every else every

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the options of a run, and lit_ft's classes as defaults."""
        add_run_options(parser)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        """Parser of a subcommand: Lightning has no public way to give one of them options of its own."""
        kwargs["description"] = DESCRIPTIONS[subcommand]  # Lightning's is the first line of a docstring, cut off
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "predict":
            add_predict_options(parser)
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse and check the recipe; the base class would warn about arguments that are passed from Python.

        The parser of the subcommand parses it: the parser around it, which prints a recipe where that is asked for,
        would parse and check each value once more.
        """
        check_files(self._arguments)
        subcommand, *options = self._arguments
        self._subcommand_parsers[subcommand].prog = f"python -m lit_ft {subcommand}"
        try:
            if any(option.startswith("--print_config") for option in options):
                self.config = parser.parse_args(self._arguments)
            else:
                parsed = self._subcommand_parsers[subcommand].parse_args(options)
                self.config = Namespace({"config": None, "subcommand": subcommand, subcommand: parsed})
        except OSError as error:  # jsonargparse reads a value that names a file
            raise RecipeError(f"a value of the recipe names a file that cannot be read ({error})") from error
        check_values(self.config[self.config.subcommand])
        expand_home(self.config[self.config.subcommand])
        check_something_runs(subcommand, self.config[subcommand].trainer)

    @property
    def options(self) -> Namespace:
        """Options of the chosen subcommand."""
        return self.config[self.subcommand]

    def _parse_ckpt_path(self) -> None:
        """Read no hyperparameters from a checkpoint: the recipe alone defines the model."""

    def before_instantiate_classes(self) -> None:
        """Choose the run folder and the checkpoint."""
        rank_zero_info(f"CPU: {describe_threads()}")
        options = self.options
        chosen = RunChoice(str(self.subcommand), options, self.recipe_name)
        is_named_by_time = chosen.run_dir() is None
        self.run_folder = chosen.folder()
        self._is_named_by_time = is_named_by_time
        options.run_dir = str(self.run_folder.root)
        self._recipe_logger = options.trainer.logger
        if self.subcommand == "fit" and self.run_folder.root.is_dir() and is_rank_zero():
            lock_run(self.run_folder.root)
            for line in replacement.recover(self.run_folder.checkpoints):
                rank_zero_info(line)
        options.ckpt_path = chosen.checkpoint(self.run_folder)
        # Other commands log nothing, and some loggers begin a run as soon as they are built.
        is_fit = self.subcommand == "fit"
        root, resumes = self.run_folder.root, options.ckpt_path is not None
        options.trainer.logger = placed(root, self._recipe_logger, resumes) if is_fit else False

    @property
    def recipe_name(self) -> str:
        """File name of the first recipe, without its ending; ``run`` without a file."""
        files = [file for file in self.options.config or [] if file is not None and str(file) != "-"]
        return Path(str(files[0])).stem if files else "run"

    def instantiate_classes(self) -> None:
        """Build module, data and trainer; a module other than ``CausalLM`` gets the recipe's optimizer too.

        Raises:
            RecipeError: a class of the recipe refuses its arguments.
        """
        self._build()
        if self.options.ckpt_path is not None:
            check_unpickling(self.options.weights_only, self.trainer.strategy)
        self.make_run_folder()
        optimizer, lr_scheduler = self.options_init("optimizer"), self.options_init("lr_scheduler")
        if optimizer is not None and not isinstance(self.model, CausalLM):
            self.model.configure_optimizers = partial(configure_optimizers, self.model, optimizer, lr_scheduler)

    def _build(self) -> None:
        try:
            super().instantiate_classes()
        except BUILD_ERRORS as error:
            raise unwrap_class_error(error) from error

    def make_run_folder(self) -> None:
        """Create the run folder on rank 0, the only rank that writes to it, and lock it for this run."""
        self.options.trainer.logger = self._recipe_logger  # config.yaml is for other runs too
        if self.trainer.is_global_zero and self.subcommand == "fit":
            self.run_folder.claim(resuming=self.options.ckpt_path is not None)
        elif self.trainer.is_global_zero and self.subcommand == "predict":
            self.run_folder.create()

    def options_init(self, name: str) -> Any:
        """Instantiated option of the chosen subcommand."""
        return self.config_init[self.subcommand][name]

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Build the trainer so that all its output is in the run folder."""
        folder, given = self.run_folder, self.options_init("trainer")
        callbacks = self._given_callbacks()
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.realpath(folder.checkpoints)  # as ModelCheckpoint spells it
        kwargs["callbacks"] = (
            self._with_defaults(callbacks)
            if self.subcommand == "fit"
            else [*_missing([RankFailureWatchdog(), GracefulStop()], callbacks), *callbacks]
        )
        plugins = given.plugins if isinstance(given.plugins, list) else [given.plugins] if given.plugins else []
        check_plugins(plugins)
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins = [*plugins, AnyCheckpointIO()]
        kwargs["plugins"] = plugins
        if given.logger is not False:
            kwargs["logger"] = beside_defaults(given.logger, folder, *self._resumed_step())
        if given.enable_progress_bar is None and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            # No progress bar in a file or pipe; ConsoleSummary writes a line at intervals instead.
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
            if sys.stdout.isatty():
                kwargs["callbacks"].append(RunProgressBar())
        # As in fit, where ModelCheckpoint resolves it: another spelling would be a warning about another folder.
        kwargs["default_root_dir"] = given.default_root_dir or os.path.realpath(folder.root)
        check_strategy(given.strategy)
        check_ranks(given.devices, given.accelerator)
        check_max_time(given.max_time)
        with explained_trainer(str(given.accelerator)):
            trainer = super().instantiate_trainer(**kwargs)
        check_world_size(trainer.num_devices, trainer.num_nodes)
        if starts_ranks(trainer):
            choose_threads_of_ranks(trainer.num_devices)
        return trainer

    def _given_callbacks(self) -> list[Callback]:
        """Callbacks of the recipe."""
        given = self.options_init("trainer").callbacks
        return [one for one in (given if isinstance(given, list) else [given]) if one is not None]

    def _resumed_step(self) -> tuple[int, frozenset[str] | None]:
        """Optimizer steps of the checkpoint that the run resumes from, and metrics of the last one not yet logged."""
        if self.subcommand != "fit" or self.options.ckpt_path is None:
            return 0, None
        return resumed_step(Path(self.options.ckpt_path))

    def _with_defaults(self, given: list[Callback]) -> list[Callback]:
        """Callbacks of the recipe between lit_ft's defaults; one of the recipe replaces the default of its class."""
        folder = self.run_folder
        # An average before all that saves, measures and writes it, and after what is checked without weights.
        averages = [one for one in given if isinstance(one, WeightAveraging)]
        given = [one for one in given if one not in averages]
        before = [RankFailureWatchdog(), FirstValidationCheck()]
        # First, so that a signal after the last step stops at once, and the run's own lines are the first and the last.
        first = [
            GracefulStop(folder.checkpoints / "last.ckpt"),
            RunState(folder.finished, folder.checkpoints),
            ConsoleSummary(folder, as_options()),
            RunReport(folder.root, title=self.recipe_name, began=started_at()),
            ThroughputMonitor(),
        ]
        last: list[Callback] = []
        if isinstance(self.model, CausalLM) or self.options.merge:
            last.append(AdapterMerger(folder.adapter, folder.merged if self.options.merge else None, texts_of(folder)))
        # In a fast_dev_run, which says that it saves nothing, a ModelCheckpoint would save its end.
        if self.options.trainer.enable_checkpointing is not False and not self.options.trainer.fast_dev_run:
            last += [ModelCheckpoint(folder.checkpoints, save_last="link"), LastCheckpoint(folder.checkpoints)]
        return [*_missing(before, given), *averages, *_missing(first, given), *given, *_missing(last, given)]

    # --- before the long work ----------------------------------------------------------------------

    def before_fit(self) -> None:
        """Check model, data and what is written at the end before weights are loaded."""
        for folder in (self.run_folder.adapter, self.run_folder.merged):
            with explained("what fit writes at its end", "or give another --run_dir"):
                check_replaceable(folder)
        self._check("fit")

    def before_validate(self) -> None:
        """Check model and data before weights are loaded."""
        self._check("validate")

    def before_test(self) -> None:
        """Check model and data before weights are loaded."""
        self._check("test")

    def before_predict(self) -> None:
        """Check model, data and the path of the answers before weights are loaded."""
        self._take_sampling()
        self._check("predict")
        if self.options.ckpt_path is None:
            rank_zero_info("ckpt_path is not set: the model answers as it is before training")
        if self.trainer.is_global_zero:
            self.answers_path = predictions.free_path(self.run_folder.root, self.options.out)

    def _take_sampling(self) -> None:
        sampling = Sampling(**{option.name: self.options[option.name] for option in fields(Sampling)})
        longest = self.options.max_new_tokens
        if isinstance(self.model, AnsweringModule):
            self.model.sampling = sampling
            self.model.max_new_tokens = longest or self.model.max_new_tokens
        elif sampling != GREEDY or longest:
            raise RecipeError(
                f"temperature and max_new_tokens are for lit_ft.CausalLM, and model is a {type(self.model).__name__}; "
                "leave them out"
            )

    def _check(self, stage: str) -> None:
        chosen = self.options_init("optimizer"), self.options_init("lr_scheduler")
        checks = FirstChecks(stage, self.options, self.trainer, self.datamodule, self._given_callbacks(), *chosen)
        self.schedule = checks.run(self.model)

    def fit(self, **kwargs: Any) -> None:
        """Train."""
        with explained_starts(), explained_full_disk(self.trainer, self.run_folder.checkpoints):
            self.trainer.fit(**kwargs)

    def predict(self, **kwargs: Any) -> None:
        """Answer questions, and write the answers to a new file: ``out``, or one in the run folder."""
        # A callback, as ranks may be processes that end with trainer.predict (ddp_fork).
        attributes_of(self.trainer).callbacks.append(predictions.AnswerFile(self.answers_path))
        self.trainer.predict(**{**kwargs, "return_predictions": False})


class RecipeCLI(TrainingCLI):
    """``fit`` for commands that read the recipe and compute nothing: without a run folder."""

    def before_instantiate_classes(self) -> None:
        """Choose no run folder."""

    def _build(self) -> None:
        """Build the classes, loggers too, which fails without their packages; they begin no run."""
        given = self.options.trainer.logger
        self.options.trainer.logger = idle(given)
        try:
            super()._build()
        finally:
            self.options.trainer.logger = given

    def make_run_folder(self) -> None:
        """Create no run folder."""


class _ParserBuilt(Exception):
    """End of a command line interface that only builds a parser."""

    def __init__(self, parser: LightningArgumentParser) -> None:
        super().__init__()
        self.parser = parser


class _ParserCLI(TrainingCLI):
    """Command line interface up to the parser of its subcommand: there is nothing to parse."""

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        raise _ParserBuilt(super()._prepare_subcommand_parser(klass, subcommand, **kwargs))

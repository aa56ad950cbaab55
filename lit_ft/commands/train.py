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
from lit_callbacks.protocols import tokenizer_of
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.bounded_yaml import load_yaml
from lit_ft.checkpointing.last import LastCheckpoint
from lit_ft.checkpointing.selection import resumed_step
from lit_ft.checkpointing.storage import replacement
from lit_ft.checkpointing.storage.checkpoint_io import (
    AnyCheckpointIO,
    check_fit,
    saved_shapes,
    saved_value,
    trainable_shapes,
)
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import LIBRARY_ERRORS, RecipeError, explained
from lit_ft.export.adapter_folders import check_unchanged
from lit_ft.export.folder_texts import texts_of
from lit_ft.model.config.positions import check_positions
from lit_ft.model.files.fingerprint import check_same_base
from lit_ft.model.generation import GREEDY, Sampling
from lit_ft.model.isolation import architectures
from lit_ft.process import choose_threads_of_ranks, describe_threads, resume_threads, started_at
from lit_ft.protocols import ChecksModel, ChecksOptimizer, ChecksRecipe
from lit_ft.recipe.allowed_code import as_options, check_unpickling
from lit_ft.recipe.callback_checks import FirstValidationCheck, check_callbacks, check_schedule
from lit_ft.recipe.checks import allow_one_loader, check_something_runs, check_values
from lit_ft.recipe.files import check_files, expand_home, read_pipes
from lit_ft.recipe.option_parser import in_order
from lit_ft.recipe.parse_errors import unwrap_class_error
from lit_ft.recipe.parser import RecipeParser
from lit_ft.recipe.run_options import add_predict_options, add_run_options
from lit_ft.recipe.trainer_checks import check_ranks, check_strategy, explained_trainer
from lit_ft.run import choice, predictions
from lit_ft.run.choice import RunChoice
from lit_ft.run.folder import RunFolder
from lit_ft.run.launching import check_world_size, is_rank_zero, starts_ranks
from lit_ft.run.lock import lock_run, release_runs
from lit_ft.run.progress import RunProgressBar
from lit_ft.run.repeated_lines import without_repetitions
from lit_ft.run.state import RunState
from lit_ft.training.answering import AnsweringModule
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.console import ConsoleSummary, show_progress_on_terminals_only
from lit_ft.training.loggers import beside_defaults, log_recipe, placed
from lit_ft.training.optimizers.configure import check_total_steps, configure_optimizers, try_out
from lit_ft.training.steps.lightning_callbacks import check_lightning_callbacks
from lit_ft.training.steps.lightning_strategies import check_lightning_strategy
from lit_ft.tuning import wrapping
from lit_ft.tuning.compatibility import check_situation
from lit_ft.tuning.targets import all_linear

BUILD_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, MisconfigurationException)
"""Exceptions that classes of a recipe raise for bad arguments."""
HASHED_BASE_BYTES = 16 * 2**30
"""Largest base model, in bytes, whose SHA-256 sums are compared before loading: some seconds, four files at a time."""


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
            self._write(trainer)
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
        options.trainer.logger = placed(self.run_folder.root, options.trainer.logger)
        if self.subcommand == "fit" and self.run_folder.root.is_dir() and is_rank_zero():
            lock_run(self.run_folder.root)
            for line in replacement.recover(self.run_folder.checkpoints):
                rank_zero_info(line)
        options.ckpt_path = chosen.checkpoint(self.run_folder)

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
        # An average of weights first: the others measure and write it at the end.
        callbacks = sorted(self._given_callbacks(), key=lambda one: not isinstance(one, WeightAveraging))
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = os.path.realpath(folder.checkpoints)  # as ModelCheckpoint spells it
        kwargs["callbacks"] = (
            self._with_defaults(callbacks)
            if self.subcommand == "fit"
            else [*_missing([RankFailureWatchdog(), GracefulStop()], callbacks), *callbacks]
        )
        plugins = given.plugins if isinstance(given.plugins, list) else [given.plugins] if given.plugins else []
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins = [*plugins, AnyCheckpointIO()]
        kwargs["plugins"] = plugins
        if given.logger is not False:
            is_fit = self.subcommand == "fit"
            kwargs["logger"] = beside_defaults(given.logger, folder, *self._resumed_step()) if is_fit else False
        if given.enable_progress_bar is None and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            # No progress bar in a file or pipe; ConsoleSummary writes a line at intervals instead.
            kwargs["enable_progress_bar"] = sys.stdout.isatty()
            if sys.stdout.isatty():
                kwargs["callbacks"].append(RunProgressBar())
        # As in fit, where ModelCheckpoint resolves it: another spelling would be a warning about another folder.
        kwargs["default_root_dir"] = given.default_root_dir or os.path.realpath(folder.root)
        check_strategy(given.strategy)
        check_ranks(given.devices, given.accelerator)
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
        # First, so that a signal after the last step stops at once, and the run's own lines are the first and the last.
        first = [
            RankFailureWatchdog(),
            GracefulStop(folder.checkpoints / "last.ckpt"),
            RunState(folder.finished, folder.checkpoints),
            ConsoleSummary(folder, as_options()),
            RunReport(folder.root, title=self.recipe_name, began=started_at()),
            ThroughputMonitor(),
            FirstValidationCheck(),
        ]
        last: list[Callback] = []
        if isinstance(self.model, CausalLM) or self.options.merge:
            last.append(AdapterMerger(folder.adapter, folder.merged if self.options.merge else None, texts_of(folder)))
        # In a fast_dev_run, which says that it saves nothing, a ModelCheckpoint would save its end.
        if self.options.trainer.enable_checkpointing is not False and not self.options.trainer.fast_dev_run:
            last += [ModelCheckpoint(folder.checkpoints, save_last=True), LastCheckpoint(folder.checkpoints)]
        return [*_missing(first, given), *given, *_missing(last, given)]

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

    def _check_checkpoint(self, model: CausalLM, skeleton: nn.Module) -> None:
        if not wrapping.takes_shapes_from_weights(model.spec.tuning.peft):
            shapes = {f"model.{name}": shape for name, shape in trainable_shapes(skeleton).items()}
            check_fit(saved_shapes(self.options.ckpt_path), shapes)
        base = saved_value(self.options.ckpt_path, "base")
        check_same_base(base, model.base_fingerprint, "the checkpoint")

    def _check(self, stage: str) -> None:
        strategy: object = self.trainer.strategy
        if stage == "fit" and isinstance(self.model, CausalLM):
            check_lightning_strategy(type(self.trainer.strategy))
            check_lightning_callbacks(self._given_callbacks(), self.trainer.strategy)
        if isinstance(strategy, ChecksRecipe):
            strategy.check(self.trainer, self.model, self.datamodule)
        if isinstance(self.model, CausalLM):
            self._check_base(self.model)
            if self.options.ckpt_path is not None:
                self.model.start = saved_value(self.options.ckpt_path, "adapter_start")
                if stage == "fit" and self.trainer.world_size == 1:
                    resume_threads(saved_value(self.options.ckpt_path, "threads"))
            with without_repetitions():
                skeleton = self.model.check()
            architectures.check_precision(self.model.spec.base.config, str(self.trainer.precision))
            self._try_optimizer(skeleton)
            if isinstance(strategy, ChecksModel):
                strategy.check_model(self.model, skeleton)
            if self.options.ckpt_path is not None:
                self._check_checkpoint(self.model, skeleton)
            if self.options.get("merge"):
                check_situation(self.model.spec.tuning.peft, "merge", "merge=true")
                all_linear.check_merged(skeleton)
            if self.options.get("merge") and self.model.spec.base.is_quantized:
                raise RecipeError(
                    "merge=true, but the base is quantized, and merging into it has a price that is yours to choose; "
                    "leave merge out, and after training: python -m lit_ft export --run RUN --merge --quantized-base "
                    "dequantize (or keep)"
                )
            if stage == "fit":
                # Of the recipe, not of the trainer: check builds a trainer without callbacks.
                data, limit = self.datamodule, self.options.trainer.limit_val_batches
                has_data = data.splits.validates if isinstance(data, TextDataModule) else True
                check_callbacks(self._given_callbacks(), validates := bool(has_data and limit != 0))
                check_schedule(self.schedule, validates)
                check_total_steps(self.schedule, self.trainer)
            allow_one_loader(self.datamodule)
        if isinstance(self.datamodule, TextDataModule):
            self._check_positions("data.max_length", self.datamodule.requested_length)
            self.datamodule.load(tokenizer_of(self.model), stage)
            self._check_positions("the longest sample", self.datamodule.splits.longest_sample)
            if stage == "predict" and isinstance(self.model, CausalLM):
                base, longest = self.model.spec.base, self.model.max_new_tokens
                name = f"model.pretrained={base.pretrained!r}"
                predictions.check_prompts(
                    self.datamodule.questions or [], tokenizer_of(self.model), base.config, longest, name
                )
            if stage == "fit" and self.options.ckpt_path is not None:
                self.datamodule.resume_data = self.options.resume_data
                data_state = saved_value(self.options.ckpt_path, type(self.datamodule).__qualname__)
                self.datamodule.check_order(data_state or {})

    @staticmethod
    def _check_base(model: CausalLM) -> None:
        """Compare a base model and a given adapter that ``export`` or ``merge`` has written with their manifests.

        Sizes are compared on all ranks; SHA-256 sums on rank 0, of folders up to ``HASHED_BASE_BYTES``. Loading then
        reads the same bytes from the file cache of the operating system.
        """
        folder = Path((base := model.spec.base).pretrained).expanduser()
        if base.init == "pretrained" and folder.is_dir():
            check_unchanged(folder, HASHED_BASE_BYTES if is_rank_zero() else 0)
        if (given := model.spec.tuning.given) is not None:
            check_unchanged(given)

    def _check_positions(self, what: str, length: int | None) -> None:
        if isinstance(self.model, CausalLM):
            base = self.model.spec.base
            check_positions(base.config, length, what, f"model.pretrained={base.pretrained!r}")

    def _try_optimizer(self, skeleton: nn.Module) -> None:
        """Build optimizer and schedule for a few small parameters, so that bad arguments fail before weights load."""
        optimizer, lr_scheduler = self.options_init("optimizer"), self.options_init("lr_scheduler")
        if optimizer is None or self.subcommand != "fit":
            return
        with explained("optimizer", "fix its init_args"):
            built = try_out(optimizer, skeleton, takes_step=self.trainer.strategy.root_device.type == "cpu")
        strategy: object = self.trainer.strategy
        if isinstance(strategy, ChecksOptimizer):
            strategy.check_optimizer(built)
        if lr_scheduler is not None:
            with explained("lr_scheduler", "fix its init_args"):
                self.schedule = lr_scheduler(built)

    def predict(self, **kwargs: Any) -> None:
        """Answer questions, and write the answers to a new file: ``out``, or one in the run folder."""
        # A callback, as ranks may be processes that end with trainer.predict (ddp_fork).
        attributes_of(self.trainer).callbacks.append(predictions.AnswerFile(self.answers_path))
        self.trainer.predict(**{**kwargs, "return_predictions": False})


class RecipeCLI(TrainingCLI):
    """``fit`` for commands that read the recipe and compute nothing: without a run folder."""

    def before_instantiate_classes(self) -> None:
        """Choose no run folder."""

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

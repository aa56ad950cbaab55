"""The LightningDataModule: it turns data sets of any known format into packed batches."""

from collections import UserList
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.protocols import tokenizer_of
from transformers import PreTrainedTokenizerBase

from lit_ft import process
from lit_ft.accumulation import accumulation, optimizer_steps
from lit_ft.checkpointing.fit_progress import FitProgress
from lit_ft.data.loaders.batching import BatchPlan, PackedBatchLoader, batch_geometry, position_under
from lit_ft.data.loaders.mixing import Strategy, check_weights
from lit_ft.data.loaders.order import Order, fingerprint_of, order_of_samples, order_of_stream
from lit_ft.data.loaders.streaming import StreamLoader
from lit_ft.data.option_checks import (
    DEFAULT_SHUFFLE_BUFFER,
    OPTIONS_OF_SOURCES,
    check_answered_stream,
    check_exclusive,
    check_fractions_of_stream,
    check_limit,
    check_mixed,
    check_no_weights,
    check_numbers,
    check_overfitted_share,
    check_packed_stream,
    check_pairs,
    check_prompts,
    check_read_by_training,
    check_streaming,
    check_system,
    sources_of,
)
from lit_ft.data.splits import DataSplits
from lit_ft.data.text.formats import OF_PAIRS, PREFERENCES, UNPAIRED
from lit_ft.data.text.rendering import Supervise
from lit_ft.data.text.sources import FormatName, Source
from lit_ft.data.tokens.preparation import OnBadRow, Preparation
from lit_ft.data.tokens.samples import Samples
from lit_ft.data.tokens.truncation import Overlong
from lit_ft.errors import RecipeError, check_types
from lit_ft.internals.lightning import validation_interval
from lit_ft.model.generation import prompt_size
from lit_ft.packed_batch import PackedBatch
from lit_ft.protocols import (
    Checkpoint,
    LearnsPreferences,
    LimitsLengths,
    LoaderState,
    PairSet,
    Question,
    SamplesAnswers,
)

DEFAULT_MAX_LENGTH = 2048
"""Longest sample in tokens, where a recipe says nothing."""


def _one() -> int:
    """Accumulation of an evaluation, as a function that can be pickled."""
    return 1


class TextDataModule(LightningDataModule):
    """Conversations, instructions, raw text or tokens, from one data set or a mixture of several.

    All data is read, checked and tokenized before any weights are loaded. A line of output counts the rows that were
    truncated, dropped or skipped.
    """

    def __init__(
        self,
        path: str | None = None,
        sources: list[Source] | None = None,
        mixing: Strategy = "concatenate",
        val_path: str | None = None,
        val_sources: list[Source] | None = None,
        val_fraction: float = 0.0,
        test_path: str | None = None,
        format: FormatName = "auto",
        columns: dict[str, str] | None = None,
        system: str | None = None,
        chat_template: str | None = None,
        template_options: dict[str, Any] | None = None,
        supervise: Supervise = "assistant",
        max_length: int | None = DEFAULT_MAX_LENGTH,
        overlong: Overlong = "truncate",
        on_bad_row: OnBadRow = "error",
        micro_batch_size: int = 1,
        join_micro_batches: bool = True,
        micro_batch_tokens: int | None = None,
        packing: int | bool | Literal["off"] | None = None,
        shuffle: bool = True,
        streaming: bool = False,
        shuffle_buffer: int = DEFAULT_SHUFFLE_BUFFER,
        cache_dir: str | None = None,
        tokenize_workers: int | None = None,
        num_workers: int = 0,
    ) -> None:
        """Set the data sources and how their samples become micro-batches.

        Args:
            path: training data: a file (.json, .jsonl, .csv, .tsv, .txt, .parquet, each but the last also .gz), a
                folder or glob of them, Megatron's .bin/.idx, a saved data set, or a hub id.
                Not needed for `validate` and `test`.
            sources: several training data sets, in place of path: a list of mappings with path, name, format, weight,
                ...
            mixing: how the sources are combined: concatenate (every sample once per epoch), or interleaved by weight
                (without weights, by size) until the first source (first_exhausted) or every source (all_exhausted) is
                used up.
            val_path: validation data; `test` and `predict` also use it when test_path is not given.
            val_sources: several validation data sets, in place of val_path, each with its own loss.
            val_fraction: fraction of each source's rows that is held out for validation, 0 to 1; equal rows stay
                together, also those of several sources.
            test_path: data for `test`, and questions for `predict`, with answers or without.
            format: format of the rows; auto chooses by the columns of the first row, except for preference (pairs of
                a chosen and a rejected answer, for lit_ft.PreferenceLM and lit_ft.RewardLM) and unpaired_preference
                (answers that a label judges, for lit_ft.PreferenceLM with lit_ft.KTO). A format that a source names
                itself has priority.
            columns: column names of the data, by the names that the format needs, e.g. {instruction: question, output:
                answer}; those that a source names itself have priority.
            system: system prompt for conversations that have none.
            chat_template: replacement for the tokenizer's chat template: Jinja text, a file of it, or chatml, llama3,
                gemma, plain.
            template_options: variables for the template, e.g. {enable_thinking: false}.
            supervise: supervised tokens: assistant (every assistant turn, unless a message has train: false), last (the
                last assistant turn), all (every token).
            max_length: maximum length of a sample, in tokens (of each conversation of a pair); null for no limit.
            overlong: treatment of longer samples: truncate (remove the end; raw text continues in further samples),
                truncate_left_prompt (remove the beginning of the prompt, keep the answer), drop, or error.
            on_bad_row: treatment of a row that cannot be used: error, or skip (skipped rows are counted).
            micro_batch_size: number of samples (with packing: of packed sequences) per device and forward pass.
            join_micro_batches: run micro-batches of one optimizer step in one forward pass while they fit in
                micro_batch_tokens. Same loss and gradients, fewer passes.
            micro_batch_tokens: maximum number of tokens of joined micro-batches, and of an evaluation batch; by default
                micro_batch_size x max_length (of pairs, twice that; with packing, x packing), the memory that the
                recipe allows anyway.
            packing: token budget of a packed sequence (a bin of samples), or off. A longer sample
                is an error.
            shuffle: draw a new order each epoch, from the seed.
            streaming: read training data while training, for data larger than memory; set trainer.max_steps.
            shuffle_buffer: number of rows that streaming shuffles (and packs) at a time.
            cache_dir: folder that keeps tokens between runs; by default LIT_FT_CACHE, or ~/.cache/lit_ft.
            tokenize_workers: number of processes that tokenize; by default one per CPU core for files of over 5 MB.
                With streaming, processes that tokenize ahead; by default 1.
            num_workers: number of DataLoader processes that build packed batches; 0 is right unless batches are huge.
                With streaming, those of evaluations.
        """
        super().__init__()
        given_here = {name: value for name, value in locals().items() if name not in OPTIONS_OF_SOURCES}
        check_types("data", TextDataModule.__init__, given_here)
        counts = micro_batch_size, micro_batch_tokens, shuffle_buffer
        check_numbers(val_fraction, max_length, packing, *counts, num_workers, tokenize_workers)
        check_system(system)
        check_exclusive(path=path, sources=sources)
        check_exclusive(val_path=val_path, val_sources=val_sources, val_fraction=val_fraction)
        given = {"train": (path, sources), "val": (val_path, val_sources), "test": (test_path, None)}
        read = {split: sources_of(*one, format, columns) for split, one in given.items()}
        check_streaming(streaming, read["train"], val_fraction, shuffle_buffer)
        check_no_weights(read["val"], "data.val_sources")
        check_pairs(read, supervise, streaming)
        if not (read["val"] or read["test"] or val_fraction):
            has_pairs = any(source.format in OF_PAIRS for source in read["train"])
            check_read_by_training(has_pairs, streaming, num_workers, join_micro_batches, micro_batch_tokens)
        named = {split for split, (_, several) in given.items() if several is not None}
        named |= {"val"} if sources and val_fraction else set()
        preparation = Preparation(
            None, system, supervise, max_length, overlong, template_options, on_bad_row, cache_dir, tokenize_workers
        )
        self.splits = DataSplits(read, named, val_fraction, preparation, chat_template)
        """Data sets, and the samples of those that were read."""
        check_mixed(read["train"], mixing)
        self.mixing = check_weights([source.weight for source in read["train"]], mixing)
        if streaming and mixing != "concatenate" and self.mixing.weights is None and len(read["train"]) > 1:
            raise RecipeError(
                f"data.mixing={mixing} without weights goes by the sources' sizes, which data.streaming=true does not "
                "know; give each source a weight, e.g. weight: 1 for equal shares"
            )
        self.val_fraction, self.max_length = val_fraction, max_length
        self.packing = packing if isinstance(packing, int) and packing else None  # YAML reads off as false
        if streaming and self.packing is not None:
            check_packed_stream(self.packing, max_length)
        self.micro_batch_size, self.join_micro_batches = micro_batch_size, join_micro_batches
        self.micro_batch_tokens = micro_batch_tokens
        self.shuffle, self.num_workers = shuffle, num_workers
        self.streaming, self.shuffle_buffer = streaming, shuffle_buffer
        self.questions: list[Question] | None = None
        """Rows that ``predict`` answers, once they are read."""
        self.resume_data: Literal["same", "changed"] = "same"
        """Treatment of a checkpoint that was written on other data: same refuses it, changed restarts its epoch."""
        self._order_compared: list[object] = []
        self._train_loader: PackedBatchLoader | StreamLoader | None = None
        self._loader_state: LoaderState = {}

    # --- reading ---------------------------------------------------------------------------------

    def load(self, tokenizer: PreTrainedTokenizerBase | None = None, stage: str = "fit") -> None:
        """Read, check and tokenize the data of a stage (fit, validate, test, predict); a second call does nothing.

        Raises:
            RecipeError: a file, a row or the tokenizer cannot be used.
        """
        if tokenizer is None:
            raise RecipeError(
                "TextDataModule needs a tokenizer: the model's class must have it as `tokenizer`; without a Trainer, "
                "call load(tokenizer)"
            )
        self.splits.use(tokenizer)
        if stage == "fit" and "train" not in self.splits:
            self._load_training()
        elif stage == "validate" and "val" not in self.splits:
            self._load_training() if self.val_fraction else self.splits.read("val")
        elif stage == "test" and "test" not in self.splits:
            self.splits.read("test")
        elif stage == "predict" and self.questions is None:
            if self.val_fraction and not self.splits.sources["test"]:
                self.load(tokenizer, "validate")
            self.questions = self.splits.read_questions()

    def _load_training(self) -> None:
        sources = self.splits.sources
        if not sources["train"]:
            raise RecipeError("data.path is not set; name the training data with --data.path FILE")
        self.splits.check_options_of_conversations()
        if sources["val"]:
            self.splits.read("val")
            self.splits.say_what_is_shared()
        if self.streaming:
            for source in sources["train"]:
                self.splits.preparation.try_out(source)
            return
        self.splits.read("train")
        if self.val_fraction:
            self.splits.hold_out()
        self._check_packing()

    def _check_packing(self) -> None:
        samples = self.splits["train"]
        longest = int(samples.lengths.max())
        if self.packing is not None and longest > self.packing:
            what, length = samples.kind, self.packing // samples.conversations_each
            raise RecipeError(
                f"data.packing={self.packing} tokens cannot hold the longest {what} of {longest}; "
                f"set it to {longest} or more, or data.max_length to {length}"
            )

    def validation_rows(self, tokenizer: PreTrainedTokenizerBase) -> list[tuple[Source, frozenset[int] | None]]:
        """Sources of the validation data, each with the numbers of its rows; None stands for all.

        With ``val_fraction`` the training data is read to choose the rows.
        """
        if self.val_fraction:
            self.load(tokenizer, "validate")
        return self.splits.validation_rows()

    def sample_texts(self, ids: Sequence[str]) -> dict[str, str]:
        """Decoded text of training samples, by their ``sample_ids``; unknown ids are left out."""
        return self.splits.texts(ids)

    def setup(self, stage: str) -> None:
        """Load the data of a stage, unless it is loaded already.

        Raises:
            RecipeError: the trainer's options do not fit the data, or the model has too few positions for a sample.
        """
        if stage == "fit" and self.streaming and self.trainer is not None:
            self._check_fractions(self.trainer)
        module = None if self.trainer is None else self.trainer.lightning_module
        self.check_options_for(module, stage)
        self.take_rows_of(module)
        self.load(tokenizer_of(module), stage)
        self.check_samples_for(module, stage)
        for line in self.splits.notes_on_judgments() if stage == "fit" and self.is_unpaired else []:
            rank_zero_warn(line)
        if stage == "fit":  # a new fit starts with the first epoch, unless a checkpoint restores another position
            self._train_loader, self._loader_state = None, {}
            vars(self).pop("order", None)  # of an earlier fit, with its seed and its options
            if self.streaming:
                self.order.saved()  # of the files as they are now, not at the first checkpoint
        replicas = process.data_parallel(self.trainer).size
        if stage == "fit" and not self.streaming and len(self.splits["train"]) < replicas:
            raise RecipeError(
                f"{replicas} data-parallel ranks cannot share {len(self.splits['train'])} training samples; use "
                "as many devices as there are samples at most, or more data"
            )
        if stage == "fit" and self.trainer is not None:
            self._check_val_interval(self.trainer, replicas)
        if self.trainer is not None:
            self._check_limit_of_evaluation(self.trainer, stage)

    def check_options_for(self, module: LightningModule | None, stage: str) -> None:
        """Compare the options with what a module trains on, before data is read.

        Raises:
            RecipeError: they do not fit each other, or the model has too few positions.
        """
        if module is not None and stage != "predict" and self.has_pairs and not isinstance(module, LearnsPreferences):
            raise RecipeError(
                f"data.format={UNPAIRED if self.is_unpaired else PREFERENCES} is for lit_ft.PreferenceLM, and the "
                f"model is a {type(module).__name__}, which trains on single good answers; set model.class_path to "
                "lit_ft.PreferenceLM, or map the chosen answers with data.columns"
            )
        if isinstance(module, SamplesAnswers):
            check_prompts(packing=self.packing, micro_batch_tokens=self.micro_batch_tokens)
            if self.streaming:
                check_answered_stream(self.splits.preparation, module.row_needs)
        if isinstance(module, LimitsLengths):
            module.check_length("data.max_length", self.requested_length)

    def take_rows_of(self, module: LightningModule | None) -> None:
        """Read rows as a module needs them, with an answer or without; data that was read otherwise is read again."""
        takes = isinstance(module, SamplesAnswers) and module.row_needs.may_lack_answers and not self.streaming
        if self.splits.take_rows(takes, isinstance(module, LearnsPreferences) and module.scores_texts):
            vars(self).pop("order", None)

    def has_known_answers(self, split: str) -> bool:
        """Whether any sample of a split has a known answer; see ``GivesKnownAnswers``."""
        return self.splits.has_known_answers(split)

    def check_samples_for(self, module: LightningModule | None, stage: str) -> None:
        """Compare the samples with what a module trains on, and find what it needs beside them.

        Raises:
            RecipeError: they do not fit, or the model has too few positions for one.
        """
        if isinstance(module, LimitsLengths):
            module.check_length("the longest sample", self.splits.longest_sample)
        if isinstance(module, SamplesAnswers):
            self.splits.check_prompts()
            if stage != "predict" and (needs := module.row_needs):
                self.splits.read_values(needs)
        if isinstance(module, LearnsPreferences) and module.needs_divergence and stage != "predict":
            self.splits.find_partners()

    @staticmethod
    def _check_fractions(trainer: Trainer) -> None:
        limit = trainer.limit_train_batches
        check_fractions_of_stream(**{"overfit_batches" if _overfits(trainer) else "limit_train_batches": limit})
        if not isinstance(limit, int):  # the length of an epoch
            check_fractions_of_stream(val_check_interval=validation_interval(trainer))

    def _check_limit_of_evaluation(self, trainer: Trainer, stage: str) -> None:
        limits = attributes_of(trainer)
        if stage == "predict":
            if _is_share(limit := limits.limit_predict_batches):
                check_limit("limit_predict_batches", limit, len(self.predict_dataloader()), "batches of questions")
        elif stage == "test":
            if _is_share(limit := limits.limit_test_batches):
                check_limit("limit_test_batches", limit, len(self._evaluation_loader("test")), "test batches")
        elif "val" in self.splits and _is_share(limit := limits.limit_val_batches) and not _overfits(trainer):
            check_limit("limit_val_batches", limit, len(self._evaluation_loader("val")), "validation batches")

    def _check_val_interval(self, trainer: Trainer, replicas: int) -> None:
        interval = validation_interval(trainer)
        if isinstance(interval, int) and trainer.check_val_every_n_epoch is not None and not self.streaming:
            batches = self.micro_batches_per_epoch(trainer, replicas)
            if interval > batches:
                raise RecipeError(
                    f"trainer.val_check_interval={interval} is more than the {batches:,} micro-batches of an epoch; "
                    "make it smaller, give a fraction of an epoch (0.5), or count over epochs with "
                    "trainer.check_val_every_n_epoch=null"
                )

    def micro_batches_per_epoch(self, trainer: Trainer, replicas: int) -> int:
        """Micro-batches of each rank in an epoch of training data that is no stream, within ``limit_train_batches``."""
        return self._loader("train", self.plan(replicas), trainer.limit_train_batches).batches

    @property
    def requested_length(self) -> int | None:
        """Length of samples that the recipe asks for; None where it leaves the default, which data may not reach."""
        return self.max_length if self.streaming or self.max_length != DEFAULT_MAX_LENGTH else None

    @property
    def has_pairs(self) -> bool:
        """Whether samples are pairs of preference data, or single answers that are judged."""
        return not self._formats.isdisjoint(OF_PAIRS)

    @property
    def is_unpaired(self) -> bool:
        """Whether one answer of each pair is missing."""
        return UNPAIRED in self._formats

    @property
    def _formats(self) -> set[str]:
        return {source.format for sources in self.splits.sources.values() for source in sources}

    # --- loaders ---------------------------------------------------------------------------------

    @property
    def token_budget(self) -> int | None:
        """Maximum number of tokens of a micro-batch; None without a limit."""
        if self.micro_batch_tokens is not None:
            return self.micro_batch_tokens
        if (policy := self._policy()) is not None:
            length = None if self.max_length is None else self.max_length + policy.max_new_tokens
            return None if length is None else policy.answers_per_prompt * length * self.micro_batch_size
        conversations = 2 if PREFERENCES in self._formats and self.packing is None else 1
        per_unit = self.packing if self.packing is not None else self.max_length
        return None if per_unit is None else conversations * per_unit * self.micro_batch_size

    def _policy(self) -> SamplesAnswers | None:
        """Module that answers the prompts of the data; None where it trains on their known answers."""
        module = None if self.trainer is None else self.trainer.lightning_module
        return module if isinstance(module, SamplesAnswers) else None

    def _needs_divergence(self) -> bool:
        module = None if self.trainer is None else self.trainer.lightning_module
        return isinstance(module, LearnsPreferences) and module.needs_divergence

    def plan(self, replicas: int = 1) -> BatchPlan:
        """Plan that distributes training samples to ``replicas`` data-parallel ranks."""
        return BatchPlan(
            micro_batch_size=self.micro_batch_size,
            packing=self.packing,
            token_budget=self.token_budget if self.join_micro_batches and self._policy() is None else None,
            shuffle=self.shuffle,
            seed=process.seed(),
            replicas=replicas,
            mixing=self.mixing,
            shows_window=self._policy() is not None or self._needs_divergence(),
        )

    def _plan_of_training(self, trainer: Trainer, replicas: int) -> BatchPlan:
        # overfit_batches: the same micro-batches each epoch, in the order of the data.
        return replace(self.plan(replicas), shuffle=self.shuffle and not _overfits(trainer))

    def train_dataloader(self) -> PackedBatchLoader | StreamLoader:
        """Loader of this rank's micro-batches; each carries the supervised tokens of its optimizer step."""
        trainer = self._trainer_of_loaders()
        replicas, replica = process.data_parallel(trainer)
        plan = self._plan_of_training(trainer, replicas)
        state = self._loader_state
        if self._train_loader is not None and trainer.training:  # reload_dataloaders_every_n_epochs
            state = self._train_loader.state_dict()
        if self.streaming:
            self._train_loader = self._stream(plan, replica)
        else:
            limit = trainer.limit_train_batches
            self._train_loader = self._loader("train", plan, limit, partial(accumulation, trainer))
        if state:
            self._train_loader.load_state_dict(state)
        return self._train_loader

    def first_batches(self, count: int) -> list[PackedBatch]:
        """The first ``count`` micro-batches of the training data, the same on every rank."""
        if not self.streaming and "train" not in self.splits:  # the stage is not fit
            self._load_training()
        plan = self.plan()
        batches = self._stream(plan, 0) if self.streaming else self._loader("train", plan, 1.0)
        return list(islice((batch for batch in batches if batch["segment_lengths"]), count))

    def _stream(self, plan: BatchPlan, replica: int) -> StreamLoader:
        trainer = self._trainer_of_loaders()
        limit = trainer.limit_train_batches
        return StreamLoader(
            self.splits.sources["train"],
            self.splits.preparation,
            plan,
            names=self.splits.names("train"),
            buffer_rows=self.shuffle_buffer,
            replica=replica,
            accumulate=partial(_steps_within, limit, trainer),
            epoch_batches=limit if isinstance(limit, int) else None,
            repeats=_overfits(trainer),
            workers=1 if self.splits.preparation.workers is None else self.splits.preparation.workers,
        )

    @cached_property
    def order(self) -> Order:
        """Order of the training samples, and the options that decide it."""
        sources, preparation = self.splits.sources["train"], self.splits.preparation
        options: dict[str, object] = {"seed_everything": process.seed(), "data.shuffle": self.shuffle}
        options |= {"data.packing": self.packing, "data.streaming": self.streaming}
        if self.streaming:
            options["data.shuffle_buffer"] = self.shuffle_buffer
            return order_of_stream(sources, preparation, self.mixing, **options)
        options["data.val_fraction"] = self.val_fraction
        return order_of_samples(self.splits["train"], preparation, self.mixing, **options)

    def check_order(self, state: LoaderState) -> bool:
        """Compare the training data with the data that a checkpoint was written on.

        Returns:
            Whether the data has changed, so that the saved position points to other samples now.

        Raises:
            RecipeError: it has changed, and ``resume_data`` is not ``changed``.
        """
        saved = state.get("order")
        is_said, self._order_compared = self._order_compared == [saved], [saved]
        if state and saved is None and not is_said:
            rank_zero_info("the checkpoint does not say what data it was written on, so changes cannot be found")
        if saved is None or not (changes := self.order.changes_since(saved)):
            return False
        message = f"the checkpoint was written on other data: {'; '.join(changes)}"
        if self.resume_data != "changed":
            raise RecipeError(
                f"{message}. The saved position stands for other samples now; resume with the data of the checkpoint, "
                "or start the epoch again on the present data with --resume_data changed"
            )
        if not is_said:
            rank_zero_info(
                f"{message}. resume_data=changed: its epoch, unless it was over, starts again on the present data"
            )
        return True

    def restart_epoch(self, state: LoaderState) -> None:
        """Set a saved position to the beginning of its epoch, unless that epoch was complete."""
        (StreamLoader if self.streaming else PackedBatchLoader).restart_epoch(state)

    def state_dict(self) -> LoaderState:
        """Position in the training data, and the order of samples that it refers to."""
        return (
            {**self._train_loader.state_dict(), "order": self.order.saved()} if self._train_loader is not None else {}
        )

    def load_state_dict(self, state_dict: LoaderState) -> None:
        """Continue from a saved position.

        Lightning restores the loaders' state too, but not where a schedule asked for
        ``trainer.estimated_stepping_batches`` before: then the loader was set up too early.
        """
        self._loader_state = state_dict
        if self._train_loader is not None and state_dict:
            self._train_loader.load_state_dict(state_dict)

    def rewind(self, state: LoaderState, micro_batch: int, ready: int) -> None:
        """Set a saved position back to an earlier micro-batch of its epoch; see the loaders' ``rewind``."""
        (StreamLoader if self.streaming else PackedBatchLoader).rewind(state, micro_batch, ready)

    def rescale_progress(self, checkpoint: Checkpoint) -> None:
        """Convert the progress within an interrupted epoch to this run's ranks and micro-batch size.

        Args:
            checkpoint: Lightning's checkpoint; changed in place where the stopped run had other ranks or micro-batches.

        Raises:
            RecipeError: the position is within an optimizer step of this run.
        """
        state, trainer = checkpoint.get(type(self).__qualname__), self.trainer
        if not state or trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return
        progress = FitProgress(checkpoint)
        plan, accumulate = self.plan(process.data_parallel(trainer).size), accumulation(trainer, progress.epoch)
        now = batch_geometry(plan, accumulate)
        if (then := state.get("deal", now)) == now:
            return
        if (
            state.get("is_over")
            and not self.streaming
            and isinstance(loader := self.train_dataloader(), PackedBatchLoader)
        ):
            done = loader.batches
        elif progress.epoch_is_over:
            done = progress.trained * then["units"] // now["units"]
        else:
            done = position_under({"position": progress.trained, "deal": then}, plan, accumulate)
        progress.recount(done)

    def val_dataloader(self) -> PackedBatchLoader | tuple[()]:
        """Validation data as packed batches of up to the token budget, each sample once."""
        return self._evaluation_loader("val") if "val" in self.splits else ()

    def test_dataloader(self) -> PackedBatchLoader:
        """Test data as packed batches of up to the token budget, each sample once."""
        return self._evaluation_loader("test")

    def predict_dataloader(self) -> UserList[list[Question]]:
        """This rank's questions, ``micro_batch_size`` of about the same length per batch, the longest first.

        Every rank has the same number of batches, some of them empty: sharded weights need all ranks in each batch.
        """
        assert self.questions is not None, "they are read by setup"
        replicas, rank = process.data_parallel(self.trainer)
        share, size = self.questions[rank::replicas], self.micro_batch_size
        limit = 1.0 if self.trainer is None else attributes_of(self.trainer).limit_predict_batches
        if isinstance(limit, float) and limit == 1.0:  # all batches: a limit, such as 1, is for the first rows
            share.sort(key=lambda question: prompt_size(question["prompt"]), reverse=True)
        starts = range(0, -(-len(self.questions) // replicas), size)
        # No list, which Lightning reads as several loaders, and no DataLoader, which it shards once more.
        return UserList(share[start : start + size] for start in starts)

    def _trainer_of_loaders(self) -> Trainer:
        if self.trainer is None:
            raise RecipeError(
                "TextDataModule: the batches of its loaders depend on a Trainer's ranks and accumulation; give it to "
                "Trainer.fit, or, to look at batches, call load(tokenizer) and set its attribute trainer to a Trainer"
            )
        return self.trainer

    def pairs(self, split: str) -> PairSet | None:
        """Pairs of a split that the run needs, each once; None where the split is not read."""
        if split not in self.splits:
            return None
        samples, trainer = self.splits[split], self._trainer_of_loaders()
        chosen = np.arange(len(samples))
        if split == "train":
            plan = self._plan_of_training(trainer, process.data_parallel(trainer).size)
            loader = self._loader(split, plan, trainer.limit_train_batches, partial(accumulation, trainer))
            if (end := self._end_in_first_epoch(loader)) is not None:
                chosen = loader.first_samples(end)
        elif attributes_of(trainer).fast_dev_run:  # it leaves nothing that could need the others
            limit = attributes_of(trainer).limit_test_batches if split == "test" else trainer.limit_val_batches
            chosen = self._evaluation_loader(split).first_samples(int(limit))
        loader = self._evaluation_loader(split, samples.take(chosen), self._needs_divergence())
        about = len(samples), fingerprint_of(samples), samples.kind
        return PairSet(loader, len(loader), torch.from_numpy(chosen), *about)

    def _end_in_first_epoch(self, loader: PackedBatchLoader) -> int | None:
        """Micro-batch of the first epoch at which the run ends; None if it is longer, as later epochs have others.

        A resumed run goes on from its position, which other micro-batches may have led to.
        """
        trainer, state = self._trainer_of_loaders(), self._loader_state
        if _overfits(trainer):
            return loader.batches
        steps, accumulate = optimizer_steps(trainer), accumulation(trainer, 0)
        if steps < 0 or state.get("epoch", 0) > 0:
            return None
        begun, taken = (loader.position_of(state), trainer.global_step) if state else (0, 0)
        end = begun + (steps - taken) * accumulate
        return int(end) if end < loader.batches + accumulate else None

    def _evaluation_loader(
        self, split: str, selected: Samples | None = None, shows_window: bool = False
    ) -> PackedBatchLoader:
        samples = self.splits[split] if selected is None else selected
        # No gradients, no optimizer step: a batch may hold as many samples as fit in the memory of a training batch.
        budget, policy = self.token_budget, self._policy()
        units = None if budget is None or policy is not None else max(budget, int(samples.lengths.max()))
        answers = 1 if policy is None else policy.answers_per_prompt  # of which an evaluation asks for one
        size = answers * self.micro_batch_size if units is None else 1
        replicas = process.data_parallel(self.trainer).size
        plan = BatchPlan(
            micro_batch_size=size,
            packing=units,
            mixes_bins=True,  # limit_val_batches must not select the longest samples
            seed=process.seed(),
            replicas=replicas,
            shows_window=shows_window,
        )
        return self._loader(split, plan, 1.0, selected=selected)  # only the trainer applies limit_val_batches

    def _loader(
        self,
        split: str,
        plan: BatchPlan,
        limit: int | float,
        accumulate: Callable[[], int] = _one,
        selected: Samples | None = None,
    ) -> PackedBatchLoader:
        trainer = self._trainer_of_loaders()
        loader = PackedBatchLoader(
            self.splits[split] if selected is None else selected,
            plan,
            replica=process.data_parallel(trainer).rank if plan.replicas > 1 else 0,
            accumulate=accumulate,
            limit=limit,
            num_workers=self.num_workers,
            pin_memory=trainer.strategy.root_device.type == "cuda",
        )
        if split in ("train", "val") and _overfits(trainer) and selected is None:  # a share is one of the whole split
            check_overfitted_share(split, len(loader), trainer.overfit_batches)  # type: ignore[attr-defined]
        check_limit("limit_train_batches", limit, len(loader), "micro-batches of an epoch")
        return loader


def _steps_within(limit: int | float, trainer: Trainer) -> int:
    """Micro-batches per optimizer step; an epoch of ``limit`` micro-batches that ends within one is refused."""
    accumulate = accumulation(trainer)
    if isinstance(limit, int) and limit % accumulate:
        name = "overfit_batches" if _overfits(trainer) else "limit_train_batches"
        raise RecipeError(
            f"trainer.{name}={limit} ends a stream within an optimizer step of {accumulate} micro-batches; set it to "
            f"{-(-limit // accumulate) * accumulate}"
        )
    return accumulate


def _overfits(trainer: Trainer) -> bool:
    """Whether a trainer repeats a few batches: a public attribute that type checkers do not see."""
    return bool(trainer.overfit_batches)  # type: ignore[attr-defined]


def _is_share(limit: int | float) -> bool:
    """Whether a limit leaves out a share of the batches; no loader is needed to see that."""
    return isinstance(limit, float) and 0 < limit < 1

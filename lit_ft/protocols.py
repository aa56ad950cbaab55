"""Optional protocols between module, strategy and data module, beyond Lightning's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from lit_ft.packed_batch import PackedBatch, TokenLoss

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer
    from transformers.modeling_outputs import BaseModelOutputWithPast

    Decoder = Callable[..., BaseModelOutputWithPast]

Checkpoint = dict[str, Any]
"""Lightning's checkpoint: ``state_dict``, ``optimizer_states``, ``loops``, and what modules and callbacks add."""
LoaderState = dict[str, Any]
"""Saved position of a data module or loader, as its ``state_dict`` returns it."""


class Question(TypedDict):
    """A row of the data that ``predict`` answers."""

    row: int
    """Number of the row, from 0, in all that is asked."""
    id: str | int
    """``id`` of the row; without one, its file and line."""
    question: str
    """Turn before the answer."""
    prompt: str
    """All that the model sees, with special tokens as text and the opening of the assistant's turn."""
    expected: str | None
    """Answer of the row; None if it has none."""


FinishReason = Literal["stop", "length"]
"""What ended an answer, in OpenAI's words: the model, or ``max_new_tokens``."""


class Answer(Question):
    """A question with what the model answers."""

    answer: str
    finish_reason: FinishReason | None


# --- modules -----------------------------------------------------------------------------------------


@runtime_checkable
class SplitsForward(Protocol):
    """Module whose forward pass over a packed batch is two halves, which a strategy may run on different ranks."""

    def forward(self, batch: PackedBatch) -> TokenLoss:
        """Summed loss over the supervised tokens; ``token_loss(hidden_states(batch), batch)``."""

    def hidden_states(self, batch: PackedBatch, decoder: Decoder | None = None) -> Tensor:
        """Final hidden states of a batch's tokens, ``(1, T, H)``.

        Args:
            batch: packed batch of T tokens.
            decoder: in place of the base model's, where a strategy has only a part of its layers here.
        """

    def token_loss(self, hidden: Tensor, batch: PackedBatch) -> TokenLoss:
        """Summed loss and number of right predictions, from a batch's final hidden states ``(1, T, H)``."""


@runtime_checkable
class LimitsLengths(Protocol):
    """Module whose model takes samples up to some length."""

    def check_length(self, what: str, length: int | None) -> None:
        """Compare the length of samples with the model's positions.

        Args:
            what: what has this length, for the message.
            length: tokens of a sample; None if it is not known.

        Raises:
            RecipeError: the samples are longer.
        """


# --- strategies --------------------------------------------------------------------------------------


@runtime_checkable
class LogsGradientNorm(Protocol):
    """Module that logs gradient norms which a strategy measures, and ends the run at one that is not finite."""

    def log_gradient_norm(self, norm: Tensor, has_scaler: bool) -> None:
        """Log the gradient norm of the current optimizer step, and check it.

        Args:
            norm: scalar, over all ranks, before clipping.
            has_scaler: whether losses are scaled (fp16), so that steps with infinite gradients are expected, and
                skipped.

        Raises:
            NotFinite: the norm is not finite, and losses are not scaled.
        """


@runtime_checkable
class ChecksRecipe(Protocol):
    """Strategy that compares itself with the recipe before weights are loaded."""

    def check(self, trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Check tuning method, batch sizes and settings.

        Raises:
            RecipeError: one does not fit; the message names the value, the rule and what works.
        """


@runtime_checkable
class ChecksModel(Protocol):
    """Strategy that refuses models which it cannot distribute."""

    def check_model(self, module: nn.Module, skeleton: nn.Module) -> None:
        """Check the model before its weights are read.

        Args:
            module: LightningModule.
            skeleton: model of the LightningModule with its adapters, on the meta device.

        Raises:
            RecipeError: the model does not fit; the message names the value, the rule and what works.
        """


@runtime_checkable
class ChecksOptimizer(Protocol):
    """Strategy that refuses optimizers whose steps would differ from those on full weights."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Check an optimizer that was built for a few small parameters, before weights are read.

        Raises:
            RecipeError: the optimizer does not work here; the message names those that do.
        """


# --- data modules ------------------------------------------------------------------------------------


@runtime_checkable
class GivesFirstBatches(Protocol):
    """Data module that hands out training data before training, for adapter inits that read data."""

    def first_batches(self, count: int) -> list[PackedBatch]:
        """The first micro-batches of training, the same on all ranks."""


class PairSet(NamedTuple):
    """Preference pairs of a data set, each once, for a pass without training."""

    loader: Iterable[PackedBatch]
    """Micro-batches of this rank; their ``pairs`` are indices into ``indices``. Each is a window of its own, whose
    ``window_mismatched`` it has where the module needs the divergence."""
    batches: int
    """Number of micro-batches."""
    indices: Tensor
    """``(selected pairs,)``, int64: indices of the selected pairs among all of the set."""
    total: int
    """Number of pairs of the set."""
    fingerprint: str
    """Equal for sets of equal pairs in equal order."""
    kind: str
    """What a pair is: pair, or judged answer where the other one is missing."""


@runtime_checkable
class GivesPairs(Protocol):
    """Data module that may hold preference pairs."""

    @property
    def has_pairs(self) -> bool:
        """Whether the data that was read is pairs."""

    @property
    def is_unpaired(self) -> bool:
        """Whether one answer of each pair is missing."""

    def pairs(self, split: str) -> PairSet | None:
        """Pairs of a split (train, val, test) that the run needs, within its limits; None where there are none."""


@runtime_checkable
class ChecksData(Protocol):
    """Module that cannot train on any data."""

    def check_data(self, data: object, stage: str) -> None:
        """Find what the module cannot train on, once the data is read.

        Args:
            data: data module of the run.
            stage: fit, validate, test or predict.

        Raises:
            RecipeError: there is something.
        """


@runtime_checkable
class LearnsPreferences(Protocol):
    """Module that trains on preference pairs, and on nothing else."""

    objective: object

    @property
    def needs_divergence(self) -> bool:
        """Whether batches must have ``window_mismatched``."""

    @property
    def takes_unpaired(self) -> bool:
        """Whether one answer of a pair may be missing."""

    @property
    def scores_texts(self) -> bool:
        """Whether it reads whole conversations, as the chat template ends them, and not the tokens of answers."""

    def describe_objective(self) -> str:
        """Text on what answers train it, and by which objective."""


@runtime_checkable
class DescribesTraining(Protocol):
    """Module whose resumed runs name a change of what it is trained on."""

    def describe_training(self) -> str:
        """Text on whose answers train it, and by what."""


@runtime_checkable
class GivesKnownAnswers(Protocol):
    """Data module whose samples may be without a known answer."""

    def has_known_answers(self, split: str) -> bool:
        """Whether any sample of a split (val, test) that was read has one."""


class RowNeeds(NamedTuple):
    """What a module that trains on its own answers reads of the rows of the data, or its rewards do."""

    columns: Mapping[str, str]
    """Names of columns, each with that of a reward that reads it."""
    messages: str | None
    """Name of a reward that reads the turns of conversations; None where none does."""
    may_lack_answers: bool
    """Whether rows may be without a known answer."""

    def __bool__(self) -> bool:
        return bool(self.columns or self.messages or self.may_lack_answers)


@runtime_checkable
class SamplesAnswers(Protocol):
    """Module that answers the prompts of a batch, and trains on its answers."""

    answers_per_prompt: int
    max_new_tokens: int

    @property
    def row_needs(self) -> RowNeeds:
        """What rewards read of the rows of the data."""

    def describe_policy(self) -> str:
        """Text on how many answers train it, and by which rewards."""


@runtime_checkable
class LearnsFromTeacher(Protocol):
    """Module that trains on the probabilities of another model."""

    def check_teacher(self) -> None:
        """Compare the other model with the one that trains, before weights are read.

        Raises:
            RecipeError: its config, weight files or tokenizer do not fit.
        """

    def teacher_bytes(self, ranks: int) -> int:
        """Bytes of the other model's weights on each of some ranks, beside its own; as if they were not quantized."""

    def describe_objective(self) -> str:
        """Text on which answers train it, and by which teacher."""


@runtime_checkable
class MayStream(Protocol):
    """Data module whose training data may have no length."""

    streaming: bool


@runtime_checkable
class CountsSamples(Protocol):
    """Data module that fixes the number of samples of a packed batch."""

    micro_batch_size: int


@runtime_checkable
class BoundsTokens(Protocol):
    """Data module that bounds the number of tokens of a packed batch."""

    @property
    def token_budget(self) -> int | None:
        """Largest number of tokens of a packed batch; None if it has no limit."""


def micro_batch_size(datamodule: object) -> int | None:
    """Number of samples of a packed batch; None if the data module does not fix it."""
    return datamodule.micro_batch_size if isinstance(datamodule, CountsSamples) else None


@runtime_checkable
class RewindsPosition(Protocol):
    """Data module whose saved position can be set back to an earlier micro-batch of the epoch."""

    def rewind(self, state: LoaderState, micro_batch: int, ready: int) -> None:
        """Set a saved position back within its epoch.

        Args:
            state: saved state of the data module, changed in place.
            micro_batch: micro-batch of the epoch that trains next, counted from 0.
            ready: number of micro-batches of the epoch that the trainer had begun at the time of saving.
        """


@runtime_checkable
class ChecksOrder(Protocol):
    """Data module that detects whether its samples or their order differ from those of a saved position."""

    def check_order(self, state: LoaderState) -> bool:
        """Whether the data has changed and the user allows it.

        Raises:
            RecipeError: it has changed, and the user has not allowed it.
        """

    def restart_epoch(self, state: LoaderState) -> None:
        """Set a saved position to the beginning of its epoch; ``state`` is changed in place."""


@runtime_checkable
class RecountsMicroBatches(Protocol):
    """Data module that can continue within an epoch with other ranks or another micro-batch size."""

    def rescale_progress(self, checkpoint: Checkpoint) -> None:
        """Convert the progress within an interrupted epoch to this run's ranks and micro-batch size.

        Args:
            checkpoint: Lightning's checkpoint, changed in place.
        """

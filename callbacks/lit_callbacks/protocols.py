"""Protocols of modules, data modules, strategies, loggers and callbacks, as callbacks use them.

All are optional: a callback checks with ``isinstance``, and does without where an object has none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Message = dict[str, Any]
"""Turn of a conversation: ``role``, ``content`` and whatever else the chat template takes."""
WeightFilter = Callable[[str, Tensor], bool]
"""Filter of weights by name and tensor."""

# --- modules -----------------------------------------------------------------------------------------


@runtime_checkable
class AnswersPrompts(Protocol):
    """A module that generates text, for ``SampleGenerations``."""

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> Sequence[str]:
        """One answer per prompt; every rank calls it at once, with the same prompts."""


@runtime_checkable
class HasScore(Protocol):
    """Decoder with a linear layer from hidden states to labels, as transformers builds classifiers of texts."""

    score: nn.Linear


@runtime_checkable
class SharesTokens(Protocol):
    """First tokens that samples of a packed batch have in common, for ``ThroughputMonitor``."""

    is_used: bool
    """Whether they were computed once."""

    @property
    def own_lengths(self) -> Sequence[int]:
        """Tokens of each sample that are computed then."""


@runtime_checkable
class RendersPrompts(Protocol):
    """A module that renders conversations itself, e.g. with limits on the time and memory of a chat template."""

    def render_prompt(self, messages: list[Message]) -> str:
        """Text of a conversation, followed by the start of the assistant's turn.

        Args:
            messages: messages of the conversation, each with ``role`` and ``content``.
        """


@runtime_checkable
class HoldsTokenizer(Protocol):
    """A module or data module with the tokenizer of the model."""

    tokenizer: PreTrainedTokenizerBase | None


@runtime_checkable
class MeasuresTextLoss(Protocol):
    """A module that computes the loss on plain texts, for ``ForgettingProbe``."""

    def text_loss(self, texts: Sequence[str]) -> tuple[Tensor | float, Tensor | float]:
        """Summed cross-entropy of some texts in nats, and their number of tokens."""


@runtime_checkable
class RecordsLosses(Protocol):
    """A module that hands the losses of its samples to ``LossLedger`` in its training step."""

    record_losses: Callable[..., None] | None
    """``LossLedger.record`` during training, else None."""


@runtime_checkable
class MeasuresGradientNorm(Protocol):
    """A module that computes the gradient norm itself, so that ``SpikeGuard`` does not compute it again."""

    def measured_gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """Gradient norm over all ranks, a scalar; None if it has none."""


@runtime_checkable
class KnowsFullModelFlops(Protocol):
    """A module of which each rank keeps only some layers, with the formula of the full model."""

    full_model_flops: Callable[..., Tensor | float | None] | None
    """Function from ``BatchCounts`` to the FLOPs of one forward and backward pass, or to None if unknown."""


@runtime_checkable
class SavesAdapter(Protocol):
    """A module that writes its trainable parameters itself, for ``AdapterMerger``."""

    def save_adapter(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write them to a folder that it creates.

        Args:
            folder: path of the folder.
            state_dict: full weights by name where they are sharded; it may be missing where they never are.
        """


@runtime_checkable
class WritesFolder(Protocol):
    """A tokenizer that writes its files to a folder, as those of transformers do."""

    def save_pretrained(self, folder: Path) -> object:
        """Write them."""


def tokenizer_of(module: object) -> PreTrainedTokenizerBase | None:
    """Tokenizer of a module or data module; None where it has none."""
    return module.tokenizer if isinstance(module, HoldsTokenizer) else None


# --- data modules ------------------------------------------------------------------------------------


@runtime_checkable
class LooksUpTexts(Protocol):
    """A data module that knows the texts of its samples, for the summary of ``LossLedger``."""

    def sample_texts(self, ids: Sequence[str]) -> Mapping[str, str]:
        """Texts by id; ids that it does not know are left out."""


# --- strategies, precision plugins, launchers and optimizers -----------------------------------------


@runtime_checkable
class GathersWeights(Protocol):
    """A strategy whose ranks hold different layers, so that it gathers the weights of all of them itself."""

    def full_weights(self, module: nn.Module, selected: WeightFilter = ..., /, keep: bool = True) -> dict[str, Tensor]:
        """Full weights by name, as ``lit_callbacks.distributed.gather.full_weights`` returns them; a collective."""


@runtime_checkable
class SumsGradientNorm(Protocol):
    """A strategy whose ranks hold different parameters, so that it computes the norm over all of them itself."""

    def gradient_norm(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Gradient norm over all ranks, from this rank's parameters with a gradient; None if it cannot tell."""


@runtime_checkable
class WritesModelFolder(Protocol):
    """A strategy that writes a model folder to which each rank adds its part."""

    def save_pretrained(self, base: PreTrainedModel, folder: Path | None = None) -> None:
        """Write the folder; a collective. The path on rank 0 counts."""


@runtime_checkable
class ScalesGradients(Protocol):
    """A precision plugin that may scale the loss, and so the gradients, under fp16."""

    scaler: GradScaler | None


@runtime_checkable
class StartsProcesses(Protocol):
    """A launcher that has started the other processes of this node."""

    procs: list[Popen[bytes]]

    def kill(self, signum: int) -> None:
        """Send a signal to all of them."""


@runtime_checkable
class KeepsTwoWeightSets(Protocol):
    """A schedule-free optimizer, which keeps one set of weights for training and one for use."""

    param_groups: list[dict[str, Any]]

    def train(self) -> None:
        """Put the weights for training into the parameters."""

    def eval(self) -> None:
        """Put the weights for use into the parameters."""


def grad_scaler(trainer: Trainer) -> GradScaler | None:
    """The run's gradient scaler; None without one."""
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, ScalesGradients) else None


# --- loggers and callbacks ---------------------------------------------------------------------------


@runtime_checkable
class LogsText(Protocol):
    """A logger that takes tables of text, e.g. that of W&B."""

    def log_text(
        self, key: str, columns: list[str] | None = None, data: list[list[str]] | None = None, step: int | None = None
    ) -> None:
        """Log a table."""


@runtime_checkable
class LogsTextList(Protocol):
    """A logger that takes a list of texts, e.g. that of SwanLab."""

    def log_text(self, key: str, texts: list[str], step: int | None = None) -> None:
        """Log texts that belong together."""


@runtime_checkable
class HasExperiment(Protocol):
    """A logger that gives access to the object of the library that it logs to, as most of Lightning's do."""

    @property
    def experiment(self) -> object:
        """The run or writer of that library."""


class AddsText(Protocol):
    """An experiment of a logger that takes Markdown, e.g. that of TensorBoard."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> object:
        """Log a text."""


def adds_text(experiment: object) -> TypeGuard[AddsText]:
    """Whether an experiment takes Markdown. Some make their methods up on access, which ``isinstance`` does not see."""
    return hasattr(experiment, "add_text")


@runtime_checkable
class WritesToFolder(Protocol):
    """A checkpoint callback with a folder of its own."""

    dirpath: str | Path | None


@runtime_checkable
class WritesAtTheEnd(Protocol):
    """A callback that writes files when training ends, and can write them later if the run was killed before."""

    def write_final(self, trainer: Trainer, pl_module: LightningModule, only_missing: bool = False) -> None:
        """Write the files; a collective.

        Args:
            trainer: trainer of the run.
            pl_module: the trained module.
            only_missing: write nothing if all files exist already.
        """

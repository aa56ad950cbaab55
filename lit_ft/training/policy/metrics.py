"""Metrics of answers that the model gives: means of their rewards and lengths."""

from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.training.metrics import SourceMeans, StageMetrics, TokenMean
from lit_ft.training.policy.reference import divergence
from lit_ft.training.policy.rollouts import Rollouts

OF_ANSWERS = ("reward", "answer_tokens", "cut_share")
OF_GROUPS = ("reward_std", "signal_share")


class RewardMetrics(StageMetrics):
    """What ``StageMetrics`` measures of the data's own answers, and means over those that the model gives.

    ``reward`` is the weighted sum of all rewards, ``rewards/<name>`` each of them, ``reward/<source>`` that of a source
    of the data, ``answer_tokens`` the length, and ``cut_share`` the share of answers that ``max_new_tokens`` cuts.
    """

    shown = ("reward",)

    def __init__(self, names: Sequence[str], has_router_loss: bool = False) -> None:
        super().__init__(has_router_loss)
        self.names = (*OF_ANSWERS, *(f"rewards/{name}" for name in names))
        self.of_answers = TokenMean((len(self.names),))
        self.of_sources: SourceMeans | None = None
        self.has_known_answers = True
        """Whether there is a loss; where no row has a known answer, there is none."""

    def add_rollouts(self, rollouts: Rollouts, batch: PackedBatch) -> None:
        """Add answers to the prompts of a batch of the data."""
        measured = torch.stack([rollouts.total, rollouts.tokens, rollouts.is_cut.float(), *rollouts.rewards])
        self.of_answers.update(measured.double().sum((1, 2)).to(self.of_answers.total), rollouts.total.numel())
        if names := batch.get("source_names"):
            if self.of_sources is None or self.of_sources.names != tuple(names):
                with torch.inference_mode(False):
                    self.of_sources = SourceMeans(names).to(self.of_answers.total.device)
            device = self.of_sources.total.device
            source = torch.tensor([asked.source for asked in rollouts.asked], dtype=torch.int64, device=device)
            each = rollouts.total.shape[1]
            self.of_sources.update(rollouts.total.flatten().to(device), source.repeat_interleave(each))

    def log(self, module: LightningModule, prefix: str, prog_bar: bool = False) -> Tensor:
        """Log the means; see ``StageMetrics``."""
        if not self.has_known_answers:
            self.loss.update(torch.zeros_like(self.loss.total), 0)  # torchmetrics warns of a mean of nothing
        return super().log(module, prefix, prog_bar)

    def _means(self, loss: Tensor) -> dict[str, Tensor]:
        return super()._means(loss) if self.has_known_answers else self._of_answers()

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        return {**super()._further_means(loss), **self._of_answers()}

    def _of_answers(self) -> dict[str, Tensor]:
        sources = {} if self.of_sources is None else self.of_sources.compute()
        of_sources = {f"reward/{name}": mean for name, mean in sources.items()}
        return {**dict(zip(self.names, self.of_answers.compute().unbind(), strict=True)), **of_sources}


class LossOfAnswers(TokenMean):
    """Mean loss over answers, or their tokens; 0 where no answer counts."""

    def compute(self) -> Tensor:
        """Mean, scalar fp32."""
        return (self.total / self.tokens.clamp(min=1)).float()


class PolicyMetrics(RewardMetrics):
    """Means over the answers that train, and the mean loss over them.

    ``reward_std`` is the mean over prompts of the standard deviation of their answers' rewards, and ``signal_share``
    the share of prompts whose answers differ in their weights. ``kl``, where it has a part in the loss, is the mean
    divergence from the reference over the tokens of answers, in nats. It and the router's loss are left out of a step
    in which no answer is computed.
    """

    def __init__(self, names: Sequence[str], has_router_loss: bool = False, has_kl: bool = False) -> None:
        super().__init__(names, has_router_loss)
        self.loss = LossOfAnswers()
        self.of_groups, self.kl = TokenMean((len(OF_GROUPS),)), TokenMean() if has_kl else None
        self.has_signal = True
        """Whether any answer trained, before the last ``log``."""

    def add_groups(self, rollouts: Rollouts, weights: Tensor) -> None:
        """Add how the answers to each prompt differ, and their weights in the loss, ``(P, G)``."""
        if rollouts.asked:
            measured = torch.stack([rollouts.total.std(1), weights.any(1).float()]).double().sum(1)
            self.of_groups.update(measured.to(self.of_groups.total), len(rollouts.asked))

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        if self.kl is not None:
            self.kl.update(divergence(result.per_token, batch).sum(), len(batch["targets"]))
        return result.per_token, "target_sources"

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        groups = dict(zip(OF_GROUPS, self.of_groups.compute().unbind(), strict=True))
        self.has_signal = bool(groups["signal_share"])  # NaN without a prompt
        divergences = {} if self.kl is None else _of_some({"kl": self.kl.compute()})
        return {**self._of_answers(), **groups, **divergences}

    def _of_router(self) -> dict[str, Tensor]:
        return _of_some(super()._of_router())


def _of_some(means: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over anything at all, for which the host waits; a mean over nothing is NaN."""
    return {name: mean for name, mean in means.items() if not mean.isnan()}

"""Metrics that average a quantity over supervised tokens, and the load of experts."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lit_callbacks.distributed.host_copy import HostCopy, queued_copy
from lit_callbacks.widest_float import widest_float
from torch import Tensor, distributed, nn
from torchmetrics import Metric

from lit_ft.errors import RecipeError
from lit_ft.internals import torch as torch_internals
from lit_ft.internals.lightning import forget_logged_values
from lit_ft.internals.transformers import GroupedExperts
from lit_ft.model.isolation import lengths
from lit_ft.packed_batch import PackedBatch, TokenLoss, terms_of_mean
from lit_ft.training.loss.token_weights import TokenWeights
from lit_ft.tuning.targets.experts import ExpertLayer, expert_layers


def metric_names(split: str, measured: Sequence[str], has_token_weights: bool = False) -> list[str]:
    """Names of the metrics that a module logs of a split (train, val, test), apart from losses of sources.

    ``measured`` is what it measures besides its loss, ``CausalLM.measured``: of all splits, or of one that a name
    begins with. ``has_token_weights`` says whether tokens have weights in its training loss.
    """
    others = tuple(f"{other}/" for other in ("train", "val", "test") if other != split)
    own = [name.removeprefix(f"{split}/") for name in measured if not name.startswith(others)]
    names = [f"{split}/{name}" for name in ("loss", *own, "router_aux_loss")]
    of_steps = ("learning_rate", "grad_norm", *(["cross_entropy"] if has_token_weights else []), "regularization")
    of_some = "expert_load_max_over_mean", "padding_share"
    return [*names, *(f"train/{name}" for name in (*of_steps, *of_some))] if split == "train" else names


def gather(state: Tensor, group: distributed.ProcessGroup | None = None) -> list[Tensor]:
    """State of a metric on each rank, which has the same shape on all; the host does not wait for a GPU.

    torchmetrics' own function begins with a barrier, in which NCCL blocks the host, and reads the shapes of all ranks.
    """
    gathered = [torch.empty_like(state) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(gathered, state.contiguous(), group=group)
    return gathered


@contextmanager
def gathered_together(metrics: Sequence["OwnStateMetric"]) -> Iterator[None]:
    """Let several metrics be computed, within, from states of all ranks that one collective for each dtype gathers.

    Each metric alone would gather each of its states. All ranks have the same metrics. The sums over ranks are the
    same, to the bit.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    states = [state for metric in metrics for state in metric.states()]
    of_ranks: dict[int, list[Tensor]] = {}  # by the identity of a state, all that a metric hands to its function
    for dtype in dict.fromkeys(state.dtype for state in states):
        alike = [state for state in states if state.dtype == dtype]
        ranks = gather(torch.cat([state.flatten() for state in alike]))
        parts = zip(*(rank.split([state.numel() for state in alike]) for rank in ranks), strict=True)
        of_ranks |= {id(state): [one.view_as(state) for one in of] for state, of in zip(alike, parts, strict=True)}
    for metric in metrics:
        metric.dist_sync_fn = lambda state, group: of_ranks[id(state)]
    try:
        yield
    finally:
        for metric in metrics:
            metric.dist_sync_fn = gather


class OwnStateMetric(Metric):
    """Metric that shares its state with no other process, and that a fit can change after a validation."""

    def states(self) -> list[Tensor]:
        """What it adds up on this rank."""
        return [getattr(self, name) for name in self._defaults]

    def reset(self) -> None:
        """Start again; the state is none of inference mode, in which `validate` runs."""
        with torch.inference_mode(False):
            super().reset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copy the state: processes of `ddp_spawn` would add to one memory."""
        super().__setstate__(state)
        for name in self._defaults:
            setattr(self, name, getattr(self, name).clone())


class TokenMean(OwnStateMetric):
    """Mean of a quantity per token, over all batches and ranks.

    Not ``torchmetrics.MeanMetric``: by default that leaves NaN out of the mean, so that a diverged run
    looks healthy, and with ``nan_strategy="disable"`` (1.9.0) it ignores the weights.

    The sum is accumulated in fp64 (fp32 on MPS, which has no fp64) and tokens in int64, whatever dtype the module is
    cast to: precision ``bf16-true`` and DeepSpeed cast everything in it, and bf16 counts no further than 256.
    """

    full_state_update = False
    total: Tensor
    tokens: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__(dist_sync_fn=gather)
        self._add_states(shape)

    def _add_states(self, shape: tuple[int, ...]) -> None:
        self.add_state("total", default=torch.zeros(shape, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("tokens", default=torch.zeros(shape, dtype=torch.int64), dist_reduce_fx="sum")

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> nn.Module:
        def move(tensor: Tensor) -> Tensor:
            """Move to another device, but keep the dtype."""
            device = fn(torch.zeros(0, device=tensor.device)).device
            return tensor.to(device, widest_float(device) if tensor.dtype == torch.float64 else tensor.dtype)

        return super()._apply(move, exclude_state)

    def update(self, total: Tensor, tokens: int | Tensor) -> None:
        """Add a batch: the quantity's sum over ``tokens`` tokens."""
        self.total += total.detach()
        self.tokens += tokens

    def compute(self) -> Tensor:
        """Mean per token, fp32, of the shape of the totals; NaN when there was no token."""
        return (self.total / self.tokens).float()


class SourceMeans(TokenMean):
    """Mean of a quantity per token for each of several sources, reduced over ranks together."""

    def __init__(self, names: Sequence[str]) -> None:
        Metric.__init__(self, dist_sync_fn=gather)
        self.names = tuple(names)
        self._add_states((len(names),))

    def update(self, per_token: Tensor, of_token: Tensor) -> None:  # type: ignore[override]
        """Add a batch.

        Args:
            per_token: quantity of each token, ``(n,)``.
            of_token: source of each token as an index into ``names``, ``(n,)``, int64.
        """
        self.total.index_add_(0, of_token, per_token.to(self.total.dtype))
        self.tokens.index_add_(0, of_token, torch.ones_like(of_token))

    def compute(self, present: Iterable[int] | None = None) -> dict[str, Tensor]:  # type: ignore[override]
        """Mean per token, scalar fp32, of each source that had tokens.

        Args:
            present: indices of those sources, of all ranks; None reads them from the device, for which the host waits.
        """
        means = (self.total / self.tokens).float()
        if present is None:
            present = self.tokens.nonzero().flatten().tolist()
        return {self.names[i]: means[i] for i in sorted(present)}


class BarMetrics:
    """Metrics of a step for the progress bar, for which the host does not wait for a GPU.

    With ``prog_bar=True`` Lightning reads them after each micro-batch. Values of a GPU are shown one step later, when
    they have reached the host; those of a CPU at once.
    """

    def __init__(self) -> None:
        self._before: dict[str, HostCopy] = {}

    def show(self, trainer: Trainer, metrics: Mapping[str, Tensor]) -> None:
        """Hand a step's metrics, scalars, to whatever bar the trainer has."""
        now = {name: HostCopy(value) for name, value in metrics.items()}
        is_on_gpu = any(value.device.type == "cuda" for value in metrics.values())
        for name, copy in ((self._before or now) if is_on_gpu else now).items():
            trainer.progress_bar_metrics[name] = float(copy.value())
        self._before = now


class ExpertLoad(OwnStateMetric):
    """Tokens of the busiest expert of a layer over the mean of its experts, for each layer; 1 where all are equal.

    Hooks before the experts count the tokens of training, on the device. A pass that recomputes activations is not
    counted: that of a step's last micro-batch comes after the step is logged, and would count into the next one.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        super().__init__(dist_sync_fn=gather)
        self.names = [f"layer_{re.findall(r'[0-9]+', layer.name)[0]}" for layer in layers]
        experts = max(layer.count for layer in layers)
        self.add_state("counts", torch.zeros(len(layers), experts, dtype=torch.int64), dist_reduce_fx="sum")
        self.experts = [layer.count for layer in layers]
        for layer_index, layer in enumerate(layers):
            layer.module.register_forward_pre_hook(partial(self._before_experts, layer_index), with_kwargs=True)
        self.reset()

    def reset(self) -> None:
        """Start again with zero tokens."""
        super().reset()
        # Counts of the other ranks are added: torchmetrics would warn on a pipeline stage that has no experts.
        self.update(0, torch.empty(0, dtype=torch.int64, device=self.counts.device))

    @classmethod
    def of(cls, base: nn.Module) -> "ExpertLoad | None":
        """Load of a model's experts; None for a model without layers of which it is known."""
        layers = [layer for layer in expert_layers(base) if isinstance(layer.holder, GroupedExperts)]
        return cls(layers) if layers else None

    def _before_experts(
        self, layer_index: int, experts: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]
    ) -> None:
        if experts.training and not torch_internals.is_in_backward():
            self.update(layer_index, (*args, *kwargs.values())[1])

    def update(self, layer_index: int, index: Tensor) -> None:
        """Count the tokens of a layer, by the indices of each token's experts, ``(tokens, k)``."""
        if (shared := lengths.shared()) is not None:  # each sample has its own
            index = index.index_select(0, shared.places)
        chosen = index.flatten()
        self.counts[layer_index].scatter_add_(0, chosen, torch.ones_like(chosen))  # bincount would wait for CUDA

    def compute(self) -> dict[str, Tensor]:
        """Ratio of each layer, scalar fp32; NaN without tokens."""
        experts = queued_copy(torch.tensor(self.experts), self.counts.device)
        ratios = self.counts.amax(1) * experts / self.counts.sum(1)
        return dict(zip(self.names, ratios.unbind(), strict=True))


class StageMetrics(nn.Module):
    """Mean loss of a stage and what is measured besides, losses of the data's sources, load of experts.

    Here the loss is a mean over supervised tokens, and perplexity and token accuracy are measured besides.
    """

    shown: ClassVar[Sequence[str]] = ()
    """What the progress shows besides the loss."""

    def __init__(self, has_router_loss: bool = False) -> None:
        super().__init__()
        self.loss = TokenMean()
        self.token_accuracy = TokenMean()
        self.router_aux_loss = TokenMean() if has_router_loss else None
        self.sources: SourceMeans | None = None
        self._present: set[int] | None = set()
        """Sources that have tokens, as the batches say of their windows; None where one of them does not say it."""
        self.expert_load: ExpertLoad | None = None
        self.on_bar: dict[str, Tensor] = {}
        """What ``shown`` names, of the last ``log``."""
        self._logged: set[str] = set()
        """Names of the means of the last ``log``."""

    @staticmethod
    def of_training(weights: TokenWeights | None, has_router_loss: bool) -> "StageMetrics":
        """Metrics of training, whose loss may weigh tokens."""
        return StageMetrics(has_router_loss) if weights is None else WeightedMetrics(weights, has_router_loss)

    def add(self, result: TokenLoss, batch: PackedBatch) -> None:
        """Add a packed batch.

        Raises:
            RecipeError: an own ``token_loss`` has returned something else.
        """
        if not isinstance(result, TokenLoss):
            raise RecipeError(
                f"token_loss has returned a {type(result).__name__}, and a lit_ft.packed_batch.TokenLoss is needed: "
                "the summed loss, the number of right predictions and the loss of each token"
            )
        self.loss.update(result.loss_sum, terms_of_mean(batch))
        losses, of_source = self._add_further(result, batch)
        if names := batch.get("source_names"):
            if self.sources is None or self.sources.names != tuple(names):
                with torch.inference_mode(False):  # as in reset
                    self.sources = SourceMeans(names).to(losses.device)
            self.sources.update(losses, batch[of_source])
            told = batch.get("window_sources")
            self._present = None if self._present is None or told is None else self._present.union(told)

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        """Add what else is measured of a batch; returns all terms of the loss, and which entry has their sources."""
        self.token_accuracy.update(result.correct, len(batch["targets"]))
        return result.per_token, "target_sources"

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        """What is logged besides the mean loss, by the names of metrics."""
        return {"perplexity": loss.exp(), "token_accuracy": self.token_accuracy.compute()}

    def _loads(self) -> dict[str, Tensor]:
        if self.expert_load is None:
            return {}
        loads, largest = self.expert_load.compute(), "expert_load_max_over_mean"
        of_layers = {f"{largest}/{name}": load for name, load in loads.items()}
        return {largest: torch.stack(list(loads.values())).max(), **of_layers}

    def _of_router(self) -> dict[str, Tensor]:
        return {} if self.router_aux_loss is None else {"router_aux_loss": self.router_aux_loss.compute()}

    def add_router_loss(self, loss: Tensor, tokens: int) -> None:
        """Add the router's auxiliary loss of a batch with ``tokens`` supervised tokens."""
        assert self.router_aux_loss is not None, "the metrics were made with a router loss"
        self.router_aux_loss.update(loss * tokens, tokens)

    def _means(self, loss: Tensor) -> dict[str, Tensor]:
        further = self._further_means(loss)
        sources = {} if self.sources is None else self.sources.compute(self._present)
        of_sources = {f"loss/{name}": mean for name, mean in sources.items()}
        return {"loss": loss, **further, **self._of_router(), **of_sources, **self._loads()}

    def log(self, module: LightningModule, prefix: str, prog_bar: bool = False) -> Tensor:
        """Log the means and start again with zero tokens; returns the mean loss, a scalar.

        Args:
            module: module that logs.
            prefix: first part of the logged names.
            prog_bar: whether Lightning hands what is shown to the progress bar; it reads it after each micro-batch.
        """
        with gathered_together([metric for metric in self.children() if isinstance(metric, OwnStateMetric)]):
            loss = self.loss.compute()
            means = self._means(loss)
        for name, mean in means.items():
            module.log(f"{prefix}/{name}", mean, prog_bar=prog_bar and name in ("loss", *self.shown))
        self.on_bar = {f"{prefix}/{name}": means[name] for name in self.shown if name in means}
        if absent := self._logged.difference(means):
            forget_logged_values(module.trainer, {f"{prefix}/{name}" for name in absent})
        self._logged = set(means)
        for metric in self.children():
            metric.reset()  # type: ignore[operator]
        self._present = set()
        return loss


class WeightedMetrics(StageMetrics):
    """The same of a training whose tokens have weights in the loss, and the mean of their cross-entropy itself."""

    shown = ("cross_entropy",)

    def __init__(self, weights: TokenWeights, has_router_loss: bool = False) -> None:
        super().__init__(has_router_loss)
        self.weights = weights
        self.cross_entropy = TokenMean()

    def _add_further(
        self, result: TokenLoss, batch: PackedBatch
    ) -> tuple[Tensor, Literal["target_sources", "pair_sources"]]:
        per_token, of_source = super()._add_further(result, batch)
        self.cross_entropy.update(per_token.sum(), len(batch["targets"]))
        return self.weights.of(per_token) * per_token, of_source

    def _further_means(self, loss: Tensor) -> dict[str, Tensor]:
        cross_entropy = self.cross_entropy.compute()
        return {"cross_entropy": cross_entropy, **super()._further_means(cross_entropy)}

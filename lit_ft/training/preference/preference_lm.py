"""The LightningModule of preference tuning."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.evaluation.evaluation_side_effects import evaluating
from lit_callbacks.phases import within_a_step
from torch import Tensor

from lit_ft.errors import RecipeError, check_types
from lit_ft.internals.lightning import gives_weights_back
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.process import datamodule_of
from lit_ft.protocols import Checkpoint, GivesPairs
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.loss.token_cross_entropy import LossOf
from lit_ft.training.preference.metrics import NAMES, PairMetrics
from lit_ft.training.preference.objectives import DPO, Objective, check_objective
from lit_ft.training.preference.pairs import answer_log_probs, loss_before_training, loss_of_pairs, with_reference
from lit_ft.training.preference.reference import ReferenceLogProbs
from lit_ft.training.saved_state import trained_on


class PreferenceLM(CausalLM):
    """Fine-tune a causal language model on better and worse answers: DPO, IPO, SimPO, ORPO, KTO.

    It takes data of the format ``preference``, pairs of answers, and with KTO also of ``unpaired_preference``, of which
    each sample is a pair that lacks one answer. The loss is the mean over the pairs of the whole optimizer step.
    Objectives that compare the model with a reference take it as it is when the run begins, with a given adapter: its
    log-probabilities are computed once, before the first step, and saved in checkpoints.

    Logged: ``{train,val,test}/{loss,reward_accuracy,reward_margin,reward_chosen,reward_rejected,log_prob_chosen,
    log_prob_rejected}``, means over pairs (``metrics.NAMES``), with KTO also ``kl``, and otherwise what ``CausalLM``
    logs, without perplexity and token accuracy.
    """

    measured: Sequence[str] = NAMES
    option = "model.objective"
    """Option that says by what loss it trains."""

    def __init__(self, pretrained: str, objective: Objective | None = None, **kwargs: Any) -> None:
        """Say what is trained and how.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder with config.json, weights and tokenizer.
            objective: loss of a pair, by class_path: lit_ft.DPO, lit_ft.IPO, lit_ft.SimPO, lit_ft.ORPO,
                lit_ft.KTO, or your own lit_ft.training.preference.objectives.Objective. null is DPO.
            **kwargs: the other options of ``CausalLM``.
        """
        check_types("model", PreferenceLM.__init__, {"objective": objective})
        super().__init__(pretrained, **kwargs)
        if self.spec.token_weights is not None:
            raise RecipeError(
                f"model.token_weights={self.spec.token_weights!r} with {type(self).__name__}, where the loss of a pair "
                "is the objective's; leave token_weights out"
            )
        self.objective = objective or DPO()
        check_objective(self.objective)
        has_router_loss = self.spec.router_aux_loss is not None
        self.train_metrics = PairMetrics(self.objective, has_router_loss, self.measured)
        self.val_metrics, self.test_metrics = (PairMetrics(self.objective, False, self.measured) for _ in range(2))
        self._reference = ReferenceLogProbs()
        self._divergence: dict[str, Tensor] = {}
        """Scalar, fp32, by split: of the optimizer step, or of the set."""
        if self.needs_divergence:
            self.measured = (*NAMES, "kl")

    @property
    def needs_divergence(self) -> bool:
        """Whether the objective needs the divergence from the reference, which further forward passes give."""
        return self.objective.needs_divergence

    @property
    def takes_unpaired(self) -> bool:
        """Whether the objective has a loss of a pair of which one answer is missing."""
        return self.objective.takes_unpaired

    @property
    def scores_texts(self) -> bool:
        """Whether whole conversations have a score, and not the tokens of answers a probability."""
        return self.spec.base.head == "score"

    def describe_objective(self) -> str:
        """Text on what answers train it, and by which objective."""
        what = "better and worse answers" if self.takes_unpaired else "pairs of a better and a worse answer"
        return f"{what} by `{self.objective!r}`"

    def setup(self, stage: str) -> None:
        """Refuse data that is no pairs."""
        super().setup(stage)
        self.check_data(datamodule_of(self._trainer), stage)
        self._reference.begin()

    def check_data(self, data: object, stage: str) -> None:
        """Refuse data that is no pairs; see ``ChecksData``."""
        if stage in ("fit", "validate", "test") and not (isinstance(data, GivesPairs) and data.has_pairs):
            judged = ", or unpaired_preference (rows of prompt, completion, label)," if self.takes_unpaired else ""
            raise RecipeError(
                f"{type(self).__name__} trains on {self.describe_objective()}, and the data holds none; set "
                f"data.format=preference (rows of prompt, chosen, rejected){judged} in a lit_ft.TextDataModule, or "
                "train on single answers with lit_ft.CausalLM"
            )
        has_single = isinstance(data, GivesPairs) and data.is_unpaired
        if stage != "predict" and has_single and not self.takes_unpaired:
            raise RecipeError(
                f"{self.option}: {self.objective!r} compares two answers to a prompt, and the data has single ones "
                "(data.format=unpaired_preference); give rows of prompt, chosen and rejected (data.format=preference), "
                "or take lit_ft.PreferenceLM with model.objective lit_ft.KTO"
            )

    # --- step ------------------------------------------------------------------------------------

    def token_loss(self, hidden: Tensor, batch: PackedBatch) -> TokenLoss:
        """Summed loss of a batch's pairs, from its final hidden states ``(1, T, H)``; cross-entropy of other texts."""
        if "pairs" not in batch:  # of `text_loss`
            return super().token_loss(hidden, batch)
        return self._packed.token_loss(hidden, batch, loss_of_pairs(self.objective, batch))

    def _initial_loss(self, batch: PackedBatch) -> LossOf | None:
        return loss_before_training(self.objective, batch)

    def training_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Part of the step's mean loss over pairs."""
        return super().training_step(self._with_reference(batch, "train"), batch_idx)

    def validation_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into the means of val."""
        super().validation_step(self._with_reference(batch, "val"), batch_idx)

    def test_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into the means of test."""
        super().test_step(self._with_reference(batch, "test"), batch_idx)

    def _with_reference(self, batch: PackedBatch | Mapping[str, Tensor], split: str) -> PackedBatch:
        packed = self._packed.as_packed_batch(batch)
        known = self._reference.of(split, packed["pairs"]) if self.objective.needs_reference else None
        return with_reference(packed, known, self._divergence.get(split))

    def _record(self, record: Callable[..., None], result: TokenLoss, batch: PackedBatch) -> None:
        losses = self.objective.losses(*answer_log_probs(result.per_token, batch))
        record(batch["sample_ids"], losses, [1] * len(batch["sample_ids"]), batch["sample_sources"])

    # --- reference -------------------------------------------------------------------------------

    def on_train_start(self) -> None:
        """Compute the reference's log-probabilities, unless a checkpoint has them."""
        super().on_train_start()
        if self.objective.needs_reference and gives_weights_back(self.trainer.strategy):
            rank_zero_warn(
                "trainer.strategy: the processes that it starts give back the trained weights, and not the reference; "
                "`validate` of this module would take the trained weights for it. Read the validation of the fit, or "
                "give `validate` a new module and a checkpoint"
            )
        self._prepare_reference("train")
        if self.trainer.limit_val_batches:  # Lightning may open the data only epochs later, with other weights
            self._prepare_reference("val")
        self._reference.is_of_start = False
        self._divergence.pop("train", None)

    def on_validation_start(self) -> None:
        """The same of the validation data, before the sanity check or in `validate`."""
        super().on_validation_start()
        self._prepare_reference("val")
        of_sanity_check = self.trainer.sanity_checking
        self._estimate("val", self.trainer.num_sanity_val_batches if of_sanity_check else self.trainer.num_val_batches)

    def on_test_start(self) -> None:
        """The same of the test data, in `test`."""
        super().on_test_start()
        self._prepare_reference("test")
        self._estimate("test", self.trainer.num_test_batches)

    def _prepare_reference(self, split: str) -> None:
        data = datamodule_of(self.trainer)
        assert isinstance(data, GivesPairs), "setup has refused other data"
        if self.objective.needs_reference:
            self._reference.prepare(self.trainer, self, data, split, self.needs_divergence)

    # --- divergence ------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Estimate the divergence at the first micro-batch of an optimizer step."""
        super().on_train_batch_start(batch, batch_idx)
        if not self.needs_divergence:
            return
        mismatched = cast(PackedBatch, batch).get("window_mismatched")
        if mismatched is not None:
            with self.apart_from_training(), within_a_step(self.trainer, self, "forward"), torch.no_grad():
                self.eval()
                self._divergence["train"] = self._reference.divergence(self.trainer, self, "train", mismatched)

    def _estimate(self, split: str, limits: Sequence[int | float]) -> None:
        """Estimate the divergence over the batches of a validation or a test, within the limits of its loaders."""
        if not self.needs_divergence or self._reference.is_of_start:  # 0: it is its reference
            return
        data = datamodule_of(self.trainer)
        assert isinstance(data, GivesPairs), "setup has refused other data"
        pairs = data.pairs(split)
        assert pairs is not None, "there is what is validated"
        batches = (self.trainer.strategy.batch_to_device(batch) for batch in islice(pairs.loader, int(sum(limits))))
        mismatched = (one for batch in batches for one in batch["window_mismatched"])
        with evaluating(self.trainer, self):
            found = self._reference.divergence(self.trainer, self, split, mismatched, pairs.indices)
        self._divergence[split] = found

    # --- save ------------------------------------------------------------------------------------

    def describe_training(self) -> str:
        """Text on whose answers train it, and by what; see ``DescribesTraining``."""
        return self.describe_objective()

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the reference's log-probabilities: no resumed run could compute them."""
        super().on_save_checkpoint(checkpoint)
        checkpoint["reference_log_probs"] = self._reference.known

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Take over the reference's log-probabilities.

        Raises:
            RecipeError: the objective needs them, and the checkpoint was trained by one that does not.
        """
        self._reference.known = checkpoint.get("reference_log_probs", {})
        if self.objective.needs_reference and not self._reference.known:
            raise RecipeError(
                f"{self.option}: {self.objective!r} compares the model with what it was before training, which the "
                f"checkpoint does not know: it was trained on {trained_on(checkpoint)}. Go on with that, or begin a "
                "new run from what it has trained (model.adapter, or its merged model as model.pretrained)"
            )
        super().on_load_checkpoint(checkpoint)
        self._reference.is_of_start = False

"""The LightningModule of distillation."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from lit_callbacks.phases import within_a_step
from torch import Tensor
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.errors import RecipeError, check_types
from lit_ft.model.loading import Dtype, dtype_name
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.distillation.divergences import Divergence, ForwardKL, check_divergence
from lit_ft.training.distillation.metrics import DistillationMetrics
from lit_ft.training.distillation.teacher import Teacher
from lit_ft.training.distillation.teacher_loss import TeacherLoss


class DistillationLM(CausalLM):
    """Fine-tune a causal language model on the probabilities of another one, its teacher, over the answers of the data.

    It takes the data of supervised training. The loss is the mean over the supervised tokens of the whole optimizer
    step of the divergence from the teacher, over the whole vocabulary, or of a mixture with their cross-entropy.

    Logged: ``{train,val,test}/divergence``, and otherwise what ``CausalLM`` logs; ``{val,test}/loss`` is the
    cross-entropy of the known answers, ``train/{cross_entropy,perplexity}`` are there where it has a part in the loss.
    """

    measured: Sequence[str] = ("divergence", "token_accuracy", "val/perplexity", "test/perplexity")
    measured_of_known = "train/cross_entropy", "train/perplexity"
    """What is measured besides where the cross-entropy of known answers has a part in the loss."""

    def __init__(
        self,
        pretrained: str,
        teacher: str | None = None,
        divergence: Divergence | None = None,
        kd_ratio: float = 1.0,
        teacher_dtype: Dtype = "auto",
        teacher_quantization: QuantizationConfigMixin | None = None,
        shard_teacher: bool = False,
        **kwargs: Any,
    ) -> None:
        """Say what is trained, by which teacher.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder with config.json, weights and tokenizer.
            teacher: model whose probabilities are learned, a hub id or a folder, with the same tokenizer. It is not
                trained, and is in no checkpoint.
            divergence: from the teacher, by class_path: lit_ft.ForwardKL, lit_ft.ReverseKL, lit_ft.JensenShannon, or
                your own lit_ft.training.distillation.divergences.Divergence. null is ForwardKL.
            kd_ratio: part of the divergence in the loss, above 0, up to 1; the rest is the answers' cross-entropy.
            teacher_dtype: of the teacher's weights; auto is what its config says.
            teacher_quantization: quantize the teacher while reading it, a transformers config by class_path.
            shard_teacher: let all ranks share the teacher's layers, each of which is gathered when it computes (FSDP);
                false leaves it whole on each rank, which is faster where it fits.
            **kwargs: the other options of ``CausalLM``.
        """
        teacher_dtype = dtype_name(teacher_dtype)
        check_types("model", DistillationLM.__init__, {k: v for k, v in locals().items() if k != "kwargs"})
        super().__init__(pretrained, **kwargs)
        name = _checked(teacher, kd_ratio)
        if self.spec.token_weights is not None:
            raise RecipeError(
                f"model.token_weights={self.spec.token_weights!r} with {type(self).__name__}, whose loss of a token is "
                "that of the teacher's probabilities; leave token_weights out"
            )
        self.divergence, self.kd_ratio = divergence or self._default_divergence(), kd_ratio
        check_divergence(self.divergence)
        of_teacher = ModelSpec(name, name, dtype=teacher_dtype, quantization=teacher_quantization)
        self.teacher = Teacher(of_teacher, shard_teacher)
        self._is_teacher_checked = False
        if kd_ratio < 1:
            self.measured = (*self.measured, *self.measured_of_known)
        has_router_loss = self.spec.router_aux_loss is not None
        self.train_metrics: DistillationMetrics = DistillationMetrics(has_router_loss)
        self.val_metrics: DistillationMetrics = DistillationMetrics()
        self.test_metrics: DistillationMetrics = DistillationMetrics()

    @staticmethod
    def _default_divergence() -> Divergence:
        return ForwardKL()

    def check_teacher(self) -> None:
        """Find what is wrong with the teacher before weights are read; see ``LearnsFromTeacher``."""
        self.teacher.check(self.tokenizer)
        self._is_teacher_checked = True

    def teacher_bytes(self, ranks: int) -> int:
        """Bytes of the teacher's weights on each of some ranks; see ``LearnsFromTeacher``."""
        return self.teacher.weight_bytes(ranks)

    def check_length(self, what: str, length: int | None) -> None:
        """Refuse samples of more tokens than one of the models has positions; see ``LimitsLengths``."""
        super().check_length(what, length)
        if self._is_teacher_checked or (self._trainer is not None and not self.trainer.predicting):
            self.teacher.check_length(what, length)

    def setup(self, stage: str) -> None:
        """Check the teacher, unless ``check_teacher`` was called."""
        super().setup(stage)
        self.teacher.free()  # of a run that has failed, whose ranks no longer share it
        if stage != "predict" and not self._is_teacher_checked:
            self.check_teacher()

    def teardown(self, stage: str) -> None:
        """Give the teacher's memory back."""
        super().teardown(stage)
        self.teacher.free()

    # --- step ------------------------------------------------------------------------------------

    def on_after_batch_transfer(
        self, batch: PackedBatch | Mapping[str, Tensor], dataloader_idx: int
    ) -> PackedBatch | Mapping[str, Tensor]:
        """Add what the teacher finds of a batch's targets."""
        if self.trainer.predicting:
            return batch
        return self._with_teacher(self._packed.as_packed_batch(batch), self.kd_ratio)

    def _with_teacher(self, batch: PackedBatch, ratio: float) -> PackedBatch:
        """A packed batch with the teacher's hidden states; ``ratio`` is its part in the loss of training."""
        self.teacher.load(self.device)
        with within_a_step(self.trainer, self, "forward"):
            hidden = self.teacher.hidden_states(batch)
        return {**batch, "target_teacher": hidden, "teacher_ratio": ratio if self.trainer.training else 0.0}

    def token_loss(self, hidden: Tensor, batch: PackedBatch) -> TokenLoss:
        """Summed loss by the teacher, from final hidden states ``(1, T, H)``; cross-entropy where it has no part."""
        if "target_teacher" not in batch:
            return super().token_loss(hidden, batch)
        loss_of = TeacherLoss(self.teacher, batch["target_teacher"], self.divergence, batch["teacher_ratio"])
        result = self._packed.token_loss(hidden, batch, loss_of)
        self._metrics_of_stage().divergence.update(loss_of.total, len(batch["targets"]))
        return result

    def _metrics_of_stage(self) -> DistillationMetrics:
        if self.trainer.training:
            return self.train_metrics
        return self.test_metrics if self.trainer.testing else self.val_metrics

    def describe_teacher(self) -> str:
        """Text on the teacher, and how far it counts; see ``LearnsFromTeacher``."""
        known = f", {self.kd_ratio:g} of the loss" if self.kd_ratio < 1 else ""
        return f"{self.divergence!r} from {self.teacher.spec.pretrained}{known}"

    def describe_objective(self) -> str:
        """Text on what answers train it, and by which teacher."""
        return f"the answers of the data by {self.describe_teacher()}"

    def describe_training(self) -> str:
        """Text on whose answers train it, and by what; see ``DescribesTraining``."""
        return self.describe_objective()


def _checked(teacher: str | None, kd_ratio: float) -> str:
    """Name of the teacher.

    Raises:
        RecipeError: there is none, or it has no part in the loss.
    """
    if not teacher:
        raise RecipeError(
            "model.teacher is not set; name the model whose probabilities are learned, e.g. "
            "Qwen/Qwen2.5-7B-Instruct for a student of Qwen2.5-0.5B"
        )
    if not 0 < kd_ratio <= 1:
        raise RecipeError(
            f"model.kd_ratio={kd_ratio} must be above 0 and up to 1, the part of the teacher in the loss; without "
            "one take model.class_path=lit_ft.CausalLM"
        )
    return os.path.expanduser(teacher)

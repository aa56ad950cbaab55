"""The LightningModule: a Hugging Face causal LM with any PEFT method, or trained in full.

It knows no strategy. What a step computes is in ``steps``.
"""

import os
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.accumulation import accumulation, optimizer_steps, warn_of_least_steps
from lit_ft.checkpointing.resume import number_logged_steps
from lit_ft.checkpointing.storage.checkpoint_io import WeightCount
from lit_ft.errors import check_counts, check_types
from lit_ft.internals.lightning import place_logged_values
from lit_ft.internals.peft import virtual_tokens
from lit_ft.model.architecture import Decoder
from lit_ft.model.config.positions import check_positions
from lit_ft.model.files.fingerprint import Fingerprint, write_fingerprint
from lit_ft.model.isolation import architectures
from lit_ft.model.loading import Dtype, Init, dtype_name
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.protocols import Checkpoint
from lit_ft.training.answering import AnsweringModule
from lit_ft.training.float32 import tensors
from lit_ft.training.loss import cuda_graphs
from lit_ft.training.loss.router_loss import RouterAuxLoss
from lit_ft.training.loss.token_weights import TokenWeights
from lit_ft.training.metrics import ExpertLoad, StageMetrics
from lit_ft.training.optimizers.configure import configure_optimizers, match_options, optimizer_and_schedules
from lit_ft.training.optimizers.lost_steps import warn_of_lost_steps
from lit_ft.training.optimizers.schedule_free import ScheduleFreeModule
from lit_ft.training.saved_state import SavedState
from lit_ft.training.spec import TrainingSpec, batches_for_init
from lit_ft.training.steps.evaluation_steps import EvaluationStepsModule
from lit_ft.training.steps.metric_schedules import MetricSchedulesModule
from lit_ft.training.steps.training_steps import TrainingStepsModule
from lit_ft.tuning import lora_init, method_hooks
from lit_ft.tuning.adapters import adapter_files
from lit_ft.tuning.lora_init import LoraInitState
from lit_ft.tuning.spec import TuningSpec
from lit_ft.tuning.targets import experts


class CausalLM(AnsweringModule, EvaluationStepsModule, TrainingStepsModule, MetricSchedulesModule, ScheduleFreeModule):
    """Fine-tune a causal language model.

    Logged: ``{train,val,test}/{loss,perplexity,token_accuracy}``, means over supervised tokens (train: of one optimizer
    step over all ranks; val and test: of the whole set), ``.../loss/<source>`` where the data has several sources,
    ``train/grad_norm``, ``train/learning_rate``, ``train/router_aux_loss`` (without its factor),
    ``train/padding_share`` with ``pad_rows_to``, ``train/cross_entropy`` with ``token_weights``, and
    ``train/expert_load_max_over_mean``, of each layer and the largest of all, with experts (``metrics.ExpertLoad``).
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        added_tokens: list[str] | None = None,
        added_special_tokens: list[str] | None = None,
        init: Init = "pretrained",
        dtype: Dtype = "auto",
        attn_implementation: str = "auto",
        config_overrides: dict[str, object] | None = None,
        peft: PeftConfig | None = None,
        adapter_dtype: Literal["float32", "auto"] = "float32",
        trainable: list[str] | None = None,
        lr_factors: dict[str, float] | None = None,
        no_weight_decay: list[str] | None = None,
        quantization: QuantizationConfigMixin | None = None,
        gradient_checkpointing: bool | Literal["selective"] = False,
        activation_offload: bool = False,
        compile: bool | str = False,
        pad_rows_to: int | None = None,
        cuda_graphs: bool = False,
        liger: bool = False,
        fused_lora: bool = True,
        init_rows: int = lora_init.DEFAULT_ROWS,
        neftune_alpha: float | None = None,
        router_aux_loss: RouterAuxLoss = None,
        token_weights: TokenWeights | None = None,
        max_new_tokens: int = 256,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        adapter: str | None = None,
    ) -> None:
        """Say what is trained and how.

        Args:
            pretrained: base model, a Hugging Face hub id or a folder with config.json, weights and tokenizer.
            tokenizer: hub id or folder, in place of the base model's own.
            added_tokens: new tokens, in spare rows of the embeddings, which grow where there are too few; they train.
            added_special_tokens: the same, left out where answers are decoded.
            init: pretrained reads the weights; random draws them (config.json and a tokenizer are enough).
            dtype: of the base's weights; auto is what its config says. float32 for full fine-tuning.
            attn_implementation: auto is lit_ft's packed attention; or sdpa, eager, flash_attention_2, ...
            config_overrides: values merged into those of config.json, e.g. {rope_parameters: {rope_type: yarn, factor:
                4.0}} for four times as many positions.
            peft: tuning method, any PEFT config by class_path; null trains all weights.
            adapter_dtype: of the weights that peft adds; auto is the base's dtype.
            trainable: without peft, train only the weights whose names match one of these regular expressions, e.g.
                ["layers.2[0-3].", norm]; the others are frozen.
            lr_factors: factors on the learning rate, by regular expressions for names of weights; the first that
                matches counts. {lora_B: 16} is LoRA+ (Hayou et al. 2024, arXiv:2402.12354).
            no_weight_decay: weights that weight decay leaves alone, by regular expressions for their names.
                ["norm|bias"] are those that transformers' Trainer leaves alone; null lets all decay.
            quantization: quantize the frozen base while reading it, a transformers config by class_path.
            gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time;
                selective keeps the results of matrix products and attention: some more memory, little more time.
            activation_offload: keep activations in the host's memory until the backward pass; with
                gradient_checkpointing only what it keeps, the layers' inputs. For CUDA.
            compile: let torch.compile fuse each decoder layer, for rows of any length; the first steps take a minute. A
                name is that of a mode or of another backend.
            pad_rows_to: compute packed batches with a multiple of this many tokens, e.g. 256, filled up by a sample
                that predicts nothing, so that CUDA graphs are recorded for few numbers of tokens.
            cuda_graphs: record all layers' kernels once for each shape of a batch, and launch them together: for small
                models on short rows, where a GPU waits for launches. Needs pad_rows_to. For CUDA.
            liger: compute norms, rotary embeddings and MLPs with Liger's kernels (extra `liger`). For CUDA.
            fused_lora: compute plain LoRA on linear layers in one function, with products in the base's dtype and the
                adapter's weights in theirs; false leaves it to PEFT, which computes all other methods and variants.
            init_rows: micro-batches of training data that inits of LoRA look at (EVA, CorDA, LoRA-GA).
            neftune_alpha: noise on embeddings in training, e.g. 5; null for none (Jain et al. 2023, arXiv:2310.05914).
            router_aux_loss: factor on the loss that keeps the experts of a mixture-of-experts model equally busy, or
                config, its router_aux_loss_coef; null leaves it out. Each micro-batch has that of all its tokens, as
                transformers does; micro-batches count by their supervised tokens, or pairs. train/loss is without it.
            token_weights: weights of tokens in the training loss by class_path: lit_ft.DFT weighs a token by its
                probability (Wu et al. 2025, arXiv:2508.05629); null weighs all alike.
            max_new_tokens: longest answer of `predict`, in tokens.
            optimizer: of the trainable parameters; a recipe gives it at the top level; null is AdamW with lr 1e-4.
            lr_scheduler: makes the schedule from the optimizer; a recipe gives it at the top level.
            adapter: folder of an adapter that was trained before, here or by another trainer, to go on with; it has its
                config, so that peft is null.
        """
        super().__init__()
        dtype = dtype_name(dtype)
        check_types("model", CausalLM.__init__, locals())
        check_counts("model", init_rows=init_rows, max_new_tokens=max_new_tokens)
        new = added_tokens or [], added_special_tokens or []
        pretrained, tokenizer = (os.path.expanduser(name) for name in (pretrained, tokenizer or pretrained))
        base = ModelSpec(pretrained, tokenizer, *new, init, dtype, attn_implementation, quantization, config_overrides)
        tuning = TuningSpec.of(peft, adapter_dtype, trainable, adapter)
        lora_init.check_rows(init_rows, tuning.peft)
        passes = gradient_checkpointing, activation_offload, compile, pad_rows_to, cuda_graphs, liger, fused_lora
        self.spec = TrainingSpec(base, tuning, *passes, neftune_alpha, router_aux_loss, token_weights)
        self.init_rows, self.max_new_tokens = init_rows, max_new_tokens
        self.lr_factors, self.no_weight_decay = lr_factors or {}, no_weight_decay or []
        self.optimizer, self.lr_scheduler = optimizer or partial(torch.optim.AdamW, lr=1e-4), lr_scheduler
        self.model: PreTrainedModel | PeftModel | None = None
        self.start: LoraInitState | None = None
        """What the adapter's init found in an earlier run, where it is not to be done again."""
        self.weight_count: WeightCount | None = None
        """Of the whole model, once it is built."""
        self.expert_notes: list[str] = []
        """Lines about experts and routers, once the model is built; none for a dense model."""
        self._is_checked = False
        self.train_metrics = StageMetrics.of_training(token_weights, has_router_loss=router_aux_loss is not None)
        self.strict_loading = False  # a checkpoint holds what trains; on_load_checkpoint is strict in its place

    # --- configure -------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer with the added tokens; saved beside adapter and merged model."""
        return self.spec.base.tokenizer

    @cached_property
    def base_fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the frozen base; None where all weights train, so that checkpoints hold everything."""
        return self.spec.fingerprint()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get gradients, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def check(self) -> PreTrainedModel | PeftModel:
        """Model as it will be trained, on the meta device, after checks of everything but the weights' values.

        Raises:
            RecipeError: config, tokenizer or tuning method do not fit.
        """
        skeleton = self.spec.check(self.start, self._device_of_run())
        trains = [f"model.{name}" for name, p in skeleton.named_parameters() if p.requires_grad]
        match_options(trains, self.lr_factors, self.no_weight_decay)
        self._is_checked = True
        return skeleton

    def check_length(self, what: str, length: int | None) -> None:
        """Refuse samples of more tokens than the model has positions; see ``LimitsLengths``."""
        name, virtual = f"model.pretrained={self.spec.base.pretrained!r}", virtual_tokens(self.spec.tuning.peft)
        check_positions(self.spec.base.config, length, what, name, virtual_tokens=virtual)

    def setup(self, stage: str) -> None:
        """Check a method that fits some bases only, unless ``check`` was called."""
        super().setup(stage)
        if self.model is None and self.spec.tuning.fits_some_bases and not self._is_checked:
            self.check()

    def configure_model(self) -> None:
        """Build the model; Lightning calls it once the strategy is ready."""
        if self.model is None:
            if self._trainer is not None:
                architectures.check_precision(self.spec.base.config, str(self._trainer.precision))
                if self.spec.cuda_graphs:
                    cuda_graphs.check_strategy(self._trainer.strategy)
            of_init = partial(batches_for_init, self._trainer, self.init_rows), self._initial_loss
            self._packed, self.start = self.spec.build(self.start, self._device_of_run(), *of_init)
            self.model = self._packed.model
            if self._trainer is not None and self._trainer.precision == "64-true":
                self.model.double()  # Lightning does so after it has read a checkpoint's weights into these
            self.weight_count = WeightCount.of(self.model)
            self.expert_notes = experts.describe(self._packed.base, self.spec.router_aux_loss is not None)
            if not self.spec.compile and not self.spec.cuda_graphs:  # which have no place for hooks
                self.train_metrics.expert_load = ExpertLoad.of(self._packed.base)
            saved = self.start, self.base_fingerprint, self.spec.base.form(), self.spec.token_weights
            self._state = SavedState(self, self._packed, *saved)

    def _device_of_run(self) -> torch.device | None:
        return None if self._trainer is None else self._trainer.strategy.root_device

    # --- step ------------------------------------------------------------------------------------

    def forward(self, batch: PackedBatch | Mapping[str, Tensor]) -> TokenLoss:
        """Summed loss and number of right predictions over a batch's supervised tokens."""
        packed = self.packed(batch)
        return self.token_loss(self.hidden_states(packed), packed)

    def hidden_states(self, batch: PackedBatch, decoder: Decoder | None = None) -> Tensor:
        """Final hidden states of a batch's tokens, ``(1, T, H)``; ``decoder`` replaces the base model's."""
        return self._packed.hidden_states(batch, decoder)

    def token_loss(self, hidden: Tensor, batch: PackedBatch) -> TokenLoss:
        """Summed loss and number of right predictions, from a batch's final hidden states ``(1, T, H)``."""
        return self._packed.token_loss(hidden, batch, self.spec.token_weights if self.training else None)

    # --- optimize --------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer over the trainable parameters, and the schedule; by now, the strategy has cast the weights."""
        tensors.warn_of_rounded(self._packed.base)
        groups = self.lr_factors, self.no_weight_decay
        made = configure_optimizers(self, self.optimizer, self.lr_scheduler, *groups, self._state.shapes)
        optimizer, schedules = optimizer_and_schedules(made)
        warn_of_lost_steps(optimizer, self.trainer.strategy)
        self._state.name_parameters(optimizer, schedules)
        return made

    def on_train_start(self) -> None:
        """Check the run's length against other options; accumulate as scheduled from the first step on."""
        super().on_train_start()
        self._state.take_options_of_recipe(self.trainer)
        method_hooks.check_schedule(self.model, optimizer_steps(self.trainer))
        warn_of_least_steps(self.trainer)
        self.trainer.accumulate_grad_batches = accumulation(self.trainer)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        """Number the logged step; validate again where a resumed run has trained again what it had trained before."""
        super().on_train_batch_start(batch, batch_idx)
        number_logged_steps(self.trainer)
        place_logged_values(self.trainer)
        self._state.end_replay(self.trainer, batch_idx)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: torch.optim.Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], object] | None = None,
    ) -> None:
        """Take the step; the tuning method may look at its gradients before they are gone."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        method_hooks.after_optimizer_step(self.model, self.trainer.global_step + 1)

    def on_fit_end(self) -> None:
        """Leave the trainer as it was given, where nothing was left to train on."""
        self._state.end_replay(self.trainer)

    # --- save ------------------------------------------------------------------------------------

    def save_adapter(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the adapter for ``PeftModel.from_pretrained`` on the base as it is published.

        ``state_dict`` has the weights that train, by their names in ``model``; None takes them from there.

        Raises:
            NotFinite: a weight is not finite.
        """
        assert isinstance(self.model, PeftModel), "the model has an adapter"
        adapter_files.save(self.model, self.check, self.start, bool(self.spec.base.added_ids), folder, state_dict)
        if self.base_fingerprint is not None:
            write_fingerprint(self.base_fingerprint, folder, self.spec.base.form())

    def on_save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Keep the trainable weights only: the frozen base is where it came from.

        Raises:
            NotFinite: the weights, or the last step's loss or gradient norm, are not finite.
        """
        super().on_save_checkpoint(checkpoint)
        self._state.write(checkpoint)

    def on_load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Refuse a checkpoint of another model, or of a base that has changed since."""
        super().on_load_checkpoint(checkpoint)
        self._state.read(checkpoint, self._trainer)

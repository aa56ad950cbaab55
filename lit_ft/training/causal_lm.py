"""The LightningModule: a Hugging Face causal LM with any PEFT method, or trained in full.

It knows no strategy. One rule holds everywhere: the loss of an optimizer step is the mean over the
supervised tokens of all its micro-batches and ranks (``losses.loss_weight``).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import move_data_to_device
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft import process
from lit_ft.accumulation import accumulation, optimizer_steps
from lit_ft.checkpointing.buffers import BufferWatch
from lit_ft.checkpointing.resume import Replay, go_back_to_a_step, number_logged_steps
from lit_ft.checkpointing.storage.checkpoint_io import Shapes, WeightCount, check_fit, shapes_of, trainable_shapes
from lit_ft.errors import RecipeError
from lit_ft.gradient_norm import GradientNorm, clip, gradient_norm, with_gradients
from lit_ft.model import deferred_cast, embeddings, loading, rotary_embedding
from lit_ft.model import liger_kernels as liger
from lit_ft.model import quantization as quantized_base
from lit_ft.model.activations import checkpointing as activation_checkpointing
from lit_ft.model.activations import offload as activation_offload
from lit_ft.model.files import size_check
from lit_ft.model.files.fingerprint import Fingerprint, check_same_base, fingerprint, write_fingerprint
from lit_ft.model.files.finite_weights import not_finite
from lit_ft.model.files.weight_files import check_weight_files
from lit_ft.model.generation import generate_answers
from lit_ft.model.packed_attention import block_masks
from lit_ft.model.render_limits import render_chat
from lit_ft.packed_batch import PackedBatch, TokenLoss, as_packed_batch, pack_samples
from lit_ft.training import router_loss
from lit_ft.training.finite import FiniteCheck, NotFinite, check_trained_weights
from lit_ft.training.metrics import SourceMeans, TokenMean
from lit_ft.training.optimizers.configure import configure_optimizers
from lit_ft.training.optimizers.schedule_free import ScheduleFreeModule
from lit_ft.training.router_loss import RouterAuxLoss
from lit_ft.training.token_cross_entropy import loss_weight, token_cross_entropy, tokens_per_chunk
from lit_ft.tuning import compatibility, lora_init, method_hooks, prompt_learning, wrapping
from lit_ft.tuning.lora_init import LoraInitState

_ISOLATING_LAYERS = {"full_attention", "sliding_attention"}


class CausalLM(ScheduleFreeModule):
    """Fine-tune a causal language model.

    Logged: ``{train,val,test}/{loss,perplexity,token_accuracy}``, each a mean over supervised tokens
    (train: of one optimizer step over all ranks; val and test: of the whole set), ``.../loss/<source>`` where
    the data has several sources (train: of those in the step), and ``train/grad_norm``, ``train/learning_rate``,
    ``train/router_aux_loss`` (without its factor).
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        added_tokens: list[str] | None = None,
        added_special_tokens: list[str] | None = None,
        init: loading.Init = "pretrained",
        dtype: loading.Dtype = "auto",
        attn_implementation: str = "auto",
        peft: PeftConfig | None = None,
        adapter_dtype: Literal["float32", "auto"] = "float32",
        trainable: list[str] | None = None,
        lr_factors: dict[str, float] | None = None,
        quantization: QuantizationConfigMixin | None = None,
        gradient_checkpointing: bool | Literal["selective"] = False,
        activation_offload: bool = False,
        compile: bool | str = False,
        liger: bool = False,
        init_rows: int = 64,
        neftune_alpha: float | None = None,
        router_aux_loss: RouterAuxLoss = None,
        max_new_tokens: int = 256,
        optimizer: OptimizerCallable | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
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
            peft: tuning method, any PEFT config by class_path; null trains all weights.
            adapter_dtype: of the weights that peft adds; auto is the base's dtype.
            trainable: without peft, train only the weights whose names match one of these regular expressions, e.g.
                ["layers.2[0-3].", norm]; the others are frozen.
            lr_factors: factors on the learning rate, by regular expressions for names of weights; the first that
                matches counts. {lora_B: 16} is LoRA+ (Hayou et al. 2024, arXiv:2402.12354).
            quantization: quantize the frozen base while reading it, a transformers config by class_path.
            gradient_checkpointing: recompute activations in the backward pass: less memory, about a third more time;
                selective keeps the results of matrix products and attention: some more memory, little more time.
            activation_offload: keep activations in the host's memory until the backward pass; with
                gradient_checkpointing only what it keeps, the layers' inputs. For CUDA.
            compile: let torch.compile fuse each decoder layer, for rows of any length (attention stays as it is); the
                first steps take a minute; a name is that of another backend than inductor.
            liger: compute norms, rotary embeddings and MLPs with Liger's kernels (extra `liger`). For CUDA.
            init_rows: micro-batches of training data that inits of LoRA look at (EVA, CorDA, LoRA-GA).
            neftune_alpha: noise on embeddings in training, e.g. 5; null for none (Jain et al. 2023, arXiv:2310.05914).
            router_aux_loss: factor on the loss that keeps the experts of a mixture-of-experts model equally busy, or
                config, its router_aux_loss_coef; null leaves the loss out. Each micro-batch has that of all its tokens,
                as transformers computes it; in an optimizer step micro-batches count by their supervised tokens.
                train/loss is without it.
            max_new_tokens: longest answer of `predict`, in tokens.
            optimizer: makes the optimizer from the trainable parameters; a recipe gives it at the top level.
                null is AdamW with a learning rate of 1e-4.
            lr_scheduler: makes the schedule from the optimizer; a recipe gives it at the top level.
        """
        super().__init__()
        if quantization is not None:
            quantized_base.check_requested(quantization, peft)
            compatibility.check_quantized(peft, quantized_base.method_of(quantization))
        if trainable is not None and peft is not None:
            raise RecipeError(
                "model.trainable is set with model.peft, which freezes the base; layers that train beside the adapter "
                "are named by the config's modules_to_save"
            )
        if liger and compile:
            raise RecipeError("model.liger and model.compile both fuse norms and MLPs; set one of them to false")
        if router_aux_loss is not None and compile:
            raise RecipeError(
                "model.router_aux_loss looks into layers, which model.compile fuses; leave one of them out"
            )
        if peft is not None:
            lora_init.check_init(peft, is_quantized=quantization is not None)
        self.pretrained, self.tokenizer_name = pretrained, tokenizer or pretrained
        self.added_tokens, self.added_special_tokens = added_tokens or [], added_special_tokens or []
        self.init, self.base_dtype = init, dtype
        self.attn_implementation, self.peft, self.adapter_dtype = attn_implementation, peft, adapter_dtype
        self.trainable, self.lr_factors = trainable, lr_factors or {}
        self.quantization, self.gradient_checkpointing = quantization, gradient_checkpointing
        self.activation_offload, self.compile_with, self.with_liger = activation_offload, compile, liger
        self.init_rows, self.neftune_alpha, self.max_new_tokens = init_rows, neftune_alpha, max_new_tokens
        self.optimizer = optimizer or partial(torch.optim.AdamW, lr=1e-4)
        self.lr_scheduler = lr_scheduler
        self.router_aux_loss = router_aux_loss
        self._router_coefficient = 0.0
        self._router_loss: Tensor | None = None
        self.model: PreTrainedModel | PeftModel | None = None
        self.metrics = nn.ModuleDict(
            {
                stage: nn.ModuleDict({name: TokenMean() for name in ("loss", "token_accuracy")})
                for stage in ("fit", "val", "test")
            }
        )
        self.start: LoraInitState | None = None
        """What the adapter's init found in an earlier run, where it is not to be done again."""
        self._trains: Shapes = {}
        self.weight_count: WeightCount | None = None
        """Of the whole model, once it is built."""
        self._optimizer_names: list[list[str]] = []
        if router_aux_loss is not None:
            of_fit: Any = self.metrics["fit"]
            of_fit["router_aux_loss"] = TokenMean()
        self._fp32_buffers: dict[str, Tensor] = {}
        self._window_tokens: int | None = None
        self._replay: Replay | None = None
        self._gradient_norm = GradientNorm()
        self._finite = FiniteCheck()
        self.record_losses: Callable[..., None] | None = None
        """Takes ids, tokens' losses, tokens and sources of a row's samples; ``lit_callbacks.LossLedger``'s."""
        self.strict_loading = False  # a checkpoint holds what trains; on_load_checkpoint is strict in its place

    # --- what is trained -------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with the added tokens; saved beside adapter and merged model."""
        tokenizer = loading.load_tokenizer(self.tokenizer_name)
        embeddings.add_tokens(tokenizer, self.added_tokens, special=False)
        embeddings.add_tokens(tokenizer, self.added_special_tokens, special=True)
        return tokenizer

    @property
    def added_ids(self) -> list[int]:
        """Ids of the added tokens."""
        tokens = [*self.added_tokens, *self.added_special_tokens]
        return [self.tokenizer.get_vocab()[token] for token in tokens]

    @cached_property
    def base_fingerprint(self) -> Fingerprint | None:
        """Tells the frozen base from another one; None where all weights train, so that checkpoints hold everything."""
        if self.peft is None and self.trainable is None:
            return None
        return fingerprint(self.pretrained, self.init, process.seed())

    def check(self) -> nn.Module:
        """Find what is wrong before weights are loaded.

        Returns:
            The model as it will be trained, without weights, on the meta device.

        Raises:
            RecipeError: config, tokenizer or tuning method do not fit.
        """
        self._check_stored_quantization()
        self._check_liger()
        skeleton = loading.skeleton(self.pretrained, self.base_dtype)
        router_loss.coefficient(skeleton, self.router_aux_loss)
        self._check_weights(skeleton)
        embeddings.resize_embeddings(skeleton, self.tokenizer, len(self.added_ids))
        if self.peft is not None:
            wrapping.give_values(skeleton, self.peft)
        if self.peft is None or not lora_init.needs_init(self.peft):
            return self._with_peft(skeleton, self.peft)
        return self._with_peft(skeleton, lora_init.with_default_init(self.peft, self.start))

    def _check_stored_quantization(self) -> None:
        if self.init == "random":
            return
        config = loading.load_config(self.pretrained)
        quantized_base.check_stored(self.pretrained, config, self.quantization, self.peft)
        if (method := quantized_base.packed_method(config)) is not None:
            compatibility.check_quantized(self.peft, method)
        if self.peft is not None:
            lora_init.check_init(self.peft, is_quantized=self.is_quantized)

    def _check_weights(self, skeleton: nn.Module) -> None:
        """Find weight files that do not fit the config, which would be allocated by it."""
        folder = Path(self.pretrained).expanduser()
        if self.init == "random":
            return
        check_weight_files(self.pretrained)
        if folder.is_dir() and not self.is_quantized:
            size_check.check_weights(folder, skeleton, f"model.pretrained={self.pretrained!r}")

    def _check_liger(self) -> None:
        if self.with_liger:
            # Before a trainer has the module, what `accelerator: auto` would find.
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            if self._trainer is not None:
                device = self.trainer.strategy.root_device
            liger.check(loading.load_config(self.pretrained), device)

    @property
    def is_quantized(self) -> bool:
        """Whether the base's weights are quantized: by the recipe, or in the checkpoint already."""
        stored = self.init == "pretrained" and quantized_base.is_packed(loading.load_config(self.pretrained))
        return self.quantization is not None or stored

    def configure_model(self) -> None:
        """Build the model; Lightning calls it once the strategy is ready."""
        if self.model is not None:
            return
        self._check_stored_quantization()
        self._check_liger()
        # New weights are a function of the seed alone, not of what drew random numbers before.
        torch.manual_seed(process.seed())
        attention = self.attn_implementation
        if attention == "auto" and self.peft is not None and self.peft.peft_type.value == prompt_learning.PREFIX:
            attention = "sdpa"  # packed attention knows no keys from before the row
        base = loading.load_base(self.pretrained, self.init, self.base_dtype, attention, self.quantization)
        if self.added_ids:
            embeddings.resize_embeddings(base, self.tokenizer, len(self.added_ids))
        if self.with_liger:
            liger.apply_liger(base)
        if self.activation_offload and self._trainer is not None:
            activation_offload.warn_if_useless(self.trainer.strategy.root_device)
        if self.gradient_checkpointing:
            base.gradient_checkpointing_enable(activation_checkpointing.options(self.gradient_checkpointing))
        self._router_coefficient = router_loss.coefficient(base, self.router_aux_loss)
        if self.router_aux_loss is None:
            router_loss.say_what_is_left_out(base)
        rotary_embedding.keep_samples_apart(base)
        self.model, self._head = base, loading.head_of(base)
        self.model = self._adapted(base)
        self._fp32_buffers = {n: b.clone() for n, b in self.model.named_buffers() if b.dtype == torch.float32}
        self._head = loading.head_of(self.base_model)
        if self.neftune_alpha is not None:
            self.base_model.get_input_embeddings().register_forward_hook(self._add_noise)
        if self.compile_with:
            for layer in loading.decoder_layers(self.base_model):
                layer.compile(dynamic=True, backend="inductor" if self.compile_with is True else self.compile_with)
        self._trains = trainable_shapes(self)
        self.buffer_watch = BufferWatch(self.base_model)
        self.weight_count = WeightCount.of(self.model)

    def _adapted(self, base: PreTrainedModel) -> PreTrainedModel | PeftModel:
        if self.peft is None or not lora_init.needs_init(self.peft):
            return self._with_peft(base, self.peft)
        deferred_cast.cast(base)  # the init looks at whole weights, and may change them
        if self.start is not None:
            return lora_init.restore(
                self._with_peft(base, lora_init.with_default_init(self.peft, self.start)), self.start
            )
        model, self.start = lora_init.run_lora_init(
            base,
            self.peft,
            wrap=partial(self._with_peft, base),
            rows=self._rows_for_init(base),
            forward=self,
            unquantized=lambda: loading.load_base(self.pretrained, self.init, self.base_dtype),
        )
        return model

    def _rows_for_init(self, base: PreTrainedModel) -> list[PackedBatch]:
        init = lora_init.init_of(self.peft)
        if init not in lora_init.FROM_DATA:
            return []
        first_rows = getattr(getattr(self._trainer, "datamodule", None), "first_rows", None)
        if first_rows is None:
            raise RecipeError(
                f"model.peft: init_lora_weights={init!r} looks at training data, which there is in `fit` with data "
                "that hands out first_rows(count), as lit_ft.TextDataModule does; take another init"
            )
        device = self.trainer.strategy.root_device
        base.to(device)
        return [move_data_to_device(row, device) for row in first_rows(self.init_rows)]

    def _with_peft(self, base: PreTrainedModel, peft: PeftConfig | None) -> Any:
        if peft is None:
            if self.trainable is not None:
                wrapping.freeze_all_but(base, self.trainable)
                embeddings.check_rows_train(base, self.added_ids)
            return base
        try:
            return wrapping.add_peft(base, embeddings.train_rows(peft, base, self.added_ids), self.adapter_dtype)
        except RecipeError:
            raise
        except ImportError as error:
            raise RecipeError(f"model.peft: {error}; install it, or take another method") from error
        except ValueError as error:
            raise RecipeError(
                f"model.peft: {error}; the linear layers of {type(base).__name__} are {wrapping.linear_layers(base)}"
            ) from error

    @property
    def base_model(self) -> PreTrainedModel:
        """The Hugging Face model within: what PEFT wraps."""
        model = self.model
        assert model is not None, "the model is built by configure_model"
        return model.get_base_model() if isinstance(model, PeftModel) else model

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get gradients, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CausalLM":
        # Precision bf16-true casts every buffer; rotary frequencies in bf16 put tokens at wrong places.
        super()._apply(fn, recurse)
        if self.model is not None:
            for name, buffer in self.model.named_buffers():
                if name in self._fp32_buffers and buffer.dtype != torch.float32:
                    buffer.data = self._fp32_buffers[name].to(buffer.device)
        return self

    # --- forward and loss ------------------------------------------------------------------------

    def forward(self, row: PackedBatch) -> TokenLoss:
        """Summed loss and number of right predictions over a row's supervised tokens."""
        return self.token_loss(self.hidden_states(row), row)

    def hidden_states(self, row: PackedBatch, decoder: Callable[..., Any] | None = None) -> Tensor:
        """Final hidden states of a row's tokens, ``(1, T, H)``.

        Args:
            row: T tokens.
            decoder: in place of the base model's, where a strategy has only a part of its layers here.
        """
        base = self.base_model
        lengths = row["segment_lengths"]
        if len(lengths) > 1:
            self._check_isolation()
        decoder = decoder or getattr(base, base.base_model_prefix)
        if self.activation_offload:
            decoder = activation_offload.keeping_on_host(decoder)
        self._segment_lengths = lengths
        is_packed = base.config._attn_implementation == loading.PACKED
        options: dict[str, Any] = {}
        lengths_in_row = prompt_learning.virtual_lengths(self.model, lengths)
        if is_packed:
            options["segment_lengths"] = lengths_in_row
        elif len(lengths) > 1 and (masks := block_masks(base.config, row["position_ids"], base.dtype)) is not None:
            options["attention_mask"] = masks
        with rotary_embedding.samples_of(lengths_in_row):
            if prompt_learning.method_of(self.model) is not None:
                return prompt_learning.hidden_states(self.model, decoder, row, **options)
            wants_router = bool(self._router_coefficient) and self.training
            if wants_router:
                options["output_router_logits"] = True
            output = decoder(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False, **options)
        self._router_loss = router_loss.router_loss(base, output) if wants_router else None
        return output.last_hidden_state

    def token_loss(self, hidden: Tensor, row: PackedBatch) -> TokenLoss:
        """Summed loss and number of right predictions, from a row's final hidden states ``(1, T, H)``."""
        head = self.base_model.get_output_embeddings()
        return token_cross_entropy(
            hidden[0, row["predict_at"]],
            self._head,
            row["targets"],
            chunk_tokens=tokens_per_chunk(head.weight.shape[0]),
            head_parameters=list(head.parameters()),
        )

    def _check_isolation(self) -> None:
        kinds = set(getattr(self.base_model.config.get_text_config(), "layer_types", None) or ["full_attention"])
        if not kinds <= _ISOLATING_LAYERS or getattr(self.base_model, "_is_stateful", False):
            raise RecipeError(
                f"{type(self.base_model).__name__} has layers that would let the samples of one row see each other "
                f"({', '.join(sorted(kinds - _ISOLATING_LAYERS)) or 'recurrent state'}); set data.micro_batch_size to "
                "1, data.join_micro_batches to false and data.packing to null"
            )

    def _add_noise(self, _: nn.Module, __: Any, embeddings: Tensor) -> Tensor:
        if not self.training or self.neftune_alpha is None:
            return embeddings
        lengths = torch.tensor(self._segment_lengths, device=embeddings.device)
        bound = self.neftune_alpha / (lengths * embeddings.shape[-1]).sqrt()  # per sample, as the paper has it
        bound = bound.repeat_interleave(lengths)[None, :, None].to(embeddings.dtype)
        return embeddings + torch.empty_like(embeddings).uniform_(-1, 1) * bound

    # --- steps -----------------------------------------------------------------------------------

    def training_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """The micro-batch's share of the optimizer step's token-mean loss.

        Args:
            batch: a row, or a padded batch in Hugging Face's convention from someone's own data.
            batch_idx: place in the epoch.
        """
        row = as_packed_batch(batch)
        accumulate = self.trainer.accumulate_grad_batches
        if batch_idx % accumulate == 0 or self._window_tokens is None or "window_tokens" not in row:
            self._window_tokens = self._count_window(row, accumulate)
        if row["input_ids"].numel() == 0:
            loss = torch.zeros((), device=self.device, requires_grad=True)
        else:
            # A function of seed, step and replica: the same draws after a resume, other ones for other data.
            if process.is_seeded():
                place = (
                    process.seed(),
                    self.trainer.global_step,
                    batch_idx,
                    process.data_parallel(self.trainer).rank,
                )
                torch.manual_seed(hash(place) % 2**63)
            result = self(row)
            self._update("fit", result, row)
            if self.record_losses is not None and "sample_ids" in row:
                of_samples = row["sample_targets"], row["sample_sources"]
                self.record_losses(row["sample_ids"], result.per_token, *of_samples, per_token=True)
            replicas, _ = process.data_parallel(self.trainer)
            weight = loss_weight(window_tokens=self._window_tokens, accumulate=accumulate, replicas=replicas)
            loss = (result.loss_sum + self._weighed_router_loss(len(row["targets"]))) * weight
        if batch_idx % accumulate == 0 and (term := method_hooks.regularization(self.model)) is not None:
            loss = loss + accumulate * term  # once in an optimizer step, over whose micro-batches Lightning averages
            self.log("train/regularization", term)
        if (batch_idx + 1) % accumulate == 0 or self.trainer.is_last_batch:
            self._log_train()
        return loss

    def _weighed_router_loss(self, tokens: int) -> Tensor | float:
        """The router's loss of a micro-batch, weighed by its supervised tokens as the mean over them is."""
        loss, self._router_loss = self._router_loss, None
        if loss is None:
            return 0.0
        of_fit: Any = self.metrics["fit"]
        of_fit["router_aux_loss"].update(loss * tokens, tokens)
        return self._router_coefficient * tokens * loss

    def on_fit_end(self) -> None:
        """Leave the trainer as it was given, where nothing was left to train on."""
        if self._replay is not None:
            self._replay.stop(self.trainer)
            self._replay = None

    def _count_window(self, row: PackedBatch, accumulate: int) -> int:
        """Supervised tokens, over all ranks, of the optimizer step that the row belongs to."""
        tokens = row.get("window_tokens")
        if tokens is None:
            if accumulate > 1:
                rank_zero_warn(
                    f"accumulate_grad_batches={accumulate}, but the batches carry no 'window_tokens': the loss is the "
                    "mean of micro-batch means, not over the tokens of the step. lit_ft.TextDataModule counts them"
                )
            tokens = len(row["targets"]) * accumulate
        if process.data_parallel(self.trainer).size == 1:
            return tokens
        everywhere = self.trainer.strategy.reduce(torch.tensor(tokens, device=self.device), reduce_op="sum")
        return int(everywhere) // process.model_parallel_size(self.trainer)

    def validation_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into val/loss, val/perplexity and val/token_accuracy."""
        row = as_packed_batch(batch)
        self._update("val", self(row), row)

    def test_step(self, batch: PackedBatch | Mapping[str, Tensor], batch_idx: int) -> None:
        """Count the batch into test/loss, test/perplexity and test/token_accuracy."""
        row = as_packed_batch(batch)
        self._update("test", self(row), row)

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        """Greedy answers to rendered prompts, whatever the base's generation_config says of sampling and penalties.

        An answer ends at the base's end tokens, the tokenizer's, and those that close a turn in its chat template.
        Where weights are split over ranks, every rank must call it equally often, some with no prompts if need be.
        """
        return generate_answers(self.model, self.base_model, self.tokenizer, prompts, max_new_tokens)

    def render_prompt(self, messages: list[dict[str, Any]]) -> str:
        """A prompt for ``answer`` from the turns of a conversation, by the chat template.

        Raises:
            RecipeError: the template takes more time or memory than one conversation may.
        """
        return render_chat(self.tokenizer, messages, generation=True)

    def text_loss(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        """Summed cross-entropy of plain texts in nats, and their number of predicted tokens."""
        encoded = [np.array(self.tokenizer(text)["input_ids"]) for text in texts]
        rows = [move_data_to_device(pack_samples([(ids, ids)]), self.device) for ids in encoded]
        return torch.stack([self(row).loss_sum for row in rows]).sum(), sum(len(row["targets"]) for row in rows)

    def predict_step(self, batch: Sequence[Mapping[str, str]], batch_idx: int) -> list[dict[str, str]]:
        """Answer each ``{"prompt", "expected"}`` of the batch; returns them with ``"answer"``."""
        answers = self.answer([row["prompt"] for row in batch], self.max_new_tokens)
        return [{**row, "answer": text} for row, text in zip(batch, answers, strict=True)]

    def on_validation_epoch_end(self) -> None:
        """Log the means over the validation set."""
        self._log_metrics("val", "val", prog_bar=True)

    def on_test_epoch_end(self) -> None:
        """Log the means over the test set."""
        self._log_metrics("test", "test")

    def _update(self, stage: str, result: TokenLoss, row: PackedBatch) -> None:
        metrics: Any = self.metrics[stage]
        tokens = len(row["targets"])
        metrics["loss"].update(result.loss_sum, tokens)
        metrics["token_accuracy"].update(result.correct, tokens)
        if names := row.get("source_names"):
            if "source_losses" not in metrics or metrics["source_losses"].names != tuple(names):
                metrics["source_losses"] = SourceMeans(names).to(self.device)
            metrics["source_losses"].update(result.per_token, row["target_sources"])

    def _log_metrics(self, stage: str, prefix: str, prog_bar: bool = False) -> Tensor:
        metrics: Any = self.metrics[stage]
        values = {name: metric.compute() for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset()
        self.log(f"{prefix}/loss", values["loss"], prog_bar=prog_bar)
        self.log(f"{prefix}/perplexity", values["loss"].exp())
        self.log(f"{prefix}/token_accuracy", values["token_accuracy"])
        if "router_aux_loss" in values:
            self.log(f"{prefix}/router_aux_loss", values["router_aux_loss"])
        for name, loss in values.get("source_losses", {}).items():
            self.log(f"{prefix}/loss/{name}", loss)
        return values["loss"]

    def _log_train(self) -> None:
        loss = self._log_metrics("fit", "train", prog_bar=True)
        self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True)
        if self._window_tokens:  # the mean over no token is NaN, and harmless
            self._finite.watch(self.trainer, "train/loss", loss)

    def on_train_epoch_end(self) -> None:
        """Look at what a GPU still had to compute, before the run is called done."""
        super().on_train_epoch_end()
        self._finite.look_at_all(self.trainer)

    # --- optimization ----------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer over the trainable parameters, and the schedule."""
        made: Any = configure_optimizers(self, self.optimizer, self.lr_scheduler, self.lr_factors)
        name_of = {id(p): name for name, p in self.named_parameters()}
        groups = (made["optimizer"] if isinstance(made, dict) else made).param_groups
        self._optimizer_names = [[name_of[id(p)] for group in groups for p in group["params"]]]
        return made

    def on_train_start(self) -> None:
        """Say where a method's schedule is not that of the run; accumulate as scheduled from the first step on."""
        method_hooks.check_schedule(self.model, optimizer_steps(self.trainer))
        self.trainer.accumulate_grad_batches = accumulation(self.trainer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Validate again from here on, where a resumed run has trained again what it had trained before."""
        super().on_train_batch_start(batch, batch_idx)
        number_logged_steps(self.trainer)
        if self._replay is not None and self._replay.ends(self.trainer, batch_idx):
            self._replay = None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take the step; the tuning method may look at its gradients before they are gone."""
        super().optimizer_step(*args, **kwargs)
        method_hooks.after_optimizer_step(self.model, self.trainer.global_step + 1)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Log the gradient norm before clipping, and clip with that same norm."""
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        if has_scaler and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise RecipeError(
                "trainer.precision=16-mixed leaves gradients scaled until a fused optimizer's step, so they cannot be "
                "measured or clipped; set fused of the optimizer to false, or trainer.precision to bf16-mixed"
            )
        norm = self.measured_gradient_norm(optimizer)
        self._gradient_norm.forget()
        is_by_norm = (gradient_clip_algorithm or "norm") == "norm"
        if norm is not None:
            self.log("train/grad_norm", norm)
            if not has_scaler:  # which skips steps of infinite gradients
                self._finite.watch(self.trainer, "train/grad_norm", norm)
            if gradient_clip_val and is_by_norm:
                clip(with_gradients(optimizer), norm, float(gradient_clip_val))
        if not is_by_norm:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def measured_gradient_norm(self, optimizer: torch.optim.Optimizer) -> Tensor | None:
        """Norm of all gradients over all ranks, a scalar, before clipping; measured once a step, whoever asks for it.

        A collective. None where the strategy measures and clips by itself.
        """
        measure = getattr(self.trainer.strategy, "gradient_norm", gradient_norm)  # it may split gradients over ranks
        return self._gradient_norm.of(optimizer, measure)

    # --- checkpoints -----------------------------------------------------------------------------

    def save_adapter(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the adapter for ``PeftModel.from_pretrained`` on the base as it is published.

        Args:
            folder: where to.
            state_dict: the weights that train, by their names in ``model``; None takes them from there.

        Raises:
            NotFinite: a weight is not finite.
        """
        model: Any = self.model
        assert isinstance(model, PeftModel), "the model has an adapter"
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if (bad := next(not_finite(trained if state_dict is None else state_dict), None)) is not None:
            raise NotFinite(f"{bad} is not finite: the adapter is not written to {folder}")
        if state_dict is not None and not state_dict.keys() <= dict(model.named_parameters()).keys():
            model = self.check()  # some layers are on other ranks, and PEFT looks at layers
        if self.start is not None and self.start["taken"]:
            lora_init.save_as_plain_lora(model, self.start, folder, state_dict)
        else:
            # Added rows are the adapter's own; PEFT would write the whole embeddings because they have grown.
            layers = False if self.added_ids else "auto"
            model.save_pretrained(folder, state_dict=state_dict, save_embedding_layers=layers)
        if self.base_fingerprint is not None:
            write_fingerprint(self.base_fingerprint, folder)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trainable weights only: the frozen base is where it came from.

        Raises:
            NotFinite: the weights, or the last step's loss or gradient norm, are not finite.
        """
        self._finite.look_at_all(self.trainer)
        check_trained_weights(self.trainer, self)
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"] = {n: t for n, t in checkpoint["state_dict"].items() if n in self._trains}
        self.buffer_watch.warn_of_changes(self.base_model)
        # State dicts of optimizers number their parameters; a rank that holds some of them needs to know which.
        checkpoint["optimizer_names"] = self._optimizer_names
        checkpoint["method_state"] = method_hooks.state_of(self.model)
        checkpoint["adapter_start"] = self.start
        checkpoint["base"] = self.base_fingerprint
        if self._replay is not None:
            checkpoint["validated_until"] = self._replay.until

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model, or of a base that has changed since."""
        super().on_load_checkpoint(checkpoint)
        lora_init.check_same(self.start, checkpoint.get("adapter_start"))
        own = trainable_shapes(self)  # fewer than trains where other ranks hold some of the layers
        saved = shapes_of(checkpoint["state_dict"])
        check_fit({n: shape for n, shape in saved.items() if n in own or n not in self._trains}, own)
        if "base" in checkpoint:
            check_same_base(checkpoint["base"], self.base_fingerprint, "the checkpoint")
        method_hooks.load_state(self.model, checkpoint.get("method_state", {}))
        self._window_tokens = None
        if self._trainer is not None and self._trainer.state.fn == TrainerFn.FITTING:
            self._replay = go_back_to_a_step(checkpoint, self._trainer)

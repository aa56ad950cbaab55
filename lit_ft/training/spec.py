"""Description of a model as it is trained: base model, tuning method, and how its passes run."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import move_data_to_device
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from lit_ft import process
from lit_ft.errors import RecipeError
from lit_ft.internals import liger_kernel
from lit_ft.internals.lightning import gives_weights_back
from lit_ft.internals.transformers import enable_checkpointing, weights_in_float32
from lit_ft.model import compiled_layers, liger_kernels, loading, quantization, rotary_embedding
from lit_ft.model.activations import checkpointing as activation_checkpointing
from lit_ft.model.activations import offload as activation_offload
from lit_ft.model.files.fingerprint import Fingerprint
from lit_ft.model.isolation import token_mixers
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.protocols import GivesFirstBatches
from lit_ft.training.float32 import products, tensors
from lit_ft.training.loss import cuda_graphs, router_loss
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.loss.token_cross_entropy import LossOf
from lit_ft.training.loss.token_weights import TokenWeights, check_token_weights
from lit_ft.tuning import compatibility, lora_init, untrained_ends
from lit_ft.tuning.lora import fused_lora
from lit_ft.tuning.lora_init import LoraInitState
from lit_ft.tuning.spec import TuningSpec
from lit_ft.tuning.targets import unreached_at_times


@dataclass(frozen=True)
class TrainingSpec:
    """Model that ``lit_ft.CausalLM`` builds and trains.

    Raises:
        RecipeError: two of the options exclude each other.
    """

    base: ModelSpec
    tuning: TuningSpec
    gradient_checkpointing: bool | Literal["selective"] = False
    activation_offload: bool = False
    compile: bool | str = False
    pad_rows_to: int | None = None
    cuda_graphs: bool = False
    liger: bool = False
    fused_lora: bool = True
    neftune_alpha: float | None = None
    router_aux_loss: router_loss.RouterAuxLoss = None
    token_weights: TokenWeights | None = None

    def __post_init__(self) -> None:
        peft = self.tuning.peft
        if self.base.quantization is not None:
            quantization.check_requested(self.base.quantization, peft)
            compatibility.check_quantized(peft, quantization.method_of(self.base.quantization))
        if self.tuning.trainable is not None and peft is not None:
            raise RecipeError(
                "model.trainable is set with model.peft, which freezes the base; layers that train beside the adapter "
                "are named by the config's modules_to_save"
            )
        if self.liger and self.compile:
            raise RecipeError("model.liger and model.compile both fuse norms and MLPs; set one of them to false")
        if self.neftune_alpha is not None and not 0 < self.neftune_alpha < math.inf:
            raise RecipeError(
                f"model.neftune_alpha={self.neftune_alpha} must be above 0 and finite, e.g. 5; null adds no noise"
            )
        if self.token_weights is not None:
            check_token_weights(self.token_weights)
        compiled_layers.check(self.compile)
        cuda_graphs.check(
            self.cuda_graphs,
            self.pad_rows_to,
            excluded={
                "gradient_checkpointing": self.gradient_checkpointing,
                "activation_offload": self.activation_offload,
                "neftune_alpha": self.neftune_alpha,
                "router_aux_loss": self.router_aux_loss,
            },
        )
        if self.cuda_graphs and self.base.attn_implementation != "auto":
            cuda_graphs.check_attention(self.base.attn_implementation)
        if self.pad_rows_to is not None and peft is not None and peft.is_prompt_learning:
            raise RecipeError(
                f"model.pad_rows_to={self.pad_rows_to} with {type(peft).__name__}, which adds virtual tokens to each "
                "sample: rows would have other lengths all the same; leave it out"
            )
        if self.router_aux_loss is not None and self.compile:
            raise RecipeError(
                "model.router_aux_loss looks into layers, which model.compile fuses; leave one of them out"
            )
        if self.router_aux_loss is not None and peft is not None and peft.is_prompt_learning:
            raise RecipeError(
                f"model.router_aux_loss={self.router_aux_loss} with {type(peft).__name__}, whose virtual tokens are "
                "routed too, and are in no sample; leave it out"
            )
        if peft is not None:
            lora_init.check_init(peft, is_quantized=self.base.quantization is not None)

    def fingerprint(self) -> Fingerprint | None:
        """Fingerprint of the frozen base; None where all weights train, so that checkpoints hold everything."""
        return None if self.tuning.trains_everything(self.base) else self.base.fingerprint()

    def check(self, start: LoraInitState | None, device: torch.device | None) -> PreTrainedModel | PeftModel:
        """Find what is wrong before weights are loaded.

        Args:
            start: init state of an earlier run; None in a new run.
            device: device of the run; None if it is not known yet, which is what ``accelerator: auto`` would take.

        Returns:
            The model as it will be trained, without weights, on the meta device.

        Raises:
            RecipeError: config, tokenizer or tuning method do not fit.
        """
        self.tuning.check_base(self.base)
        self._check_liger(device)
        skeleton = self.base.skeleton()
        self._check_checkpointing(skeleton)
        router_loss.coefficient(skeleton, self.router_aux_loss)
        base = None if self.tuning.given is None else self.fingerprint()
        self.tuning.check_tokens(self.base)
        return self.tuning.wrap_skeleton(skeleton, self.base.added_ids, start, base)

    def _check_checkpointing(self, model: PreTrainedModel) -> None:
        if self.gradient_checkpointing and not model.supports_gradient_checkpointing:
            value = str(self.gradient_checkpointing).lower()
            raise RecipeError(
                f"model.gradient_checkpointing={value}: transformers does not support it for {type(model).__name__}; "
                "set it to false"
            )

    def _check_liger(self, device: torch.device | None) -> None:
        if self.liger:
            default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            liger_kernels.check(self.base.config, device or default)

    def build(
        self,
        start: LoraInitState | None,
        device: torch.device | None,
        batches: Callable[[PreTrainedModel, str], Sequence[PackedBatch]],
        loss_of: Callable[[PackedBatch], LossOf | None],
    ) -> tuple[PackedForward, LoraInitState | None]:
        """Build the model with its weights; returns its forward pass and the state of the adapter's init.

        Args:
            start: init state of an earlier run; None in a new run.
            device: device of the run; None without a trainer.
            batches: function from the model and the name of an init to the training data that the init reads.
            loss_of: gives the loss of a batch whose gradients the init may look at; None is summed cross-entropy.
        """
        self.tuning.check_base(self.base)
        self._check_liger(device)
        # New weights are a function of the seed alone, not of what drew random numbers before.
        process.seed_torch(process.seed())
        base = self.base.build(self.tuning.attention(self.base.attn_implementation))
        if self.liger:
            liger_kernel.apply_to_instance(base)
        if self.activation_offload and device is not None:
            activation_offload.warn_if_useless(device)
        if self.gradient_checkpointing:
            self._check_checkpointing(base)
            enable_checkpointing(base, activation_checkpointing.options(self.gradient_checkpointing))
        if self.router_aux_loss is None:
            router_loss.say_what_is_left_out(base)
        unreached_at_times.give_a_gradient(base)
        prepare_for_packed_batches(base)
        # Some models draw while they are built, though not where they are built without memory for weights.
        process.seed_torch(process.seed())
        before = PackedForward(base, self.activation_offload, self.router_aux_loss)
        before.shares_tokens = False  # inits that look at inputs count the tokens of each sample
        for_init = partial(self._loss_for_init, before, loss_of)
        model, start = self.tuning.adapt(base, self.base, start, batches, forward=for_init)
        if (tokenizer := self.base.tokenizer_in_use) is not None:
            untrained_ends.warn(base, tokenizer)
        base.disable_input_require_grads()  # which PEFT enables too
        tensors.keep(model)  # buffers of the adapter
        options = self.activation_offload, self.router_aux_loss, self.compile, self.pad_rows_to, self.cuda_graphs
        forward = PackedForward(model, *options)
        if self.neftune_alpha is not None:
            forward.add_embedding_noise(self.neftune_alpha)
        if self.fused_lora:
            fused_lora.fuse(model, self.gradient_checkpointing, is_compiled=bool(self.compile))
        if self.compile:
            layers = loading.decoder_layers(forward.base)
            compiled_layers.compile_layers(layers, self.compile, self.gradient_checkpointing)
        return forward, start

    def _loss_for_init(
        self, forward: PackedForward, loss_of: Callable[[PackedBatch], LossOf | None], batch: PackedBatch
    ) -> TokenLoss:
        """Training loss of a batch, by a base without its adapter."""
        return forward.token_loss(forward.hidden_states(batch), batch, loss_of(batch) or self.token_weights)


def prepare_for_packed_batches(base: PreTrainedModel) -> None:
    """Keep the samples of a packed batch apart, and in float32 what transformers keeps in it; changed in place."""
    rotary_embedding.keep_samples_apart(base)
    token_mixers.keep_samples_apart(base)
    products.keep(base, in_float32 := weights_in_float32(base))
    tensors.keep(base, in_float32)


@runtime_checkable
class TrainsFromSpec(Protocol):
    """Module that describes what it trains, as ``lit_ft.CausalLM`` does."""

    spec: TrainingSpec


def spec_of(module: nn.Module) -> TrainingSpec | None:
    """Description of what a module trains; None for modules that have none."""
    # Another module's attribute of that name may be anything.
    return module.spec if isinstance(module, TrainsFromSpec) and isinstance(module.spec, TrainingSpec) else None


def batches_for_init(trainer: Trainer | None, count: int, base: PreTrainedModel, init: str) -> list[PackedBatch]:
    """First packed batches of training, for an adapter init that reads data; the model moves to their device.

    Raises:
        RecipeError: there is no training data, its data module does not hand it out, or the process that takes the
            trained weights back cannot repeat the init.
    """
    if trainer is not None and gives_weights_back(trainer.strategy):
        raise RecipeError(
            f"model.peft: init_lora_weights={init!r} looks at training data, and what it finds is lost with the "
            "processes that a notebook's strategies (ddp_notebook, ddp_fork, ddp_spawn) start; take one device, or "
            "strategy='ddp' in a script"
        )
    data = process.datamodule_of(trainer)
    if trainer is None or not isinstance(data, GivesFirstBatches):
        raise RecipeError(
            f"model.peft: init_lora_weights={init!r} looks at training data, which there is in `fit` with data "
            "that hands out first_batches(count), as lit_ft.TextDataModule does; take another init"
        )
    device = trainer.strategy.root_device
    base.to(device)
    return [move_data_to_device(batch, device) for batch in data.first_batches(count)]

"""LoRA linear layers computed by one autograd function: weights in float32, products in the dtype of the inputs.

PEFT computes ``x W^T + scaling (x A^T) B^T`` operator by operator. Where the adapter is in float32 and the base in
bfloat16, it casts the inputs of every layer to float32, keeps that copy for the backward pass, and multiplies in
float32. Here the adapter's matrices are cast, which are small, in ``LoraProducts``.

Layers with the same input (q, k and v; gate and up) are one function: the input is read once for all their matrices A,
forward and backward, and their gradients of it add up in one buffer. The first of them computes the outputs of all.

Modules, parameters, saving and merging stay PEFT's: a layer changes its class, which overrides ``forward`` alone.

bitsandbytes' 4-bit weights are dequantized in the forward and again in the backward pass, as bitsandbytes does.

Legend: T tokens, I inputs and O outputs of a layer, R rank.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora
from torch import Tensor, nn

from lit_ft.internals.torch import forward_hooks
from lit_ft.model.activations.checkpointing import Checkpointing
from lit_ft.tuning.lora import expert_lora
from lit_ft.tuning.lora.lora_products import AdaptedLayer, LoraProducts

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' models call one after another with the same input."""


def fuse(model: nn.Module, checkpointing: Checkpointing = False, is_compiled: bool = False) -> None:
    """Let plain LoRA linear layers of a model compute their products in one autograd function, and LoRA on experts too.

    Layers with another base layer than ``nn.Linear`` or bitsandbytes' in 4 bits, embeddings and variants of LoRA
    (DoRA, ...) keep PEFT's ``forward``; a notice gives their number.

    Args:
        model: model with any tuning method, or none; changed in place.
        checkpointing: activation checkpointing of the decoder layers.
        is_compiled: whether they are compiled. In a compiled checkpoint each linear layer has its own function, for
            torch lets nothing there keep outputs for a later call.
    """
    keeps_products = checkpointing == "selective"
    left: Counter[str] = Counter()
    reported: set[str] = set()
    for layer in model.modules():
        if not isinstance(layer, lora.LoraLayer) or isinstance(layer, lora.ParamWrapper):
            continue
        if reason := _unlike_plain_lora(layer):
            left[reason] += 1
            continue
        layer.__class__ = fused_classes()[type(layer)]
        layer.keeps_products, layer.reported = keeps_products, reported
    for outer in expert_lora.outer_wrappers(model):
        if expert_lora.is_of_linear(outer):
            outer.__class__ = FusedWeight
            outer.keeps_products, outer.reported = keeps_products, reported
        elif reason := expert_lora.obstacle(outer):
            left[reason] += 1
        else:
            outer.__class__ = expert_lora.FusedExperts
    if not (checkpointing and is_compiled):
        _share_inputs(model)
    for reason, count in left.items():
        rank_zero_info(f"model.fused_lora: PEFT computes {count} LoRA layers itself ({reason})")


def _share_inputs(model: nn.Module) -> None:
    """Let the first of layers with the same input that is called compute the outputs of the others."""
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in SAME_INPUT:
            layers = [child for child in map(children.get, names) if isinstance(child, Fused)]
            if len(layers) > 1:
                ahead = OutputsAhead()
                for place, layer in enumerate(layers):
                    layer.ahead, layer.place = ahead, place
                    layer.others = tuple(other for other in layers if other is not layer)


def _unlike_plain_lora(layer: lora.LoraLayer) -> str | None:
    if (fused := fused_classes().get(type(layer))) is None:
        return type(layer).__name__
    if layer.lora_variant:
        return " and ".join(sorted({type(variant).__name__ for variant in layer.lora_variant.values()}))
    if type(base := layer.get_base_layer()) is not fused.base_class or base is not layer.base_layer:
        return f"a layer on {type(layer.base_layer).__name__}"
    return None


class OutputsAhead:
    """Outputs of layers that the first one with their input has computed, until their own calls."""

    def __init__(self) -> None:
        self.x: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}
        self.is_off = False
        """Whether the layers were called with other inputs, and each computes its own output now."""

    def __getstate__(self) -> dict[str, object]:
        """State of a copy: without what a call has left, which belongs to its graph."""
        return {"x": None, "outputs": {}, "is_off": self.is_off}

    def put(self, x: Tensor, outputs: Mapping[int, Tensor]) -> None:
        """Keep the outputs of the other layers, by place, for an input of all."""
        self.x, self.outputs = x, dict(outputs)

    def take(self, place: int, x: Tensor) -> Tensor | None:
        """Output of a layer for an input; None if it has to compute it."""
        if self.is_off or not self.outputs:
            return None
        if x is not self.x or place not in self.outputs:
            self.x, self.outputs, self.is_off = None, {}, True
            return None
        out = self.outputs.pop(place)
        if not self.outputs:
            self.x = None
        return out


class Fused(nn.Module, lora.LoraLayer):
    """Base of a class that also inherits a LoRA layer of PEFT; where its ``forward`` does not apply, PEFT's runs."""

    base_class: type[nn.Linear] = nn.Linear
    weight_classes: tuple[type[Tensor], ...] = (nn.Parameter, Tensor)
    base_layer: Any
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    scaling: Any
    active_adapters: Any
    keeps_products: bool
    reported: set[str]
    """Reasons that a notice was printed for; all layers of a model share it."""
    others: tuple["Fused", ...] = ()
    """The other layers with the same input."""
    ahead: OutputsAhead | None = None
    place: int
    """Place of the layer among those with the same input."""

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Apply layer and adapter, ``(..., I) -> (..., O)``, in the dtype of ``x`` or of autocast."""
        if args or kwargs:
            return super().forward(x, *args, **kwargs)
        if self.ahead is not None and (out := self.ahead.take(self.place, x)) is not None:
            return out
        adapter = self._adapter(x)
        if adapter is None:
            return super().forward(x)
        others = self._adapters_of_others(x, adapter)
        out, *of_others = _outputs(x, [(self, adapter), *others])
        if of_others:
            assert self.ahead is not None
            places = [layer.place for layer, _ in others]
            self.ahead.put(x, dict(zip(places, of_others, strict=True)))
        return out

    def _adapter(self, x: Tensor) -> str | None:
        """Name of the adapter that the function computes; None if PEFT computes the layer."""
        if self.disable_adapters or self.merged:
            return None
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        reason = f"{len(adapters)} adapters are active" if len(adapters) != 1 else self._obstacle(x, adapters[0])
        if reason is None:
            return adapters[0]
        self._report(reason)
        return None

    def _adapters_of_others(self, x: Tensor, adapter: str) -> list[tuple["Fused", str]]:
        """The layers that are computed together with this one, each with the name of its adapter; or none."""
        if not self.others or not self.training or self.ahead is None or self.ahead.is_off:
            return []
        if any(map(_is_changed, (self, *self.others))):  # as by tensor parallelism: what they compute is not known here
            return []
        found: list[tuple[Fused, str]] = []
        for layer in (self, *self.others):
            name = adapter if layer is self else layer._adapter(x)
            if name is None or isinstance(layer.lora_dropout[name], nn.Dropout):  # each layer drops other inputs
                return []
            found.append((layer, name))
        return found[1:]

    def _obstacle(self, x: Tensor, adapter: str) -> str | None:
        """Reason why weights cannot be multiplied directly at this call; None if they can."""
        base, plain = (self.base_class, self.weight_classes), (Fused.base_class, Fused.weight_classes)
        parts = (self.base_layer, base), (self.lora_A[adapter], plain), (self.lora_B[adapter], plain)
        for part, (layer_class, weight_classes) in parts:
            if type(part) is not layer_class:
                return f"a part of them is a {type(part).__name__}"
            if type(part.weight) not in weight_classes:
                return f"a weight of theirs is a {type(part.weight).__name__}"
            if _is_changed(part):
                return "their parts have hooks, or a forward pass of their own"  # ZeRO-3 gathers weights there
        if self.base_layer.weight.requires_grad:
            return "their base weights train"
        return self._unlike_weight(_dtype_of(x))

    def _unlike_weight(self, dtype: torch.dtype) -> str | None:
        """Reason why inputs of a dtype, cast by autocast, are not multiplied by the base weights in that dtype."""
        if dtype != self.base_layer.weight.dtype and not torch.is_autocast_enabled(self.base_layer.weight.device.type):
            return f"inputs are {dtype} and base weights {self.base_layer.weight.dtype}"
        return None

    def _dequantize(self) -> Callable[[Tensor], Tensor] | None:
        """Function that gives the dense form of the base weight; None if it is dense."""
        return None

    def _report(self, reason: str) -> None:
        if not torch.compiler.is_compiling() and reason not in self.reported:
            self.reported.add(reason)
            rank_zero_info(f"model.fused_lora: PEFT computes LoRA layers itself: {reason}")

    def weights(self, adapter: str) -> AdaptedLayer:
        """What ``LoraProducts`` is given of this layer."""
        base, down, up = self.base_layer, self.lora_A[adapter], self.lora_B[adapter]
        scaling, bias = self.scaling[adapter], base.bias
        if up.bias is not None:
            bias = scaling * up.bias + (0 if bias is None else bias)
        return AdaptedLayer(base.weight, bias, down.weight, up.weight, scaling, self._dequantize())


def _is_changed(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward pass of its own."""
    return any(forward_hooks(module)) or "forward" in vars(module)


def _outputs(x: Tensor, layers: Sequence[tuple[Fused, str]]) -> tuple[Tensor, ...]:
    """Outputs of layers for an input of all, each with the name of its adapter; of one layer with dropout."""
    x = x.to(_dtype_of(x))
    (first, adapter), *_ = layers
    dropout = first.lora_dropout[adapter]
    dropped = dropout(x) if dropout.training and isinstance(dropout, nn.Dropout) else None
    weights = [part for layer, name in layers for part in layer.weights(name)]
    outputs: tuple[Tensor, ...] = LoraProducts.apply(x, dropped, first.keeps_products, *weights)
    return outputs


def _dtype_of(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class FusedLinear(Fused, lora.Linear):
    """Fused LoRA linear layer on dense weights."""


class FusedWeight(Fused, lora.ParamWrapper):
    """Fused LoRA on the weight of a linear layer, to which PEFT adds a product of its size in each forward pass."""


@cache
def fused_classes() -> dict[type[lora.LoraLayer], type[Fused]]:
    """Fused class of each class of PEFT; the one for 4-bit weights imports bitsandbytes, as PEFT has done before."""
    classes: dict[type[lora.LoraLayer], type[Fused]] = {lora.Linear: FusedLinear}
    if is_bnb_4bit_available():
        from bitsandbytes.functional import dequantize_4bit
        from bitsandbytes.nn import Linear4bit as Base
        from bitsandbytes.nn import Params4bit
        from peft.tuners.lora.bnb import Linear4bit

        class FusedLinear4bit(Fused, Linear4bit):
            """Fused LoRA linear layer on 4-bit weights."""

            base_class, weight_classes = Base, (Params4bit,)

            def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
                """Apply layer and adapter, ``(..., I) -> (..., O)``, in the dtype of ``x`` or of autocast."""
                if not self.training:  # bitsandbytes multiplies few rows, as in answers, without a dense weight
                    return Linear4bit.forward(self, x, *args, **kwargs)
                return super().forward(x, *args, **kwargs)

            def _unlike_weight(self, dtype: torch.dtype) -> str | None:
                computed = self.base_layer.compute_dtype
                if computed not in (None, dtype):
                    return f"inputs are {dtype} and bnb_4bit_compute_dtype is {computed}"
                return None

            def _dequantize(self) -> Callable[[Tensor], Tensor]:
                return partial(dequantize_4bit, quant_state=self.base_layer.weight.quant_state)

        classes[Linear4bit] = FusedLinear4bit
    return classes

"""LoRA linear layers computed by one autograd function: weights in float32, products in the dtype of the inputs.

PEFT computes ``x W^T + scaling (x A^T) B^T`` operator by operator. Where the adapter is in float32 and the base in
bfloat16, it casts the inputs of every layer to float32, keeps that copy for the backward pass, and multiplies in
float32. Here the adapter's matrices are cast, which are small, and both products add up in one buffer. The backward
pass keeps the inputs as they are and ``x A^T``, which has only the rank's columns.

Layers with the same input (q, k and v; gate and up) are one function: the input is read once for all their matrices A,
forward and backward, and their gradients of it add up in one buffer. The first of them computes the outputs of all.

Modules, parameters, saving and merging stay PEFT's: a layer changes its class, which overrides ``forward`` alone.

bitsandbytes' 4-bit weights are dequantized in the forward and again in the backward pass, as bitsandbytes does.

Legend: T tokens, I inputs and O outputs of a layer, R rank.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_ft.internals.torch import forward_hooks
from lit_ft.tuning import expert_lora

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers that transformers' models call one after another with the same input."""


def fuse(model: nn.Module, keeps_products: bool = False, shares_inputs: bool = True) -> None:
    """Let plain LoRA linear layers of a model compute their products in one autograd function, and LoRA on experts too.

    Layers with another base layer than ``nn.Linear`` or bitsandbytes' in 4 bits, embeddings and variants of LoRA
    (DoRA, ...) keep PEFT's ``forward``; a notice gives their number.

    Args:
        model: model with any tuning method, or none; changed in place.
        keeps_products: whether activation checkpointing keeps the results of matrix products (``selective``).
        shares_inputs: whether layers with the same input are one function; torch.compile lets nothing in a checkpoint
            keep outputs for a later call.
    """
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
    if shares_inputs:
        _share_inputs(model)
    for reason, count in left.items():
        rank_zero_info(f"model.fused_lora: PEFT computes {count} LoRA layers itself ({reason})")


def _share_inputs(model: nn.Module) -> None:
    """Let the first of layers with the same input compute the outputs of the others."""
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in SAME_INPUT:
            layers = [child for child in map(children.get, names) if isinstance(child, Fused)]
            if len(layers) > 1:
                layers[0].others, ahead = tuple(layers[1:]), OutputsAhead()
                for place, layer in enumerate(layers):
                    layer.ahead, layer.place = ahead, place


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

    def put(self, x: Tensor, outputs: Sequence[Tensor]) -> None:
        """Keep the outputs of the layers after the first one for an input of all."""
        self.x, self.outputs = x, dict(enumerate(outputs, 1))

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
    """Layers with the same input, of the one that the model calls first."""
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
            self.ahead.put(x, of_others)
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

    def weights(self, adapter: str) -> tuple[Tensor | float | Callable[[Tensor], Tensor] | None, ...]:
        """What ``_LoraProducts`` takes of a layer."""
        base, down, up = self.base_layer, self.lora_A[adapter], self.lora_B[adapter]
        scaling, bias = self.scaling[adapter], base.bias
        if up.bias is not None:
            bias = scaling * up.bias + (0 if bias is None else bias)
        return base.weight, bias, down.weight, up.weight, scaling, self._dequantize()


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
    outputs: tuple[Tensor, ...] = _LoraProducts.apply(x, dropped, first.keeps_products, *weights)
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


class _Layer(NamedTuple):
    """What the function is given of a layer."""

    weight: Tensor
    bias_O: Tensor | None
    a_RI: Tensor
    b_OR: Tensor
    scaling: float
    dequantize: Callable[[Tensor], Tensor] | None


class _LoraProducts(torch.autograd.Function):
    """``x W^T + bias + scaling (x A^T) B^T`` of each layer; with dropout, ``dropped`` is the second ``x``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dropped: Tensor | None, keeps_products: bool, *of_layers: Any
    ) -> tuple[Tensor, ...]:
        layers = _layers(of_layers)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # the weights of an output that nothing reads have no gradients
        source = x if dropped is None else dropped
        inputs = x.shape[-1]
        x_TI = x.reshape(-1, inputs)
        a_RI = torch.cat([layer.a_RI for layer in layers]) if len(layers) > 1 else layers[0].a_RI
        a_RI = a_RI.to(x.dtype)
        h_TR = source.reshape(-1, inputs) @ a_RI.T
        ctx.ranks = [len(layer.a_RI) for layer in layers]
        ctx.scalings, ctx.dequantize = [layer.scaling for layer in layers], [layer.dequantize for layer in layers]
        weights, scaled, outputs = [], [], []
        for layer, h in zip(layers, h_TR.split(ctx.ranks, dim=1), strict=True):
            weight_OI = _dense(layer.weight, layer.dequantize, x.dtype)
            scaled_b_OR = (layer.b_OR * layer.scaling).to(x.dtype)
            weights.append(weight_OI if layer.dequantize is None else layer.weight)
            scaled.append(scaled_b_OR)
            outputs.append(_sum_of_products(x, x_TI, weight_OI, layer.bias_O, h, scaled_b_OR, keeps_products))
        ctx.save_for_backward(source, h_TR, a_RI, *weights, *scaled)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        source, h_TR, a_RI, *weights_and_scaled = ctx.saved_tensors
        count = len(grads)
        weights, scaled = weights_and_scaled[:count], weights_and_scaled[count:]
        for_x, for_dropped = ctx.needs_input_grad[:2]
        needed = _layers(ctx.needs_input_grad[3:])
        is_read = [grad is not None for grad in grads]
        given = (
            b.new_zeros(len(h_TR), len(b)) if grad is None else grad for grad, b in zip(grads, scaled, strict=True)
        )
        grads_TO = [grad.reshape(-1, grad.shape[-1]) for grad in given]
        products = [grad_TO @ scaled_b_OR for grad_TO, scaled_b_OR in zip(grads_TO, scaled, strict=True)]
        grad_h_TR = torch.cat(products, dim=1) if count > 1 else products[0]
        grad_x = grad_dropped = None
        if for_dropped:
            grad_dropped = (grad_h_TR @ a_RI).view(source.shape)
        elif for_x:
            grad_x = grad_h_TR @ a_RI
        for grad_TO, weight, dequantize in zip(grads_TO, weights, ctx.dequantize, strict=True):
            if for_x:
                weight_OI = _dense(weight, dequantize, source.dtype)
                grad_x = grad_TO @ weight_OI if grad_x is None else _add_product(grad_x, grad_TO, weight_OI)
        of_a: Sequence[Tensor | None] = [None] * count
        if any(layer.a_RI for layer in needed):
            of_a = _product_in_float32(grad_h_TR.T, source.reshape(-1, source.shape[-1])).split(ctx.ranks)
        found: list[Tensor | None] = []
        parts = zip(needed, is_read, grads_TO, of_a, h_TR.split(ctx.ranks, dim=1), ctx.scalings, strict=True)
        for layer, has_gradient, grad_TO, grad_a, h, scaling in parts:
            grad_bias = grad_TO.sum(0, dtype=torch.float32) if layer.bias_O else None
            grad_b = _product_in_float32(grad_TO.T, h) * scaling if layer.b_OR else None
            of_layer = [None, grad_bias, grad_a if layer.a_RI else None, grad_b, None, None]
            found += of_layer if has_gradient else [None] * len(of_layer)
        return None if grad_x is None else grad_x.view(source.shape), grad_dropped, None, *found


def _layers(parts: Sequence[Any]) -> list[_Layer]:
    """What a function is given of each layer, from what it is given of all."""
    size = len(_Layer._fields)
    return [_Layer(*parts[start : start + size]) for start in range(0, len(parts), size)]


def _dense(weight: Tensor, dequantize: Callable[[Tensor], Tensor] | None, dtype: torch.dtype) -> Tensor:
    return (weight if dequantize is None else dequantize(weight)).to(dtype)


def _sum_of_products(
    x: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, h_TR: Tensor, b_OR: Tensor, keeps_products: bool
) -> Tensor:
    """``x W^T + bias + h B^T``, in the shape of ``x``."""
    # The small product first: it is rounded to bfloat16 once more, and a rounding of the sum would cost more.
    # With `out`, selective checkpointing does not keep it, but the sum alone.
    # Models may change the result in place, which autograd forbids for a view: `out` is none, nor is an unsafe one.
    out = x.new_empty(*x.shape[:-1], len(weight_OI))
    out_TO = out.view(-1, len(weight_OI))
    if bias_O is None:
        torch.mm(h_TR, b_OR.T, out=out_TO)
    else:
        torch.addmm(bias_O.to(x.dtype), h_TR, b_OR.T, out=out_TO)
    if keeps_products:
        total_TO = torch.addmm(out_TO, x_TI, weight_OI.T)
        return torch.ops.aten._unsafe_view.default(total_TO, out.shape)
    _add_product(out_TO, x_TI, weight_OI.T)
    return out


torch.library.define("lit_ft::add_product", "(Tensor(a!) total, Tensor a, Tensor b) -> ()")


@torch.library.impl("lit_ft::add_product", "CompositeExplicitAutograd")
def _add_in_graph(total: Tensor, a: Tensor, b: Tensor) -> None:
    total.addmm_(a, b)


@torch.library.register_fake("lit_ft::add_product")
def _(total: Tensor, a: Tensor, b: Tensor) -> None:
    """The operator in a traced graph: it changes no shape and returns nothing."""


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``total.addmm_(a, b)``; in a graph an operator, for Inductor would copy ``total`` first (torch 2.13)."""
    if torch.compiler.is_compiling():
        torch.ops.lit_ft.add_product(total, a, b)
        return total
    return total.addmm_(a, b)


def _product_in_float32(a: Tensor, b: Tensor) -> Tensor:
    """Product of two matrices, a sum over tokens, that is not rounded to float16 or bfloat16."""
    if a.dtype.itemsize >= torch.float32.itemsize:
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()

"""LoRA linear layers computed by one autograd function: weights in float32, products in the dtype of the inputs.

PEFT computes ``x W^T + scaling (x A^T) B^T`` operator by operator. Where the adapter is in float32 and the base in
bfloat16, it casts the inputs of every layer to float32, keeps that copy for the backward pass, and multiplies in
float32. Here the adapter's matrices are cast, which are small, and both products add up in one buffer. The backward
pass keeps the inputs as they are and ``x A^T``, which has only the rank's columns.

Modules, parameters, saving and merging stay PEFT's: a layer changes its class, which overrides ``forward`` alone.

bitsandbytes' 4-bit weights are dequantized in the forward and again in the backward pass, as bitsandbytes does.

Legend: T tokens, I inputs and O outputs of a layer, R rank.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft.import_utils import is_bnb_4bit_available
from peft.tuners import lora
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lit_ft.internals.torch import forward_hooks
from lit_ft.tuning import expert_lora


def fuse(model: nn.Module, keeps_products: bool = False) -> None:
    """Let plain LoRA linear layers of a model compute their products in one autograd function, and LoRA on experts too.

    Layers with another base layer than ``nn.Linear`` or bitsandbytes' in 4 bits, embeddings and variants of LoRA
    (DoRA, ...) keep PEFT's ``forward``; a notice gives their number.

    Args:
        model: model with any tuning method, or none; changed in place.
        keeps_products: whether activation checkpointing keeps the results of matrix products (``selective``).
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
    for reason, count in left.items():
        rank_zero_info(f"model.fused_lora: PEFT computes {count} LoRA layers itself ({reason})")


def _unlike_plain_lora(layer: lora.LoraLayer) -> str | None:
    if (fused := fused_classes().get(type(layer))) is None:
        return type(layer).__name__
    if layer.lora_variant:
        return " and ".join(sorted({type(variant).__name__ for variant in layer.lora_variant.values()}))
    if type(base := layer.get_base_layer()) is not fused.base_class or base is not layer.base_layer:
        return f"a layer on {type(layer.base_layer).__name__}"
    return None


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

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Apply layer and adapter, ``(..., I) -> (..., O)``, in the dtype of ``x`` or of autocast."""
        if args or kwargs or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        adapters = [name for name in self.active_adapters if name in self.lora_A]
        reason = f"{len(adapters)} adapters are active" if len(adapters) != 1 else self._obstacle(x, adapters[0])
        if reason is not None:
            self._report(reason)
            return super().forward(x)
        return self._fused(x, adapters[0])

    def _obstacle(self, x: Tensor, adapter: str) -> str | None:
        """Reason why weights cannot be multiplied directly at this call; None if they can."""
        base, plain = (self.base_class, self.weight_classes), (Fused.base_class, Fused.weight_classes)
        parts = (self.base_layer, base), (self.lora_A[adapter], plain), (self.lora_B[adapter], plain)
        for part, (layer_class, weight_classes) in parts:
            if type(part) is not layer_class:
                return f"a part of them is a {type(part).__name__}"
            if type(part.weight) not in weight_classes:
                return f"a weight of theirs is a {type(part.weight).__name__}"
            if any(forward_hooks(part)) or "forward" in vars(part):
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

    def _fused(self, x: Tensor, adapter: str) -> Tensor:
        base, down, up = self.base_layer, self.lora_A[adapter], self.lora_B[adapter]
        dropout, scaling, bias = self.lora_dropout[adapter], self.scaling[adapter], base.bias
        if up.bias is not None:
            bias = scaling * up.bias + (0 if bias is None else bias)
        x = x.to(_dtype_of(x))
        dropped = dropout(x) if dropout.training and isinstance(dropout, nn.Dropout) else None
        inputs = x, dropped, base.weight, bias, down.weight, up.weight
        return _LoraProducts.apply(*inputs, scaling, self.keeps_products, self._dequantize())


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


class _LoraProducts(torch.autograd.Function):
    """``x W^T + bias + scaling (x A^T) B^T``, with ``dropped`` in place of the second ``x`` if there is dropout."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        dropped: Tensor | None,
        weight: Tensor,
        bias_O: Tensor | None,
        a_RI: Tensor,
        b_OR: Tensor,
        scaling: float,
        keeps_products: bool,
        dequantize: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        source = x if dropped is None else dropped
        weight_OI = (weight if dequantize is None else dequantize(weight)).to(x.dtype)
        a_RI, scaled_b_OR = a_RI.to(x.dtype), (b_OR * scaling).to(x.dtype)
        outputs, inputs = weight_OI.shape
        x_TI = x.reshape(-1, inputs)
        h_TR = source.reshape(-1, inputs) @ a_RI.T
        ctx.save_for_backward(source, h_TR, weight_OI if dequantize is None else weight, a_RI, scaled_b_OR)
        ctx.scaling, ctx.dequantize = scaling, dequantize

        # The small product first: it is rounded to bfloat16 once more, and a rounding of the sum would cost more.
        # With `out`, selective checkpointing does not keep it, but the sum alone.
        # Models may change the result in place, which autograd forbids for a view: `out` is none, nor is an unsafe one.
        out = x.new_empty(*x.shape[:-1], outputs)
        out_TO = out.view(-1, outputs)
        if bias_O is None:
            torch.mm(h_TR, scaled_b_OR.T, out=out_TO)
        else:
            torch.addmm(bias_O.to(x.dtype), h_TR, scaled_b_OR.T, out=out_TO)
        if keeps_products:
            total_TO = torch.addmm(out_TO, x_TI, weight_OI.T)
            return torch.ops.aten._unsafe_view.default(total_TO, out.shape)
        _add_product(out_TO, x_TI, weight_OI.T)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        source, h_TR, weight_OI, a_RI, scaled_b_OR = ctx.saved_tensors
        for_x, for_dropped, _, for_bias, for_a, for_b, *_ = ctx.needs_input_grad
        grad_TO = grad.reshape(-1, grad.shape[-1])
        grad_h_TR = grad_TO @ scaled_b_OR
        grad_x = grad_dropped = grad_bias = grad_a = grad_b = None
        if for_x and ctx.dequantize is not None:
            weight_OI = ctx.dequantize(weight_OI).to(source.dtype)
        if for_dropped:
            grad_dropped = (grad_h_TR @ a_RI).view(source.shape)
            grad_x = (grad_TO @ weight_OI).view(source.shape)
        elif for_x:
            grad_x = _add_product(grad_h_TR @ a_RI, grad_TO, weight_OI).view(source.shape)
        if for_bias:
            grad_bias = grad_TO.sum(0, dtype=torch.float32)
        if for_a:
            grad_a = _product_in_float32(grad_h_TR.T, source.reshape(-1, source.shape[-1]))
        if for_b:
            grad_b = _product_in_float32(grad_TO.T, h_TR) * ctx.scaling
        return grad_x, grad_dropped, None, grad_bias, grad_a, grad_b, None, None, None


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

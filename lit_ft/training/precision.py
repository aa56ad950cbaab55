"""Training with matrix products in 8-bit floats (float8), as a Lightning precision plugin.

Legend: T tokens, I inputs and O outputs of a layer; M, N, K dimensions of a matrix product.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import ScalingType, linear, pad, scaled_mm
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals import torch as torch_internals
from lit_ft.model.architecture import head_layer

Scaling = Literal["tensorwise", "rowwise"]
_MULTIPLE = 16
"""Number that matrix dimensions must be a multiple of for float8 kernels."""


class Float8Precision(Precision):
    """Train with the linear layers' matrix products in 8-bit floats, for NVIDIA GPUs from Hopper and Ada on.

    Each product scales its two factors to float8's range from their current values (Micikevicius et al. 2022,
    arXiv:2209.05433): in the forward pass, for the gradient of the inputs, and for that of trainable weights. Weights,
    optimizer state, attention, norms, head and the adapter's own matrices keep their dtypes. Evaluation, generation and
    merging use the weights in their own dtype, like the exported model.
    """

    def __init__(self, scaling: Scaling = "tensorwise", mixed: bool = False, keep_rounded: bool = True) -> None:
        """Set the scaling, the dtype of all other operators, and what is kept in memory.

        Args:
            scaling: tensorwise uses one scale per tensor (fastest); rowwise uses one per matrix row (closer to
                bfloat16 if a few values are far larger than the others).
            mixed: compute all other operators in bfloat16, for full fine-tuning of float32 weights.
            keep_rounded: round frozen weights once, when training starts, and keep them in 8 bits for the forward and
                for the backward pass, 2 bytes for each weight beside the weight itself; false rounds them in each pass.
        """
        self.scaling: Scaling = scaling
        self.mixed, self.keep_rounded = mixed, keep_rounded
        self._device = "cpu"

    def convert_module(self, module: Any) -> nn.Module:
        """Replace linear layers by :class:`Float8Linear`; Lightning calls it before it moves the model to the device.

        Those of an earlier call, as of a validation before a fit, are kept, and take this scaling.

        Raises:
            RecipeError: the device does not support float8, or no linear layer fits.
        """
        device: torch.device = module.trainer.strategy.root_device
        self._device = device.type
        _check_device(device)
        layers = list(_linear_layers(module))
        fit = [(parent, name, layer) for parent, name, layer in layers if _fits(layer)]
        earlier = [part for part in module.modules() if isinstance(part, Float8Linear)]
        if not fit and not earlier:
            raise RecipeError(
                "Float8Precision finds no linear layer to compute in float8: they are quantized, or their sizes are no "
                f"multiples of {_MULTIPLE}; leave it out of trainer.plugins"
            )
        for parent, name, layer in fit:
            setattr(parent, name, Float8Linear(layer, self.scaling))
        for part in earlier:
            part.take_scaling(self.scaling)
        summary = f"float8 ({self.scaling}) in {len(fit) + len(earlier)} linear layers"
        if len(layers) > len(fit):
            summary += f"; {len(layers) - len(fit)} others have sizes that are no multiples of {_MULTIPLE}"
        if device.type == "cpu":
            summary += "; on a CPU this is slower than without"
        rank_zero_info(summary)
        return module

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Round frozen weights; Lightning calls it after it has moved the model to the device.

        In evaluation, which computes with the weights in their own dtype, there are no optimizers.
        """
        if self.keep_rounded and optimizers:
            kept = sum(part.round_frozen() for part in model.modules() if isinstance(part, Float8Linear))
            if kept:
                rank_zero_info(f"float8: frozen weights are rounded once; {kept / 2**20:,.0f} MiB beside the weights")
        return super().connect(model, optimizers, lr_schedulers)

    def forward_context(self) -> AbstractContextManager[None]:
        """Autocast context for all other operators."""
        return torch.autocast(self._device, torch.bfloat16, enabled=self.mixed)


def _check_device(device: torch.device) -> None:
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise RecipeError(
            f"Float8Precision needs compute capability 8.9 (Ada, Hopper), {torch.cuda.get_device_name(device)} has "
            f"{capability[0]}.{capability[1]}; take trainer.precision=bf16-mixed"
        )
    if device.type == "cpu" and not torch_internals.FLOAT8_ON_CPU:
        raise RecipeError(
            f"Float8Precision: torch {torch.__version__} has no float8 products on a CPU; install a newer one, or take "
            "trainer.precision=bf16-mixed"
        )
    if device.type not in ("cuda", "cpu"):
        raise RecipeError(f"Float8Precision needs an NVIDIA GPU (a CPU for trying it out), not {device.type}")


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Parent, name and layer of each dense linear layer, except heads and an adapter's own matrices."""
    heads = [head_layer(m) for m in model.modules() if isinstance(m, PreTrainedModel)]
    adapters = {
        child
        for layer in model.modules()
        if isinstance(layer, BaseTunerLayer)
        for name, part in layer.named_children()
        if name != "base_layer"
        for child in part.modules()
    }
    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            # Quantized layers are subclasses.
            if type(layer) is nn.Linear and layer not in adapters and all(layer is not head for head in heads):
                yield parent, name, layer


def _fits(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


class Rounded(NamedTuple):
    """Matrix in 8-bit floats."""

    values: Tensor
    """``(M, K)``, float8."""
    scale: Tensor
    """Factor that the values must be multiplied by, fp32: ``(M, 1)`` or a scalar."""


class Float8Linear(nn.Linear):
    """Linear layer over the weight and bias of another one, whose products are in 8-bit floats during training."""

    def __init__(self, layer: nn.Linear, scaling: Scaling) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias, self.scaling = layer.weight, layer.bias, scaling
        self._rounded: tuple[Tensor, ...] = ()

    def take_scaling(self, scaling: Scaling) -> None:
        """Compute by a scaling from now on; what was rounded by another one is dropped."""
        self.scaling, self._rounded = scaling, ()

    def round_frozen(self) -> int:
        """Round the weight for all forward and backward passes to come, unless it is trainable or sharded.

        Returns:
            Bytes of the result.
        """
        if self.weight.requires_grad or isinstance(self.weight, DTensor):
            return 0
        by_row, weight_OI = self.scaling == "rowwise", self.weight.detach()
        both = [to_float8(factor, torch.float8_e4m3fn, by_row) for factor in (weight_OI, weight_OI.t())]
        # As parameters they are weights for activation_offload, which leaves those on the device. In a tuple they are
        # no parameters of the module: not saved, not broadcast by DDP.
        self._rounded = tuple(nn.Parameter(part, requires_grad=False) for one in both for part in one)
        return sum(part.nbytes for part in self._rounded)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._rounded = ()  # of a weight that is moved or cast now
        return super()._apply(fn, recurse)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer, ``(..., I) -> (..., O)``, in the dtype of ``input`` or of autocast."""
        if not self.training:
            return linear(input, self.weight, self.bias)
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        rounded = () if self.weight.requires_grad else self._rounded
        flat: Tensor = _Float8Products.apply(input.reshape(-1, self.in_features), self.weight, self.scaling, *rounded)
        output = flat.reshape(*input.shape[:-1], self.out_features)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class _Float8Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_TI: Tensor, weight_OI: Tensor, scaling: Scaling, *rounded: Tensor) -> Tensor:
        """``rounded`` is empty, or values and scale of the weight, then of the transposed weight."""
        ctx.save_for_backward(input_TI if weight_OI.requires_grad else None, *(rounded[2:] or (weight_OI,)))
        ctx.scaling = scaling
        right = Rounded(*rounded[:2]) if rounded else weight_OI
        return float8_product(input_TI, right, scaling, is_forward=True)

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        input_TI, weight, *scale = ctx.saved_tensors
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            right = Rounded(weight, *scale) if scale else weight.t()
            grad_input = float8_product(grad_TO, right, ctx.scaling)
        if ctx.needs_input_grad[1]:
            grad_weight = float8_product(grad_TO.t(), input_TI.t(), ctx.scaling).to(weight.dtype)
        return grad_input, grad_weight, *[None] * (len(ctx.needs_input_grad) - 2)


def float8_product(left: Tensor, right: Tensor | Rounded, scaling: Scaling, *, is_forward: bool = False) -> Tensor:
    """Product ``left @ right.T`` of factors rounded to 8-bit floats, in the dtype of ``left``.

    Args:
        left: first factor, ``(M, K)``; a gradient in the backward pass.
        right: second factor, ``(N, K)``, or the same in 8-bit floats, with K a multiple of 16.
        scaling: scaling of tensors, see :class:`Float8Precision`.
        is_forward: whether it is a product of the forward pass, whose factors have 3 mantissa bits (e4m3). Gradients
            with one scale per tensor have the larger range instead (e5m2).
    """
    by_row = scaling == "rowwise"
    spare = -left.shape[1] % _MULTIPLE  # padding tokens: the gradient of a weight is a sum over tokens
    left_dtype = torch.float8_e4m3fn if is_forward or by_row else torch.float8_e5m2
    left_8, left_scale = to_float8(pad(left, (0, spare)), left_dtype, by_row)
    if not isinstance(right, Rounded):
        right = to_float8(pad(right, (0, spare)), torch.float8_e4m3fn, by_row)
    right_8, right_scale = right
    recipe = ScalingType.RowWise if by_row else ScalingType.TensorWise
    product = scaled_mm(
        left_8,
        right_8.t(),
        scale_a=left_scale,
        scale_recipe_a=recipe,
        scale_b=right_scale.t(),
        scale_recipe_b=recipe,
        output_dtype=torch.bfloat16 if by_row else left.dtype,  # row-wise kernels write only bfloat16
        use_fast_accum=is_forward,
    )
    return product.to(left.dtype)


def to_float8(tensor: Tensor, dtype: torch.dtype, by_row: bool) -> Rounded:
    """Round a matrix ``(M, K)`` to 8-bit floats, with one scale for all of it, or ``by_row`` for each row."""
    peak = tensor.abs().amax(-1, keepdim=True) if by_row else tensor.abs().amax()
    scale = peak.float().clamp(min=1e-12) / torch.finfo(dtype).max
    return Rounded((tensor.float() / scale).to(dtype).contiguous(), scale)

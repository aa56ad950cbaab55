"""LoRA on the fused experts of a layer, computed beside the experts' weights and not added to them.

transformers keeps the experts of a layer in one tensor per projection, e.g. ``mlp.experts.down_proj`` ``(E, O, I)``,
and PEFT's ``ParamWrapper`` (``target_parameters``) adds a product of the same size to it in each forward pass. The sum
is as large as all experts of the layer, is rounded to their dtype, and is kept for the backward pass: in all layers
together as much memory as the experts themselves. Here an expert's tokens are multiplied by its weight and by its two
small matrices.

Modules, parameters, saving and merging stay PEFT's: the outer wrapper of a layer's experts changes its class, which
overrides ``forward`` alone.

Legend: S pairs of a token and one of its experts, sorted by expert; E experts, I inputs and O outputs of one, R rank.
"""

from collections.abc import Iterator

import torch
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

from lit_ft.internals.transformers import GroupedExperts, gated, grouped_linear


def outer_wrappers(model: nn.Module) -> list[ParamWrapper]:
    """PEFT's wrappers of parameters that are not inside another one: it nests those of a module's parameters."""
    nested = {id(layer.base_layer) for layer in model.modules() if isinstance(layer, ParamWrapper)}
    return [layer for layer in model.modules() if isinstance(layer, ParamWrapper) and id(layer) not in nested]


def wrapped_parameters(layer: nn.Module) -> Iterator[ParamWrapper]:
    """Wrappers around a module, from the outer one: one for each of its parameters that has LoRA."""
    while isinstance(layer, ParamWrapper):
        yield layer
        layer = layer.base_layer


def holder(experts: nn.Module) -> nn.Module:
    """Module that holds the experts' weights: inside PEFT's wrappers where they have LoRA."""
    return experts.get_base_layer() if isinstance(experts, ParamWrapper) else experts


def bytes_of_sums(model: nn.Module, is_fused: bool) -> int:
    """Bytes of the experts that PEFT makes anew in a forward pass: all, or those ``FusedExperts`` cannot do."""
    outer_ones = outer_wrappers(model)
    by_peft = [outer for outer in outer_ones if not is_fused or not (is_of_linear(outer) or obstacle(outer) is None)]
    sums = [layer.get_param() for outer in by_peft for layer in wrapped_parameters(outer)]
    return sum(weight.numel() * weight.element_size() for weight in sums)


def is_of_linear(outer: ParamWrapper) -> bool:
    """Whether a wrapper is that of a linear layer's weight, which is LoRA on the layer."""
    return type(outer.base_layer) is nn.Linear and outer.parameter_name == "weight"


class FusedExperts(ParamWrapper):
    """Experts of a layer with LoRA on their tensors; where this does not apply, PEFT's own wrappers compute them."""

    first_expert: int = 0
    """Index of the first expert that is here, where ranks hold different experts."""

    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        """Outputs of the experts for tokens ``(tokens, I)``; the arguments are those of the experts themselves."""
        wrappers = list(wrapped_parameters(self))
        if self.disable_adapters or any(layer.merged or len(layer.active_adapters) != 1 for layer in wrappers):
            return super().forward(x, *args, **kwargs)
        index, weights = (*args, *kwargs.values())
        return self.outputs(x, index, weights)

    def outputs(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Outputs of the experts that are here, ``(tokens, I)``.

        Args:
            x: hidden states, ``(tokens, I)``.
            index: each token's experts, counted from the first that is here, ``(tokens, k)``.
            weights: router weights of their outputs, ``(tokens, k)``.
        """
        experts: GroupedExperts = self.get_base_layer()
        adapted = {} if self.disable_adapters else {layer.parameter_name: layer for layer in wrapped_parameters(self)}
        of_expert, order = index.flatten().sort(stable=True)
        counts = torch.zeros(experts.num_experts, dtype=torch.int32, device=x.device)
        counts.scatter_add_(0, of_expert, torch.ones_like(of_expert, dtype=torch.int32))  # bincount would wait for CUDA
        ends = counts.cumsum(0, dtype=torch.int32)

        def project(inputs_SI: Tensor, name: str) -> Tensor:
            weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias") if experts.has_bias else None
            out_SO = grouped_linear(inputs_SI, weight, ends, experts.is_transposed)
            if name in adapted:
                a_ERI, b_EOR = self._factors(adapted[name], weight)
                out_SO = out_SO + grouped_linear(grouped_linear(inputs_SI, a_ERI, ends), b_EOR, ends)
            return out_SO if bias is None else out_SO + bias[of_expert]

        inner = gated(experts, project(x[order // index.shape[1]], "gate_up_proj"))
        out = project(inner, "down_proj")
        in_place = torch.empty_like(out).index_copy(0, order, out)
        return (in_place.view(*index.shape, -1) * weights[..., None]).sum(1).to(x.dtype)

    def _factors(self, layer: ParamWrapper, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A ``(E, R, I)`` and scaled B ``(E, O, R)`` of the experts that are here, in the dtype of their weights."""
        (name,) = layer.active_adapters
        a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
        here = slice(self.first_expert, self.first_expert + len(weight))
        a_ERI = a.view(layer.num_experts, -1, a.shape[1])[here]
        b_EOR = b.view(b.shape[0], -1, layer.num_experts).permute(2, 0, 1)[here] * layer.scaling[name]
        missing = -a_ERI.shape[1] % (16 // weight.element_size())  # kernels for groups want rows of whole 16 bytes
        a_ERI, b_EOR = nn.functional.pad(a_ERI, (0, 0, 0, missing)), nn.functional.pad(b_EOR, (0, missing))
        return a_ERI.to(weight.dtype), b_EOR.to(weight.dtype).contiguous()


def use_own_experts(outer: nn.Module, first: int) -> FusedExperts:
    """Let LoRA on experts, of which a rank holds a part, compute those; ``first`` is the index of the first."""
    assert isinstance(outer, ParamWrapper), "other adapters are refused before"
    outer.__class__ = FusedExperts  # it is not yet where the model has no weights
    assert isinstance(outer, FusedExperts)
    outer.first_expert = first
    return outer


def obstacle(outer: ParamWrapper) -> str | None:
    """Reason why PEFT has to compute a wrapper itself; None if ``FusedExperts`` can."""
    experts = outer.get_base_layer()
    if not isinstance(experts, GroupedExperts):
        return f"a parameter of {type(experts).__name__}"
    if experts.has_post_expert_norm or not experts.has_gate or experts.num_experts == 1:
        return f"{type(experts).__name__}, which has a norm, no gate, or one expert"
    if others := {layer.parameter_name for layer in wrapped_parameters(outer)} - {"gate_up_proj", "down_proj"}:
        return f"{', '.join(sorted(others))} of {type(experts).__name__}"
    return None

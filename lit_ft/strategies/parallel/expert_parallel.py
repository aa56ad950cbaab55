"""Expert parallelism: each rank holds some experts in full, and tokens are sent to the ranks that hold their experts.

(GShard: Lepikhin et al. 2020, arXiv:2006.16668.) The ranks of a group see different data, and are data-parallel for
all other weights. Under tensor parallelism, where ranks see the same tokens, ``tensor_parallel`` distributes the
experts, and no token is sent.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.torch import all_to_all_single_autograd, own_parameters, wait_tensor
from lit_ft.internals.transformers import mark_expert_parallel
from lit_ft.model.architecture import Architecture
from lit_ft.model.parameter_patterns import layers_by_wildcard
from lit_ft.strategies.parallel.tensor_plan import must_divide
from lit_ft.tuning.lora.expert_lora import holder, obstacle, use_own_experts

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Outputs of a layer's experts, from hidden states, indices of each token's experts, and weights of their outputs."""


def experts_of(base: PreTrainedModel) -> list[nn.Module]:
    """Experts of each layer, or PEFT's wrappers around them, from Hugging Face's ``base_model_ep_plan``."""
    plan = Architecture.of(base.config).expert_plan
    names = {f"{base.base_model_prefix}.{name}" for name, style in plan.items() if style == "ep_dispatch_experts"}
    return [module for name, module in base.named_modules() if layers_by_wildcard(name) in names]


def expert_count(experts: nn.Module) -> int | None:
    """Number of experts that a module from ``experts_of`` holds; None if an adapter has replaced the module."""
    count = getattr(experts, "num_experts", None)
    return count if isinstance(count, int) else None


def set_expert_count(experts: nn.Module, count: int) -> None:
    """Tell a module that it holds only ``count`` experts: its own code then skips indices of ``count`` and above."""
    experts.num_experts = count  # type: ignore[assignment]
    mark_expert_parallel(experts)


def check(base: PreTrainedModel, size: int) -> None:
    """Refuse models whose experts cannot be distributed over ``size`` ranks, before weights are read.

    Raises:
        RecipeError: the model has no experts, their number is not divisible, or an adapter other than LoRA on their
            fused tensors changes them.
    """
    experts = experts_of(base)
    if not experts:
        raise RecipeError(
            f"expert_parallel_size={size}, but Hugging Face has no plan for experts in {type(base).__name__} "
            "(base_model_ep_plan); set it to 1"
        )
    for module in experts:
        count = expert_count(module)
        why = obstacle(module) if isinstance(module, ParamWrapper) else None
        if count is None or why is not None or not any(True for _ in holder(module).parameters(recurse=False)):
            raise RecipeError(
                f"expert_parallel_size={size}: an adapter changes {why or f'experts to {type(module).__name__}'}; take "
                "LoRA on gate_up_proj and down_proj (target_parameters) or on attention, or set it to 1"
            )
        if count % size:
            raise RecipeError(must_divide(size, "the number of experts", count, "expert_parallel_size"))


class ExpertParallel:
    """Distribution of experts over the ranks of a mesh of one dimension, which see different data."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.size, self.group = mesh, mesh.size(), mesh.get_group()

    def assign_experts(self, experts: nn.Module) -> None:
        """Keep this rank's experts of a layer, and make its forward pass send tokens to the ranks of their experts.

        The matrices of LoRA stay whole here: they are sharded with the layer's other weights.
        """
        held, total = holder(experts), expert_count(experts)
        assert total is not None, "check has refused it"
        for key, weight in list(held.named_parameters(recurse=False, remove_duplicate=False)):
            part = distribute_tensor(weight.data, self.mesh, [Shard(0)], src_data_rank=None)
            own = DTensor.from_local(part.to_local().clone(), self.mesh, [Shard(0)], run_check=False)
            held.register_parameter(key, nn.Parameter(own, requires_grad=weight.requires_grad))
        set_expert_count(held, total // self.size)
        forward = held.forward
        if experts is not held:
            fused = use_own_experts(experts, self.mesh.get_local_rank() * (total // self.size))
            # By way of the holder, whose hooks gather its weights where several ranks share them.
            forward, fused.forward = fused.outputs, held.__call__  # type: ignore[method-assign]

        def on_local_experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            return self._exchange(experts, forward, total, hidden, index, weights)

        held.forward = on_local_experts

    def _exchange(
        self, experts: nn.Module, forward: Forward, total: int, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> Tensor:
        """Outputs of the experts for this rank's N tokens, ``(N, H)``, from hidden states of that shape.

        Each token has k experts: ``index`` and ``weights``, those of the router, are ``(N, k)``. ``forward`` computes
        the experts that are here, of ``total`` on all ranks.
        """
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=total).view(self.size, -1)  # (ranks, experts of each)
        counts_in = torch.empty_like(counts)
        dist.all_to_all_single(counts_in, counts, group=self.group)
        sizes_out, sizes_in = counts.sum(1).tolist(), counts_in.sum(1).tolist()
        arrived = self._send(hidden[order // index.shape[1]], sizes_in, sizes_out)
        own = torch.arange(total // self.size, device=hidden.device).repeat(self.size)
        of_expert = own.repeat_interleave(counts_in.flatten())
        answers = self._send(self._compute(experts, forward, arrived, of_expert), sizes_out, sizes_in)
        in_place = torch.empty_like(answers).index_copy(0, order, answers)
        return (in_place.view(*index.shape, -1) * weights[..., None]).sum(1).to(hidden.dtype)

    def _compute(self, experts: nn.Module, forward: Forward, hidden: Tensor, of_expert: Tensor) -> Tensor:
        own = own_parameters(holder(experts))
        whole = {key: weight for key, weight in own.items() if isinstance(weight, DTensor)}
        # An expert's gradient is the sum over the tokens of all ranks of this group, but is averaged only over the
        # ranks that hold the same expert; the other gradients are averaged over both.
        local = {key: _ScaleGradient.apply(w.to_local(), 1 / self.size) for key, w in whole.items()}
        own.update(local)
        try:
            if len(hidden) == 0:  # each rank needs gradients of its weights: their reduction may be a collective
                return hidden + sum(weight.sum() * 0 for weight in experts.parameters())
            return forward(hidden, of_expert[:, None], torch.ones_like(of_expert[:, None], dtype=hidden.dtype))
        finally:
            own.update(whole)

    def _send(self, rows: Tensor, sizes_in: Sequence[int], sizes_out: Sequence[int]) -> Tensor:
        return _Wait.apply(all_to_all_single_autograd(rows, list(sizes_in), list(sizes_out), self.group))


class _Wait(torch.autograd.Function):
    """Wait for the result of a collective; torch's own function has no gradient before 2.12."""

    @staticmethod
    def forward(ctx: FunctionCtx, pending: Tensor) -> Tensor:
        return wait_tensor(pending)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> Tensor:
        return grads[0]


class _ScaleContext(FunctionCtx):
    factor: float


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _ScaleContext, weight: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: _ScaleContext, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None

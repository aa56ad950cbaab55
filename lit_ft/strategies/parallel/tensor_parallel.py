"""Tensor and sequence parallelism: each rank computes with its shards of a layer's matrices, on plain tensors.

A decoder layer's attention and MLP are its blocks; the hidden states between them are the residual stream. Inside a
block every value and every gradient is one rank's part: the input is copied to all ranks and the output is summed over
them, once forward and once backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With sequence parallelism the
residual stream is sharded along the sequence, and copy and sum become all-gather and reduce-scatter, which send as many
bytes (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). Hugging Face's plan (``tp_plan``) defines along which
dimension each matrix is sharded.

Parameters are ``DTensor`` for optimizer and checkpoints; a forward pass sees their local tensors, so that no operator
has the overhead of ``DTensor`` dispatch. ``to_local(grad_placements=...)`` declares whether a gradient is full or one
rank's part of a sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lit_callbacks.protocols import HasScore
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.torch import own_parameters
from lit_ft.strategies.parallel.expert_parallel import Forward, expert_count, set_expert_count
from lit_ft.strategies.parallel.tensor_plan import (
    COLUMNS,
    EXPERTS,
    HEADS,
    ROWS,
    WHOLE_IN,
    WHOLE_OUT,
    Plan,
    is_block,
    linears,
)
from lit_ft.tuning.lora.expert_lora import holder, use_own_experts

_SEQUENCE = Shard(1)

Arguments = tuple[Any, ...]
"""Positional arguments of some module's ``forward``; its hidden states are the first argument."""
Options = dict[str, Any]
"""Keyword arguments of some module's ``forward``."""
Before = Callable[[Arguments, Options], tuple[Arguments, Options]]
"""Function that changes the arguments of ``forward``."""


class TensorParallel:
    """Sharding of a model's matrices over the ranks of a mesh dimension.

    Args:
        mesh: mesh of one dimension.
        sequence_parallel: shard the residual stream along the sequence; the number of tokens of a packed batch must
            be a multiple of the number of ranks.
        loss_parallel: keep logits sharded along the vocabulary.
    """

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool = False, loss_parallel: bool = True) -> None:
        self.mesh, self.size = mesh, mesh.size()
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self._sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied weights are sharded once

    # --- conversions between layouts -------------------------------------------------------------

    def _move(self, x: Tensor, have: Placement, want: Placement, gradient: Placement) -> Tensor:
        whole = DTensor.from_local(x, self.mesh, [have], run_check=False)
        return whole.redistribute(placements=[want]).to_local(grad_placements=[gradient])

    def _copy_in(self, x: Tensor) -> Tensor:
        """Identity in the forward pass, sum of the gradients over ranks in the backward pass."""
        return self._move(x, Replicate(), Replicate(), Partial()) if x.requires_grad else x

    def _sum_out(self, x: Tensor) -> Tensor:
        return self._move(x, Partial(), Replicate(), Replicate())

    # --- layers ----------------------------------------------------------------------------------

    def shard(
        self,
        base: PreTrainedModel,
        layers: Sequence[nn.Module],
        plan: Plan,
        cast: Callable[[nn.Module], object] = lambda _: None,
    ) -> None:
        """Shard a model in place.

        Args:
            base: Hugging Face model; layers of other pipeline stages may be missing.
            layers: decoder layers of this rank.
            plan: style of each module.
            cast: function that is called with a module before it is sharded, to cast its weights.
        """
        for layer in layers:
            cast(layer)
            self.shard_layer(layer, plan)
            self._sharded.clear()  # its keys are the full weights, which can be freed: layers share none
        cast(base)
        if isinstance(embedding := base.get_input_embeddings(), nn.Embedding | ModulesToSaveWrapper):
            self.shard_embedding(embedding)
        if isinstance(head := base.get_output_embeddings(), nn.Linear | BaseTunerLayer | ModulesToSaveWrapper):
            self.shard_head(head)
        elif isinstance(base, HasScore):
            self.keep(base.score, Replicate())  # its input is that of all tokens, also under sequence parallelism
        for module in base.modules():
            if any(not isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
                self._keep_local(module, self._in_stream)
        self._sharded.clear()

    @property
    def _in_stream(self) -> Placement:
        """Placement of the gradients of replicated weights between the blocks (norms)."""
        return Partial() if self.sequence_parallel else Replicate()

    def shard_layer(self, layer: nn.Module, plan: Plan) -> None:
        """Shard the blocks of a decoder layer; the other weights stay on every rank."""
        for child in layer.children():
            if is_block(child):
                self._shard_block(child, plan)
            else:
                self.keep(child, self._in_stream)
        self._keep_local(layer, self._in_stream)

    def _shard_block(self, block: nn.Module, plan: Plan) -> None:
        if plan.covers(block) and plan.styles.get(block) != EXPERTS:
            self._shard_unit(block, plan)
            _wrap(block, _on_hidden(self._enter), self._leave)
        else:
            self._shard_units_within(block, plan)
            _wrap(block, _on_hidden(self._enter_full), self._leave_full)

    def _shard_units_within(self, block: nn.Module, plan: Plan) -> None:
        for child in block.children():
            style = plan.styles.get(child)
            if style in (WHOLE_OUT, WHOLE_IN):
                self._shard_linear(child, COLUMNS if style == WHOLE_OUT else ROWS)
                before, after = self._copy_in, self._gather_features
                if style == WHOLE_IN:
                    before, after = self._shard_features, self._sum_out
                _wrap(child, _on_hidden(before), after)
            elif style == EXPERTS:
                self._assign_experts(child)
            elif plan.covers(child):
                self._shard_unit(child, plan)
                _wrap(child, _on_hidden(self._copy_in), self._sum_out)
            elif any(module in plan.styles for module in child.modules()):
                self._shard_units_within(child, plan)
            else:
                self.keep(child, Replicate())
                for part in child.modules():  # a delta net or Mamba reads the weight of its convolution itself
                    _compute_on_local(part, Replicate(), call_of=block)
        self._keep_local(block, Replicate())

    def _shard_unit(self, unit: nn.Module, plan: Plan) -> None:
        """Shard a module inside which every value and gradient is one rank's part."""
        for linear in linears(unit):
            style = plan.styles.get(linear)
            if style in (COLUMNS, ROWS):
                self._shard_linear(linear, style)
            elif style == HEADS:
                for key, _ in list(linear.named_parameters(recurse=False)):
                    self._set(linear, key, Shard(0))
                _compute_on_local(linear, Partial())
            else:
                self._keep_local(linear, Partial())

    def _shard_linear(self, linear: nn.Module, style: str) -> None:
        """Shard a linear layer ``W + B A`` with its adapter: "colwise" shards W and B, "rowwise" shards W and A."""
        dimension = 0 if style == COLUMNS else 1
        for name, part in linear.named_modules():
            is_full = f".{name}".find(".lora_A." if style == COLUMNS else ".lora_B.") >= 0
            own = list(part.named_parameters(recurse=False, remove_duplicate=False))
            for key, weight in own:
                is_replicated = is_full or (style == ROWS and key == "bias")
                at = Replicate() if is_replicated else Shard(min(dimension, weight.ndim - 1))
                self._set(part, key, at)
            # The ranks' outputs are summed, so each rank adds 1 / size of the bias.
            share = 1 / self.size if style == ROWS else 1.0
            if own:
                _compute_on_local(part, Partial(), {"bias": share}, call_of=linear)

    # --- experts ---------------------------------------------------------------------------------

    def _assign_experts(self, experts: nn.Module) -> None:
        """Assign full experts to ranks; every rank sees all tokens, and the outputs are summed over ranks.

        The matrices of LoRA stay whole: a rank uses, and has gradients of, those parts that are its experts'.
        """
        held, total = holder(experts), expert_count(experts)
        assert total is not None, "the plan names modules of experts"
        own, rank = total // self.size, self.mesh.get_local_rank()
        for key, weight in list(held.named_parameters(recurse=False, remove_duplicate=False)):
            assert weight.shape[0] == total
            self._set(held, key, Shard(0))
        set_expert_count(held, own)
        if experts is not held:
            use_own_experts(experts, rank * own)
        compute = _of_own_experts if experts is not held else _of_all_tokens
        forward = experts.forward

        def on_local_experts(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            is_local = index // own == rank
            index = torch.where(is_local, index % own, own)
            answer = compute(forward, self._copy_in(hidden), index, self._copy_in(weights), is_local)
            trains = any(weight.requires_grad for weight in experts.parameters())
            if trains and not is_local.any():  # each rank needs gradients: their reduction may be a collective
                answer = answer + sum(weight.sum() * 0 for weight in experts.parameters())
            return self._sum_out(answer)

        experts.forward = on_local_experts
        for part in experts.modules():
            own_names = [key for key, _ in part.named_parameters(recurse=False, remove_duplicate=False)]
            for key in own_names if part is not held else ():
                self._set(part, key, Replicate())
            if own_names:
                _compute_on_local(part, Partial(), call_of=experts)

    # --- embedding and head ----------------------------------------------------------------------

    def shard_embedding(self, embedding: nn.Module) -> None:
        """Shard the embedding along the vocabulary."""
        for table in _without_wrapper(embedding):
            self._set(table, "weight", Shard(0))
            rows, start = len(table.weight.to_local()), self._start(table.weight)
            if table.padding_idx is not None:  # its embedding gets no gradient, on the rank that holds it
                table.padding_idx = table.padding_idx - start if start <= table.padding_idx < start + rows else None
            _compute_on_local(table, Shard(0))
            _wrap_lookup(table, start, rows, self._sum_out)

    def shard_head(self, head: nn.Module) -> None:
        """Shard the head along the vocabulary, so that each rank computes the logits of some tokens."""
        for linear in _without_wrapper(head):
            self._shard_linear(linear, COLUMNS)
            vocabulary = next(weight for name, weight in linear.named_parameters() if "lora_" not in name).shape[0]
            _wrap(linear, _on_hidden(lambda x: self._copy_in(_as_computed(x))), partial(self._logits, vocabulary))

    def _logits(self, vocabulary: int, local: Tensor) -> Tensor:
        shape = torch.Size((*local.shape[:-1], vocabulary))
        stride = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(
            local, self.mesh, [Shard(local.ndim - 1)], run_check=False, shape=shape, stride=stride
        )
        return whole if self.loss_parallel else whole.full_tensor(grad_placements=[Replicate()])

    def _start(self, weight: Tensor) -> int:
        return self.mesh.get_local_rank() * -(-weight.shape[0] // self.size)

    # --- inputs and outputs of blocks ------------------------------------------------------------

    def _enter(self, x: Tensor) -> Tensor:
        x = _as_computed(x)
        return self._move(x, _SEQUENCE, Replicate(), Partial()) if self.sequence_parallel else self._copy_in(x)

    def _leave(self, x: Tensor) -> Tensor:
        return self._move(x, Partial(), _SEQUENCE, _SEQUENCE) if self.sequence_parallel else self._sum_out(x)

    def _enter_full(self, x: Tensor) -> Tensor:
        """Input of a block that computes on full values, except in those of its modules that are sharded."""
        return self._move(x, _SEQUENCE, Replicate(), Replicate()) if self.sequence_parallel else x

    def _leave_full(self, x: Tensor) -> Tensor:
        return self._move(x, Replicate(), _SEQUENCE, _SEQUENCE) if self.sequence_parallel else x

    def shard_sequence(self, layer: nn.Module) -> None:
        """Shard the residual stream along the sequence, before the first layer of the model."""
        # With a hook: transformers applies no activation checkpointing to a layer whose `forward` was replaced.
        begin = _on_hidden(self._begin)
        layer.register_forward_pre_hook(lambda _, args, kwargs: begin(args, kwargs), with_kwargs=True)

    def _begin(self, hidden: Tensor) -> Tensor:
        if self.sequence_parallel and hidden.shape[1] % self.size:
            raise RecipeError(
                f"sequence_parallel=true splits sequences into {self.size} parts, but one has {hidden.shape[1]} "
                "tokens; pad it to a multiple (lit_ft.CausalLM does), or set sequence_parallel to false"
            )
        return self._leave_full(hidden)

    def gather_sequence(self, hidden: Tensor) -> Tensor:
        """Full hidden states, ``(1, T, H)``, from this rank's part of the last layer's output."""
        return self._enter_full(hidden)

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Context in which the model's inputs and outputs are full tensors of any length, as in ``generate``."""
        flags = self.sequence_parallel, self.loss_parallel
        self.sequence_parallel = self.loss_parallel = False
        try:
            yield
        finally:
            self.sequence_parallel, self.loss_parallel = flags

    # --- features --------------------------------------------------------------------------------

    def _gather_features(self, x: Tensor) -> Tensor:
        return self._move(x, Shard(x.ndim - 1), Replicate(), Replicate())

    def _shard_features(self, x: Tensor) -> Tensor:
        return self._move(x, Replicate(), Shard(x.ndim - 1), Shard(x.ndim - 1))

    # --- gradients -------------------------------------------------------------------------------

    def sum_parts(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum partial gradients over ranks, with one all-reduce for each dtype."""
        parts: dict[torch.dtype, list[tuple[nn.Parameter, Tensor]]] = {}
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                parts.setdefault(gradient.dtype, []).append((parameter, gradient.to_local()))
        for gradients in parts.values():
            together = torch.cat([part.flatten() for _, part in gradients])
            dist.all_reduce(together, group=self.mesh.get_group())
            for (parameter, part), total in zip(
                gradients, together.split([part.numel() for _, part in gradients]), strict=True
            ):
                parameter.grad = DTensor.from_local(total.view_as(part), self.mesh, [Replicate()], run_check=False)

    # --- parameters ------------------------------------------------------------------------------

    def keep(self, module: nn.Module, gradient: Placement) -> None:
        """Keep a module's weights replicated on every rank; ``gradient`` is the placement of their gradients."""
        for part in module.modules():
            self._keep_local(part, gradient)

    def _keep_local(self, module: nn.Module, gradient: Placement) -> None:
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        for key, _ in own:
            self._set(module, key, Replicate())
        if own:
            _compute_on_local(module, gradient)

    def _set(self, module: nn.Module, key: str, placement: Placement) -> None:
        weight = module.get_parameter(key)
        if weight not in self._sharded:
            # No communication: every rank has the full weight, usually mapped from the same file. The clone allows
            # the full weight to be freed.
            part = distribute_tensor(weight.data, self.mesh, [placement], src_data_rank=None)
            part = DTensor.from_local(
                part.to_local().clone(), self.mesh, [placement], run_check=False, shape=part.shape, stride=part.stride()
            )
            self._sharded[weight] = nn.Parameter(part, requires_grad=weight.requires_grad)
        module.register_parameter(key, self._sharded[weight])


def _of_all_tokens(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor, is_local: Tensor) -> Tensor:
    """Outputs of a rank's experts by the model's own code, which skips the index after the last of them."""
    return forward(hidden, index, weights.masked_fill(~is_local, 0.0))


def _of_own_experts(forward: Forward, hidden: Tensor, index: Tensor, weights: Tensor, is_local: Tensor) -> Tensor:
    """Outputs of a rank's experts with LoRA, for the pairs of a token and an expert that are here."""
    token = is_local.nonzero()[:, 0]
    rows, own = hidden[token], weights[is_local][:, None]
    # Without a pair the result depends on both all the same, as their gradients are summed over ranks.
    outputs = forward(rows, index[is_local][:, None], own) if len(token) else rows * own.to(rows.dtype)
    return torch.zeros_like(hidden).index_add(0, token, outputs)


def _as_computed(x: Tensor) -> Tensor:
    """Cast to the dtype that autocast will compute in, so that half as many bytes are sent."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _without_wrapper(module: nn.Module) -> list[Any]:
    """The layer itself, or PEFT's frozen and trainable copies of it."""
    if isinstance(module, ModulesToSaveWrapper):
        return [module.original_module, *module.modules_to_save.values()]
    return [module]


def _wrap(module: nn.Module, before: Before | None = None, after: Callable[[Tensor], Tensor] | None = None) -> None:
    """Call functions before and after a module's ``forward``, inside its hooks."""
    forward = module.forward

    def wrapped(*args: object, **kwargs: object) -> object:
        if before is not None:
            args, kwargs = before(args, kwargs)
        output = forward(*args, **kwargs)
        if after is None:
            return output
        return (after(output[0]), *output[1:]) if isinstance(output, tuple) else after(output)

    module.forward = wrapped


def _on_hidden(function: Callable[[Tensor], Tensor]) -> Before:
    """Apply a function to a module's hidden states, its first argument."""

    def apply(args: Arguments, kwargs: Options) -> tuple[Arguments, Options]:
        if args:
            return (function(args[0]), *args[1:]), kwargs
        first = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
        return args, {**kwargs, first: function(kwargs[first])}

    return apply


def _compute_on_local(
    module: nn.Module, gradient: Placement, factors: Mapping[str, float] | None = None, call_of: nn.Module | None = None
) -> None:
    """Replace a module's own parameters, which are ``DTensor``, by their local tensors during ``forward``.

    That is the module's own, or that of ``call_of``, a layer that reads its parts' weights. ``gradient`` is the
    placement of the gradients of replicated parameters; ``factors``, by name, multiply parameters.
    """
    called = module if call_of is None else call_of
    forward = called.forward

    def wrapped(*args: object, **kwargs: object) -> object:
        parameters = own_parameters(module)
        own = dict(parameters)
        for name, weight in own.items():
            if isinstance(weight, DTensor):
                placements = [gradient if at.is_replicate() else at for at in weight.placements]
                part = weight.to_local(grad_placements=placements)
                factor = (factors or {}).get(name, 1.0)
                parameters[name] = part if factor == 1 else part * factor
        try:
            return forward(*args, **kwargs)
        finally:
            parameters.update(own)

    called.forward = wrapped


def _wrap_lookup(table: nn.Module, start: int, rows: int, total: Callable[[Tensor], Tensor]) -> None:
    forward = table.forward

    def wrapped(ids: Tensor) -> Tensor:
        is_local = (ids >= start) & (ids < start + rows)
        looked_up = forward((ids - start).clamp(0, max(rows - 1, 0)))
        return total(looked_up.masked_fill(~is_local[..., None], 0.0))

    table.forward = wrapped

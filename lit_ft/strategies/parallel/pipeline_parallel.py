"""Pipeline parallelism: each rank holds some layers, and micro-batches pass through them on one of torch's schedules.

A micro-batch of the pipeline is a part of a packed batch, some of its samples, of any length: the tensors that a stage
receives vary in length. All ranks of a pipeline see the same packed batch, so each knows the shapes in advance.

Lightning's loop computes a loss, sets gradients to zero and then calls ``backward``; a schedule runs forward and
backward passes together. The gradients of the schedule are therefore stored separately, and the loss's ``backward``
adds them to the parameters, multiplied by the gradient of the loss: accumulation, clipping and logging work as without
a pipeline.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.modeling_outputs import CausalLMOutput

from lit_ft import packed_batch
from lit_ft.gradient_norm import local
from lit_ft.internals.torch import HAS_DEFERRED_REDUCTION, with_submodules
from lit_ft.model.architecture import head_layer, replace_head
from lit_ft.model.loading import head_of
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.protocols import SplitsForward
from lit_ft.training.loss import token_cross_entropy

SCHEDULES = ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that compute the gradients of inputs and of weights separately."""
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def stages_per_rank(schedule: str) -> int:
    """Number of stages that a schedule gives each rank: 1 or 2."""
    return 1 if issubclass(get_schedule_class(schedule), PipelineScheduleSingle) else 2


def stages_of(rank: int, ranks: int, schedule: str) -> list[int]:
    """Indices of a rank's stages: one, or two, which are ``ranks`` apart (looped) or mirrored (V)."""
    if stages_per_rank(schedule) == 1:
        return [rank]
    return [rank, 2 * ranks - 1 - rank] if schedule in _V_SHAPED else [rank, ranks + rank]


def edges_of(base: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Names of the decoder's modules before and after its layers, from Hugging Face's ``pp_plan``."""
    prefix = f"{base.base_model_prefix}."
    names = [name.removeprefix(prefix) for name in base.pp_plan or () if name.startswith(prefix)]
    position = names.index("layers")
    return names[:position], names[position + 1 :]


def drop_layers(base: PreTrainedModel, keep: Sequence[range], is_first: bool, is_last: bool) -> None:
    """Drop the modules that other ranks hold; the names of the others do not change.

    Args:
        base: Hugging Face model, changed in place.
        keep: indices of the layers to keep.
        is_first: whether to keep the embedding.
        is_last: whether to keep the final norm and the head.
    """
    decoder = getattr(base, base.base_model_prefix)
    before, after = edges_of(base)
    for index in range(len(decoder.layers)):
        if not any(index in layers for layers in keep):
            decoder.layers[index] = PipelineIdentityLayer()
    for name in ([] if is_first else before) + ([] if is_last else after):
        setattr(decoder, name, PipelineIdentityLayer())
    if not is_last:
        replace_head(base, PipelineIdentityLayer())


class _Entry(nn.Module):
    """Replacement for the layers before a stage: returns the hidden states received from the previous stage."""

    received: Tensor

    def forward(self, *_: object, **__: object) -> Tensor:
        return self.received


class StageModule(nn.Module):
    """Pipeline stage: consecutive layers, with the embedding in the first stage, and final norm and head in the last.

    It shares its submodules with the model, whose parameter names do not change.

    Args:
        module: LightningModule with ``hidden_states(batch, decoder)`` and ``token_loss(hidden, batch)``, as
            ``lit_ft.CausalLM`` has.
        base: Hugging Face model inside it, without the modules that other ranks hold.
        index: index of this stage.
        stages: number of stages of the pipeline.
        layers: indices of this stage's layers.
        end: function applied to the last layer's hidden states, which returns ``(1, T, H)``.
        full_loss: function from the loss of this rank's tokens to that of all tokens (context parallelism).
    """

    def __init__(
        self,
        module: SplitsForward,
        base: PreTrainedModel,
        index: int,
        stages: int,
        layers: range,
        end: Callable[[Tensor], Tensor] = lambda hidden: hidden,
        full_loss: Callable[[TokenLoss, PackedBatch], TokenLoss] = lambda result, _: result,
    ) -> None:
        super().__init__()
        self.index, self.is_first, self.is_last, self.layers = index, index == 0, index == stages - 1, layers
        self.entry, self.end, self.full_loss = _Entry(), end, full_loss
        self.decoder = _part_of(getattr(base, base.base_model_prefix), layers)
        if not self.is_first:
            self.decoder.layers[layers.start - 1] = self.entry
        before, after = edges_of(base)
        for name in ([] if self.is_first else before) + ([] if self.is_last else after):
            setattr(self.decoder, name, PipelineIdentityLayer())
        self.head = head_layer(base) if self.is_last else None
        self._logits = head_of(base)
        self._module = [module]  # in a list, so that it is not registered as a submodule
        self.packed_batches: Sequence[PackedBatch] = ()
        self.results: dict[int, TokenLoss] = {}

    def forward(self, received: Tensor, index: Tensor) -> Tensor:
        """Compute one micro-batch: hidden states ``(1, T, H)`` for the next stage, or the summed loss.

        Args:
            received: hidden states of the previous stage; ignored by the first stage.
            index: index of the micro-batch in ``packed_batches``, ``(1,)``, on the CPU.
        """
        batch = self.packed_batches[int(index)]
        decoder = self.decoder
        if not self.is_first:
            self.entry.received = received
            # The first stage has done what a model does to its input embeddings (gemma and granite scale them).
            nothing = received.detach().new_zeros(1, 1, 1).expand(1, batch["input_ids"].shape[1], received.shape[-1])
            decoder = lambda input_ids, **options: self.decoder(inputs_embeds=nothing, **options)  # noqa: E731
        (module,) = self._module
        hidden = module.hidden_states(batch, decoder)
        if not self.is_last:
            return hidden
        with token_cross_entropy.repeatable_backward():
            result = self.full_loss(module.token_loss(self.end(hidden), batch), batch)
        self.results[int(index)] = result
        return result.loss_sum

    def next_logits(
        self, received: Tensor | None, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor:
        """Compute this stage for a padded batch of ``generate``.

        Args:
            received: hidden states of the previous stage, ``(B, T, H)``; None for the first stage.
            input_ids: token ids, ``(B, T)``.
            attention_mask: mask, ``(B, T)``, 1 on tokens and 0 on padding.
            position_ids: positions, ``(B, T)``.

        Returns:
            Hidden states for the next stage, ``(B, T, H)``, or logits of the next token, ``(B, 1, V)``.
        """
        inputs: dict[str, Tensor] = {"input_ids": input_ids}
        if received is not None:
            self.entry.received = received
            inputs = {"inputs_embeds": received.new_zeros(1, 1, 1).expand_as(received)}
        hidden = self.decoder(**inputs, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        if not self.is_last:
            return hidden.last_hidden_state
        return self._logits(hidden.last_hidden_state[:, -1])[:, None]


def _part_of(decoder: PreTrainedModel, layers: range) -> PreTrainedModel:
    own = (layer if index in layers else PipelineIdentityLayer() for index, layer in enumerate(decoder.layers))
    return with_submodules(decoder, {"layers": nn.ModuleList(own)})


class _Stage(PipelineStage):
    """torch's stage, for micro-batches of different lengths, and with one gradient reduction per optimizer step."""

    shapes: Sequence[tuple[int, ...]] = ()
    """Shape of the tensor that is received for each micro-batch."""
    is_within_window = False

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        messages = super().get_fwd_recv_ops(fwd_chunk_id)
        return self._fit(messages, self.args_recv_info, fwd_chunk_id, requires_grad=self.has_backward)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._fit(super().get_bwd_recv_ops(bwd_chunk_id), self.grad_recv_info, bwd_chunk_id)

    def _fit(
        self, messages: list[dist.P2POp], infos: Mapping[int, Sequence[Any]], chunk: int, requires_grad: bool = False
    ) -> list[dist.P2POp]:
        """Receive into tensors of the micro-batch's length; those of torch have the length of the examples."""
        for message, info in zip(messages, _with_buffer(infos[chunk]) if messages else (), strict=True):
            options = {"dtype": info.buffer.dtype, "device": self.device, "requires_grad": requires_grad}
            message.tensor = info.buffer = torch.empty(self.shapes[chunk], **options)
        return messages

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for infos in (self.args_recv_info, self.grad_recv_info):
            for info in _with_buffer(infos.get(bwd_chunk_id, ())):  # torch 2.13 keeps them until the end of the step
                info.buffer = info.buffer.detach().new_empty(0)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if not self.has_backward:
            self._reshard()
        elif not self.is_within_window:
            super().perform_reduce_grad(grad_scale_factor)

    def _post_metadata_inference_cleanup(self) -> None:
        # torch's own, between training and evaluation, drops the gradients of gathered weights as well, also those of
        # the earlier micro-batches of an optimizer step.
        self._reshard()

    def _reshard(self) -> None:
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    # torch 2.11 warms up connections, also of a rank with itself, which gloo does not support (`Pipeline` does it by a
    # collective).

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return []

    # torch 2.11, and a later one with TORCH_DISTRIBUTED_DEBUG=DETAIL, compares shapes with those that a stage was
    # created with.

    def _validate_fwd_input(self, *_: object) -> None:
        pass

    def _validate_fwd_outputs(self, *_: object) -> None:
        pass

    def _validate_stage_tensors(self, *_: object) -> None:
        pass

    # torch 2.13 asserts a backward pass if consecutive stages on one rank exchange tensors in `eval`.

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


def _with_buffer(infos: Iterable[Any]) -> list[Any]:
    """Torch's descriptions of received tensors that have a buffer."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


class Pipeline:
    """Replacement for a module's ``forward`` that computes the loss of a packed batch through all stages.

    Args:
        stages: stages of this rank.
        count: number of stages of the pipeline.
        mesh: mesh of the pipeline dimension.
        schedule: name of a schedule of ``torch.distributed.pipelining``.
        micro_batches: number of micro-batches that a packed batch is split into.
        boundary: empty tensor ``(1, 0, H)`` with the dtype and device of what stages exchange.
        vocabulary: number of logits of a token.
        multiple: number that the tokens of a micro-batch are padded to a multiple of.
        sequence_shards: number of ranks that the hidden sequence is split over between layers.
        local_tokens: selects this rank's tokens of a micro-batch (context parallelism).
        scaled: multiplies a tensor by the scale of fp16's gradient scaler, if there is one.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        count: int,
        mesh: DeviceMesh,
        schedule: str,
        micro_batches: int,
        boundary: Tensor,
        vocabulary: int,
        multiple: int = 1,
        sequence_shards: int = 1,
        local_tokens: Callable[[PackedBatch], PackedBatch] | None = None,
        scaled: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.stages, self.mesh = stages, mesh
        self._scaled, self._loss_factor = scaled or (lambda tensor: tensor), torch.ones((), device=boundary.device)
        self.micro_batches, self.multiple = micro_batches, multiple
        self.sequence_shards, self.local_tokens = sequence_shards, local_tokens
        self.width, self.device = boundary.shape[-1], boundary.device
        self.parameters = list(dict.fromkeys(p for stage in stages for p in stage.parameters() if p.requires_grad))
        self.count, self.schedule_name, self.dtype, self.vocabulary = count, schedule, boundary.dtype, vocabulary
        self.last_rank = self._owner(count - 1)
        # Leaf tensor through which the loop's `backward` reaches `_Bridge`; it is not a parameter.
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._gradients: list[Tensor | None] = []
        self._reduction: dict[str, bool] = {}

        # Shapes change with every micro-batch; these examples define the number of tensors, their rank and dtype.
        index = torch.empty(1, dtype=torch.int64, device="meta")
        hidden = torch.empty((1, 1, self.width), dtype=boundary.dtype, device="meta", requires_grad=True)
        loss = torch.empty((), device="meta", requires_grad=True)
        self._torch_stages = [
            _Stage(
                stage,
                stage.index,
                count,
                self.device,
                input_args=index if stage.is_first else hidden,
                output_args=loss if stage.is_last else hidden,
                group=mesh.get_group(),
            )
            for stage in stages
        ]
        make = get_schedule_class(schedule)
        self.schedule = make(
            self._torch_stages[0] if stages_per_rank(schedule) == 1 else self._torch_stages,
            n_microbatches=micro_batches,
            loss_fn=lambda loss, _: loss * self._loss_factor,
            scale_grads=False,
        )
        # On NCCL a group's first call must be one of all its ranks, or a batch of messages among some of them may hang
        # (torch.distributed.batch_isend_irecv). torch's own warm-up does not do this for stages with known shapes.
        dist.all_reduce(torch.zeros(1, device=self.device), group=mesh.get_group())

    def __call__(self, batch: PackedBatch) -> TokenLoss:
        """Compute the loss of a packed batch, on every rank of the pipeline.

        If gradients are enabled they are computed too, and ``backward`` of the loss adds them to the parameters.
        """
        parts = [
            packed_batch.pad_to_multiple(part, self.multiple) for part in packed_batch.split(batch, self.micro_batches)
        ]
        shapes = [(1, part["input_ids"].shape[1] // self.sequence_shards, self.width) for part in parts]
        for stage, torch_stage in zip(self.stages, self._torch_stages, strict=True):
            stage.packed_batches = parts if self.local_tokens is None else [self.local_tokens(part) for part in parts]
            torch_stage.shapes = shapes
            stage.results.clear()
        # FSDP adds up the gradients of an optimizer step's micro-batches in itself, so those of the schedule have what
        # differs between them; and the scale, or they would vanish in fp16. `_put_in_place` divides by both.
        self._loss_factor = self._scaled(torch.ones((), device=self.device)) * batch.get("loss_weight", 1.0)
        wants_gradients = torch.is_grad_enabled()
        with _set_aside(self.parameters) as gradients:
            self._run(self.schedule.step if wants_gradients else self.schedule.eval)
        result = self._share_result(len(batch["targets"]))
        if not wants_gradients:
            return result
        self._gradients = gradients
        return result._replace(loss_sum=_Bridge.apply(self._anchor, result.loss_sum, self._put_in_place))

    def next_logits(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: object
    ) -> CausalLMOutput:
        """Logits of the next token for ``generate``, ``(B, 1, V)``, on every rank; no key-value cache is used."""
        here, group = {stage.index: stage for stage in self.stages}, self.mesh.get_group()
        flowing: Tensor | None = None
        for index in range(self.count):
            if index not in here:
                continue
            if index > 0 and index - 1 not in here:
                flowing = torch.empty((*input_ids.shape, self.width), dtype=self.dtype, device=self.device)
                dist.recv(flowing, src=self._owner(index - 1), group=group)
            flowing = here[index].next_logits(flowing, input_ids, attention_mask, position_ids)
            if index + 1 < self.count and index + 1 not in here:
                dist.send(flowing.contiguous(), dst=self._owner(index + 1), group=group)
        if flowing is None or self.count - 1 not in here:
            flowing = torch.empty(len(input_ids), 1, self.vocabulary, device=self.device)
        logits = flowing.float().contiguous()
        dist.broadcast(logits, src=self._owner(self.count - 1), group=group)
        return CausalLMOutput(logits=logits)

    def _owner(self, index: int) -> int:
        """Global rank that holds a stage."""
        ranks = range(self.mesh.size())
        owner = next(r for r in ranks if index in stages_of(r, self.mesh.size(), self.schedule_name))
        return dist.get_global_rank(self.mesh.get_group(), owner)

    def within_window(self, is_within: bool) -> None:
        """Set whether more micro-batches of the optimizer step follow, so that gradients are not reduced yet."""
        for stage in self._torch_stages:
            stage.is_within_window = is_within
        self._reduction = {"finalize_gradients": not is_within} if HAS_DEFERRED_REDUCTION else {}

    def drop_gradients(self) -> None:
        """Free the gradients after an optimizer step."""
        for parameter in self.parameters:
            parameter.grad = None

    def _run(self, step: Callable[..., object]) -> None:
        indices = torch.arange(self.micro_batches)  # on the CPU: a stage reads them as indices of Python lists
        first = (indices,) if any(stage.is_first for stage in self.stages) else ()
        target = indices if any(stage.is_last for stage in self.stages) else None
        step(*first, target=target, return_outputs=False, index=indices, **self._reduction)

    def _share_result(self, tokens: int) -> TokenLoss:
        values = torch.zeros(2 + tokens, dtype=torch.float32, device=self.device)  # the default dtype may be bf16
        for stage in self.stages:
            if stage.is_last:
                results = [stage.results[index] for index in range(self.micro_batches)]
                values[0] = torch.stack([result.loss_sum.detach() for result in results]).sum()
                values[1] = torch.stack([result.correct for result in results]).sum()
                values[2:] = torch.cat([result.per_token for result in results])
        dist.broadcast(values, src=self.last_rank, group=self.mesh.get_group())
        return TokenLoss(values[0].clone(), values[1].long(), values[2:])

    def _put_in_place(self, factor: Tensor) -> None:
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if gradient is not None:
                local(gradient).mul_(factor / self._loss_factor)
                if parameter.grad is None:
                    parameter.grad = gradient
                else:
                    local(parameter.grad).add_(local(gradient))
        self._gradients = []


@contextmanager
def _set_aside(parameters: Sequence[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Context that starts without gradients; at its end, the list that it yields holds the new ones."""
    earlier = [p.grad for p in parameters]
    gradients: list[Tensor | None] = []
    for parameter in parameters:
        parameter.grad = None
    try:
        yield gradients
    finally:
        for parameter, gradient in zip(parameters, earlier, strict=True):
            gradients.append(parameter.grad)
            parameter.grad = gradient


class _BridgeContext(FunctionCtx):
    put_in_place: Callable[[Tensor], None]


class _Bridge(torch.autograd.Function):
    """Identity whose backward pass calls a function with the gradient."""

    @staticmethod
    def forward(ctx: _BridgeContext, anchor: Tensor, value: Tensor, put_in_place: Callable[[Tensor], None]) -> Tensor:
        ctx.put_in_place = put_in_place
        return value.clone()

    @staticmethod
    def backward(ctx: _BridgeContext, *grads: Tensor) -> tuple[None, None, None]:
        ctx.put_in_place(grads[0])
        return None, None, None

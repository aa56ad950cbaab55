"""Tensor, sequence, pipeline, context and expert parallelism with sharded data parallelism, on one device mesh."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.protocols import grad_scaler
from lit_callbacks.throughput.flops import TransformerFlops
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from lit_ft import packed_batch
from lit_ft.checkpointing.storage.sharded import OptimizerState
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import set_device_mesh
from lit_ft.internals.torch import flatten_mesh
from lit_ft.model.architecture import head_layer
from lit_ft.model.files.deferred_cast import final_dtype
from lit_ft.model.loading import decoder_layers
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.planning.communication import step_of
from lit_ft.planning.layout import Layout, Stage
from lit_ft.planning.report import format_layout, rank_contents
from lit_ft.process import datamodule_of
from lit_ft.protocols import SplitsForward, micro_batch_size
from lit_ft.strategies.module_calls import (
    Forward,
    gather_in_answer,
    map_hidden_states,
    replaced_forward,
    wrap_answer,
    wrap_forward,
)
from lit_ft.strategies.parallel import expert_parallel, pipeline_parallel
from lit_ft.strategies.parallel.context_parallel import ContextParallel
from lit_ft.strategies.parallel.expert_parallel import ExpertParallel
from lit_ft.strategies.parallel.mesh import MeshSizes, ParallelDims, RequestedSizes, Size, base_of
from lit_ft.strategies.parallel.pipeline_parallel import Pipeline, StageModule
from lit_ft.strategies.parallel.tensor_parallel import TensorParallel
from lit_ft.strategies.parallel.tensor_plan import Plan
from lit_ft.strategies.parallel.tied_embeddings import TiedEmbeddings
from lit_ft.strategies.sharded import ShardedStrategy, T, check_mixers, check_shared

PIPELINE, DATA, CONTEXT, TENSOR = "pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"


class ModelParallelStrategy(ShardedStrategy):
    """Distribute layers (pipeline), matrices (tensor), all weights (data), tokens (context) and experts over ranks.

    Megatron-LM's three dimensions (Narayanan et al. 2021, arXiv:2104.04473) on torch's ``DTensor``, ``fully_shard`` and
    ``torch.distributed.pipelining``. It supports Hugging Face decoders that come with a plan, LoRA and full
    fine-tuning. Results are those of one process, and checkpoints can be resumed under every other strategy.
    """

    def __init__(
        self,
        pipeline_parallel_size: Size = 1,
        tensor_parallel_size: Size = 1,
        data_parallel_size: Size = "auto",
        context_parallel_size: Size = 1,
        expert_parallel_size: int = 1,
        schedule: str = "1F1B",
        num_microbatches: int | None = None,
        layers_per_stage: list[int] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = True,
        tp_plan: dict[str, str] | None = None,
        reshard_after_forward: bool = True,
        save_distributed_checkpoint: bool | None = None,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        """Set the sizes of the device mesh; their product is the number of ranks, and one of them may be auto.

        Args:
            pipeline_parallel_size: number of ranks that the model's layers are distributed over.
            tensor_parallel_size: number of ranks that each layer's matrices are sharded over; keep them on one node.
            data_parallel_size: number of ranks that each train on different data, and over which the remaining weights
                are sharded (as under FSDP).
            context_parallel_size: number of ranks that the tokens of a packed batch are distributed over, for
                sequences too long for one rank.
            expert_parallel_size: number of ranks that the experts of a mixture-of-experts model are distributed over:
                a subset of the data- and context-parallel ranks. With tensor_parallel_size above 1 it must equal that
                size, and experts are distributed over the tensor-parallel ranks.
            schedule: pipeline schedule: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble
                or DualPipeV. All but the first two give a rank two stages.
            num_microbatches: number of pipeline micro-batches that a packed batch is split into; it must divide
                data.micro_batch_size. null is data.micro_batch_size.
            layers_per_stage: number of decoder layers of each stage, first to last; null balances the stages by their
                number of weights, head included.
            sequence_parallel: shard the residual stream along the sequence: less memory, the same communication.
            loss_parallel: keep logits sharded along the vocabulary.
            tp_plan: tensor-parallel styles of modules for which Hugging Face has none, e.g.
                {model.layers.*.mlp.up_proj: colwise}.
            reshard_after_forward: free a layer's weights after its forward pass; without a pipeline only.
            save_distributed_checkpoint: true writes a checkpoint folder, to which each rank adds its shards; false
                writes one file; null writes one file if an adapter is trained, and a folder otherwise.
            async_save: write checkpoint folders in the background while training continues, from a copy in host
                memory.
            process_group_backend: backend of torch.distributed; null is nccl on CUDA, gloo on CPU.
            timeout: longest time that a rank waits for the others before the run fails.

        Raises:
            RecipeError: the schedule is unknown.
        """
        super().__init__(save_distributed_checkpoint, process_group_backend, timeout, async_save)
        requested = RequestedSizes(
            pipeline_parallel_size, data_parallel_size, context_parallel_size, tensor_parallel_size
        )
        self.placement = ParallelDims(
            requested,
            expert_parallel_size,
            schedule,
            num_microbatches,
            layers_per_stage,
            tp_plan,
            sequence_parallel,
            loss_parallel,
        )
        self.expert_parallel_size, self.schedule, self.tp_plan = expert_parallel_size, schedule, tp_plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self.reshard_after_forward = reshard_after_forward
        self.pipeline: Pipeline | None = None
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.edges: TiedEmbeddings | None = None
        self._trained_names: list[str] = []
        self._base: PreTrainedModel
        self._distributed: LightningModule | None = None

    # --- checks of the recipe --------------------------------------------------------------------

    def check(self, trainer: Trainer, module: nn.Module, datamodule: LightningDataModule | None = None) -> None:
        """Check the batch sizes, before weights are read.

        Raises:
            RecipeError: one does not fit; the message names the value, the rule and what works.
        """
        self.placement.check_batches(self.sizes(), micro_batch_size(datamodule), module)

    def check_model(self, module: nn.Module, skeleton: nn.Module) -> None:
        """Refuse models that cannot be distributed over this mesh; see ``ChecksModel``."""
        self.placement.check_model(self.sizes(), module, skeleton)

    def sizes(self) -> MeshSizes:
        """Mesh sizes for the ranks of this run.

        Raises:
            RecipeError: the product of the sizes is not the number of ranks.
        """
        return self.placement.sizes(self.num_nodes, self.num_processes)

    def micro_batches(self, micro_batch_size: int | None) -> int:
        """Number of pipeline micro-batches that a packed batch is split into."""
        return self.placement.micro_batches(self.sizes(), micro_batch_size)

    # --- processes and mesh ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self.sizes()  # checked before processes are started, so that an error is reported once
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the process group and create the device mesh."""
        super().setup_environment()
        self._device_mesh = init_device_mesh(
            self.root_device.type, tuple(self.sizes()), mesh_dim_names=(PIPELINE, DATA, CONTEXT, TENSOR)
        )
        set_device_mesh(self._module, self._device_mesh)

    def _mesh(self, name: str) -> DeviceMesh:
        return self.device_mesh[name]

    # --- model -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Distribute the model, then build the optimizer on this rank's part."""
        self.check(trainer, self._module, datamodule_of(trainer))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(self.describe())

    def describe(self) -> str:
        """Text of the mesh, the schedule with its bubble, and what each rank holds and sends; a collective."""
        layout, step = self.layout(), step_of(self._module.trainer)
        own = rank_contents(layout, self._module, step)
        shares = [own] * self.world_size
        dist.all_gather_object(shares, own)
        return format_layout(layout, shares, step)

    def layout(self) -> Layout:
        """Layout of the model, once it is sharded, as seen from this rank."""
        stages = [] if self.pipeline is None else self.pipeline.stages
        has_remote_copy = self.edges is not None and self.edges.group is not None
        return Layout(
            self._base,
            self.sizes(),
            self._precision_policy(),
            self.reshard_after_forward,
            sequence_parallel=self.sequence_parallel,
            loss_parallel=self.loss_parallel,
            expert_parallel_size=self.expert_parallel_size,
            schedule=self.schedule,
            micro_batches=1 if self.pipeline is None else self.pipeline.micro_batches,
            pipeline_rank=self._mesh(PIPELINE).get_local_rank(),
            stages=[Stage(stage.index, stage.layers, stage.is_first, stage.is_last) for stage in stages],
            tied_copies=[*self.edges.copies.values()] if self.edges is not None and has_remote_copy else [],
        )

    def takes_over(self, earlier: str) -> bool:
        """Whether this object itself has distributed the module: stages and the split of matrices are kept in it."""
        return super().takes_over(earlier) and self._distributed is self._module

    def shard(self, module: LightningModule) -> None:
        """Drop the layers of other stages, shard matrices (tensor), then shard all weights over data-parallel ranks."""
        base, sizes = base_of(module), self.sizes()
        self.check_model(module, module)
        self._base, self._distributed = base, module
        # For ThroughputMonitor, before layers are dropped.
        module.full_model_flops = TransformerFlops.of(module)  # type: ignore[assignment]
        self._trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
        plan = Plan(base, self.tp_plan) if sizes.tensor > 1 else None
        if sizes.tensor > 1:
            self.tensor = TensorParallel(self._mesh(TENSOR), self.sequence_parallel, self.loss_parallel)
        if sizes.context > 1:
            self.context = ContextParallel(self._mesh(CONTEXT))
        stages = self._make_stages(module, base) if sizes.pipeline > 1 else []
        layers = decoder_layers(base)
        if plan is not None and self.tensor is not None:
            self._shard_stage(module, base, layers, plan, self.tensor)
        self._cast_to_trained_dtype(module)
        if self.context is not None:
            self.context.prepare(layers)
        if sizes.data * sizes.context > 1:
            self._shard_over_data(module, layers, stages)
        if stages:
            self._start_pipeline(module, base, stages)
        elif isinstance(module, SplitsForward) and self._multiple() > 1:
            wrap_forward(module, self._on_local_tokens)

    def _make_stages(self, module: nn.Module, base: PreTrainedModel) -> list[StageModule]:
        assert isinstance(module, SplitsForward), "check_batches has refused it"
        layers, size = self.placement.layers_of_stages(self.sizes(), base), self.sizes().pipeline
        embedding, head = base.get_input_embeddings(), head_layer(base)
        dtype = final_dtype(embedding.weight) or embedding.weight.dtype
        like_embedding = self.precision_plugin.convert_module(nn.Embedding(1, 1, dtype=dtype))
        self._boundary_dtype = next(like_embedding.parameters()).dtype
        self.edges = TiedEmbeddings(module, base) if head.weight is embedding.weight else None
        self._vocabulary = head.weight.shape[0]
        own = pipeline_parallel.stages_of(self._mesh(PIPELINE).get_local_rank(), size, self.schedule)
        pipeline_parallel.drop_layers(base, [layers[k] for k in own], is_first=0 in own, is_last=len(layers) - 1 in own)
        end = (lambda hidden: hidden) if self.tensor is None else self.tensor.gather_sequence
        full_loss = (lambda result, _: result) if self.context is None else self.context.full_loss
        return [StageModule(module, base, k, len(layers), layers[k], end, full_loss) for k in own]

    def _shard_stage(
        self,
        module: nn.Module,
        base: PreTrainedModel,
        layers: Sequence[nn.Module],
        plan: Plan,
        parallel: TensorParallel,
    ) -> None:
        parallel.shard(base, layers, plan, self._cast_to_trained_dtype)
        decoder, is_whole = getattr(base, base.base_model_prefix), self.sizes().pipeline == 1
        if parallel.sequence_parallel and (is_whole or decoder.layers[0] is layers[0]):
            parallel.shard_sequence(layers[0])
        if parallel.sequence_parallel and is_whole:
            map_hidden_states(decoder, parallel.gather_sequence)
        wrap_answer(module, parallel.as_one_process())

    def _on_local_tokens(self, forward: Forward) -> Forward:
        """Without a pipeline, pad packed batches to a divisible length and select this rank's tokens of them."""

        def on_local_tokens(batch: PackedBatch) -> TokenLoss:
            batch = packed_batch.pad_to_multiple(batch, self._multiple())
            if self.context is None:
                return forward(batch)
            local = self.context.local_tokens(batch)
            return self.context.full_loss(forward(local), local)

        return on_local_tokens

    def _multiple(self) -> int:
        """Number that the tokens of a packed batch must be a multiple of, so that ranks get equal parts."""
        sizes = self.sizes()
        of_context = 2 * sizes.context if sizes.context > 1 else 1
        return of_context * (sizes.tensor if self.sequence_parallel else 1)

    def _shard_over_data(self, module: nn.Module, layers: Sequence[nn.Module], stages: Sequence[StageModule]) -> None:
        if not stages:
            check_shared(module, layers)
        experts = self._assign_experts(layers) if self.expert_parallel_size > 1 and self.tensor is None else set()
        # For gradients, ranks with other tokens of a packed batch are the same as ranks with other packed batches.
        mesh = self._mesh(DATA) if self.context is None else flatten_mesh(self.device_mesh[DATA, CONTEXT], "shard")
        shard = partial(fully_shard, mesh=mesh, mp_policy=self._precision_policy(), ignored_params=experts)
        # With a pipeline, freeing weights between passes gives wrong gradients under zero-bubble schedules.
        reshard = self.reshard_after_forward and not stages
        for layer in layers:
            self._shard_weights(layer, partial(shard, reshard_after_forward=reshard))
        check_mixers(self._base)
        roots: Sequence[nn.Module] = stages or [module]
        for root in roots:
            self._shard_weights(root, partial(shard, reshard_after_forward=False))
        for stage in stages:
            register_fsdp_forward_method(stage, "next_logits")
        if not stages:
            gather_in_answer(module)

    def _assign_experts(self, layers: Sequence[nn.Module]) -> set[nn.Parameter]:
        """Assign experts to ranks, and shard them over the ranks that hold the same experts; returns their weights."""
        sizes, size = self.sizes(), self.expert_parallel_size
        copies = sizes.data * sizes.context // size
        mesh = init_device_mesh(
            self.root_device.type, (sizes.pipeline, copies, size), mesh_dim_names=("stage", "copies", "experts")
        )
        parallel = ExpertParallel(mesh["experts"])
        of_layers = [
            m for m in expert_parallel.experts_of(self._base) if any(m in set(lay.modules()) for lay in layers)
        ]
        for experts in of_layers:
            parallel.assign_experts(experts)
            if copies > 1:
                fully_shard(
                    expert_parallel.holder(experts),
                    mesh=mesh["copies"],
                    reshard_after_forward=False,
                    mp_policy=self._precision_policy(),
                    shard_placement_fn=lambda _: Shard(1),
                )
        return {weight for experts in map(expert_parallel.holder, of_layers) for weight in experts.parameters()}

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the optimizers; if weights lie on different meshes, each parameter is updated separately."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            meshes = {
                p.device_mesh for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)
            }
            for group in optimizer.param_groups if len(meshes) > 1 else ():
                group.update({name: False for name in ("foreach", "fused") if name in group})

    def _start_pipeline(self, module: LightningModule, base: PreTrainedModel, stages: Sequence[StageModule]) -> None:
        sizes = self.sizes()
        policy = self._precision_policy().param_dtype if sizes.data * sizes.context > 1 else None
        width = base.config.get_text_config().hidden_size
        scaler = grad_scaler(module.trainer)
        self.pipeline = Pipeline(
            stages,
            sizes.pipeline * pipeline_parallel.stages_per_rank(self.schedule),
            self._mesh(PIPELINE),
            self.schedule,
            self.micro_batches(micro_batch_size(datamodule_of(module.trainer))),
            torch.empty(1, 0, width, dtype=policy or self._boundary_dtype, device=self.root_device),
            self._vocabulary,
            multiple=self._multiple(),
            sequence_shards=sizes.context * (sizes.tensor if self.sequence_parallel else 1),
            local_tokens=None if self.context is None else self.context.local_tokens,
            scaled=None if scaler is None else scaler.scale,
        )
        pipeline = self.pipeline
        wrap_forward(module, lambda _: pipeline)
        wrap_answer(module, self._answering(base, pipeline))
        if self.edges is not None:
            self.edges.connect(module, self._ranks_per_stage(), self.pipeline.last_rank)

    @contextmanager
    def _answering(self, base: PreTrainedModel, through: Pipeline) -> Iterator[None]:
        """Context in which the base model's ``generate`` runs through all stages, token by token."""
        config = base.generation_config
        had_cache, config.use_cache = config.use_cache, False
        try:
            with replaced_forward(base, through.next_logits):
                yield
        finally:
            config.use_cache = had_cache

    def _fsdp_roots(self) -> Sequence[nn.Module]:
        return self.pipeline.stages if self.pipeline is not None else super()._fsdp_roots()

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for all but the last micro-batch of an optimizer step: gradients are not reduced over ranks."""
        if self.pipeline is not None:
            self.pipeline.within_window(True)
        try:
            with super().block_backward_sync():
                yield
        finally:
            if self.pipeline is not None:
                self.pipeline.within_window(False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> object:
        """Take a step, then free a pipeline's gradients, which Lightning would keep during the next schedule."""
        result = super().optimizer_step(*args, **kwargs)
        if self.pipeline is not None:
            self.pipeline.drop_gradients()
        return result

    def post_backward(self, closure_loss: Tensor) -> None:
        """Sum partial gradients over ranks, after the last micro-batch of an optimizer step."""
        if self._within_window:
            return
        if self.tensor is not None:
            self.tensor.sum_parts([p for p in self._module.parameters() if isinstance(p.grad, DTensor)])
        if self.edges is not None:
            self.edges.sum_gradients()

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self.edges is None or not self.edges.is_copy(parameter)

    def _ranks_per_stage(self) -> int:
        return self.world_size // self.sizes().pipeline

    # --- checkpoints -----------------------------------------------------------------------------

    def _saved_name(self, name: str) -> str:
        return name if self.edges is None else self.edges.saved_name(name)

    def _saved_elsewhere(self) -> frozenset[str]:
        return frozenset() if self.edges is None else frozenset({self.edges.copy_in_base})

    def _order(self) -> list[str]:
        return self._trained_names

    def _leads_stage(self) -> bool:
        return self.global_rank % self._ranks_per_stage() == 0

    def _join_stages(self, own: T) -> list[T]:
        if self.sizes().pipeline == 1:
            return [own]
        group = self._mesh(PIPELINE).get_group()
        first = dist.get_global_rank(group, 0)
        parts = [own] * self.sizes().pipeline if self.global_rank == first else None
        dist.gather_object(own, parts, dst=first, group=group)
        return parts if parts is not None else [own]

    def _local_part(self, checkpoint: Mapping[str, Any], number: int, state: OptimizerState) -> OptimizerState:
        if self.sizes().pipeline > 1 and "optimizer_names" not in checkpoint:
            raise RecipeError(
                "the checkpoint does not name the parameters of its optimizer, so a pipeline's stages cannot tell "
                "theirs; resume without a pipeline (pipeline_parallel_size: 1) and save again"
            )
        return super()._local_part(checkpoint, number, state)

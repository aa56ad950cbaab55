"""Tensor, sequence and pipeline parallelism with sharded data parallelism, on one mesh."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.throughput.flops import TransformerFlops
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from lit_ft import packed_batch
from lit_ft.checkpointing.storage import sharded
from lit_ft.errors import RecipeError
from lit_ft.model.loading import decoder_layers
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.planning.communication import step_of
from lit_ft.planning.report import format_layout, rank_share
from lit_ft.strategies.parallel import expert_parallel, pipeline_parallel
from lit_ft.strategies.parallel.context_parallel import ContextParallel
from lit_ft.strategies.parallel.expert_parallel import ExpertParallel
from lit_ft.strategies.parallel.mesh import MeshSizes, ParallelDims, base_of
from lit_ft.strategies.parallel.pipeline_parallel import Pipeline, StageModule
from lit_ft.strategies.parallel.tensor_parallel import TensorParallel
from lit_ft.strategies.parallel.tensor_plan import Plan
from lit_ft.strategies.parallel.tied_embeddings import TiedEdges
from lit_ft.strategies.sharded import ShardedStrategy, check_method

Size = int | Literal["auto"]
PIPELINE, DATA, CONTEXT, TENSOR = "pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"


class ModelParallelStrategy(ShardedStrategy):
    """Give each rank some layers (pipeline), and of these a part of each matrix (tensor) or of all weights (data).

    Megatron-LM's three dimensions (Narayanan et al. 2021, arXiv:2104.04473) on torch's ``DTensor``, ``fully_shard`` and
    ``torch.distributed.pipelining``. Any Hugging Face decoder that has a plan; LoRA and full fine-tuning. The numbers
    are those of one process, and checkpoints those of every other strategy.
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
        """Lay out the mesh; the product of the sizes is the number of ranks, and one of them may be auto.

        Args:
            pipeline_parallel_size: ranks that a model's layers are dealt out to.
            tensor_parallel_size: ranks that each layer is cut over; keep them on one node.
            data_parallel_size: ranks that each see other data, and shard what is left (as under FSDP).
            context_parallel_size: ranks that each compute some tokens of a row, for rows too long for one.
            expert_parallel_size: ranks that the experts of a mixture-of-experts model are dealt out to: some of those
                that shard the data; with tensor_parallel_size above 1 that size, and experts lie as the rest does.
            schedule: of the pipeline: GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble or
                DualPipeV. All but the first two give a rank two stages.
            num_microbatches: parts that a pipeline cuts a row into; it must divide data.micro_batch_size. null is
                data.micro_batch_size.
            layers_per_stage: decoder layers of each stage, first to last; null balances them by their weights, head
                included.
            sequence_parallel: cut what runs between a layer's blocks along the sequence: less memory, the same
                communication.
            loss_parallel: leave logits cut along the vocabulary.
            tp_plan: how modules are cut, where Hugging Face does not say, e.g. {model.layers.*.mlp.up_proj: colwise}.
            reshard_after_forward: free a layer's weights after its forward pass; without a pipeline only.
            save_distributed_checkpoint: each rank writes its share into a folder; false writes one file; null does
                so where an adapter is trained.
            async_save: write checkpoints of shares while training goes on, from a copy in host memory.
            process_group_backend: of torch.distributed; null is nccl on CUDA, gloo on CPU.
            timeout: how long a rank waits for the others before the run fails.

        Raises:
            RecipeError: the schedule is unknown.
        """
        super().__init__(save_distributed_checkpoint, process_group_backend, timeout, async_save)
        sizes: Any = (pipeline_parallel_size, data_parallel_size, context_parallel_size, tensor_parallel_size)
        self.placement = ParallelDims(
            MeshSizes(*sizes), expert_parallel_size, schedule, num_microbatches, layers_per_stage, tp_plan
        )
        self.expert_parallel_size, self.schedule, self.tp_plan = expert_parallel_size, schedule, tp_plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self.reshard_after_forward = reshard_after_forward
        self.pipeline: Pipeline | None = None
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self.edges: TiedEdges | None = None
        self._trained_names: list[str] = []

    # --- what does not fit -----------------------------------------------------------------------

    def check(self, trainer: Trainer, module: nn.Module, datamodule: Any = None) -> None:
        """Find what does not fit before weights are read.

        Raises:
            RecipeError: it names the value, the rule and what works.
        """
        if self.sizes() != (1, 1, 1, 1):
            check_method(module)
        self.placement.check_batches(self.sizes(), getattr(datamodule, "micro_batch_size", None), module)

    def check_model(self, module: nn.Module, skeleton: nn.Module) -> None:
        """Find what of a model cannot be split, before weights are read.

        Args:
            module: the LightningModule.
            skeleton: its model with its adapters, on the meta device.

        Raises:
            RecipeError: it names the value, the rule and what works.
        """
        self.placement.check_model(self.sizes(), module, skeleton)

    def sizes(self) -> MeshSizes:
        """The mesh for the ranks that there are.

        Raises:
            RecipeError: the sizes do not multiply to the ranks.
        """
        return self.placement.sizes(self.num_nodes, self.num_processes)

    def micro_batches(self, micro_batch_size: int | None) -> int:
        """Parts that a pipeline cuts a row into."""
        return self.placement.micro_batches(self.sizes(), micro_batch_size)

    def layers_of_stages(self, base: PreTrainedModel) -> list[range]:
        """Places of each stage's decoder layers."""
        return self.placement.layers_of_stages(self.sizes(), base)

    # --- processes and mesh ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        self.sizes()  # before processes are started, so that what is wrong is said once
        super()._configure_launcher()

    def setup_environment(self) -> None:
        """Join the processes and lay out the mesh."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        self._device_mesh = init_device_mesh(
            self.root_device.type, tuple(self.sizes()), mesh_dim_names=(PIPELINE, DATA, CONTEXT, TENSOR)
        )
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _mesh(self, name: str) -> DeviceMesh:
        return self.device_mesh[name]

    # --- model -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Split the model, then make the optimizer of what is here."""
        assert self.lightning_module is not None
        self.check(trainer, self.lightning_module, getattr(trainer, "datamodule", None))
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            rank_zero_info(self.describe())

    def describe(self) -> str:
        """Mesh, schedule with its bubble, what each rank holds and sends; a collective, once the model is split."""
        assert self.lightning_module is not None
        step = step_of(self.lightning_module.trainer)
        shares: list[Any] = [None] * self.world_size
        dist.all_gather_object(shares, rank_share(self, self.model, self._base, step))
        return format_layout(self, shares, step)

    def shard(self, module: Any) -> None:
        """Drop the layers of other stages, cut what is left, shard that over the data-parallel ranks."""
        base, sizes = base_of(module), self.sizes()
        self.check_model(module, module.model if isinstance(getattr(module, "model", None), PeftModel) else base)
        self._base = base
        module.flops_of_whole = TransformerFlops.of(module)  # for ThroughputMonitor, before layers are gone
        self._trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
        plan = Plan(base, self.tp_plan) if sizes.tensor > 1 else None
        if sizes.tensor > 1:
            self.tensor = TensorParallel(self._mesh(TENSOR), self.sequence_parallel, self.loss_parallel)
        if sizes.context > 1:
            self.context = ContextParallel(self._mesh(CONTEXT))
        stages = self._make_stages(module, base) if sizes.pipeline > 1 else []
        layers = decoder_layers(base)
        if plan is not None and self.tensor is not None:
            self._cut(module, base, layers, plan, self.tensor)
        self._settle(module)
        if self.context is not None:
            self.context.prepare(layers)
        if sizes.data * sizes.context > 1:
            self._shard_over_data(module, layers, stages)
        if stages:
            self._start_pipeline(module, base, stages)
        else:
            self._wrap_forward(module)

    def _make_stages(self, module: nn.Module, base: PreTrainedModel) -> list[StageModule]:
        layers, size = self.layers_of_stages(base), self.sizes().pipeline
        embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
        dtype = getattr(embedding.weight, "cast_to", embedding.weight.dtype)
        like_embedding = self.precision_plugin.convert_module(nn.Embedding(1, 1, dtype=dtype))
        self._boundary_dtype = next(like_embedding.parameters()).dtype
        self.edges = TiedEdges(module, base) if head.weight is embedding.weight else None
        self._vocabulary = head.weight.shape[0]
        own = pipeline_parallel.stages_of(self._mesh(PIPELINE).get_local_rank(), size, self.schedule)
        pipeline_parallel.drop_layers(base, [layers[k] for k in own], is_first=0 in own, is_last=len(layers) - 1 in own)
        end = (lambda hidden: hidden) if self.tensor is None else self.tensor.gather_sequence
        full_loss = (lambda result, _: result) if self.context is None else self.context.full_loss
        return [StageModule(module, base, k, len(layers), layers[k], end, full_loss) for k in own]

    def _cut(
        self, module: Any, base: PreTrainedModel, layers: Sequence[nn.Module], plan: Plan, parallel: TensorParallel
    ) -> None:
        parallel.shard(base, layers, plan, self._settle)
        decoder = getattr(base, base.base_model_prefix)
        if parallel.sequence_parallel and decoder.layers[0] is layers[0]:
            parallel.shard_sequence(layers[0])
        if parallel.sequence_parallel and self.sizes().pipeline == 1:
            _map_result(decoder, parallel.gather_sequence)
        if hasattr(module, "answer"):
            module.answer = parallel.as_one_process()(module.answer)

    def _wrap_forward(self, module: Any) -> None:
        """Without a pipeline: rows of a length that can be cut, and this rank's tokens of them."""
        if self._multiple() == 1 or not hasattr(module, "hidden_states"):
            return
        forward, context = module.forward, self.context

        def on_own_tokens(row: PackedBatch) -> TokenLoss:
            row = packed_batch.pad_to_multiple(row, self._multiple())
            if context is None:
                return forward(row)
            local = context.local_tokens(row)
            return context.full_loss(forward(local), local)

        module.forward = on_own_tokens

    def _multiple(self) -> int:
        """What the tokens of a row must be a multiple of, to be cut into equal parts."""
        sizes = self.sizes()
        of_context = 2 * sizes.context if sizes.context > 1 else 1
        return of_context * (sizes.tensor if self.sequence_parallel else 1)

    def _shard_over_data(self, module: nn.Module, layers: Sequence[nn.Module], stages: Sequence[StageModule]) -> None:
        experts = self._deal_out_experts(layers) if self.expert_parallel_size > 1 and self.tensor is None else set()
        # Ranks with other tokens of a row are to the gradients what ranks with other rows are.
        mesh = self._mesh(DATA) if self.context is None else self.device_mesh[DATA, CONTEXT]._flatten("shard")
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self._precision_policy()}
        # With a pipeline, weights that are freed between passes give wrong gradients under zero-bubble schedules.
        reshard = self.reshard_after_forward and not stages
        for layer in layers:
            fully_shard(layer, reshard_after_forward=reshard, ignored_params=experts, **options)
        roots: Sequence[nn.Module] = stages or [module]
        for root in roots:
            fully_shard(root, reshard_after_forward=False, ignored_params=experts, **options)
        for stage in stages:
            register_fsdp_forward_method(stage, "next_logits")
        if not stages and hasattr(module, "answer"):
            register_fsdp_forward_method(module, "answer")

    def _deal_out_experts(self, layers: Sequence[nn.Module]) -> set[nn.Parameter]:
        """Give ranks experts of their own, and shard those over the ranks that have the same; returns their weights."""
        sizes, size = self.sizes(), self.expert_parallel_size
        copies = sizes.data * sizes.context // size
        mesh = init_device_mesh(
            self.root_device.type, (sizes.pipeline, copies, size), mesh_dim_names=("stage", "copies", "experts")
        )
        parallel = ExpertParallel(mesh["experts"])
        dealt = [m for m in expert_parallel.experts_of(self._base) if any(m in set(lay.modules()) for lay in layers)]
        for experts in dealt:
            parallel.assign_experts(experts)
            if copies > 1:
                fully_shard(
                    experts,
                    mesh=mesh["copies"],
                    reshard_after_forward=False,
                    mp_policy=self._precision_policy(),
                    shard_placement_fn=lambda _: Shard(1),
                )
        return {weight for experts in dealt for weight in experts.parameters()}

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the optimizers; where weights lie on different meshes, they step one by one."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            meshes = {
                p.device_mesh for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)
            }
            for group in optimizer.param_groups if len(meshes) > 1 else ():
                group.update({name: False for name in ("foreach", "fused") if name in group})

    def _start_pipeline(self, module: Any, base: PreTrainedModel, stages: Sequence[StageModule]) -> None:
        sizes = self.sizes()
        datamodule = getattr(module.trainer, "datamodule", None)
        policy = self._precision_policy().param_dtype if sizes.data * sizes.context > 1 else None
        width = base.config.get_text_config().hidden_size
        self.pipeline = Pipeline(
            stages,
            self.sizes().pipeline * pipeline_parallel.stages_per_rank(self.schedule),
            self._mesh(PIPELINE),
            self.schedule,
            self.micro_batches(getattr(datamodule, "micro_batch_size", None)),
            torch.empty(1, 0, width, dtype=policy or self._boundary_dtype, device=self.root_device),
            self._vocabulary,
            multiple=self._multiple(),
            sequence_shards=sizes.context * (sizes.tensor if self.sequence_parallel else 1),
            local_tokens=None if self.context is None else self.context.local_tokens,
        )
        module.forward = self.pipeline
        if (answer := getattr(module, "answer", None)) is not None:
            module.answer = self._answering(base, self.pipeline)(answer)
        if self.edges is not None:
            self.edges.connect(module, self._ranks_per_stage(), self.pipeline.last_rank)

    @contextmanager
    def _answering(self, base: Any, through: Pipeline) -> Iterator[None]:
        """Within it, the base model's ``generate`` goes through all stages, token by token."""
        config = base.generation_config
        had_cache, config.use_cache = config.use_cache, False
        base.forward = through.next_logits
        try:
            yield
        finally:
            config.use_cache = had_cache
            del base.forward

    def _fsdp_roots(self) -> Sequence[nn.Module]:
        return self.pipeline.stages if self.pipeline is not None else super()._fsdp_roots()

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within an accumulation window, gradients stay on their rank."""
        if self.pipeline is not None:
            self.pipeline.within_window(True)
        with super().block_backward_sync():
            yield
        if self.pipeline is not None:
            self.pipeline.within_window(False)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Take a step; a pipeline's gradients go at once, where Lightning would keep them through the next schedule."""
        result = super().optimizer_step(*args, **kwargs)
        if self.pipeline is not None:
            self.pipeline.drop_gradients()
        return result

    def post_backward(self, closure_loss: Tensor) -> None:
        """At the end of an accumulation window, bring together what ranks have computed of the same gradients."""
        if self._within_window:
            return
        assert self.model is not None
        if self.tensor is not None:
            self.tensor.sum_parts([p for p in self.model.parameters() if isinstance(p.grad, DTensor)])
        if self.edges is not None:
            self.edges.sum_gradients()

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self.edges is None or not self.edges.is_copy(parameter)

    def _ranks_per_stage(self) -> int:
        return self.world_size // self.sizes().pipeline

    # --- checkpoints -----------------------------------------------------------------------------

    def _saved_name(self, name: str) -> str:
        return name if self.edges is None else self.edges.saved_name(name)

    def _saved_elsewhere(self, base: PreTrainedModel) -> frozenset[str]:
        return frozenset() if self.edges is None else frozenset({self.edges.copy_in_base})

    def _order(self) -> list[str]:
        return self._trained_names

    def _leads_stage(self) -> bool:
        return self.global_rank % self._ranks_per_stage() == 0

    def _join_stages(self, own: Any) -> list[Any]:
        if self.sizes().pipeline == 1:
            return [own]
        group = self._mesh(PIPELINE).get_group()
        first = dist.get_global_rank(group, 0)
        parts: list[Any] | None = [None] * self.sizes().pipeline if self.global_rank == first else None
        dist.gather_object(own, parts, dst=first, group=group)
        return parts if parts is not None else [own]

    def _own_part(self, checkpoint: Mapping[str, Any], place: int, state: dict[str, Any]) -> dict[str, Any]:
        if self.sizes().pipeline == 1:
            return state
        if "optimizer_names" not in checkpoint:
            raise RecipeError(
                "the checkpoint does not name the parameters of its optimizer, so a pipeline's stages cannot tell "
                "theirs; resume without a pipeline (pipeline_parallel_size: 1) and save again"
            )
        return sharded.select_optimizer_state(
            state, checkpoint["optimizer_names"][place], self._names_in_optimizers()[place]
        )


def _map_result(decoder: nn.Module, function: Any) -> None:
    forward = decoder.forward

    def mapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = function(output.last_hidden_state)
        return output

    decoder.forward = mapped

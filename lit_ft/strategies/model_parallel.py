"""Tensor, sequence and pipeline parallelism with sharded data parallelism, on one mesh."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import ReduceOp
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer

from lit_ft import rows, split_checkpoints
from lit_ft.attention import PACKED
from lit_ft.errors import RecipeError
from lit_ft.loading import decoder_layers, pick_attention
from lit_ft.losses import TokenLoss
from lit_ft.partition import cut_evenly
from lit_ft.rows import Row
from lit_ft.strategies import expert_parallel, pipeline, tensor_parallel
from lit_ft.strategies.context_parallel import ContextParallel
from lit_ft.strategies.description import share_of, text
from lit_ft.strategies.expert_parallel import ExpertParallel
from lit_ft.strategies.pipeline import Pipeline, StageModule
from lit_ft.strategies.sharded import ShardedStrategy, local
from lit_ft.strategies.tensor_parallel import Plan, TensorParallel
from lit_ft.strategies.traffic import step_of

Size = int | Literal["auto"]
PIPELINE, DATA, CONTEXT, TENSOR = "pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"


class Sizes(NamedTuple):
    """Ranks along each dimension of the mesh, from the outermost to the innermost."""

    pipeline: int
    data: int
    context: int
    tensor: int


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
        if schedule not in pipeline.SCHEDULES:
            raise RecipeError(f"trainer.strategy schedule={schedule!r} is unknown; use one of {pipeline.SCHEDULES}")
        sizes: Any = (pipeline_parallel_size, data_parallel_size, context_parallel_size, tensor_parallel_size)
        self.requested = Sizes(*sizes)
        self.expert_parallel_size = expert_parallel_size
        self.schedule, self.num_microbatches, self.layers_per_stage = schedule, num_microbatches, layers_per_stage
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self.tp_plan, self.reshard_after_forward = tp_plan, reshard_after_forward
        self.pipeline: Pipeline | None = None
        self.tensor: TensorParallel | None = None
        self.context: ContextParallel | None = None
        self._tied: dict[str, nn.Parameter] = {}
        self._trained_names: list[str] = []

    # --- what does not fit -----------------------------------------------------------------------

    def check(self, trainer: Trainer, module: nn.Module, datamodule: Any = None) -> None:
        """Find what does not fit before weights are read.

        Raises:
            RecipeError: it names the value, the rule and what works.
        """
        sizes = self.sizes()
        if sizes.pipeline == 1:
            return
        per_row = getattr(datamodule, "micro_batch_size", None)
        count = self.micro_batches(per_row)
        if count < sizes.pipeline:
            raise RecipeError(
                f"trainer.strategy num_microbatches={count} leaves stages idle: a pipeline of {sizes.pipeline} needs "
                f"as many at least; set data.micro_batch_size to a multiple of {sizes.pipeline}"
            )
        if per_row is not None and per_row % count:
            fitting = [n for n in range(sizes.pipeline, per_row + 1) if per_row % n == 0]
            raise RecipeError(
                f"trainer.strategy num_microbatches={count} must divide data.micro_batch_size={per_row}; use one of "
                f"{fitting}, or set data.micro_batch_size to {count * max(1, round(per_row / count))}"
            )
        if not hasattr(module, "hidden_states") or not hasattr(module, "token_loss"):
            raise RecipeError(
                f"pipeline_parallel_size={sizes.pipeline} needs a module with hidden_states(row, decoder) and "
                f"token_loss(hidden, row), as lit_ft.CausalLM has; {type(module).__name__} has not"
            )

    def check_model(self, module: nn.Module, skeleton: nn.Module) -> None:
        """Find what of a model cannot be split, before weights are read.

        Args:
            module: the LightningModule.
            skeleton: its model with its adapters, on the meta device.

        Raises:
            RecipeError: it names the value, the rule and what works.
        """
        base, sizes = base_of(skeleton), self.sizes()
        method: Any = skeleton.active_peft_config if isinstance(skeleton, PeftModel) else None
        if method is not None and method.is_prompt_learning and sizes.data < self._world():
            raise RecipeError(
                f"model.peft: {method.peft_type.value} adds virtual tokens, which pipeline, tensor and context "
                "parallelism do not know of; take another method, or data_parallel_size alone"
            )
        if sizes.tensor > 1:
            if getattr(base, "is_quantized", False):
                raise RecipeError(
                    f"tensor_parallel_size={sizes.tensor} cannot cut the packed weights of a quantised base; leave "
                    "quantization out, or use pipeline_parallel_size and data_parallel_size"
                )
            tensor_parallel.check(base, sizes.tensor, self.tp_plan)
        if self.expert_parallel_size > 1:
            self._check_experts(base)
        if sizes.context > 1:
            self._check_context(module, base)
        if sizes.pipeline > 1:
            self._check_stages(skeleton, base)

    def _check_experts(self, base: PreTrainedModel) -> None:
        sizes, size = self.sizes(), self.expert_parallel_size
        if sizes.tensor > 1:
            if size != sizes.tensor:
                raise RecipeError(
                    f"expert_parallel_size={size} with tensor_parallel_size={sizes.tensor}: experts are dealt out to "
                    f"the tensor-parallel ranks; set expert_parallel_size to {sizes.tensor} or leave it out"
                )
        elif sizes.data * sizes.context % size:
            raise RecipeError(
                f"expert_parallel_size={size} must divide the {sizes.data * sizes.context} ranks of a stage "
                f"(data {sizes.data} x context {sizes.context})"
            )
        expert_parallel.check(base, size)

    def _check_context(self, module: Any, base: PreTrainedModel) -> None:
        size = self.sizes().context
        attention = pick_attention(base.config, getattr(module, "attn_implementation", "auto"))
        if attention != PACKED or not hasattr(module, "hidden_states"):
            raise RecipeError(
                f"context_parallel_size={size} needs lit_ft.CausalLM with its packed attention, but "
                f"{type(base).__name__} in {type(module).__name__} has {attention}; set it to 1"
            )
        if getattr(module, "neftune_alpha", None) is not None:
            raise RecipeError(
                f"context_parallel_size={size}: neftune_alpha={module.neftune_alpha} draws noise for whole samples; "
                "leave it out, or set context_parallel_size to 1"
            )

    def _check_stages(self, skeleton: nn.Module, base: PreTrainedModel) -> None:
        if not any(name.endswith(".layers") for name in base.pp_plan or ()):
            raise RecipeError(
                f"pipeline_parallel_size={self.sizes().pipeline}: Hugging Face does not say how {type(base).__name__} "
                "is cut into stages (pp_plan); use tensor_parallel_size and data_parallel_size"
            )
        parts, head = getattr(base, base.base_model_prefix).layers, base.get_output_embeddings()
        stages = self.layers_of_stages(base)
        for number, of_stage in enumerate(stages):
            edges = [base.get_input_embeddings()] * (number == 0) + [head] * (number == len(stages) - 1)
            if not any(_trains(part) for part in (*(parts[place] for place in of_stage), *edges)):
                raise RecipeError(
                    f"pipeline_parallel_size={self.sizes().pipeline}: nothing trains in stage {number} (layers "
                    f"{of_stage.start} to {of_stage.stop - 1}); train something in each, choose layers_per_stage so "
                    "that each has some, or use data_parallel_size and tensor_parallel_size"
                )

    # --- sizes -----------------------------------------------------------------------------------

    def sizes(self) -> Sizes:
        """The mesh for the ranks that there are.

        Raises:
            RecipeError: the sizes do not multiply to the ranks.
        """
        world = self._world()
        unknown = [name for name, size in self.requested._asdict().items() if size == "auto"]
        known = math.prod(size for size in self.requested if size != "auto")
        if len(unknown) > 1:
            names = ", ".join(f"{name}_parallel_size" for name in unknown)
            raise RecipeError(f"trainer.strategy: {names} are auto; give all but one of them")
        if known < 1 or world % known or (not unknown and known != world):
            asked = " x ".join(f"{name} {size}" for name, size in self.requested._asdict().items())
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            raise RecipeError(
                f"trainer.strategy: {asked} must make {world} ranks ({self.num_nodes} nodes x {self.num_processes} "
                f"devices); each size is one of {divisors}, or start a multiple of {known} ranks"
            )
        return Sizes(*(world // known if size == "auto" else size for size in self.requested))

    def _world(self) -> int:
        return self.num_nodes * self.num_processes

    def micro_batches(self, micro_batch_size: int | None) -> int:
        """Parts that a pipeline cuts a row into."""
        return self.num_microbatches or micro_batch_size or self.sizes().pipeline

    def layers_of_stages(self, base: PreTrainedModel) -> list[range]:
        """Places of each stage's decoder layers.

        Raises:
            RecipeError: there are too few layers, or those given do not add up.
        """
        stages = self.sizes().pipeline * pipeline.stages_per_rank(self.schedule)
        layers = getattr(base, base.base_model_prefix).layers
        if self.layers_per_stage is not None:
            given = self.layers_per_stage
            if len(given) != stages or sum(given) != len(layers) or min(given) < 1:
                raise RecipeError(
                    f"trainer.strategy layers_per_stage={given} must be {stages} numbers of at least 1 (stages of "
                    f"{self.schedule} on {self.sizes().pipeline} ranks) that add up to the {len(layers)} layers"
                )
            ends = torch.tensor(given).cumsum(0).tolist()
            return [range(end - count, end) for end, count in zip(ends, given, strict=True)]
        if len(layers) < stages:
            raise RecipeError(
                f"pipeline_parallel_size={self.sizes().pipeline} with schedule {self.schedule} makes {stages} stages, "
                f"but {type(base).__name__} has {len(layers)} layers; use at most "
                f"{len(layers) // pipeline.stages_per_rank(self.schedule)}"
            )
        # The head is computed with the last stage; an embedding is a look-up, and costs nothing.
        head = sum(p.numel() for p in base.get_output_embeddings().parameters())
        costs = [float(sum(p.numel() for p in layer.parameters())) for layer in layers]
        costs[-1] += head
        return cut_evenly(costs, stages)

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

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the ranks; a sum counts each share of the data once, though several ranks compute it."""
        result = super().reduce(tensor, group, reduce_op)
        copies = self.world_size // self.sizes().data
        if group is not None or copies == 1 or str(reduce_op).lower() not in ("sum", "reduceop.sum", "redoptype.sum"):
            return result
        return result / copies if result.is_floating_point() else result // copies

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks say so, or any."""
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes, op=ReduceOp.MIN if all else ReduceOp.MAX)
        return bool(votes)

    # --- model -----------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Split the model, then make the optimiser of what is here."""
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
        dist.all_gather_object(shares, share_of(self, self.model, self._base, step))
        return text(self, shares, step)

    def shard(self, module: Any) -> None:
        """Drop the layers of other stages, cut what is left, shard that over the data-parallel ranks."""
        base, sizes = base_of(module), self.sizes()
        self.check_model(module, module.model if isinstance(getattr(module, "model", None), PeftModel) else base)
        self._base = base
        self._trained_names = [name for name, p in module.named_parameters() if p.requires_grad]
        plan = Plan(base, self.tp_plan) if sizes.tensor > 1 else None
        if sizes.tensor > 1:
            self.tensor = TensorParallel(self._mesh(TENSOR), self.sequence_parallel, self.loss_parallel)
        if sizes.context > 1:
            self.context = ContextParallel(self._mesh(CONTEXT))
        stages = self._make_stages(module, base) if sizes.pipeline > 1 else []
        layers = [layer for layer in decoder_layers(base) if any(True for _ in layer.parameters())]
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
        self._edges = {
            name: which
            for name, p in module.named_parameters(remove_duplicate=False)
            for which, edge in (("embedding", embedding), ("head", head))
            if p is edge.weight and name.endswith(f"{_name_of(base, edge)}.weight")
        }
        self._is_tied = head.weight is embedding.weight
        self._vocabulary = head.weight.shape[0]
        own = pipeline.stages_of(self._mesh(PIPELINE).get_local_rank(), size, self.schedule)
        pipeline.drop_layers(base, [layers[k] for k in own], is_first=0 in own, is_last=len(layers) - 1 in own)
        end = (lambda hidden: hidden) if self.tensor is None else self.tensor.end_stream
        whole = (lambda result, _: result) if self.context is None else self.context.whole
        return [StageModule(module, base, k, len(layers), layers[k], end, whole) for k in own]

    def _cut(
        self, module: Any, base: PreTrainedModel, layers: Sequence[nn.Module], plan: Plan, parallel: TensorParallel
    ) -> None:
        parallel.cut(base, layers, plan, self._settle)
        decoder = getattr(base, base.base_model_prefix)
        if parallel.sequence_parallel and decoder.layers[0] is layers[0]:
            parallel.begin_stream(layers[0])
        if parallel.sequence_parallel and self.sizes().pipeline == 1:
            _map_result(decoder, parallel.end_stream)
        if hasattr(module, "answer"):
            module.answer = parallel.as_one_process()(module.answer)

    def _wrap_forward(self, module: Any) -> None:
        """Without a pipeline: rows of a length that can be cut, and this rank's tokens of them."""
        if self._multiple() == 1 or not hasattr(module, "hidden_states"):
            return
        forward, context = module.forward, self.context

        def on_own_tokens(row: Row) -> TokenLoss:
            row = rows.pad_to_multiple(row, self._multiple())
            if context is None:
                return forward(row)
            own = context.own(row)
            return context.whole(forward(own), own)

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
            parallel.deal_out(experts)
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
        """Make the optimisers; where weights lie on different meshes, they step one by one."""
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
            module,
            stages,
            self.sizes().pipeline * pipeline.stages_per_rank(self.schedule),
            self._mesh(PIPELINE),
            self.schedule,
            self.micro_batches(getattr(datamodule, "micro_batch_size", None)),
            torch.empty(1, 0, width, dtype=policy or self._boundary_dtype, device=self.root_device),
            self._vocabulary,
            multiple=self._multiple(),
            share=sizes.context * (sizes.tensor if self.sequence_parallel else 1),
            own=None if self.context is None else self.context.own,
        )
        module.forward = self.pipeline
        if (answer := getattr(module, "answer", None)) is not None:
            module.answer = self._answering(base, self.pipeline)(answer)
        self._tie(module)

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

    def post_backward(self, closure_loss: Tensor) -> None:
        """At the end of an accumulation window, bring together what ranks have computed of the same gradients."""
        if self._within_window:
            return
        assert self.model is not None
        if self.tensor is not None:
            self.tensor.sum_parts([p for p in self.model.parameters() if p.grad is not None])
        if self._tied:
            self._sync_tied()

    def _tie(self, module: nn.Module) -> None:
        """Find the weight that embedding and head share, where it lies on two stages."""
        own = dict(module.named_parameters(remove_duplicate=False))
        here = {which: own[name] for name, which in self._edges.items() if name in own}
        per_stage, last = self._ranks_per_stage(), self.pipeline.last_rank if self.pipeline else 0
        first_ranks = range(per_stage)
        last_stage = last - last % per_stage
        # A collective: every rank makes every group.
        pairs = [dist.new_group([r, last_stage + r]) for r in first_ranks] if last_stage else []
        if not self._is_tied or not any(p.requires_grad for p in here.values()):
            return
        if len({id(p) for p in here.values()}) == 2 or last_stage:
            self._tied = here
            self._tied_group = pairs[self.global_rank % per_stage] if pairs else None

    def _sync_tied(self) -> None:
        gradients = [local(p.grad) for p in self._tied.values() if p.grad is not None]
        if len(gradients) == 2:
            gradients[0].add_(gradients[1])
            gradients[1].copy_(gradients[0])
        else:
            dist.all_reduce(gradients[0], group=self._tied_group)

    def _counts(self, parameter: nn.Parameter) -> bool:
        return self._tied.get("head") is not parameter

    def _ranks_per_stage(self) -> int:
        return self.world_size // self.sizes().pipeline

    # --- checkpoints -----------------------------------------------------------------------------

    def _saved_name(self, name: str) -> str:
        if self._tied and self._edges.get(name) == "head":
            return next(other for other, which in self._edges.items() if which == "embedding")
        return name

    def _saved_elsewhere(self, base: PreTrainedModel) -> frozenset[str]:
        head = base.get_output_embeddings()
        if self.sizes().pipeline == 1 or not self._is_tied or isinstance(head, PipelineIdentityLayer):
            return frozenset()
        return frozenset({f"{_name_of(base, head)}.weight"})

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
        return split_checkpoints.pick(state, checkpoint["optimizer_names"][place], self._names_in_optimizers()[place])


def base_of(module: nn.Module) -> PreTrainedModel:
    """The Hugging Face causal LM in a module.

    Raises:
        RecipeError: it holds none.
    """
    for candidate in module.modules():
        if isinstance(candidate, PreTrainedModel) and candidate.get_output_embeddings() is not None:
            return candidate
    raise RecipeError(
        f"ModelParallelStrategy needs a Hugging Face causal LM, and {type(module).__name__} holds none; use ddp or "
        "lit_ft.strategies.FSDPStrategy"
    )


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _name_of(base: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in base.named_modules() if module is wanted)


def _map_result(decoder: nn.Module, function: Any) -> None:
    forward = decoder.forward

    def mapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.last_hidden_state = function(output.last_hidden_state)
        return output

    decoder.forward = mapped

"""Common base of strategies that shard weights over ranks: set-up, gradient norm and checkpoints."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy as LightningModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.distributed.failures import failing_together
from lit_callbacks.distributed.gather import full_weights, named_weights
from lit_callbacks.distributed.host_copy import queued_copy
from lit_callbacks.export.atomic_folder import errors_of_the_disk
from lit_callbacks.protocols import ScalesGradients, WeightFilter
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lit_ft.checkpointing.storage import sharded, sharded_safetensors
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO, mapped
from lit_ft.checkpointing.storage.integrity import check_on_rank_zero
from lit_ft.checkpointing.storage.sharded import OptimizerState
from lit_ft.errors import RecipeError
from lit_ft.gradient_norm import local, norms
from lit_ft.internals.torch import clear_mesh_caches
from lit_ft.internals.transformers import attention_implementation
from lit_ft.model.files import deferred_cast, finite_weights
from lit_ft.model.isolation import token_mixers
from lit_ft.model.loading import decoder_layers
from lit_ft.planning.layout import Layout
from lit_ft.protocols import Checkpoint
from lit_ft.strategies.separate_dtypes import Shard, shard_by_dtype, shard_kept
from lit_ft.training.optimizers import compatibility as optimizer_support
from lit_ft.training.spec import spec_of

T = TypeVar("T")


def check_shared(module: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Refuse a model that uses one weight in several layers, or in a layer and outside of it.

    Raises:
        RecipeError: there is such a weight.
    """
    layer_of = {part: layer for layer in layers for part in layer.modules()}
    places: dict[nn.Parameter, nn.Module | None] = {}
    for name, part in module.named_modules():
        for weight in part.parameters(recurse=False):
            if places.setdefault(weight, layer_of.get(part)) is not layer_of.get(part):
                raise RecipeError(
                    f"{name} shares a weight with a layer, and each layer is sharded by itself; take "
                    "trainer.strategy=ddp, or lit_ft.strategies.DeepSpeedStrategy with stage=2"
                )


def check_mixers(base: PreTrainedModel) -> None:
    """Refuse sharded parts within a module that is called once per sample: ranks with more samples would wait forever.

    Such a part has trained weights of another dtype than its layer (``separate_dtypes``).

    Raises:
        RecipeError: there is one; the message names it.
    """
    for mixer in (mixer for layer in decoder_layers(base) for mixer in token_mixers.mixers(layer, in_layer=True)):
        inner = [name for name, part in mixer.named_modules() if isinstance(part, FSDPModule) and part is not mixer]
        if inner and not token_mixers.isolates(base, mixer):
            attention = attention_implementation(base.config)
            raise RecipeError(
                f"{inner[0]} in {type(mixer).__name__} trains weights of another dtype than the rest of its layer, and "
                f"is called sample by sample with attn_implementation={attention}, which cannot be sharded; set "
                "model.attn_implementation=auto, model.dtype=float32 or trainer.precision=bf16-true, or take "
                "trainer.strategy=ddp"
            )


def _evaluate_without_inference_mode(trainer: Trainer) -> None:
    """Let evaluation run under ``no_grad`` alone, as Lightning does for its own ``FSDPStrategy`` and on gloo.

    FSDP2 keeps the tensors into which it gathers weights, and a training step cannot write those of inference mode.
    There, operators also reach ``DTensor`` without being decomposed, and it lacks some of them (tensor parallelism).
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):  # that of a fit never is in it
        loop.inference_mode = False


def _sharded_by(module: nn.Module) -> str | None:
    """Name of the class of the strategy that has sharded a module; None if none has."""
    earlier: str | None = getattr(module, "_sharded_by", None)
    return earlier


class ShardedStrategy(LightningModelParallelStrategy):
    """Base class of strategies whose ranks hold shards of the weights, as ``DTensor``."""

    def __init__(
        self,
        save_distributed_checkpoint: bool | None,
        process_group_backend: str | None,
        timeout: timedelta | None,
        async_save: bool = False,
    ) -> None:
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.save_in_shares = save_distributed_checkpoint
        self.async_save = async_save
        self._writing: Future[None] | None = None
        self._cpu_group: dist.ProcessGroup | None = None
        self._within_window = False
        self._joined_names: dict[int, list[str]] = {}

    @abstractmethod
    def shard(self, module: LightningModule) -> None:
        """Replace the module's weights by this rank's shards, in place."""

    def takes_over(self, earlier: str) -> bool:
        """Whether this strategy works on the module as it is sharded; ``earlier`` is the class that has done so."""
        return earlier == type(self).__name__

    @abstractmethod
    def layout(self) -> Layout:
        """Layout of the model, once it is sharded, as seen from this rank."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- set-up ----------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the process group and create the device mesh.

        Raises:
            RecipeError: the module was distributed by a strategy whose place this one cannot take.
        """
        if (earlier := _sharded_by(self._module)) is not None and not self.takes_over(earlier):
            raise RecipeError(
                f"model: the module is distributed over ranks by an earlier {earlier}, and a new "
                f"{type(self).__name__} cannot take its parts over; call the Trainer that has distributed it, or give "
                "the new one a new module, and what was saved as ckpt_path"
            )
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = AnyCheckpointIO()
        if not dist.is_initialized():
            clear_mesh_caches()
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context for building the model: weights stay in their files until they are sharded."""
        with deferred_cast.casting_later():
            yield

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Data-parallel size and rank, which each micro-batch asks for; Lightning makes a mesh each time."""
        mesh = self.device_mesh
        assert mesh.mesh_dim_names is not None
        dimension = mesh.mesh_dim_names.index("data_parallel")
        coordinate = mesh.get_coordinate()
        assert coordinate is not None, "every rank is in the mesh"
        return {"num_replicas": mesh.size(dimension), "rank": coordinate[dimension]}

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then build the optimizer on the shards."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        _evaluate_without_inference_mode(trainer)
        self._share_skipped_steps()
        if _sharded_by(self._module) is None:
            self.shard(self._module)
            self._module._sharded_by = type(self).__name__  # type: ignore[assignment]
        self._place()
        spec = spec_of(self._module)
        finite_weights.check_split_base(self, self._module, "" if spec is None else spec.base.pretrained)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self._say_what_is_vain()
            self._reshard()  # the optimizer takes what the module has: after `predict`, a pipeline's gathered weights
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                self.check_optimizer(optimizer)
        self.setup_precision_plugin()

    def _say_what_is_vain(self) -> None:
        if self.async_save and not self._saves_sharded():
            why = "as an adapter's are" if self.save_in_shares is None else "save_distributed_checkpoint=False"
            rank_zero_warn(
                f"trainer.strategy async_save=True has no effect on checkpoints that are one file ({why}); leave it "
                "out, or set save_distributed_checkpoint to true"
            )

    def _share_skipped_steps(self) -> None:
        """Let all ranks skip a step if one has gradients that are not finite (fp16), and lower the scale together.

        torch's usual scaler asks the ranks of its first gradient's mesh alone, not the other stages of a pipeline.
        """
        plugin: object = self.precision_plugin
        if not isinstance(plugin, ScalesGradients) or plugin.scaler is None:
            return
        if not isinstance(own := plugin.scaler, ShardedGradScaler):
            plugin.scaler = ShardedGradScaler(self.root_device.type, enabled=own.is_enabled())
            plugin.scaler.load_state_dict(own.state_dict())

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose update on shards differs from that on full weights.

        Raises:
            RecipeError: the optimizer is one, or was not compared; the message names those that work.
        """
        optimizer_support.check_situation(optimizer, "shards")
        plugin: object = self.precision_plugin
        if isinstance(plugin, ScalesGradients) and plugin.scaler is not None:
            optimizer_support.check_scaled_weights(optimizer)

    def _place(self) -> None:
        self.model_to_device()

    def _cast_to_trained_dtype(self, module: nn.Module) -> None:
        """Cast weights to the dtypes that they are trained in, just before they are sharded."""
        deferred_cast.cast(module)
        self.precision_plugin.convert_module(module)

    def _precision_policy(self) -> MixedPrecisionPolicy:
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.precision_plugin.precision))
        if dtype is None:
            return MixedPrecisionPolicy()
        # Weights are gathered in half precision; what autocast keeps in fp32 (the residual stream) stays in fp32.
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    def _shard_weights(self, part: nn.Module, shard: Shard) -> None:
        """Shard a part's weights, those in other dtypes on their own."""
        if self._precision_policy().param_dtype is not None:
            shard_kept(part, shard)
        shard_by_dtype(part, shard)

    # --- gradients -------------------------------------------------------------------------------

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for all but the last micro-batch of an optimizer step: gradients are not reduced over ranks."""
        self._within_window = True
        self._sync_gradients(False)
        try:
            yield
        finally:
            self._within_window = False
            self._sync_gradients(True)

    def _sync_gradients(self, is_on: bool) -> None:
        for module in self._fsdp_modules():
            module.set_requires_gradient_sync(is_on, recurse=False)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """L2 norm of the parameters' gradients over all ranks, a scalar; a collective.

        torch's own function cannot mix meshes. Each rank sums its squared gradients, divided by the number of ranks
        that hold the same part, and one all-reduce of a scalar adds the sums up.
        """
        gradients = [p.grad for p in parameters if p.grad is not None and self._counts(p)]
        copies = torch.tensor([float(self._copies_of(gradient)) for gradient in gradients])
        own = norms([local(gradient) for gradient in gradients])
        total = (own.square() / queued_copy(copies, own.device)).sum().to(self.root_device)
        torch.distributed.all_reduce(total)
        return total.sqrt()

    def _counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds a parameter to the norm: a tied weight that two stages hold is added by one."""
        return True

    def _copies_of(self, gradient: Tensor) -> int:
        """Number of ranks that hold the same part of a gradient."""
        copies = self._ranks_per_stage()
        if isinstance(gradient, DTensor):
            for dimension, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    copies //= gradient.device_mesh.size(dimension)
        return copies

    def _ranks_per_stage(self) -> int:
        return self.world_size

    # --- checkpoints -----------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning passes the optimizer's saved state on, and each rank loads its shards of it."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """What trains, by name, or all of a module of one's own: full tensors on rank 0, or each rank's shards."""
        self._reshard()
        if self._saves_sharded():
            return {name: tensor for name, tensor in named_weights(self._module) if self._is_saved(name, tensor)}
        return self.full_weights(self._module, self._is_saved, keep=self.global_rank == 0)

    def _is_saved(self, _: str, tensor: Tensor) -> bool:
        # Frozen weights are those of the model's folder, and its buffers constant, only where a recipe has built it.
        return tensor.requires_grad or spec_of(self._module) is None

    def full_weights(
        self, module: nn.Module, selected: WeightFilter = lambda *_: True, keep: bool = True
    ) -> dict[str, Tensor]:
        """Full parameters of a module by name, on the CPU, from all ranks and stages; a collective.

        Args:
            module: LightningModule, or a part of it.
            selected: predicate on name and parameter that selects what is returned.
            keep: whether this rank keeps the result, else ``{}``; only rank 0 can have the parameters of all stages.
        """
        parts = self._join_stages(full_weights(module, selected, keep=self._leads_stage()))
        return {name: tensor for part in parts for name, tensor in part.items()} if keep else {}

    def save_pretrained(self, base: PreTrainedModel, folder: Path | None = None) -> None:
        """Write a Hugging Face model folder, to which each rank adds one part; a collective.

        Args:
            base: Hugging Face model, or the part of it on this rank.
            folder: path of the folder; that of rank 0 counts.

        Raises:
            OSError: a rank could not write.
            RecipeError: a weight is not finite.
            MergeFailed: no rank has a certain parameter or buffer.
        """
        self._reshard()
        folder, writers = Path(self.broadcast(str(folder))), self._ranks_per_stage()
        own = sharded_safetensors.collect(base, writers, self.global_rank % writers, self._saved_elsewhere())
        names: list[list[str]] = [[]] * self.world_size
        torch.distributed.all_gather_object(names, list(own))
        sharded_safetensors.check_complete(base, {name for part in names for name in part})
        # folder has a hidden name until it is whole
        with failing_together(), errors_of_the_disk(folder.parent):
            if own:
                sharded_safetensors.write_part(base, own, folder / f"{self.global_rank:05}.safetensors")
        with failing_together(), errors_of_the_disk(folder.parent):
            if self.is_global_zero:
                sharded_safetensors.join_parts(base, folder)

    def _saved_elsewhere(self) -> frozenset[str]:
        return frozenset()

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """State dict of the optimizer: full tensors on rank 0, or each rank's shards."""
        state = optimizer.state_dict()
        if self._saves_sharded():
            return state
        index = next(i for i, own in enumerate(self.optimizers) if own is optimizer)
        names = [name for group in self._names_in_optimizers()[index] for name in group]
        parts = self._join_stages((sharded.gather(state, keep=self._leads_stage()), names))
        if self.global_rank != 0:
            return {}
        joined, self._joined_names[index] = sharded.merge_optimizer_states(parts, self._order())
        return joined

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's shards of the saved weights."""
        self._reshard()
        with torch.no_grad():
            for name, own in named_weights(self._module):
                if (saved := checkpoint["state_dict"].get(name)) is not None:
                    own.copy_(sharded.split_like(own, saved))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the saved optimizer states."""
        for number, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            optimizer.load_state_dict(sharded.split_state(optimizer, self._local_part(checkpoint, number, state)))

    def _local_part(self, checkpoint: Mapping[str, Any], number: int, state: OptimizerState) -> OptimizerState:
        """Entries of a saved optimizer state for the parameters that this rank holds, in the optimizer's order."""
        names = checkpoint.get("optimizer_names") or []
        if number >= len(names):  # a checkpoint of another strategy, in the optimizer's own order
            return state
        return sharded.select_optimizer_state(state, names[number], self._names_in_optimizers()[number])

    def save_checkpoint(self, checkpoint: Checkpoint, filepath: str | Path, storage_options: object = None) -> None:
        """Write a checkpoint folder of shards, or one file."""
        path = Path(self.broadcast(filepath))
        if self._saves_sharded():
            names = [[name for group in groups for name in group] for groups in self._names_in_optimizers()]
            self._finish_writing()
            self._writing = sharded.save_sharded(
                checkpoint, path, names, self._join_stages, self._order(), self._background()
            )
            return
        with failing_together():
            if self.is_global_zero:
                checkpoint["optimizer_names"] = list(self._joined_names.values())
                self.checkpoint_io.save_checkpoint(checkpoint, path)

    def _background(self) -> dist.ProcessGroup | None:
        if self.async_save and self._cpu_group is None:
            self._cpu_group = torch.distributed.new_group(backend="gloo")
        return self._cpu_group

    def _finish_writing(self) -> None:
        """Wait for a checkpoint that is still being written in the background; its error is raised here.

        No collective, as a rank that has failed waits alone: the end of writing on one rank is that on all.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, after the one that replaces it is written."""
        if self._writing is None:
            super().remove_checkpoint(filepath)
        else:
            self._writing.add_done_callback(partial(self._remove_after, filepath))

    def _remove_after(self, filepath: str | Path, written: "Future[None]") -> None:
        if written.exception() is None:
            super().remove_checkpoint(filepath)

    def teardown(self) -> None:
        """Wait until the last checkpoint is written, then shut down."""
        self._finish_writing()
        super().teardown()

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> Checkpoint:
        """Read a checkpoint of any strategy; a file is memory-mapped, so each rank loads only its shards."""
        self._finish_writing()
        path = Path(self.broadcast(checkpoint_path))
        check_on_rank_zero(path)
        if not sharded.is_sharded_folder(path):
            return mapped(path)
        names = [name for name, _ in self._module.named_parameters()]
        aliases = {name: self._saved_name(name) for name in names if self._saved_name(name) != name}
        return sharded.load_sharded(path, self._module, self._names_in_optimizers(), aliases)

    def _saves_sharded(self) -> bool:
        if self.save_in_shares is not None:
            return self.save_in_shares
        spec = spec_of(self._module)
        return spec is None or spec.tuning.peft is None

    def _reshard(self) -> None:
        # After a forward pass without a backward pass, modules with reshard_after_forward=False are still gathered.
        for module in self._fsdp_modules():
            module.reshard()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for root in self._fsdp_roots():
            yield from (module for module in root.modules() if isinstance(module, FSDPModule))

    def _fsdp_roots(self) -> Sequence[nn.Module]:
        return [self._module]

    def _names_in_optimizers(self) -> list[list[list[str]]]:
        self._reshard()
        name_of = {id(p): self._saved_name(name) for name, p in self._module.named_parameters()}
        return [
            [[name_of[id(p)] for p in group["params"]] for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]

    # Overridden by strategies whose ranks hold different parameters (pipeline stages).

    def _saved_name(self, name: str) -> str:
        return name

    def _order(self) -> list[str]:
        """Names of the trainable parameters of the full model, in order."""
        return [name for name, p in self._module.named_parameters() if p.requires_grad]

    def _leads_stage(self) -> bool:
        """Whether this rank collects the tensors of its pipeline stage."""
        return self.global_rank == 0

    def _join_stages(self, own: T) -> list[T]:
        """Gather one object per pipeline stage, in order of the stages; complete on rank 0 at least."""
        return [own]

"""FSDP2: each rank holds a share of every decoder layer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lit_callbacks.gather import whole_weights
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from lit_ft import late_casting, split_checkpoints
from lit_ft.checkpoints_io import AnyCheckpointIO
from lit_ft.errors import RecipeError
from lit_ft.optimizers import clip_gradients_by_norm


class FSDPStrategy(ModelParallelStrategy):
    """Shard parameters, gradients and optimiser state over the ranks (torch's ``fully_shard``), layer by layer.

    Weights are read from safetensors straight into shards. New weights are drawn as on one process. Checkpoints are
    those of every other strategy.
    """

    def __init__(
        self,
        shard_size: int | Literal["all", "node"] = "all",
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        sync_each_micro_batch: bool = False,
        save_distributed_checkpoint: bool | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        """Say what is sharded over which ranks.

        Args:
            shard_size: ranks that share one copy of the model; node is those of a node, so that only gradients
                travel between nodes (hybrid sharding); all is every rank.
            reshard_after_forward: free a layer's weights after its forward pass and gather them again in the
                backward pass: less memory, half as much communication again.
            cpu_offload: keep shards and optimiser state in host memory.
            sync_each_micro_batch: reduce gradients in every micro-batch and hold a shard of them, instead of holding
                them whole until the optimiser step.
            save_distributed_checkpoint: each rank writes its share into a folder; false writes one file; null does
                so where an adapter is trained.
            process_group_backend: of torch.distributed; null is nccl on CUDA, gloo on CPU.
            timeout: how long a rank waits for the others before the run fails.
        """
        super().__init__(
            data_parallel_size="auto",
            tensor_parallel_size=1,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.shard_size, self.reshard_after_forward = shard_size, reshard_after_forward
        self.cpu_offload, self.sync_each_micro_batch = cpu_offload, sync_each_micro_batch
        self.save_in_shares = save_distributed_checkpoint
        self.shard_mesh: DeviceMesh | None = None

    def check(self, trainer: Trainer, module: nn.Module, datamodule: Any = None) -> None:
        """Find what cannot be sharded before weights are read.

        Raises:
            RecipeError: it names the method.
        """
        if (peft := getattr(module, "peft", None)) is None:
            return
        method = "kasa_config" if getattr(peft, "kasa_config", None) is not None else peft.peft_type.value
        if (reason := _NOT_IN_SHARDS.get(method)) is not None:
            raise RecipeError(f"model.peft: {method} {reason} under FSDP; take ddp, or another method")

    # --- processes and mesh ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Before processes are started, so that what is wrong is said once.
        self._ranks_per_shard_group()
        super()._configure_launcher()

    def _ranks_per_shard_group(self) -> int:
        world = self.num_nodes * self.num_processes
        size = {"all": world, "node": self.num_processes}.get(str(self.shard_size), self.shard_size)
        assert isinstance(size, int)
        if size < 1 or world % size:
            divisors = [n for n in range(1, world + 1) if world % n == 0]
            raise RecipeError(
                f"trainer.strategy shard_size={self.shard_size} must divide the {world} ranks "
                f"({self.num_nodes} nodes x {self.num_processes} devices); use one of {divisors}, all or node"
            )
        return size

    def setup_environment(self) -> None:
        """Join the processes and lay out the mesh."""
        if type(self.checkpoint_io) is TorchCheckpointIO:
            self.checkpoint_io = AnyCheckpointIO()
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        size, device = self._ranks_per_shard_group(), self.root_device.type
        if size == self.world_size:
            self.shard_mesh = self.device_mesh["data_parallel"]
        else:
            self.shard_mesh = init_device_mesh(
                device, (self.world_size // size, size), mesh_dim_names=("replicate", "shard")
            )

    # --- model -----------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Within it the model is built; its weights stay in their files."""
        with late_casting.casting_later():
            yield

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then make the optimiser of its shards."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.check(trainer, self.lightning_module)
        self.accelerator.setup(trainer)
        self.model = self.lightning_module
        if not isinstance(self.model, FSDPModule):
            self.shard(self.model)
        if not self.cpu_offload:
            self.model_to_device()
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                check_optimizer(optimizer)
        self.setup_precision_plugin()

    def shard(self, module: nn.Module) -> None:
        """Give each rank its share of every decoder layer, then of the rest."""
        options: dict[str, Any] = {
            "mesh": self.shard_mesh,
            "mp_policy": self._precision_policy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
            if self.cpu_offload
            else OffloadPolicy(),
        }
        for layer in decoder_layers(module):
            self._settle(layer)
            fully_shard(layer, reshard_after_forward=self.reshard_after_forward, **options)
        self._settle(module)
        # Embedding and head are needed at both ends of every pass: gathered once for both.
        fully_shard(module, reshard_after_forward=False, **options)
        if hasattr(module, "answer"):
            register_fsdp_forward_method(module, "answer")

    def _settle(self, module: nn.Module) -> None:
        late_casting.cast(module)
        self.precision_plugin.convert_module(module)

    def _precision_policy(self) -> MixedPrecisionPolicy:
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(str(self.precision_plugin.precision))
        if dtype is None:
            return MixedPrecisionPolicy()
        # Weights travel in half precision; what autocast keeps in fp32 (the residual stream) stays so.
        return MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within an accumulation window, gradients stay on their rank."""
        module: Any = self.model
        module.set_requires_gradient_sync(self.sync_each_micro_batch)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    def clip_gradients_by_norm(self, parameters: Sequence[nn.Parameter], max_norm: float | None) -> Tensor:
        """Norm of all gradients over all ranks; they are scaled down to ``max_norm`` where that is given."""
        norm = clip_gradients_by_norm(parameters, max_norm)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    # --- checkpoints -----------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Lightning hands the optimiser's saved state over; it is split here."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights that train: whole on rank 0, or each rank's shards of them."""
        self._reshard()
        assert self.model is not None
        if self._saves_in_shares():
            return {n: p for n, p in self.model.named_parameters(remove_duplicate=False) if p.requires_grad}
        return whole_weights(self.model, lambda _, p: p.requires_grad, keep=self.global_rank == 0)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimiser's state: whole on rank 0, or each rank's shards of it."""
        state = optimizer.state_dict()
        return state if self._saves_in_shares() else split_checkpoints.gather(state, keep=self.global_rank == 0)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take each rank's share of saved weights."""
        self._reshard()
        assert self.model is not None
        own = dict(self.model.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in checkpoint["state_dict"].items():
                own[name].copy_(split_checkpoints.split_like(own[name], tensor))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take each rank's share of saved optimiser states."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(split_checkpoints.split_state(optimizer, state))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a folder of shares, or one file."""
        path = Path(self.broadcast(filepath))
        if self._saves_in_shares():
            split_checkpoints.save_shares(checkpoint, path, names=self._names_in_optimizers())
        elif self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path)
        self.barrier()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of any strategy; of a file, each rank takes only its share into memory."""
        path = Path(self.broadcast(checkpoint_path))
        if split_checkpoints.is_folder_of_shares(path):
            assert self.model is not None
            return split_checkpoints.load_shares(path, self.model, self.optimizers, self._names_in_optimizers())
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    def _saves_in_shares(self) -> bool:
        if self.save_in_shares is not None:
            return self.save_in_shares
        module: Any = self.lightning_module
        return getattr(module, "peft", None) is None

    def _reshard(self) -> None:
        # What is gathered once for a whole pass is still gathered after one without a backward pass.
        assert self.model is not None
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _names_in_optimizers(self) -> list[list[str]]:
        self._reshard()
        assert self.model is not None
        name_of = {id(p): name for name, p in self.model.named_parameters()}
        return [
            [name_of[id(p)] for group in optimizer.param_groups for p in group["params"]]
            for optimizer in self.optimizers
        ]


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse optimisers that do not compute on shards what they compute on whole weights.

    Raises:
        RecipeError: it names those that do.
    """
    if not type(optimizer).__module__.startswith("torch.optim") or type(optimizer).__name__ not in _ON_SHARDS:
        raise RecipeError(
            f"optimizer={type(optimizer).__module__}.{type(optimizer).__name__} does not work on shards, or nobody has "
            f"tried; take one of torch.optim's {', '.join(_ON_SHARDS)}, or trainer.strategy=ddp"
        )


_ON_SHARDS = ("AdamW", "Adam", "SGD", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
"""Optimisers that were compared with one process (tests/test_strategies.py); bitsandbytes' and schedulefree's fail."""
_OUTSIDE = "looks at whole weights between passes, which no rank has"
_SHARED = "shares weights between layers, which are sharded apart"
_NOT_IN_SHARDS = {
    **dict.fromkeys(("ADALORA", "kasa_config"), _OUTSIDE),
    **dict.fromkeys(("TINYLORA", "UNILORA", "VBLORA"), _SHARED),
    "OSF": "projects gradients of whole weights, and would train something else",
    "PREFIX_TUNING": "runs sample by sample, and ranks have different numbers of samples",
}
"""Tuning methods that fail, hang or compute something else on shards (tests/test_methods.py)."""


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that Hugging Face says must not be split between devices."""
    names: set[str] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            names |= set(model._no_split_modules or [])
    return [layer for layer in module.modules() if type(layer).__name__ in names]

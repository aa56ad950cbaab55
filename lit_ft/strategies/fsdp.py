"""FSDP2: each rank holds a share of every decoder layer."""

from datetime import timedelta
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method

from lit_ft.errors import RecipeError
from lit_ft.model.loading import decoder_layers
from lit_ft.strategies.sharded import ShardedStrategy, check_method


class FSDPStrategy(ShardedStrategy):
    """Shard parameters, gradients and optimizer state over the ranks (torch's ``fully_shard``), layer by layer.

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
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = timedelta(minutes=30),
    ) -> None:
        """Say what is sharded over which ranks.

        Args:
            shard_size: ranks that share one copy of the model; node is those of a node, so that only gradients
                travel between nodes (hybrid sharding); all is every rank.
            reshard_after_forward: free a layer's weights after its forward pass and gather them again in the
                backward pass: less memory, half as much communication again.
            cpu_offload: keep shards and optimizer state in host memory.
            sync_each_micro_batch: reduce gradients in every micro-batch and hold a shard of them, instead of holding
                them whole until the optimizer step.
            save_distributed_checkpoint: each rank writes its share into a folder; false writes one file; null does
                so where an adapter is trained.
            async_save: write checkpoints of shares while training goes on, from a copy in host memory.
            process_group_backend: of torch.distributed; null is nccl on CUDA, gloo on CPU.
            timeout: how long a rank waits for the others before the run fails.
        """
        super().__init__(save_distributed_checkpoint, process_group_backend, timeout, async_save)
        self.shard_size, self.reshard_after_forward = shard_size, reshard_after_forward
        self.cpu_offload, self.sync_each_micro_batch = cpu_offload, sync_each_micro_batch
        self.shard_mesh: DeviceMesh | None = None

    def check(self, trainer: Trainer, module: nn.Module, datamodule: Any = None) -> None:
        """Find what cannot be sharded before weights are read.

        Raises:
            RecipeError: it names the method.
        """
        check_method(module)

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

    def setup(self, trainer: Trainer) -> None:
        """Shard the model, then make the optimizer of its shards."""
        assert self.lightning_module is not None
        self.check(trainer, self.lightning_module)
        super().setup(trainer)

    def _place(self) -> None:
        if not self.cpu_offload:
            super()._place()

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

    def _sync_gradients(self, wanted: bool) -> None:
        super()._sync_gradients(wanted or self.sync_each_micro_batch)

"""FSDP2: sharded data parallelism, in which each rank holds a shard of every decoder layer."""

from datetime import timedelta
from functools import partial
from typing import Literal

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torchmetrics import Metric

from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import set_device
from lit_ft.model.loading import decoder_layers
from lit_ft.planning.layout import Layout
from lit_ft.strategies.module_calls import gather_in_answer
from lit_ft.strategies.parallel.mesh import MeshSizes, base_of
from lit_ft.strategies.sharded import ShardedStrategy, check_mixers, check_shared
from lit_ft.training.spec import spec_of
from lit_ft.tuning.compatibility import check_situation


class FSDPStrategy(ShardedStrategy):
    """Shard parameters, gradients and optimizer state over the ranks (torch's ``fully_shard``), layer by layer.

    Weights are read from safetensors straight into shards. Random initial weights equal those of one process.
    Checkpoints can be resumed under every other strategy.
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
        """Choose what is sharded, and over which ranks.

        Args:
            shard_size: number of ranks that one copy of the model is sharded over; node is the ranks of one node, so
                that only gradients travel between nodes (hybrid sharding); all is every rank.
            reshard_after_forward: free a layer's weights after its forward pass and gather them again in the
                backward pass: less memory, 1.5 times the communication.
            cpu_offload: keep sharded parameters and optimizer state in host memory.
            sync_each_micro_batch: reduce gradients in every micro-batch and keep one shard of them, instead of
                keeping full gradients until the optimizer step.
            save_distributed_checkpoint: true writes a checkpoint folder, to which each rank adds its shards; false
                writes one file; null writes one file if an adapter is trained, and a folder otherwise.
            async_save: write checkpoint folders in the background while training continues, from a copy in host
                memory.
            process_group_backend: backend of torch.distributed; null is nccl on CUDA, gloo on CPU.
            timeout: longest time that a rank waits for the others before the run fails.
        """
        super().__init__(save_distributed_checkpoint, process_group_backend, timeout, async_save)
        self.shard_size, self.reshard_after_forward = shard_size, reshard_after_forward
        self.cpu_offload, self.sync_each_micro_batch = cpu_offload, sync_each_micro_batch
        self.shard_mesh: DeviceMesh | None = None

    def check(self, trainer: Trainer, module: nn.Module, datamodule: LightningDataModule | None = None) -> None:
        """Refuse tuning methods and quantized bases that cannot be sharded, before weights are read.

        Raises:
            RecipeError: the tuning method or base does not work on shards; the message names it.
        """
        spec = spec_of(module)
        check_situation(None if spec is None else spec.tuning.peft, "fsdp")
        if spec is not None:
            spec.base.check_shards("trainer.strategy=FSDPStrategy")

    # --- processes and mesh ----------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        # Checked before processes are started, so that an error is reported once.
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
        """Join the process group and create the device mesh."""
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
        """Shard the model, then build the optimizer on the shards."""
        self.check(trainer, self._module)
        super().setup(trainer)

    def _place(self) -> None:
        if not self.cpu_offload:
            super()._place()
            return
        # FSDP has moved the buffers, and wants its shards in host memory.
        set_device(self._module, self.root_device)
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.to(self.root_device)

    def shard(self, module: LightningModule) -> None:
        """Shard every decoder layer, then the remaining parameters."""
        pinned = CPUOffloadPolicy(pin_memory=self.root_device.type == "cuda")
        shard = partial(
            fully_shard,
            mesh=self.shard_mesh,
            mp_policy=self._precision_policy(),
            offload_policy=pinned if self.cpu_offload else OffloadPolicy(),
        )
        layers = decoder_layers(module)
        check_shared(module, layers)
        for layer in layers:
            self._cast_to_trained_dtype(layer)
            self._shard_weights(layer, partial(shard, reshard_after_forward=self.reshard_after_forward))
        self._cast_to_trained_dtype(module)
        # Embedding and head are needed at the start and at the end of every pass: they stay gathered in between.
        self._shard_weights(module, partial(shard, reshard_after_forward=False))
        if spec_of(module) is not None:
            check_mixers(base_of(module))
        gather_in_answer(module)

    def layout(self) -> Layout:
        """Layout of the model: all ranks are data-parallel."""
        return Layout(
            base_of(self._module),
            MeshSizes(1, self.world_size, 1, 1),
            self._precision_policy(),
            self.reshard_after_forward,
            sync_each_micro_batch=self.sync_each_micro_batch,
        )

    def _sync_gradients(self, is_on: bool) -> None:
        super()._sync_gradients(is_on or self.sync_each_micro_batch)

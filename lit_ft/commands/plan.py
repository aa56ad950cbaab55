"""The ``plan`` command: estimate memory and communication of each rank of a recipe, without processes or weights."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lit_ft.commands.train import RecipeCLI
from lit_ft.errors import RecipeError
from lit_ft.internals.lightning import reduces_views
from lit_ft.internals.torch import clear_mesh_caches, fake_store
from lit_ft.internals.transformers import enable_checkpointing
from lit_ft.model.activations import checkpointing as activation_checkpointing
from lit_ft.model.loading import decoder_layers
from lit_ft.planning.communication import step_of
from lit_ft.planning.layout import Layout, Replication
from lit_ft.planning.memory import Memory, layer_inputs, memory_of, replicated_memory
from lit_ft.planning.pipeline_timeline import idle_fraction, timeline
from lit_ft.planning.report import MIB, RankContents, aligned, by_stage, format_layout, rank_contents
from lit_ft.planning.timeline_plot import draw
from lit_ft.protocols import ChecksRecipe, LearnsFromTeacher, SamplesAnswers, micro_batch_size
from lit_ft.recipe.option_parser import OptionParser, positive
from lit_ft.recipe.trainer_checks import quiet_trainer
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.strategies.model_parallel import base_of
from lit_ft.strategies.parallel.mesh import MeshSizes
from lit_ft.strategies.sharded import ShardedStrategy
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.optimizers.configure import MATRICES, hidden_matrices
from lit_ft.training.policy.policy_lm import PolicyLM
from lit_ft.tuning.lora import expert_lora

GIB = 2**30
_Strategy = TypeVar("_Strategy", bound=ShardedStrategy)


def run(arguments: list[str]) -> None:
    """Parse the options and print the plan."""
    parser = OptionParser(
        prog="python -m lit_ft plan",
        description="Say what each rank of a recipe would hold and send, without starting any process or reading "
        "weights. Takes every option of fit (python -m lit_ft fit --help).",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="of each node, in place of trainer.devices")
    parser.add_argument("--num_nodes", type=int, metavar="N", help="in place of trainer.num_nodes")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="also draw the pipeline's schedule (.png, .svg)")
    parser.add_argument("--memory_gib", type=positive, metavar="N", help="memory of a device: say whether a rank fits")
    options, rest = parser.parse_known_args(arguments[1:])
    for name in ("devices", "num_nodes"):
        if (count := getattr(options, name)) is not None and count < 1:
            raise RecipeError(f"--{name} {count} must be 1 or more")
    PlanCLI(["fit", *rest], options.devices, options.num_nodes, options.draw, options.memory_gib)


class PlanCLI(RecipeCLI):
    """``fit`` up to the start of processes; it then builds the layout of one rank after the other."""

    def __init__(
        self,
        arguments: list[str],
        devices: int | None,
        num_nodes: int | None,
        picture: Path | None,
        memory_gib: float | None,
    ) -> None:
        """Parse the options and print the plan.

        Args:
            arguments: command line of ``fit``.
            devices: number of ranks per node; None takes the recipe's.
            num_nodes: number of nodes; None takes the recipe's.
            picture: file for a drawing of the pipeline schedule; None draws none.
            memory_gib: memory of a device; None does not compare with it.
        """
        self.devices, self.num_nodes, self.picture, self.memory_gib = devices, num_nodes, picture, memory_gib
        super().__init__(arguments)

    def instantiate_trainer(self, **kwargs: object) -> Trainer:
        """Build a trainer with the recipe's strategy; the devices of the recipe need not exist on this machine."""
        given = self.options_init("trainer")
        devices = str(self.devices or given.devices)
        if devices == "auto" and given.accelerator in ("auto", "cpu"):  # those of this machine, as fit takes them
            devices = str(max(1, torch.accelerator.device_count() if given.accelerator == "auto" else 1))
        if not devices.isdecimal() or devices == "0":
            raise RecipeError(f"trainer.devices={devices} is not a number; give one with --devices N")
        return quiet_trainer(
            accelerator="cpu",
            devices=int(devices),
            num_nodes=self.num_nodes or given.num_nodes,
            strategy=given.strategy,
            precision="bf16-mixed" if given.precision in ("16-mixed", 16, "16") else given.precision,  # same bytes
            accumulate_grad_batches=given.accumulate_grad_batches,
        )

    def before_fit(self) -> None:
        """Check the layout with the checks of ``fit``."""
        if not isinstance(self.model, CausalLM):
            raise RecipeError(
                f"plan builds lit_ft.CausalLM without weights; the recipe's model is {type(self.model).__name__}"
            )
        self.trainer.datamodule = self.datamodule  # type: ignore[attr-defined]
        self.model.trainer = self.datamodule.trainer = self.trainer
        self.trainer.strategy.connect(self.model)  # a batch's size is that of the module's answers, if it gives some
        strategy: object = self.trainer.strategy
        if isinstance(strategy, ChecksRecipe):
            strategy.check(self.trainer, self.model, self.datamodule)

    def fit(self, **_: object) -> None:
        """Print memory and communication of each rank."""
        strategy: object = self.trainer.strategy
        if isinstance(strategy, ModelParallelStrategy):
            memory = self._plan_model_parallel(strategy)
        elif isinstance(strategy, FSDPStrategy):
            with pretended_rank(0, self.trainer.world_size):
                memory = [self._memory(self._split(strategy))]
            print(f"each of {self.trainer.world_size} ranks, with FSDPStrategy:")
            _print_memory([(f"0-{self.trainer.world_size - 1}", memory[0])])
        else:
            memory = [self._plan_replicas(strategy)]
        if self.model.spec.base.is_quantized:
            print("the base is quantized: its weights are counted as if they were not")
        if added := expert_lora.bytes_of_sums(self.model.check(), self.model.spec.fused_lora):
            print(
                f"PEFT adds LoRA to the weights of experts in each forward pass: {added / MIB:,.1f} MiB in all layers "
                "(with gradient_checkpointing in one at a time)"
            )
        if isinstance(self.model, LearnsFromTeacher):
            of_teacher = self.model.teacher_bytes(self.trainer.world_size)
            print(f"the teacher has {of_teacher / MIB:,.1f} MiB of weights more on each rank")
            memory = [replace(of_rank, weights=of_rank.weights + of_teacher) for of_rank in memory]
        if self.picture is not None:
            self._draw(strategy)
        self._compare(memory)

    def _plan_model_parallel(self, strategy: ModelParallelStrategy) -> list[Memory]:
        world, size = self.trainer.world_size, self.trainer.world_size // strategy.sizes().pipeline
        shares: list[RankContents] = []
        memory: list[Memory] = []
        for first in range(0, world, size):  # the first rank of a stage has the largest shards where sizes differ
            with pretended_rank(first, world):
                split = self._split(strategy)
                layout = split.layout()
                shares.append(rank_contents(layout, self.model, step_of(self.trainer)))
                memory.append(self._memory(split))
        print(format_layout(layout, shares, step_of(self.trainer)))
        stages = by_stage(shares, world, strategy.sizes().pipeline)
        _print_memory([(ranks, of_stage) for (ranks, _), of_stage in zip(stages, memory, strict=True)])
        return memory

    def _split(self, strategy: _Strategy) -> _Strategy:
        """Copy of the strategy that has sharded the model for this rank, without weights."""
        split, module = copy.copy(strategy), self.model
        module.model = module.check()
        if recomputes := module.spec.gradient_checkpointing:
            options = activation_checkpointing.options(recomputes)
            enable_checkpointing(base_of(module), options)
        split.connect(module)
        split.setup_environment()
        split.shard(module)
        return split

    def _memory(self, split: ShardedStrategy) -> Memory:
        module, layout = self.model, split.layout()
        base, layers = layout.base, decoder_layers(layout.base)
        itemsize = (layout.precision.param_dtype or base.dtype).itemsize
        hidden = base.config.get_text_config().hidden_size
        inputs = layer_inputs(layout, len(layers), hidden, itemsize, step_of(self.trainer))
        accumulates = self.trainer.accumulate_grad_batches > 1
        return memory_of(layout, list(module.parameters()), layers, in_groups(module), inputs, accumulates)

    def _plan_replicas(self, strategy: object) -> Memory:
        world, name, module = self.trainer.world_size, type(strategy).__name__, self.model
        if isinstance(strategy, DeepSpeedStrategy):
            split = strategy.replication()
        elif isinstance(strategy, DDPStrategy):
            split = Replication(gradient_copies=1 if reduces_views(strategy) else 2)
        elif isinstance(strategy, SingleDeviceStrategy):
            split = Replication()
        else:
            raise RecipeError(
                f"plan knows one device, DDP, lit_ft's DeepSpeedStrategy, FSDPStrategy and ModelParallelStrategy, and "
                f"trainer.strategy is {name}; name one of them"
            )
        skeleton = module.model = module.check()
        self.trainer.precision_plugin.convert_module(skeleton)
        base = base_of(module)
        layout = Layout(base, MeshSizes(1, world, 1, 1), MixedPrecisionPolicy(), reshard_after_forward=False)
        text, itemsize = base.config.get_text_config(), (split.dtype or base.dtype).itemsize
        step = step_of(self.trainer)
        inputs = layer_inputs(layout, len(decoder_layers(base)), text.hidden_size, itemsize, step)
        memory = replicated_memory(split, list(skeleton.parameters()), in_groups(module), inputs)
        print(f"each of {world} ranks, with {name}:" if world > 1 else f"one device, with {name}:")
        print(f"a packed batch has {'at most' if step.is_known else '(assumed)'} {step.tokens:,} tokens")
        _print_memory([(f"0-{world - 1}" if world > 1 else "0", memory)])
        if split.on_host:
            print(f"in host memory, and not counted: {', '.join(sorted(split.on_host))}")
        return memory

    def _compare(self, memory: list[Memory]) -> None:
        """Say whether the memory of a device is enough, if it is given; exit code 1 if not."""
        if isinstance(self.model, SamplesAnswers):
            print("keys and values of the answers that are generated together (model.answers_at_once) come on top too")
        if isinstance(self.model, PolicyLM) and (names := [one.name for one in self.model.rewards if one.uses_device]):
            print(f"so do the weights of {', '.join(names)} (model.rewards)")
        if self.memory_gib is None:
            print("does it fit? give the memory of a device: --memory_gib N")
            return
        most = max(of_rank.total for of_rank in memory) / GIB
        # A quantized weight takes less than is counted; all else is as it is.
        least = max(of_rank.total - of_rank.weights - of_rank.gathered for of_rank in memory) / GIB
        sizes = f"{_in_gib(most)} of {_in_gib(self.memory_gib)}"
        if math.isnan(most):
            print("does it fit? unknown, as the size of the optimizer's state is")
        elif most <= self.memory_gib:
            left = self.memory_gib - most
            print(f"fits: {sizes}; {_in_gib(left)} are left for activations, logits and buffers")
        elif self.model.spec.base.is_quantized and least > self.memory_gib:
            print(
                f"does not fit: {_in_gib(least)} of {_in_gib(self.memory_gib)} without any weights, before "
                "activations, logits and buffers"
            )
            raise SystemExit(1)
        elif self.model.spec.base.is_quantized:
            print(f"may fit: {sizes}, with the quantized weights counted as if they were not")
        else:
            print(f"does not fit: {sizes}, before activations, logits and buffers")
            raise SystemExit(1)

    def _draw(self, strategy: object) -> None:
        assert self.picture is not None
        if not isinstance(strategy, ModelParallelStrategy) or strategy.sizes().pipeline == 1:
            raise RecipeError("--draw shows the schedule of a pipeline, and the recipe has pipeline_parallel_size=1")
        ranks = strategy.sizes().pipeline
        count = strategy.micro_batches(micro_batch_size(self.datamodule))
        table = timeline(strategy.schedule, ranks, count)
        share = idle_fraction(table)
        draw(table, self.picture, f"{strategy.schedule}, {ranks} ranks, {count} micro-batches: {share:.1%} bubble")
        print(f"schedule: {self.picture}")


@contextmanager
def pretended_rank(rank: int, world: int) -> Iterator[None]:
    """Context in which this process is a rank of a group whose other ranks do not exist; collectives do nothing."""
    # Lightning would log that it has joined a process group.
    logger = logging.getLogger("lightning.fabric.utilities.distributed")
    level = logger.level
    logger.setLevel(logging.WARNING)
    clear_mesh_caches()
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
        logger.setLevel(level)


def in_groups(module: CausalLM) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Optimizer of the recipe, made from stand-ins of the parameters that train, in order, in groups as in training."""
    matrices = hidden_matrices(module)
    kinds = [parameter in matrices for parameter in module.parameters() if parameter.requires_grad]

    def make(stand_ins: list[nn.Parameter]) -> Optimizer:
        pairs = list(zip(stand_ins, kinds, strict=True))
        members = {kind: [one for one, of_kind in pairs if of_kind is kind] for kind in (True, False)}
        made: Any = module.optimizer([{"params": one, MATRICES: kind} for kind, one in members.items() if one])
        return made

    return make


def _in_gib(size: float) -> str:
    """Text of a size in GiB, with two digits also where it is below 0.01."""
    return f"{size:,.2g} GiB" if 0 < size < 0.01 else f"{size:,.2f} GiB"


def _print_memory(rows: list[tuple[str, Memory]]) -> None:
    print("memory of a rank, MiB (layer inputs are estimated; other activations, logits and buffers come on top):")
    heads = ("ranks", "weights", "gathered", "gradients", "optimizer", "layer inputs", "sum")
    cells = [
        (ranks, *(f"{part / MIB:,.1f}" for part in (*vars(memory).values(), memory.total))) for ranks, memory in rows
    ]
    print("\n".join(aligned([heads, *cells], left=1)))

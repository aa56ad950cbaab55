"""DeepSpeed's ZeRO, on CUDA and on CPU: optimizer state, gradients and weights are sharded over the ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import lightning.pytorch.strategies as lightning_strategies
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lit_callbacks.distributed.failures import failing_together
from lit_callbacks.distributed.gather import full_weights, is_zero3
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel

from lit_ft.checkpointing.storage.checkpoint_io import mapped
from lit_ft.checkpointing.storage.integrity import check_on_rank_zero
from lit_ft.checkpointing.storage.sharded import OptimizerState
from lit_ft.errors import RecipeError
from lit_ft.internals.deepspeed import restore_linear, stop_gathering_in_calls, zero_gradient_buffer
from lit_ft.internals.torch import without_forward_hooks
from lit_ft.model.isolation import token_mixers
from lit_ft.model.loading import decoder_layers
from lit_ft.model.spec import ModelSpec
from lit_ft.planning.layout import Replication
from lit_ft.process import datamodule_of
from lit_ft.protocols import Checkpoint, LogsGradientNorm
from lit_ft.strategies.module_calls import Answer, wrap_answer
from lit_ft.strategies.zero import config as zero_config
from lit_ft.strategies.zero import state as zero_state
from lit_ft.training.float32 import tensors
from lit_ft.training.optimizers import compatibility as optimizer_support
from lit_ft.training.spec import spec_of

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

T = TypeVar("T")


class DeepSpeedStrategy(lightning_strategies.DeepSpeedStrategy):
    """ZeRO: stage 1 shards optimizer state over the ranks, stage 2 also gradients, stage 3 also weights.

    Results are those of one process, and checkpoints can be resumed under every other strategy. At stage 3 a base
    model is sharded while it is read. ``config``, a JSON file or a mapping, accepts every key of DeepSpeed's
    configuration and replaces all other arguments; the value ``"auto"`` in it stands for what the recipe sets.
    """

    config: dict[str, Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Accept the arguments of Lightning's ``DeepSpeedStrategy``.

        Raises:
            RecipeError: a package is missing, or ``config`` comes together with arguments that it replaces.
        """
        zero_config.check_packages()
        zero_config.check_arguments(lightning_strategies.DeepSpeedStrategy, args, kwargs)
        super().__init__(*args, **kwargs)
        self.config = zero_config.with_explicit_values(self.config)
        self._forward_redirection: Any = self._run_in_engine
        self._is_in_step, self._has_gradients = False, True
        self._order: list[list[nn.Parameter]] = []
        """Parameters of the optimizer by group, in the order that they had before ZeRO flattened each group."""

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    # --- checks of the recipe --------------------------------------------------------------------

    def _load_config(self, config: str | Path | dict[str, Any] | None) -> dict[str, Any] | None:
        try:
            return super()._load_config(config)
        except (ValueError, MisconfigurationException) as error:
            raise RecipeError(
                f"trainer.strategy: config={str(config)!r} is no file of DeepSpeed's JSON ({error}); name one that is"
            ) from error

    def check(self, trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None = None) -> None:
        """Compare DeepSpeed's configuration with the recipe, before processes are started and weights are loaded.

        Raises:
            RecipeError: the two disagree; the message names both values.
        """
        zero_config.check_recipe(self._given_config, trainer, datamodule)
        zero_config.check_method(zero_config.stage_of(self.config), module)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that needs more of a weight than its elements: ZeRO gives it flat parts of many weights.

        Raises:
            RecipeError: the optimizer's updates would differ from those without ZeRO.
        """
        optimizer_support.check_situation(optimizer, "zero")

    def _configure_launcher(self) -> None:
        # Checked before processes are started, so that an error is reported once.
        self._given_config = dict(self.config)
        on_cpu = isinstance(self.accelerator, CPUAccelerator)
        zero_config.check_devices(self.config, ranks=self.num_nodes * self.num_processes, on_cpu=on_cpu)
        super()._configure_launcher()

    # --- processes -------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the process group, also on CPU, which Lightning's own method refuses."""
        self.check(self._module.trainer, self._module, datamodule_of(self._module.trainer))
        if not isinstance(self.accelerator, CPUAccelerator):
            super().setup_environment()
            return
        import deepspeed.ops

        # DeepSpeed would compile its shared-memory collectives for a minute at the first start; gloo needs none.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        assert self.parallel_devices is not None
        self.parallel_devices = [torch.device("cpu", i) for i in range(len(self.parallel_devices))]
        super(lightning_strategies.DeepSpeedStrategy, self).setup_environment()

    def _format_batch_size_and_grad_accum_config(self) -> None:
        # Lightning counts the micro-batches of each optimizer step, also of the shorter last step of an epoch, and
        # divides by their number. The batch size is for DeepSpeed's throughput log only.
        self.config = {key: value for key, value in self.config.items() if key not in zero_config.SET_BY_THE_RECIPE}
        self.config["gradient_accumulation_steps"] = 1
        self.config["train_micro_batch_size_per_gpu"] = 1
        self.config["gradient_clipping"] = float(self._module.trainer.gradient_clip_val or 0)

    # --- model -----------------------------------------------------------------------------------

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Context for building the model: at stage 3 a base model is sharded as it is read, so no rank holds all of it.

        Random initial weights (``init: random``) and quantized weights are sharded after they are created.
        """
        self._init_config_if_needed()
        base = self._base()
        if not self.zero_stage_3 or (base is not None and (base.init == "random" or base.is_quantized)):
            yield
            return
        import torch._dynamo  # noqa: F401  # zero.Init patches Tensor.__new__, which its import does not survive
        from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

        # transformers keeps a weak reference to it, and shards all that it reads while the object exists.
        settings = HfDeepSpeedConfig(self._reading_config())
        try:
            yield
        finally:
            unset_hf_deepspeed_config()
            del settings

    def _reading_config(self) -> zero_config.Config:
        """Configuration with the dtype that ``zero.Init`` gives weights: the base model's, unless precision casts."""
        base = self._base()
        if self.precision_plugin.precision != "32-true" or base is None:
            return self.config
        key = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(base.weights_dtype())
        return self.config if key is None else {**self.config, key: {"enabled": True}}

    def _base(self) -> ModelSpec | None:
        spec = spec_of(self._module)
        return None if spec is None else spec.base

    def setup(self, trainer: Trainer) -> None:
        """Give model and optimizer to DeepSpeed's engine."""
        assert self.accelerator is not None
        assert self.model is not None
        self._init_config_if_needed()
        self.accelerator.setup(trainer)
        if self.precision_plugin.precision != "32-true":  # which casts nothing, as under every other strategy
            self.model = self.precision_plugin.convert_module(self.model)
            self._cast_weights(self.model)
        self.model_to_device()  # DeepSpeed moves nothing, not even metrics, if the base was sharded as it was read
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        with nullcontext() if self.zero_stage_3 else tensors.frozen(self.model):  # the engine casts all of them
            (self._initialize_deepspeed_train if is_fitting else self._initialize_deepspeed_inference)(self.model)
        if self.zero_stage_3:
            self._keep_head_whole()
            self._gather_with_layers()
            wrap_answer(self._module, self._answer_in_engine)
        self.barrier()

    def _answer_in_engine(self, answer: Answer) -> Answer:
        def run(prompts: Sequence[str], max_new_tokens: int) -> Sequence[str]:
            engine = self.model  # a trainer that fits and then tests has two engines
            assert engine is not None
            return self._run_in_engine(engine, self._module, answer, prompts, max_new_tokens)

        return run

    def _cast_weights(self, model: nn.Module) -> None:
        """Cast weights as DeepSpeed does, which forgets an adapter's if the base was split as it was read."""
        dtype = torch.bfloat16 if str(self.precision_plugin.precision).startswith("bf16") else torch.float16
        model.to(dtype)
        for parameter in model.parameters() if self.zero_stage_3 else ():  # it joins frozen ones too
            if parameter.is_floating_point() and not is_zero3(parameter):
                parameter.data = parameter.data.to(dtype)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: LRScheduler | None = None
    ) -> tuple["DeepSpeedEngine", Optimizer]:
        if optimizer is not None:
            self.check_optimizer(optimizer)
            self._check_dtypes(optimizer)
            self._order = [list(group["params"]) for group in optimizer.param_groups]
        return super()._setup_model_and_optimizer(model, optimizer, lr_scheduler)

    def _check_dtypes(self, optimizer: Optimizer) -> None:
        """Refuse trained weights of several dtypes, which the engine joins into one tensor.

        Raises:
            RecipeError: there are some; the message names what gives them one dtype.
        """
        groups = [{parameter.dtype for parameter in group["params"]} for group in optimizer.param_groups]
        joined = [set().union(*groups)] if self.zero_stage_3 else groups  # before stage 3, each group is one tensor
        if mixed := [dtypes for dtypes in joined if len(dtypes) > 1]:
            advice = "model.dtype=float32" if self._trains_base() else "model.adapter_dtype=auto"
            raise RecipeError(
                f"trainer.strategy=DeepSpeedStrategy: stage={zero_config.stage_of(self.config)} trains weights of one "
                f"dtype, and here they are in {' and '.join(sorted(map(str, mixed[0])))}; set {advice} or "
                "trainer.precision=bf16-true, or take lit_ft.strategies.FSDPStrategy, which trains each in its own"
            )

    def _trains_base(self) -> bool:
        spec = spec_of(self._module)
        return spec is None or spec.tuning.peft is None

    def _keep_head_whole(self) -> None:
        """Keep the head gathered for the full duration of each step, instead of gathering it in every call.

        The loss calls the head once per chunk of tokens, so a rank with more tokens calls it more often, and computes
        its gradient at once; ranks that gather at different times would deadlock. It costs the memory of the head.
        """
        module, base = self._module, self._model_of_run()
        if base is None:
            return
        import deepspeed

        decoder = getattr(base, base.base_model_prefix)
        head = [base, *(part for child in base.children() if child is not decoder for part in child.modules())]
        stop_gathering_in_calls(self.deepspeed_engine, head)
        for part in head:
            for parameter in part.parameters(recurse=False):
                deepspeed.zero.register_external_parameter(module, parameter)

    def _gather_with_layers(self) -> None:
        """Gather what runs sample by sample, or expert by expert, once for each call of its layer, not for its own.

        Ranks have different numbers of samples in a packed batch, and of experts that its tokens reach, and would
        gather at different times.
        """
        if (base := self._model_of_run()) is None:
            return
        import deepspeed

        for layer in decoder_layers(base):
            mixers = token_mixers.mixers(layer, in_layer=True)
            parts = [mixer for mixer in mixers if not token_mixers.isolates(base, mixer)]
            parts += [part for name, part in layer.named_modules() if name.endswith(".experts") and _calls_each(part)]
            for part in parts:
                stop_gathering_in_calls(self.deepspeed_engine, list(part.modules()))
                for parameter in part.parameters():
                    deepspeed.zero.register_external_parameter(layer, parameter)

    def _model_of_run(self) -> PreTrainedModel | None:
        return next((m for m in self._module.modules() if isinstance(m, PreTrainedModel)), None)

    def replication(self) -> Replication:
        """Numbers of ranks that each part is split over, from DeepSpeed's configuration."""
        zero, ranks = self.config.get("zero_optimization", {}), self.num_nodes * self.num_processes
        stage = zero_config.stage_of(self.config)
        half = {"bf16": torch.bfloat16, "16": torch.float16}.get(str(self.precision_plugin.precision).split("-")[0])
        offloads = {"weights": "offload_param", "optimizer": "offload_optimizer"}
        return Replication(
            weights=ranks if stage >= 3 else 1,
            gradients=ranks if stage >= 2 else 1,
            optimizer=ranks,
            dtype=half,
            has_float32_copy=True,
            gathered_elements=int(zero.get("stage3_max_live_parameters", 1e9)) if stage >= 3 else 0,
            on_host=frozenset(
                part for part, key in offloads.items() if zero.get(key, {}).get("device", "none") != "none"
            ),
        )

    def teardown(self) -> None:
        """Leave nothing of DeepSpeed's in torch."""
        super().teardown()
        restore_linear()

    # --- steps -----------------------------------------------------------------------------------

    def _run_in_engine(
        self, engine: nn.Module, module: LightningModule, step: str | Callable[..., T], *args: object, **kwargs: object
    ) -> T:
        """Run a step of the module, given as a name or a callable, as the engine's forward pass.

        It replaces Lightning's forward redirection. A step calls the module itself, and ZeRO's hooks would treat that
        as another forward pass: they are removed for the duration of the step.
        """
        call = getattr(module, step) if isinstance(step, str) else step
        if self._is_in_step:
            return call(*args, **kwargs)
        forward = module.forward

        def inner(*args: object, **kwargs: object) -> T:
            module.forward = forward  # type: ignore[method-assign]
            with without_forward_hooks(module):
                result = call(*args, **kwargs)
            self._has_gradients = not (isinstance(result, Tensor) and result.is_leaf)
            return result

        module.forward, self._is_in_step = inner, True  # type: ignore[method-assign]
        try:
            return engine(*args, **kwargs)
        finally:
            module.forward, self._is_in_step = forward, False  # type: ignore[method-assign]

    @property
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning accumulates gradients, as it knows when an epoch ends in the middle of an optimizer step."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Context for all but the last micro-batch of an optimizer step: DeepSpeed does not step after it."""
        self.deepspeed_engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.deepspeed_engine.set_gradient_accumulation_boundary(True)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward pass, unless the micro-batch is empty, which it then is on all ranks.

        For an empty one DeepSpeed would look for gradients to reduce, and treat it as the first of an accumulation.
        """
        if not self._has_gradients:
            return closure_loss
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> None:
        """None: DeepSpeed computes the norm and clips by itself."""

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], object], model: nn.Module | None = None, **kwargs: object
    ) -> object:
        """Take the step and log the gradient norm before clipping; DeepSpeed skips a step where it is not finite."""
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        if (norm := self.deepspeed_engine.get_global_grad_norm()) is not None:  # compute_grad_norm: false
            self._log_gradient_norm(torch.as_tensor(norm))
        zero_gradient_buffer(self.deepspeed_engine)
        return result

    def _log_gradient_norm(self, norm: Tensor) -> None:
        if isinstance(self._module, LogsGradientNorm):
            self._module.log_gradient_norm(norm, has_scaler=str(self.precision_plugin.precision).startswith("16"))
        else:
            self._module.log("train/grad_norm", norm)

    # --- checkpoints -----------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True: Lightning passes the optimizer's saved state on, and each rank loads its shard of it."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Tensor]:
        """Full tensors on rank 0 of what trains (of DeepSpeed's fp32 copy, if any), or all of a module of one's own."""
        keep, saves_all = self.is_global_zero, spec_of(self._module) is None
        if not self._order:
            return full_weights(self._module, lambda _, p: p.requires_grad or saves_all, keep)
        trained = zero_state.weights(self._module, keep)
        return trained | (full_weights(self._module, lambda _, p: not p.requires_grad, keep) if saves_all else {})

    def optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """Full optimizer state on rank 0, in the layout that it has without ZeRO.

        Raises:
            RecipeError: a validation or test after the fit has replaced the engine by one without optimizer.
        """
        if self._order and self.deepspeed_engine.basic_optimizer is None:
            raise RecipeError(
                "a Trainer that validates or tests after its fit has no optimizer of DeepSpeed any more: call "
                "save_checkpoint before, or with weights_only=True"
            )
        return zero_state.optimizer_state(self.deepspeed_engine, self._order, keep=self.is_global_zero)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load saved weights; each rank loads its shards of those that are sharded."""
        zero_state.load_weights(self._module, checkpoint["state_dict"], self.deepspeed_engine)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's shards of the saved optimizer states."""
        zero_state.load_optimizer_state(self.deepspeed_engine, self._order, checkpoint["optimizer_states"][0])

    def save_checkpoint(self, checkpoint: Checkpoint, filepath: str | Path, storage_options: object = None) -> None:
        """Write one file, from which a run can resume under any strategy and on any number of ranks."""
        path = self.broadcast(filepath)
        with failing_together():
            if self.is_global_zero:
                self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> Checkpoint:
        """Read a checkpoint of any strategy; a file is memory-mapped, so each rank loads only its shards."""
        path = Path(self.broadcast(checkpoint_path))
        check_on_rank_zero(path)
        return mapped(path)


def _calls_each(experts: nn.Module) -> bool:
    """Whether a layer's experts are modules (DBRX), not tensors of one module that it calls once."""
    have_weights = (next(child.parameters(), None) is not None for child in experts.children())
    return any(have_weights) and not isinstance(experts, BaseTunerLayer)

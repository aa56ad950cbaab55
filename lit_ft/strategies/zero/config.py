"""Checks of DeepSpeed's configuration against the recipe, and of the recipe against the limits of ZeRO."""

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lightning.pytorch import LightningDataModule, Trainer
from torch import nn

from lit_ft.errors import RecipeError
from lit_ft.protocols import micro_batch_size
from lit_ft.training.spec import spec_of
from lit_ft.tuning.compatibility import check_situation

Config = Mapping[str, Any]
"""DeepSpeed's configuration: JSON of any depth, with keys of the user's choice."""

SET_BY_THE_RECIPE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
"""Keys of DeepSpeed's configuration whose values the recipe sets elsewhere."""

_BESIDE_CONFIG = ("config", "accelerator", "parallel_devices", "cluster_environment", "precision_plugin")
_ALSO_BESIDE_CONFIG = ("process_group_backend", "timeout", "logging_level", "remote_device")


def check_packages() -> None:
    """Check that DeepSpeed is installed, and accelerate, which the DeepSpeed integration of transformers needs.

    Raises:
        RecipeError: one of them is missing.
    """
    if missing := [name for name in ("deepspeed", "accelerate") if find_spec(name) is None]:
        raise RecipeError(
            f"trainer.strategy: DeepSpeedStrategy needs {' and '.join(missing)}, which is not installed; "
            f"pip install {' '.join(missing)} (Linux), or take lit_ft.strategies.FSDPStrategy"
        )


def check_arguments(strategy: type, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse arguments that would be ignored because ``config`` is given.

    Raises:
        RecipeError: there are such arguments; the message names them.
    """
    signature = inspect.signature(strategy)
    given = signature.bind(*args, **kwargs).arguments
    if given.get("config") is None:
        return
    ignored = {
        name: value
        for name, value in given.items()
        if name not in _BESIDE_CONFIG + _ALSO_BESIDE_CONFIG and value != signature.parameters[name].default
    }
    if ignored:
        listed = ", ".join(f"{name}={value!r}" for name, value in ignored.items())
        raise RecipeError(
            f"trainer.strategy: config takes the place of all other settings, but there is also {listed}; "
            "say it in config (zero_optimization: ...), or leave config out"
        )


def with_explicit_values(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration without ``"auto"``, and with the settings that torch's own optimizers need."""
    explicit = _without_auto(config)
    explicit.setdefault("zero_allow_untested_optimizer", True)
    explicit.setdefault("zero_force_ds_cpu_optimizer", False)
    return explicit


def _without_auto(config: Config) -> dict[str, Any]:
    explicit: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            value = _without_auto(value)
            if not value and config[key]:
                continue
        if value != "auto":
            explicit[key] = value
    return explicit


def stage_of(config: Config) -> int:
    """Stage of ZeRO; 0 where nothing is sharded."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def check_devices(config: Config, ranks: int, on_cpu: bool) -> None:
    """Refuse settings of ZeRO that do not work on the devices of the run.

    Raises:
        RecipeError: a setting does not work; the message names it.
    """
    zero = config.get("zero_optimization", {})
    if stage_of(config) == 0:
        raise RecipeError("trainer.strategy: DeepSpeed with stage=0 splits nothing; set stage to 1, 2 or 3, or use ddp")
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator().device_name()
    if on_cpu and chosen != "cpu":
        raise RecipeError(
            f"trainer.accelerator=cpu, but DeepSpeed has chosen {chosen}; set DS_ACCELERATOR=cpu in the environment"
        )
    quantized = [name for name in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(name)]
    if on_cpu and quantized:
        raise RecipeError(
            f"trainer.strategy: {', '.join(quantized)} with trainer.accelerator=cpu, but DeepSpeed's kernels for them "
            "are for CUDA; leave them out on CPU (zero_hpz_partition_size runs there)"
        )
    if ranks % (size := zero.get("zero_hpz_partition_size", 1)):
        raise RecipeError(
            f"trainer.strategy: zero_hpz_partition_size={size} must divide the {ranks} ranks; use one of "
            f"{[n for n in range(1, ranks + 1) if ranks % n == 0]}"
        )
    for part in ("offload_param", "offload_optimizer"):
        if zero.get(part, {}).get("device") == "nvme":
            _check_nvme(stage_of(config), part, zero[part].get("nvme_path"))


def _check_nvme(stage: int, part: str, folder: str | None) -> None:
    if stage != 3:
        raise RecipeError(f"trainer.strategy: {part} to nvme needs stage=3, but stage={stage}; offload to cpu")
    path = Path(str(folder)).absolute()
    try:
        TemporaryFile(dir=next(folder_above for folder_above in (path, *path.parents) if folder_above.exists())).close()
    except OSError as error:
        raise RecipeError(
            f"trainer.strategy: nvme_path={folder!r} cannot be written to ({error.strerror}); name a folder on a local "
            "NVMe disk"
        ) from error
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False):
        raise RecipeError(
            f"trainer.strategy: {part} to nvme needs libaio with its headers to compile DeepSpeed's async_io, and they "
            "are not there; apt install libaio-dev (dnf install libaio-devel), or offload to cpu"
        )


def check_recipe(config: Config, trainer: Trainer, datamodule: LightningDataModule | None = None) -> None:
    """Compare DeepSpeed's configuration with the recipe's values for the same settings.

    Raises:
        RecipeError: two values differ, and the message names both; or DeepSpeed has no such precision on the device.
    """
    _check_precision(str(trainer.precision))
    ranks = trainer.num_nodes * trainer.num_devices
    accumulate = trainer.accumulate_grad_batches
    size = micro_batch_size(datamodule)
    in_recipe = {
        "gradient_accumulation_steps": ("trainer.accumulate_grad_batches", accumulate),
        "gradient_clipping": ("trainer.gradient_clip_val", trainer.gradient_clip_val or 0),
        "train_micro_batch_size_per_gpu": ("data.micro_batch_size", size),
        "train_batch_size": (
            f"data.micro_batch_size x trainer.accumulate_grad_batches x {ranks} ranks",
            None if size is None else size * accumulate * ranks,
        ),
        "bf16.enabled": ("trainer.precision", trainer.precision),
        "fp16.enabled": ("trainer.precision", trainer.precision),
    }
    for key, (option, value) in in_recipe.items():
        given = _at(config, key)
        kind = {"bf16.enabled": "bf16", "fp16.enabled": "16"}.get(key)
        agrees = given == value if kind is None else bool(given) == trainer.precision.startswith(f"{kind}-")
        if given is not None and value is not None and not agrees:
            raise RecipeError(
                f"DeepSpeed's {key}={json.dumps(given)}, but {option}={value}; take {key} out of the DeepSpeed "
                f'config, or make it "auto"'
            )
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise RecipeError(
                f"DeepSpeed's {key}={json.dumps(config[key])}, but the recipe says "
                f"{'optimizer' if key == 'optimizer' else 'lr_scheduler'}; take {key} out of the DeepSpeed config "
                "(optimizer.class_path: deepspeed.ops.adam.DeepSpeedCPUAdam is there for all)"
            )
    for key in ("tensor_parallel.autotp_size", "sequence_parallel_size"):
        if (given := _at(config, key) or 1) > 1:
            raise RecipeError(f"DeepSpeed's {key}={given}: ranks here share the data and nothing else; take it out")
    if (algorithm := trainer.gradient_clip_algorithm) == "value" and trainer.gradient_clip_val:
        raise RecipeError(
            f"trainer.gradient_clip_algorithm={algorithm.value}, but DeepSpeed clips by norm only; set it to norm"
        )


def _check_precision(precision: str) -> None:
    from deepspeed.accelerator import get_accelerator

    if precision.startswith("16-") and not get_accelerator().is_fp16_supported():
        raise RecipeError(
            f"trainer.precision={precision}, but DeepSpeed does not compute in float16 on this device; set "
            f"bf16-{precision.removeprefix('16-')}"
        )


def _at(config: Config, path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_method(stage: int, module: nn.Module) -> None:
    """Refuse tuning methods that need weights or gradients which ZeRO has sharded, and other options of the model.

    Modules other than ``CausalLM`` pass, unless they have a ``TrainingSpec``.

    Raises:
        RecipeError: the tuning method or option does not work at this stage; the message names both.
    """
    spec = spec_of(module)
    if spec is None:
        return
    if stage == 3 and spec.router_aux_loss is not None:
        raise RecipeError(
            f"model.router_aux_loss={spec.router_aux_loss} and trainer.strategy stage=3 were not compared "
            "with one process; set stage to 2, or take lit_ft.strategies.FSDPStrategy"
        )
    if stage == 3 and spec.gradient_checkpointing == "selective":
        raise RecipeError(
            "model.gradient_checkpointing=selective keeps products to which DeepSpeed adds biases in place (stage=3), "
            "and gradients would be wrong; set it to true, or take lit_ft.strategies.FSDPStrategy"
        )
    peft, added = spec.tuning.peft, [*spec.base.added_tokens, *spec.base.added_special_tokens]
    if peft is not None and added:  # which the module will train as rows of the embeddings
        peft = copy.copy(peft)
        peft.trainable_token_indices = added
    check_situation(peft, "zero3" if stage == 3 else "zero", f"stage={stage}")

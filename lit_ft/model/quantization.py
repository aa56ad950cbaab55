"""Quantized base models: quantized while a checkpoint is read, or read from a quantized checkpoint."""

import copy
from enum import Enum
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.internals.bitsandbytes_internals import keep_scales, without_faults
from lit_callbacks.internals.transformers_internals import is_quantized
from peft import PeftConfig
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils.quantization_config import BitsAndBytesConfig, QuantizationConfigMixin

from lit_ft.errors import RecipeError, first_line
from lit_ft.model.architecture import head_layer, linear_routers, not_to_pack

_DEQUANTIZED = ("compressed-tensors", "fp8", "mxfp8", "mxfp4")
"""Methods whose checkpoints are dequantized while they are read. Otherwise transformers would dequantize them in the
first forward pass (compressed-tensors), or also round activations, which gives wrong gradients."""
_CALIBRATED = ("gptq", "awq", "auto-round")
"""Methods that need data to quantize: only their checkpoints can be used."""
_ON_CPU = ("gptq", "awq", *_DEQUANTIZED)
"""Methods whose layers are created on the CPU and moved to the device with the rest of the model."""
_WHERE_BUILT = ("bitsandbytes", "torchao", "quanto")
"""Methods that quantize on the device that the model is built for, one weight at a time: a CPU or CUDA."""
_GPTQMODEL = (
    "pip install optimum defuser device-smi logbar pypcre tokenicer threadpoolctl && pip install --no-deps gptqmodel"
)
_INSTALL = {
    "bitsandbytes": "pip install bitsandbytes",
    "torchao": "pip install -e '.[torchao]'",
    "gptq": _GPTQMODEL,
    "awq": _GPTQMODEL,
    "compressed-tensors": "pip install compressed-tensors",
    "quanto": "pip install optimum-quanto",
}


# --- rules, before weights are read ------------------------------------------------------------------


def check_requested(quantization: QuantizationConfigMixin, peft: PeftConfig | None) -> None:
    """Refuse a ``model.quantization`` that cannot be trained on.

    Raises:
        RecipeError: the message says what is missing.
    """
    if peft is None:
        raise RecipeError(
            "model.quantization is set without model.peft; quantized weights cannot be trained, add a method"
        )
    check_method(quantization)


def check_method(quantization: QuantizationConfigMixin) -> None:
    """Refuse a ``model.quantization`` that no weights can be read with.

    Raises:
        RecipeError: the message says what is missing.
    """
    if (method := method_of(quantization)) in _CALIBRATED:
        raise RecipeError(
            f"model.quantization: {method} looks at data while it quantizes; name a checkpoint that was quantized with "
            "it as model.pretrained and leave model.quantization out"
        )
    if isinstance(quantization, BitsAndBytesConfig) and quantization.bnb_4bit_quant_type not in ("nf4", "fp4"):
        raise RecipeError(
            f"model.quantization: bnb_4bit_quant_type={quantization.bnb_4bit_quant_type!r} must be nf4 or fp4"
        )
    _check_installed("model.quantization", quantization, stored=False)


_NOT_QUANTIZED = {"rwkv": "scales its weights for evaluation, and fails where they are packed"}
"""Why an architecture fails with quantized weights (transformers 5.24)."""


def check_stored(
    pretrained: str, config: PretrainedConfig, quantization: QuantizationConfigMixin | None, peft: PeftConfig | None
) -> None:
    """Refuse recipes that do not work with a quantized checkpoint, and architectures that fail when quantized.

    Raises:
        RecipeError: the message says what is missing.
    """
    is_any = quantization is not None or _stored(config) is not None
    if is_any and (reason := _NOT_QUANTIZED.get(config.model_type)) is not None:
        raise RecipeError(f"model.quantization: {config.model_type} {reason}; leave it out, or take another model")
    if (stored := _stored(config)) is None:
        return
    where, method = f"model.pretrained={pretrained!r}", method_of(stored)
    if quantization is not None:
        raise RecipeError(f"{where} is quantized already ({method}); leave model.quantization out")
    _check_installed(where, stored, stored=True)
    if is_packed(config) and peft is None:
        raise RecipeError(
            f"{where} is quantized ({method}), and quantized weights cannot be trained; set model.peft, e.g. to "
            "peft.LoraConfig, or name the checkpoint that it was quantized from"
        )


def packed_method(config: PretrainedConfig) -> str | None:
    """transformers' name for the quantization of a checkpoint; None if its weights are dense after they are read."""
    stored = _stored(config)
    return None if stored is None or method_of(stored) in _DEQUANTIZED else method_of(stored)


def is_packed(config: PretrainedConfig) -> bool:
    """Whether a checkpoint's weights are quantized and stay so when they are read."""
    return packed_method(config) is not None


def _stored(config: PretrainedConfig) -> dict[str, object] | None:
    return getattr(config, "quantization_config", None)


def is_bitsandbytes_int8(quantization: QuantizationConfigMixin | PretrainedConfig) -> bool:
    """Whether linear layers are bitsandbytes' in INT8: by a recipe's quantization, or the config of a checkpoint."""
    return bool(_values(quantization).get("load_in_8bit"))


def stores_integers(quantization: QuantizationConfigMixin | PretrainedConfig) -> bool:
    """Whether bitsandbytes' 4-bit weights are stored as integers, not in a floating-point dtype."""
    values = _values(quantization)
    stored_as = getattr(torch, str(values.get("bnb_4bit_quant_storage") or "uint8").rpartition(".")[2])
    return bool(values.get("load_in_4bit")) and not stored_as.is_floating_point


def _values(quantization: QuantizationConfigMixin | PretrainedConfig) -> dict[str, Any]:
    return quantization.to_dict() if isinstance(quantization, QuantizationConfigMixin) else _stored(quantization) or {}


def method_of(quantization: QuantizationConfigMixin | dict[str, object]) -> str:
    """transformers' name for a quantization method, e.g. ``gptq``."""
    if not isinstance(quantization, dict):
        return str(method.value if isinstance(method := quantization.quant_method, Enum) else method)
    is_old_bitsandbytes = quantization.get("load_in_8bit") or quantization.get("load_in_4bit")
    return "bitsandbytes" if is_old_bitsandbytes else str(quantization.get("quant_method"))


def _check_installed(where: str, quantization: QuantizationConfigMixin | dict[str, object], *, stored: bool) -> None:
    method = method_of(quantization)
    try:
        if isinstance(quantization, dict):
            quantization = AutoQuantizationConfig.from_dict(dict(quantization))
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=stored)
        quantizer.validate_environment(device_map=_device_map(method))
    except ImportError as error:
        install = _INSTALL.get(method, "install what it names")
        raise RecipeError(f"{where}: {method} needs a package ({first_line(error)}): {install}") from error
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise RecipeError(f"{where}: {method} does not run here ({first_line(error)}); take another base") from error


# --- reading -----------------------------------------------------------------------------------------


def reading_options(config: PretrainedConfig, quantization: QuantizationConfigMixin | None) -> dict[str, object]:
    """Keyword arguments of ``from_pretrained`` for a quantized base model; empty for a dense one.

    The checkpoint's config is changed in place if its quantization is set up for inference.
    """
    if quantization is not None:
        quantization = _with_exceptions(quantization, config)
        return {"quantization_config": quantization, "device_map": _device_map(method_of(quantization))}
    if (stored := _stored(config)) is None:
        return {}
    method = method_of(stored)
    if method in _DEQUANTIZED:
        config.quantization_config = {**stored, "dequantize": True}
        rank_zero_info(f"the base is stored in {method}: dequantized while it is read")
    elif method in ("gptq", "awq"):
        config.quantization_config = {**stored, "backend": "auto_trainable"}  # the others have no backward pass
    return {"device_map": _device_map(method)}


def _with_exceptions(quantization: QuantizationConfigMixin, config: PretrainedConfig) -> QuantizationConfigMixin:
    """The quantization without layers that have to stay dense; a copy if there are any."""
    if isinstance(quantization, BitsAndBytesConfig):  # leaves classes derived from nn.Linear dense itself
        option, names, reason = "llm_int8_skip_modules", not_to_pack(config), "whose weights the model reads itself"
        patterns = names
    else:
        option, names, reason = "modules_to_not_convert", linear_routers(config), "which returns more than a product"
        patterns = {rf".*\.{name}" for name in names}  # torchao compares with names of weights, quanto of layers
    if not names or not hasattr(quantization, option):
        return quantization
    # transformers' own choice is replaced by the list
    given = set(getattr(quantization, option) or ["lm_head", "score"])
    rank_zero_info(f"model.quantization leaves out {', '.join(sorted(names))}, {reason}")
    quantization = copy.deepcopy(quantization)
    setattr(quantization, option, sorted(given | patterns))
    return quantization


def _device_map(method: str) -> dict[str, object]:
    if method in _WHERE_BUILT:
        # Lightning builds models in the context of the run's device; without one the default is the CPU.
        device = torch.get_default_device()
        return {"": device if device.type == "cuda" else "cpu"}
    on_cpu = method in _ON_CPU or not torch.cuda.is_available()
    return {"": "cpu" if on_cpu else torch.cuda.current_device()}


def prepare_for_training(model: PreTrainedModel) -> None:
    """Prepare the quantized layers of a model for training, and check their gradients.

    Raises:
        RecipeError: a kind of layer passes no gradients, or wrong ones.
    """
    without_faults(model)
    if not is_quantized(model):
        return
    keep_scales(model)
    kinds = {(type(m), type(getattr(m, "weight", None))): m for m in linear_modules(model).values()}
    if all(kind is nn.Parameter for _, kind in kinds):
        names = sorted({layer.__name__ for layer, _ in kinds})
        raise RecipeError(
            f"model.quantization changes no layer of {type(model).__name__}: it knows nn.Linear itself, and the model "
            f"has {', '.join(names)}; leave it out, or take another model"
        )
    for (_, kind), module in kinds.items():
        is_dense = kind is nn.Parameter and next(module.parameters()).dtype.itemsize > 1  # as Llama 4's router
        if not is_dense:
            check_gradient(module, model.dtype)


@runtime_checkable
class LinearLayer(Protocol):
    """Linear layer; the quantized ones of some libraries are not derived from ``nn.Linear``."""

    in_features: int
    out_features: int


def linear_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Linear layers by name, quantized ones included, without the head."""
    head = head_layer(model)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return {name: m for name, m in modules.items() if isinstance(m, LinearLayer) and m is not head}


def check_gradient(module: Any, dtype: torch.dtype) -> None:
    """Compare a linear layer's gradient with its outputs: for its matrix J and an input v, <J'Jv, v> = |Jv|^2.

    The layer is in training mode; ``dtype`` is that of its inputs.

    Raises:
        RecipeError: there is no gradient, or its error is above 5 %: rounding activations to 8 bits causes 1 %.
    """
    device = next(chain(module.parameters(), module.buffers())).device
    own_draws = torch.Generator().manual_seed(0)  # so that new weights depend on the seed of the run only
    # Lightning builds models in the context of the run's device, which is not the generator's.
    probe = torch.randn(16, module.in_features, generator=own_draws, device="cpu").to(device, dtype).requires_grad_()
    problem, cause = None, None
    try:
        output = module(probe) - module(torch.zeros_like(probe)).detach()  # less the bias
        (gradient,) = torch.autograd.grad(output, probe, output.detach())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        problem, cause = first_line(error), error
    else:
        expected, got = output.detach().float().square().sum(), (gradient.float() * probe.detach().float()).sum()
        if (got - expected).abs() > 0.05 * expected:
            problem = f"it is {got / expected:.0%} of what it should be"
    if problem is not None:
        kind = f"{type(module).__name__} with {type(getattr(module, 'weight', None)).__name__}"
        raise RecipeError(
            f"the base's quantized layers ({kind}) do not pass the gradient back that LoRA below them trains on "
            f"({problem}); take a quantization of weights alone, e.g. transformers.BitsAndBytesConfig"
        ) from cause

"""Private API of PEFT, as read in peft 0.21."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import wraps
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeGuard, get_type_hints

from lit_ft.internals.transformers import cache_option

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from torch import Tensor, nn
    from transformers import PreTrainedModel


def accept_all_inits() -> None:
    """Add values of ``init_lora_weights`` that PEFT takes to its type hint, by which recipes are read."""
    from jsonargparse.typing import restricted_string_type
    from peft import LoraConfig

    with_iterations = restricted_string_type("pissa_niter_N", r"^pissa_niter_\d+$")
    declared = get_type_hints(LoraConfig)["init_lora_weights"]
    LoraConfig.__annotations__["init_lora_weights"] = declared | Literal["lora_ga"] | with_iterations


@contextmanager
def adapters_off(model: PeftModel) -> Iterator[None]:
    """Context in which a model computes without its adapter.

    PEFT's own, ``disable_adapter``, changes which weights require gradients, and strategies have read that.

    Raises:
        ValueError: the method has trained weights in modules that cannot be switched off.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = BaseTunerLayer, AuxiliaryTrainingWrapper
    parts = {name: part for name, part in model.named_modules() if isinstance(part, kinds)}
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for name in trained:
        inner = max((part for part in parts if name.startswith(f"{part}.")), key=len, default=None)
        if inner is None or name.removeprefix(f"{inner}.").startswith("base_layer."):
            raise ValueError(f"{name} is in no adapter that PEFT switches off")
    was_off = {name: part._disable_adapters for name, part in parts.items()}
    try:
        for part in parts.values():
            part._disable_adapters = True
        yield
    finally:
        for name, part in parts.items():
            part._disable_adapters = was_off[name]


def all_linear_layers(config: PeftConfig, model: PreTrainedModel) -> set[str]:
    """Names of the layers that PEFT reads ``target_modules: all-linear`` as."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    config = copy(config)
    config.target_modules = "all-linear"
    return set(_maybe_include_all_linear_layers(config, model).target_modules)


def refuses_target(config: PeftConfig, model: PreTrainedModel, last_name: str) -> bool:
    """Whether PEFT refuses to adapt layers of a name, because kernels of the architecture read their weights alone."""
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(config, model, last_name)
    except ValueError:  # its only answer
        return True
    return False


def names_read_otherwise(config: PeftConfig, model: PreTrainedModel, layers: Iterable[str]) -> list[str]:
    """Names of layers whose LoRA weights PEFT gives other names when it reads its own files, and so does not load.

    It renames them as transformers renames the weights of a model's files, though they have the model's names already.
    """
    import torch
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    keys = {f"base_model.model.{layer}.lora_A.weight": layer for layer in layers}
    weights = {key: torch.empty(1, 1, device="meta") for key in keys}
    read = convert_peft_adapter_state_dict_for_transformers(model, config, weights)
    return [layer for key, layer in keys.items() if key not in read]


@contextmanager
def around_each_layer(
    tuner: type[BaseTuner], entered: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """Context in which a tuner creates the adapter of each layer within a context of that layer's.

    Tuners override ``_create_and_replace``, which PEFT asks new methods to do, and PEFT has no hook around its calls.
    """
    create = tuner._create_and_replace

    def create_within(
        self: BaseTuner, config: PeftConfig, adapter: str, target: nn.Module, *args: object, **options: object
    ) -> None:
        with entered(target):
            create(self, config, adapter, target, *args, **options)

    tuner._create_and_replace = create_within
    try:
        yield
    finally:
        tuner._create_and_replace = create


def kasa_loss(model: PeftModel) -> Tensor:
    """KaSA's regularization term; PEFT's documentation tells training loops to call this method, private by name."""
    return model.base_model._get_kasa_loss()


def renamed_targets(model: PreTrainedModel) -> frozenset[str]:
    """Names of linear layers that PEFT takes for experts or routers of transformers 4 in a LoRA config, and moves."""
    from peft.utils.transformers_weight_conversion import (
        _MODEL_TO_CONVERSION_PATTERN,
        _MOE_FUSED_TARGETS,
        _MOE_TARGET_MODULE_MAPPING,
    )

    pattern = _MODEL_TO_CONVERSION_PATTERN.get(model.config.model_type)
    return frozenset(_MOE_TARGET_MODULE_MAPPING.get(pattern, ()) if pattern in _MOE_FUSED_TARGETS else ())


def virtual_tokens(peft: PeftConfig | None) -> int:
    """Number of positions that a method takes before each sample; 0 for methods without virtual tokens."""
    from peft import PromptLearningConfig

    return peft.num_virtual_tokens or 0 if isinstance(peft, PromptLearningConfig) else 0


def virtual_tokens_of(model: nn.Module) -> int:
    """``virtual_tokens`` of a model; 0 if it is no ``PeftModel``, and while its adapter is disabled."""
    return virtual_tokens(model.active_peft_config) if has_prompt(model) else 0


def has_prompt(model: nn.Module | None) -> TypeGuard[PeftModel]:
    """Whether a model is a ``PeftModel`` of a prompt-learning method that is not disabled."""
    from peft import PeftModel

    if not isinstance(model, PeftModel) or not model.active_peft_config.is_prompt_learning:
        return False
    return bool(model.has_active_enabled_adapter)  # without one its methods are those of the base


@contextmanager
def virtual_tokens_in_answers(model: nn.Module) -> Iterator[None]:
    """Context in which a ``PeftModel`` of a prompt-learning method generates what it was trained to.

    PEFT prepends virtual tokens while ``past_key_values`` is empty, which transformers 5.24 calls ``cache``: it would
    prepend them before each new token. And it drops the positions, so that padding would be counted.
    """
    from peft import PeftModelForCausalLM

    if not isinstance(model, PeftModelForCausalLM) or not has_prompt(model):
        yield
        return
    is_prefix = model.active_peft_config.peft_type.value == "PREFIX_TUNING"
    of_base, of_peft = model.base_model_prepare_inputs_for_generation, model.prepare_inputs_for_generation

    @wraps(of_base)
    def prepare_base(*args: object, **kwargs: object) -> dict[str, object]:
        inputs = _renamed(of_base(*args, **kwargs), "cache", "past_key_values")
        return inputs if is_prefix else inputs | {"position_ids": None}  # which PEFT would drop with a warning

    @wraps(of_peft)  # generate reads its signature
    def prepare(*args: object, **kwargs: object) -> dict[str, object]:
        inputs = of_peft(*args, **kwargs)
        if inputs.get("position_ids") is None and inputs.get("attention_mask") is not None:
            inputs["position_ids"] = _positions(inputs)
        return _renamed(inputs, "past_key_values", cache_option(model.get_base_model()))

    model.base_model_prepare_inputs_for_generation, model.prepare_inputs_for_generation = prepare_base, prepare
    try:
        yield
    finally:
        model.base_model_prepare_inputs_for_generation = of_base
        del model.prepare_inputs_for_generation  # the method of the class again


def _positions(inputs: dict[str, Any]) -> Tensor:
    """Positions of a step's tokens, ``(N, T)``, without padding; of its attention mask ``(N, all tokens so far)``."""
    tokens = inputs["inputs_embeds"] if inputs.get("inputs_embeds") is not None else inputs["input_ids"]
    return (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :].long()


def _renamed(inputs: dict[str, object], old: str, new: str) -> dict[str, object]:
    return {new if name == old else name: value for name, value in inputs.items()}


def accept_inputs_of_any_shape(model: PeftModel) -> None:
    """Let OFT and GraLoRA take inputs of linear layers that have four dimensions, as those of latent attention.

    OFT takes these for images, and GraLoRA fails.
    """
    from peft.tuners.gralora import layer as gralora
    from peft.tuners.oft import layer as oft

    for layer in model.modules():
        rotations = layer.oft_R.values() if isinstance(layer, oft.Linear) else ()
        for one in (*rotations, *([layer] if isinstance(layer, gralora.Linear) else ())):
            one.forward = MethodType(_on_vectors, one)


def _on_vectors(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = type(module).forward(module, x.flatten(0, -2))
    return output.view(*x.shape[:-1], output.shape[-1])


def return_dtypes_of_inputs(model: PeftModel) -> None:
    """Let adapters on a base packed by bitsandbytes return the dtype of their inputs, as on a dense one.

    IA3, RoAd and RandLora return float32 to a model in bfloat16, whose next layer then fails. SHiRA multiplies inputs
    in bfloat16 by INT8 weights that it has dequantized to float32, which fails at once.
    """
    from peft.tuners import shira
    from peft.tuners.lora import bnb
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        is_packed = isinstance(layer, BaseTunerLayer) and type(layer).__module__.endswith(".bnb")
        if is_packed and type(layer).__module__ != bnb.__name__:  # it returns the right one, maybe as one function
            layer.register_forward_hook(_in_dtype_of_input)
        if isinstance(layer, shira.Linear) and layer.quantization_backend is not None:
            layer.forward = MethodType(_multiplied_in_dtype_of_input, layer)


def _multiplied_in_dtype_of_input(layer: nn.Module, x: Tensor) -> Tensor:
    import torch

    is_needed = x.dtype != torch.float32 and not torch.is_autocast_enabled(x.device.type)
    with torch.autocast(x.device.type, x.dtype) if is_needed else nullcontext():
        output: Tensor = type(layer).forward(layer, x)
    return output


def _in_dtype_of_input(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    import torch

    return output if torch.is_autocast_enabled(output.device.type) else output.to(inputs[0].dtype)

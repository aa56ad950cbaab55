"""Private and undeclared attributes of transformers' models and configs, as read in transformers 5.24."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lit_callbacks.internals.transformers_internals import attention_implementation as attention_implementation
from lit_callbacks.internals.transformers_internals import portable_attention as portable_attention
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.integrations.heterogeneity.configuration_utils import AmbiguousGlobalPerLayerAttributeError

from lit_ft.internals.torch import with_submodules

if TYPE_CHECKING:
    from collections.abc import Callable

    from jinja2 import Template
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

_PRODUCT_IN_FLOAT32 = re.compile(r"linear\([^,\n]+, *[\w.]+\.(float\(\)|(type|to)\(torch\.float32\))\)")


def enable_checkpointing(model: PreTrainedModel, options: Mapping[str, object]) -> None:
    """Recompute the activations of all layers, with options for ``torch.utils.checkpoint``.

    transformers 5.24 has another name for it, and warns of the one before. It also lets embeddings require a gradient,
    for reentrant checkpoints, whose inputs must; a model cannot change such embeddings in place (GIT).
    """
    is_new = hasattr(model, "activation_checkpointing_enable")
    enable = model.activation_checkpointing_enable if is_new else model.gradient_checkpointing_enable
    enable(options)
    model.disable_input_require_grads()


def set_checkpointing(layer: nn.Module, options: dict[str, Any]) -> None:
    """Give ``torch.utils.checkpoint`` other options in one layer; ``enable_checkpointing`` sets all."""
    if hasattr(layer, "_gradient_checkpointing_func"):
        layer._gradient_checkpointing_func = partial(checkpoint, **options)  # type: ignore[assignment]


def mark_expert_parallel(experts: nn.Module) -> None:
    """Tell a module of experts that it holds a part of them: its code then skips the indices of others."""
    experts._is_expert_parallel = True  # type: ignore[assignment]


def decoder_layer_classes(model: PreTrainedModel) -> set[str]:
    """Names of the classes of a model's decoder layers: those that must stay whole where a model is split.

    Where a class of models names none (BioGPT, CTRL, ELECTRA), those in lists of as many modules as it has layers.
    """
    if model._no_split_modules:
        return set(model._no_split_modules)
    layers = getattr(model.config, "num_hidden_layers", None)
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part) == layers]
    return {type(layer).__name__ for each in lists for layer in each}


def outline_in(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Outline of a model that is loaded in ``dtype``: the dtype of each weight, on the meta device, and some buffers.

    Some weights stay in fp32 in any dtype: those that the model's class names, and those that its code creates in fp32.
    Buffers that no file has are computed in ``dtype``, and have values: the scale of Gemma's embeddings is rounded to
    it. The steps are those of ``from_pretrained``.
    """
    from transformers.core_model_loading import build_glob_alternation

    with torch.device("meta"):
        outline = type(model)._from_config(copy.deepcopy(model.config), dtype=dtype)
    for name, buffer in list(outline.named_non_persistent_buffers()):
        owner, _, own_name = name.rpartition(".")
        setattr(outline.get_submodule(owner), own_name, torch.empty_like(buffer, device="cpu"))
    with torch.random.fork_rng(devices=[]):  # where weights are read, none are drawn
        outline.initialize_weights()
    if kept := outline._get_dtype_plan(dtype):
        pattern, names, _ = build_glob_alternation(list(kept))
        for name, tensor in [*outline.named_parameters(), *outline.named_buffers()]:
            if tensor.is_meta and (found := pattern.search(name)) is not None:
                tensor.data = tensor.data.to(kept[names[str(found.lastgroup)]])
    return outline


def weights_in_float32(model: PreTrainedModel) -> set[str]:
    """Names of the weights that stay in float32 where a model is loaded in bfloat16, as in ``outline_in``."""
    from transformers.core_model_loading import build_glob_alternation
    from transformers.modeling_utils import local_torch_dtype

    config, dtype = copy.deepcopy(model.config), torch.bfloat16
    for one in (config, *(getattr(config, name) for name in config.sub_configs)):
        if one is not None:
            one.dtype = dtype
    with torch.device("meta"), local_torch_dtype(dtype, type(model).__name__), _whole_weights():
        outline = type(model)(config)
    plan = list(outline._get_dtype_plan(dtype))
    pattern = build_glob_alternation(plan)[0]  # of an empty plan it matches everything
    return {
        name
        for name, weight in outline.named_parameters()
        if weight.dtype == torch.float32 or (plan and pattern.search(name))
    }


@contextmanager
def _whole_weights() -> Iterator[None]:
    """Context in which transformers builds models whole under DeepSpeed's stage 3 too, those within others included."""
    from transformers.integrations import deepspeed as integration

    kept = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = kept


def casts_weight_to_float32(module: nn.Module) -> bool:
    """Whether a module casts a weight to float32 and multiplies by it, whatever its dtype, as many routers do.

    Read from the source of its ``forward``; it is declared nowhere.
    """
    return _PRODUCT_IN_FLOAT32.search(_source(type(module).forward)) is not None


def calls_attention_interface(module: nn.Module) -> bool:
    """Whether a module computes attention by the function that the model's ``attn_implementation`` names.

    Read from the source of ``forward`` of the module and its parts: transformers reads whether a model can change its
    attention in the same way, and declares it nowhere.
    """
    return any("ALL_ATTENTION_FUNCTIONS" in _source(type(part).forward) for part in module.modules())


@cache
def _source(function: Callable[..., object]) -> str:
    return inspect.getsource(function)


def global_value(config: PretrainedConfig, name: str) -> int | None:
    """Value of a config that some layers may depart from (Gemma 4), which the attribute itself does not tell then."""
    try:
        return getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return config.to_dict()[name]


def attention_functions(config: PretrainedConfig) -> set[str]:
    """Kinds of attention functions that compute a model's attention: ``eager``, and ``sdpa``, ``flash`` where declared.

    Flash attention takes no mask, and SDPA neither attention sinks nor capped logits. A model whose sliding window is
    in the mask alone (Phi-3.5-MoE) declares it all the same.
    """
    model, code = _model_class(config)
    text = config.get_text_config()
    is_windowed = "sliding_attention" in (getattr(text, "layer_types", None) or ["sliding_attention"])
    has_window = is_windowed and bool(getattr(text, "sliding_window", None))  # 0 is none (Qwen2-MoE)
    masks_window = has_window and "create_sliding_window_causal_mask" in code and "sliding_window=" not in code
    takes_any = "ALL_ATTENTION_FUNCTIONS" in code and not masks_window
    supported = {"eager"} | ({"sdpa"} if model._supports_sdpa else set())
    return supported | ({"flash"} if model._supports_flash_attn and takes_any else set())


def has_sinks(config: PretrainedConfig) -> bool:
    """Whether a model passes attention sinks to its attention function."""
    return "s_aux=" in _model_class(config)[1]


def _model_class(config: PretrainedConfig) -> tuple[type[PreTrainedModel], str]:
    """Class of a config's causal LM, and the source of its module."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM._model_mapping[type(config)]
    return model, inspect.getsource(sys.modules[model.__module__])


def reads_boundaries(module: nn.Module) -> bool:
    """Whether a module passes the samples' boundaries on to kernels that start anew at each (gated delta nets)."""
    return "cu_seq_lens_q" in _source(type(module).forward)


def takes_any_attention(model: PreTrainedModel) -> bool:
    """Whether all layers attend through transformers' attention functions and carry no other state between tokens."""
    return bool(model._supports_attention_backend) and not model._is_stateful


def one_forward_at_a_time(model: PreTrainedModel) -> None:
    """Let threads that call a model take turns.

    ``merge_with_config_defaults`` keeps the ``is_causal`` of a call in the model's config until the call ends. Of two
    calls at once, each would mask as the other one is to, and the value of one would stay.
    """
    turn = threading.Lock()

    def begin(*_: object) -> None:
        turn.acquire()

    # Of the decoder, whose forward is decorated: PEFT calls `forward` of the model around it, without hooks.
    model.base_model.register_forward_pre_hook(begin)
    model.base_model.register_forward_hook(lambda *_: turn.release(), always_call=True)


def declare_decoder(model: PreTrainedModel) -> None:
    """Correct the name under which a model has its decoder, where its class declares another (Llama 4)."""
    if not hasattr(model, model.base_model_prefix):
        embedding = model.get_input_embeddings()
        model.base_model_prefix = next(name for name, child in model.named_children() if embedding in child.modules())


def with_decoder(model: PreTrainedModel, decoder: nn.Module) -> PreTrainedModel:
    """Copy of a model with another decoder, so that its ``forward`` computes the rest from what that returns."""
    return with_submodules(model, {model.base_model_prefix: decoder})


def as_published(base: PreTrainedModel, skeleton: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names, and in the shapes, of the files that a model was read from.

    Args:
        base: model that was read, which remembers how the files were converted.
        skeleton: model of the same config on the meta device, without what a strategy has changed; changed in place.
        weights: some of the model's weights.
    """
    skeleton._weight_conversions = getattr(base, "_weight_conversions", None)
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(skeleton, weights)


@contextmanager
def without_load_report(of: Sequence[str]) -> Iterator[None]:
    """Context in which ``from_pretrained`` prints no table of what it found in the files, if that is of some kinds.

    Args:
        of: kinds that are said elsewhere: UNEXPECTED, MISSING, MISMATCH or CONVERSION.
    """
    others = {"MISSING", "MISMATCH", "CONVERSION"}.difference(of)

    def tells_more(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "LOAD REPORT" not in message or any(word in message for word in others)

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(tells_more)
    try:
        yield
    finally:
        logger.removeFilter(tells_more)


def compile_chat_template(template: str) -> Template:
    """Compiled chat template with the sandbox and the filters of ``apply_chat_template``, which compiles it itself."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(template)


@runtime_checkable
class GroupedExperts(Protocol):
    """Experts of a layer in one tensor per projection: attributes that ``use_experts_implementation`` gives the class.

    ``gate_up_proj`` and ``down_proj`` are ``(E, O, I)``, or ``(E, I, O)`` if transposed; ``gate_up_proj_bias`` and
    ``down_proj_bias`` are ``(E, O)``.
    """

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    _apply_gate: Callable[[Tensor], Tensor]


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool = False) -> Tensor:
    """Product of each group of rows with a matrix of its own, by the fastest kernel of this torch and device.

    Args:
        rows: rows ``(S, I)``, sorted by group.
        weight: matrices ``(E, O, I)``, or ``(E, I, O)`` if transposed.
        ends: index after each group's last row, ``(E,)``, int32.
        is_transposed: whether inputs come before outputs in ``weight``.
    """
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(rows, weight, ends, is_transposed=is_transposed)


def gated(experts: GroupedExperts, gate_and_up: Tensor) -> Tensor:
    """Activation of the gate times the other half, ``(S, 2 I) -> (S, I)``, as the model's class has it."""
    return experts._apply_gate(gate_and_up)


def cache_option(module: nn.Module) -> str:
    """Name of the option of a model or layer that takes the keys and values of earlier tokens."""
    return "cache" if "cache" in inspect.signature(type(module).forward).parameters else "past_key_values"

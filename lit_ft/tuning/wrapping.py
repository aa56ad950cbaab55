"""Application of a tuning method to a base model: PEFT's wrappers, or parameters selected by name."""

import copy
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lit_callbacks.protocols import HasScore
from peft import (
    AdaptionPromptConfig,
    LNTuningConfig,
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptLearningConfig,
    get_peft_model,
)
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.adalora import AdaLoraLayer
from peft.tuners.adaption_prompt.config import TRANSFORMERS_MODEL_CONFIG
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTuner, cast_adapter_dtype, check_target_module_exists
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError, explained
from lit_ft.internals.peft import accept_inputs_of_any_shape, around_each_layer, return_dtypes_of_inputs
from lit_ft.model.architecture import Architecture
from lit_ft.model.files import deferred_cast
from lit_ft.model.loading import decoder_layers
from lit_ft.model.parameter_patterns import matching
from lit_ft.model.quantization import LinearLayer
from lit_ft.model.rotary_embedding import rotated_width
from lit_ft.tuning import compatibility, prompt_learning, score_head
from lit_ft.tuning.lora_init import changes_biases
from lit_ft.tuning.targets import all_linear, experts, patterns


def add_peft(
    model: PreTrainedModel, peft: PeftConfig, adapter_dtype: Literal["float32", "auto"] = "float32"
) -> PeftModel:
    """Wrap a base model with a tuning method, and freeze the base weights.

    Args:
        model: base model.
        peft: any PEFT config; it is copied, so that one recipe object can be used twice.
        adapter_dtype: dtype of the adapter's weights; ``auto`` is that of the base model.

    Raises:
        RecipeError: the method's target modules match no layer.
    """
    compatibility.check_method(peft, scores_texts=isinstance(model, HasScore))
    peft = copy.deepcopy(peft)
    peft.task_type = "CAUSAL_LM"
    if isinstance(model, HasScore):
        score_head.let_peft_train(peft)
    _check_config(model, peft)
    prompt_learning.fit_to(model, peft)
    shared = all_linear.shared_layers(model)
    all_linear.leave_out(model, peft, shared)
    experts.resolve_targets(model, peft)
    all_linear.name_layers(model, peft)
    in_float32 = adapter_dtype == "float32"
    wrap = partial(get_peft_model, model, peft, autocast_adapter_dtype=in_float32)
    names = f"fix its init_args; the linear layers of {type(model).__name__} are {linear_layers(model)}"
    biases = [parameter for name, parameter in model.named_parameters() if "bias" in name]
    # Lightning builds a model with its GPU as the default device; PEFT draws from generators of the CPU. On the CPU new
    # weights are also the same numbers for every device.
    creates_on = nullcontext() if model.device.type == "meta" else torch.device("cpu")
    with explained("model.peft", names, also=(re.error,)), creates_on, patterns.without_warnings_of_peft(peft):
        is_marked = deferred_cast.is_marked(model)
        wrapped = wrap_in_final_dtype(model, peft, wrap, in_float32) if is_marked else wrap()
    _correct_layers(wrapped)
    if isinstance(model, HasScore) and in_float32:
        score_head.keep_in_float32(model)
    check_ranks(wrapped)
    patterns.warn_of_unmatched(wrapped)
    _check_trained_twice(wrapped)
    _check_biases(peft, biases, type(model).__name__)
    all_linear.check_shared(wrapped, shared)
    all_linear.check_wrapped(wrapped, peft.peft_type.value)
    all_linear.check_computed(wrapped, peft.peft_type.value)
    all_linear.check_loaded(wrapped)
    prompt_learning.check_embeddings(wrapped)
    return wrapped.train()


def _check_config(model: PreTrainedModel, peft: PeftConfig) -> None:
    """Refuse what does not fit the model, before it is changed."""
    check_numbers(peft)
    prompt_learning.check_sizes(peft)
    adapt_to_architecture(model, peft)
    check_target_modules(model, peft)
    check_norms(model, peft)
    check_other_modules(model, peft)
    experts.check_target_parameters(model, peft)


def _check_biases(peft: PeftConfig, biases: Iterable[nn.Parameter], model: str) -> None:
    if changes_biases(peft) and not any(bias.requires_grad for bias in biases):
        raise RecipeError(
            f"model.peft: bias={peft.bias} trains nothing: no layer of {model} that it is about has a bias; set it to "
            "none"
        )


def _correct_layers(model: PeftModel) -> None:
    """Correct shapes of inputs, and the output's dtype on a packed base, and freeze AdaLoRA's numbers of ranks.

    PEFT divides by these numbers and does not save them; a cast or a move to another device lets them train.
    """
    return_dtypes_of_inputs(model)
    accept_inputs_of_any_shape(model)
    for layer in model.modules():
        if isinstance(layer, AdaLoraLayer):
            layer.ranknum.requires_grad_(False)


def freeze_all_but(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters except those in whose names a regular expression is found.

    Raises:
        RecipeError: there is no pattern, or one that is not a regular expression, or matches no name.
    """
    if not patterns:
        raise RecipeError("model.trainable is empty, so that nothing trains; name weights, or null to train all")
    names = [name for name, _ in model.named_parameters()]
    matched = matching(patterns, names, "model.trainable")
    if isinstance(model, HasScore) and "score.weight" not in matched:
        raise RecipeError("model.trainable leaves out the head that scores texts; add score to it")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in matched)


def check_target_modules(model: nn.Module, peft: PeftConfig) -> None:
    """Refuse target modules if the model lacks any of them, and a pattern that matches none of its modules.

    Raises:
        RecipeError: a target module is missing; the message lists the model's linear layers, and what trains experts.
    """
    options = peft.to_dict()
    targets = options.get("target_modules")
    if targets is None or targets == "all-linear" or (not targets and options.get("target_parameters")):
        return  # PEFT's default for the architecture
    unmatched = _unmatched(model, targets, "target_modules")
    if unmatched and isinstance(targets, str) and (better := _as_list(targets, model)) is not None:
        raise RecipeError(
            f"model.peft: target_modules={targets!r} is one text, which PEFT reads as a regular expression for "
            f"full names, and it matches none; write {better}"
        )
    if "all-linear" in unmatched:
        raise RecipeError("model.peft: target_modules=['all-linear'] is a list; write target_modules: all-linear")
    if unmatched or not targets:
        of_experts = f"; its experts train by {experts.advice(model)}" if experts.expert_layers(model) else ""
        raise RecipeError(
            f"model.peft target_modules {unmatched} match nothing in {type(model).__name__}; "
            f"its linear layers are {linear_layers(model)}{of_experts}"
        )


def check_norms(model: nn.Module, peft: PeftConfig) -> None:
    """Refuse LN tuning of modules without weights, as the norms of OLMo and nanochat are.

    Raises:
        RecipeError: a target module has no weights.
    """
    if not isinstance(peft, LNTuningConfig) or peft.target_modules is None:
        return
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None and check_target_module_exists(peft, name):
            raise RecipeError(
                f"model.peft: {name} of {type(model).__name__} ({type(module).__name__}) has no weights to train; "
                "leave it out of target_modules, or take another method"
            )


def check_other_modules(model: nn.Module, peft: PeftConfig) -> None:
    """Refuse modules and layers in further options that the model lacks, which PEFT passes over.

    Raises:
        RecipeError: a name, a pattern or a layer's number matches no module, or numbers of layers would not hold; the
            message lists what the model has.
    """
    options = peft.to_dict()
    saved = options.get("modules_to_save") or ()
    names = [name for name, _ in model.named_modules()]
    unmatched = {
        "exclude_modules": _unmatched(model, options.get("exclude_modules") or (), "exclude_modules"),
        "modules_to_save": sorted(s for s in saved if not any(name.endswith(s) for name in names)),
    }
    for option, missing in unmatched.items():
        if missing:
            raise RecipeError(
                f"model.peft {option} {missing} match nothing in {type(model).__name__}; correct or remove them; its "
                f"linear layers are {linear_layers(model)}"
            )
    _say_what_has_no_adapter(names, options.get("target_modules"), saved)
    given, targets = options.get("layers_to_transform"), options.get("target_modules")
    if isinstance(targets, str) and given not in (None, []):  # as LoRA's config does; all-linear becomes full names
        raise RecipeError(
            f"model.peft: layers_to_transform={given} does not limit target_modules={targets} (peft 0.21); give a list "
            f"of names; the linear layers of {type(model).__name__} are {linear_layers(model)}"
        )
    layers = {int(parts[0]) for name in names if (parts := [part for part in name.split(".") if part.isdecimal()])}
    if beyond := sorted({given} - layers if isinstance(given, int) else set(given or ()) - layers):
        raise RecipeError(
            f"model.peft: layers_to_transform={given} has {beyond}, which {type(model).__name__} lacks; its layers are "
            f"0 to {max(layers, default=0)}"
        )


def _say_what_has_no_adapter(names: Sequence[str], targets: str | Collection[str] | None, saved: Iterable[str]) -> None:
    """Name target modules that train in full, or are in a module that does: PEFT gives them no adapter."""
    if targets is None or targets == "all-linear":
        return
    found = [name for name in names if any(re.match(rf"(^|.*\.){one}($|\..*)", name) for one in saved)]
    if isinstance(targets, str):
        both = [name for name in found if re.fullmatch(targets, name)]
    else:
        both = [name for name in found if any(name == one or name.endswith(f".{one}") for one in targets)]
    if both:
        rank_zero_warn(
            f"model.peft: target_modules and modules_to_save both name {_last(both)}: trained in full, without an "
            "adapter; take them out of one of the two"
        )


def _last(names: Iterable[str]) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in names}))


def _unmatched(model: nn.Module, names_or_pattern: str | Collection[str], option: str) -> list[str]:
    """Those names of modules, or that pattern, which match none of a model's as PEFT compares them."""
    names = [name for name, _ in model.named_modules()]
    if isinstance(names_or_pattern, str):
        with explained(f"model.peft: {option}", "correct the pattern", also=(re.error,)):
            return [] if any(re.fullmatch(names_or_pattern, name) for name in names) else [names_or_pattern]
    return sorted(w for w in names_or_pattern if not any(name == w or name.endswith(f".{w}") for name in names))


def _as_list(targets: str, model: nn.Module) -> str | None:
    """List of modules that a text probably means; None where it names none of the model's."""
    if re.sub(r"[\W_]", "", targets).lower() in ("all", "alllinear", "linear"):
        return "all-linear"
    parts = [part for part in re.split(r"[\s,;|'\"()\[\]]+", targets) if part]
    last = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return f"a list: [{', '.join(parts)}]" if parts and set(parts) <= last else None


def linear_layers(model: nn.Module) -> list[str]:
    """Sorted last name components of the linear layers, quantized ones included, without duplicates."""
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, LinearLayer)})


def give_values(skeleton: nn.Module, peft: PeftConfig) -> None:
    """Give a model on the meta device random weights, for methods that read weights when they are created.

    The skeleton gets small random weights on the CPU, which are freed after the check.
    """
    is_velora = isinstance(peft, LoraConfig) and peft.velora_config is not None
    if peft.peft_type.value in _LOOK_AT_WEIGHTS or is_velora:
        skeleton.to_empty(device="cpu")
        for weight in skeleton.parameters():
            nn.init.normal_(weight, std=0.02)


_LOOK_AT_WEIGHTS = {"ADAMSS", "SHIRA"}


def takes_shapes_from_weights(peft: PeftConfig | None) -> bool:
    """Whether the shapes of an adapter are not those of a skeleton's: AdaMSS groups the rows of the base's weights."""
    return peft is not None and peft.peft_type.value == "ADAMSS"


def wrap_in_final_dtype(
    base: nn.Module, peft: PeftConfig, wrap: Callable[[], PeftModel], in_float32: bool
) -> PeftModel:
    """Wrap a base model whose weights are cast later, so that its adapter equals that of a model which is cast already.

    PEFT creates new weights in the dtype of the layer that they are added to, or computes them from its weights: each
    layer temporarily gets its final dtype, which ``deferred_cast.mark`` has stored, while its adapter is created.
    ``in_float32`` says whether ``wrap`` casts the adapter's weights to float32.
    """
    tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(peft.peft_type)
    if peft.is_prompt_learning:
        wrapped = wrap()
    elif isinstance(tuner, type) and issubclass(tuner, BaseTuner):
        with around_each_layer(tuner, deferred_cast.cast_meanwhile):
            wrapped = wrap()
    else:  # LLaMA-Adapter adds its prompts without BaseTuner's steps
        deferred_cast.cast(base)
        wrapped = wrap()
    _cast_copies(wrapped, in_float32)
    return wrapped


def _cast_copies(model: nn.Module, in_float32: bool) -> None:
    """Cast the copies that ``modules_to_save`` and trainable tokens have made of base weights in their file's dtype."""
    for wrapper in (module for module in model.modules() if isinstance(module, AuxiliaryTrainingWrapper)):
        dtypes = {name: deferred_cast.final_dtype(p) for name, p in wrapper.original_module.named_parameters()}
        for name, tensor in [*wrapper.named_parameters(), *wrapper.named_buffers()]:
            of_rows = isinstance(wrapper, TrainableTokensWrapper)
            dtype = dtypes.get("weight" if of_rows else name.removeprefix("modules_to_save.default."))
            if dtype is not None and tensor.is_floating_point() and deferred_cast.final_dtype(tensor) is None:
                tensor.data = tensor.data.to(dtype)
        cast_adapter_dtype(wrapper, "default", in_float32)  # trainable tokens only: PEFT does not cast modules_to_save


def _check_trained_twice(model: nn.Module) -> None:
    wrappers = [(name, part) for name, part in model.named_modules() if isinstance(part, AuxiliaryTrainingWrapper)]
    # By their weights, which tied embeddings have in common.
    in_full, by_rows = (
        {weight for _, part in wrappers if isinstance(part, kind) for weight in _frozen(part)}
        for kind in (ModulesToSaveWrapper, TrainableTokensWrapper)
    )
    if twice := [name for name, part in wrappers if in_full & by_rows & _frozen(part)]:
        raise RecipeError(
            f"model.peft: modules_to_save trains all rows of {twice[0].rpartition('.')[2]}, or of embeddings that are "
            "tied to it, and trainable_token_indices some of them; leave one of the two out"
        )


def _frozen(module: nn.Module) -> set[nn.Parameter]:
    return {parameter for parameter in module.parameters() if not parameter.requires_grad}


def check_numbers(peft: PeftConfig) -> None:
    """Refuse a rank below 1, dropout that is no probability (PEFT leaves out a negative one), and negative token ids.

    Raises:
        RecipeError: a number is out of range; the message names it.
    """
    if isinstance(peft, PromptLearningConfig) and peft.num_virtual_tokens is None:
        raise RecipeError("model.peft: num_virtual_tokens is missing; give the length of the prompt, e.g. 20")
    if isinstance(peft, AdaptionPromptConfig) and None in (peft.adapter_len, peft.adapter_layers):
        raise RecipeError(
            "model.peft: adapter_len and adapter_layers must be given; e.g. adapter_len: 10, adapter_layers: 2"
        )
    numbers = {name: value for name, value in vars(peft).items() if isinstance(value, int | float)}
    for name, value in numbers.items():
        if name == "r" and value < 1 and not numbers.get("oft_block_size"):  # OFT has one of the two
            raise RecipeError(f"model.peft: r={value} must be 1 or more, e.g. 8")
        if name == "num_virtual_tokens" and value < 1:
            raise RecipeError(f"model.peft: num_virtual_tokens={value} must be 1 or more, e.g. 20")
        if name.endswith("dropout") and not 0 <= value < 1:
            raise RecipeError(f"model.peft: {name}={value} must be at least 0 and below 1, e.g. 0.05")
    rows = peft.to_dict().get("trainable_token_indices") or []
    ids = [row for side in rows.values() for row in side] if isinstance(rows, dict) else rows
    if negative := [row for row in ids if row < 0]:
        raise RecipeError(f"model.peft: trainable_token_indices has {negative[0]}; token ids are 0 or more")


def check_ranks(model: PeftModel) -> None:
    """Refuse LoRA with a rank above a layer's smaller dimension, which is the largest rank that its weight can have.

    Raises:
        RecipeError: a rank is too large, or the scale is 0; the message names the layer.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, ParamWrapper) and not (
            isinstance(layer, LoraLayer) and isinstance(layer.get_base_layer(), nn.Linear)
        ):
            continue
        size, rank = min(layer.in_features, layer.out_features), layer.r.get("default", 0)
        if layer.lora_alpha.get("default", 1) <= 0:
            raise RecipeError(
                f"model.peft: lora_alpha={layer.lora_alpha['default']} must be above 0: the adapter's output is scaled "
                "by lora_alpha / r; r or 2 r is usual"
            )
        if rank > size:
            raise RecipeError(
                f"model.peft: rank {rank} is above the size of {name.removeprefix('base_model.model.')} "
                f"({layer.out_features} x {layer.in_features}); lower r to {size} or less, or leave the layer out"
            )


def adapt_to_architecture(model: PreTrainedModel, peft: PeftConfig) -> None:
    """Register the attention of the model's architecture with PEFT for LLaMA-Adapter; PEFT knows three architectures.

    Raises:
        RecipeError: the model's attention is not built like Llama's.
    """
    kind = model.config.model_type
    if peft.peft_type.value != "ADAPTION_PROMPT" or kind in TRANSFORMERS_MODEL_CONFIG:
        return
    if why := _unlike_llama(model):
        raise RecipeError(f"model.peft: LLaMA-Adapter does not fit {type(model).__name__}: {why}; take peft.LoraConfig")
    TRANSFORMERS_MODEL_CONFIG[kind] = TRANSFORMERS_MODEL_CONFIG["llama"]


def _unlike_llama(model: PreTrainedModel) -> str | None:
    """What LLaMA-Adapter, as PEFT computes it, does not fit in the attention of a model; None if it fits."""
    config = model.config.get_text_config()
    parts = [dict(layer.named_children()) for layer in decoder_layers(model)]
    attentions = [part["self_attn"] for part in parts if "self_attn" in part]
    names = set.intersection(*({name for name, _ in attention.named_children()} for attention in attentions or [model]))
    if not {"q_proj", "k_proj", "v_proj", "o_proj"} <= names or "q_norm" in names:
        return "its attention is not built like Llama's (self_attn with q_proj, k_proj, v_proj and o_proj, no q_norm)"
    width = Architecture.of(config).head_dim
    if width * config.num_attention_heads != config.hidden_size:
        return f"its {config.num_attention_heads} heads of {width} are not its hidden size of {config.hidden_size}"
    if rotated_width(model) != width:
        return "its attention does not rotate all of each query, as Llama's does"
    return None

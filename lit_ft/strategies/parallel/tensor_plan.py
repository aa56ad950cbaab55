"""Tensor-parallel plan of a model, from Hugging Face's ``tp_plan`` and through adapters, and its limits."""

import math
from collections.abc import Iterator, Mapping
from inspect import signature

from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.torch import own_parameters
from lit_ft.internals.transformers import global_value
from lit_ft.model.architecture import Architecture, head_layer
from lit_ft.model.loading import decoder_layers
from lit_ft.model.parameter_patterns import layers_by_wildcard
from lit_ft.tuning.lora import expert_lora

COLUMNS, ROWS = "colwise", "rowwise"
WHOLE_OUT, WHOLE_IN = "colwise_gather_output", "rowwise_split_input"
EXPERTS = "experts"
HEADS = "heads"
"""Style of an attention module whose own weights have an entry for each head (attention sinks)."""
_STYLES = {
    "colwise": COLUMNS,
    "rowwise": ROWS,
    "colwise_gather_output": WHOLE_OUT,
    "colwise_rep": WHOLE_OUT,
    "rowwise_split_input": WHOLE_IN,
    "rowwise_rep": WHOLE_IN,
    "replicated_with_grad_allreduce": "within",
    "moe_tp_experts": EXPERTS,
    "ep_dispatch_experts": EXPERTS,
    "local_params": HEADS,
}
_OF_WEIGHTS = {"packed_colwise", "packed_rowwise", "grouped_gemm"}
"""Styles that repeat for one weight what the style of its module says."""
_KEEPS_WHOLE = "mla_kv_a_proj"  # multi-head latent attention: some of its weights are for all heads
_OF_EDGES = {"embedding_rowwise", "embedding_colwise"}  # embedding and head are sharded here for every architecture

_MORE = {
    "gpt_oss": {
        "layers.*.self_attn": "local_params",
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
    }
}
"""Styles of modules in the decoder that Hugging Face's plan leaves whole, by architecture (transformers 5.24)."""
_READ_BY_OTHERS = frozenset({"Gemma3nTextAltUp"})
"""Classes that read the weight of a layer in another function than its ``forward`` (transformers 5.24)."""


class Plan:
    """Tensor-parallel style of each module.

    Args:
        base: Hugging Face model, with or without adapters; it may be on the meta device.
        given: plan of the recipe that extends the model's own: from module names (``*`` for a layer's number) to
            Hugging Face's styles.

    Raises:
        RecipeError: there is no plan, or it has a style that is not supported.
    """

    def __init__(self, base: PreTrainedModel, given: Mapping[str, str] | None = None) -> None:
        of_decoder = {**Architecture.of(base.config).expert_plan, **_MORE.get(base.config.model_type, {})}
        of_decoder = {f"{base.base_model_prefix}.{name}": style for name, style in of_decoder.items()}
        styles = {**of_decoder, **(base.tp_plan or {}), **(given or {})}
        known = {*_STYLES, *_OF_WEIGHTS, *_OF_EDGES, _KEEPS_WHOLE}
        unknown = sorted(set(styles.values()) - known)
        if unknown:
            raise RecipeError(
                f"tensor parallelism: the plan of {type(base).__name__} has the styles {unknown}, which are not "
                f"supported; known are {sorted(_STYLES)}. Give others by trainer.strategy.init_args.tp_plan"
            )
        whole = {name.rpartition(".")[0] for name, style in styles.items() if style == _KEEPS_WHOLE}
        styles = {name: style for name, style in styles.items() if not {name, name.rpartition(".")[0]} & whole}
        self.styles: dict[nn.Module, str] = {}
        for name, module in base.named_modules():
            style = _STYLES.get(styles.get(layers_by_wildcard(name), ""))
            if style is not None:
                self.styles[module] = style
        edges = {base.get_input_embeddings(), head_layer(base)}
        if not set(self.styles) - edges:
            raise RecipeError(
                f"tensor parallelism: Hugging Face has no plan for {type(base).__name__}; give one by "
                "trainer.strategy.init_args.tp_plan, e.g. {model.layers.*.self_attn.q_proj: colwise, ...o_proj: "
                "rowwise}, take an architecture that has one (llama, mistral, qwen, gemma, phi3, granite, olmo2, "
                "mixtral, ...), or set tensor_parallel_size to 1"
            )

    def covers(self, block: nn.Module) -> bool:
        """Whether all of a block's weights are sharded or between sharded ones: it communicates only at both ends."""
        if self.styles.get(block) == EXPERTS:
            return True
        styles = {self.styles.get(module) for module in linears(block) if not _has_numbers_alone(module)}
        return styles <= {COLUMNS, ROWS, HEADS, "within"} and {COLUMNS, ROWS} <= styles


def _has_numbers_alone(module: nn.Module) -> bool:
    """Whether its weights are single numbers, which multiply each rank's part (Apertus's activation function)."""
    own = [parameter for parameter in own_parameters(module).values() if parameter is not None]
    return not isinstance(module, BaseTunerLayer) and all(parameter.numel() == 1 for parameter in own)


def linears(block: nn.Module) -> Iterator[nn.Module]:
    """Modules of a block that own weights; a layer and its adapter are one module."""
    for child in block.children():
        if isinstance(child, BaseTunerLayer):
            yield child
        else:
            yield from linears(child)
    if own_parameters(block):
        yield block


def is_block(module: nn.Module) -> bool:
    """Whether a part of a decoder layer is a block (attention, MLP), not a norm or dropout on the residual stream."""
    return any(True for _ in module.children()) or any(p.ndim > 1 for p in module.parameters(recurse=False))


def check(base: PreTrainedModel, size: int, given: Mapping[str, str] | None = None) -> None:
    """Refuse models whose matrices cannot be sharded over ``size`` ranks, before weights are read.

    Raises:
        RecipeError: the model does not fit; the message names the value, the rule and what fits.
    """
    plan, config = Plan(base, given), base.config.get_text_config()
    styles = set(plan.styles.values())
    sizes = {
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": global_value(config, "intermediate_size"),
    }
    sizes["num_key_value_heads"] = Architecture.of(base.config).kv_heads
    counts = {name: count for name, count in sizes.items() if COLUMNS in styles and isinstance(count, int)}
    if unfit := {name: count for name, count in counts.items() if count % size}:
        raise RecipeError(must_divide(size, *next(iter(unfit.items())), common=math.gcd(*counts.values())))
    for module, style in plan.styles.items():
        if style == EXPERTS:
            _check_experts(module, size)
        if style in (WHOLE_OUT, WHOLE_IN) and module is not head_layer(base):
            weight = next(module.parameters())
            width = weight.shape[0 if style == WHOLE_OUT else -1]
            if width % size:
                raise RecipeError(must_divide(size, f"the width of {type(module).__name__}", width))
    for block in (child for layer in decoder_layers(base) for child in layer.children() if is_block(child)):
        if not plan.covers(block):
            _check_parts(block, plan)
    for name, module in base.named_modules():
        _check_adapter(name, module)
        if type(module).__name__ in _READ_BY_OTHERS:
            raise RecipeError(
                f"tensor parallelism: {type(base).__name__} reads weights in {type(module).__name__} past the layers "
                "that they are in, where a rank's part cannot take their place; set tensor_parallel_size to 1"
            )


def _check_parts(block: nn.Module, plan: Plan) -> None:
    """Refuse a block of which some weights are sharded, and others that are computed with them are whole."""
    for child in block.children():
        style = plan.styles.get(child)
        if style in (WHOLE_OUT, WHOLE_IN) or plan.covers(child):
            continue
        parts = block.named_modules()
        if style in (COLUMNS, ROWS) and (saved := [n for n, one in parts if isinstance(one, ModulesToSaveWrapper)]):
            raise RecipeError(
                f"model.peft: modules_to_save trains {saved[0]} of {type(block).__name__} in full, which tensor "
                "parallelism shards; adapt it (target_modules), or set tensor_parallel_size to 1"
            )
        if style in (COLUMNS, ROWS):
            raise RecipeError(
                f"tensor parallelism: the plan shards {type(child).__name__} {style} within {type(block).__name__}, "
                "whose other weights it leaves whole; set tensor_parallel_size to 1, or give a tp_plan that shards all "
                "of them (or uses colwise_gather_output and rowwise_split_input)"
            )
        _check_parts(child, plan)


def _check_experts(module: nn.Module, size: int) -> None:
    """Refuse a layer's experts, or an adapter's wrapper around them, that cannot be assigned to ranks."""
    experts = expert_lora.holder(module)
    if not any(True for _ in experts.parameters(recurse=False)):
        raise RecipeError(
            f"tensor parallelism: an adapter changes experts to {type(experts).__name__}, of which each rank would "
            "compute a part as if it were all; take LoRA on gate_up_proj and down_proj (target_parameters), or set "
            "tensor_parallel_size to 1"
        )
    if (count := int(experts.num_experts)) % size:  # type: ignore[arg-type]
        raise RecipeError(must_divide(size, "the number of experts", count))
    if len(signature(type(experts).forward).parameters) < 3:  # self, tokens and their experts
        raise RecipeError(
            f"tensor parallelism: each expert of {type(experts).__name__} computes all tokens, so that ranks cannot "
            "choose theirs; set tensor_parallel_size to 1, e.g. with lit_ft.strategies.FSDPStrategy"
        )


def must_divide(
    size: int, name: str, count: int, option: str = "tensor_parallel_size", common: int | None = None
) -> str:
    """Message that an option does not divide a count, with the nearest value that does.

    Args:
        size: value of the option.
        name: name of the count.
        count: what the option must divide.
        option: name of the option.
        common: greatest common divisor of all counts that it must divide; None: it must divide this one alone.
    """
    common = common or count
    fitting = [n for n in range(1, common + 1) if common % n == 0]
    nearest = min(fitting, key=lambda n: (abs(n - size), n))
    return f"{option}={size} must divide {name}={count}; use {nearest}"


def _check_adapter(name: str, module: nn.Module) -> None:
    if not isinstance(module, LoraLayer):
        return
    base, why = module.get_base_layer(), None
    if module.lora_embedding_A:
        why = "LoRA on an embedding looks tokens up in whole tables"
    elif isinstance(module, ParamWrapper) and not expert_lora.is_of_linear(module):
        if (of := expert_lora.obstacle(module)) is not None:
            why = f"LoRA on {of} multiplies whole tensors, of which a rank has a part"
    elif not isinstance(base, nn.Linear):
        why = f"LoRA on {type(base).__name__} computes something else there"
    if why is not None:
        raise RecipeError(
            f"model.peft: {name}: under tensor parallelism {why}; take LoraConfig on linear layers of attention and "
            "MLP, or set tensor_parallel_size to 1 (pipeline_parallel_size and data_parallel_size split it too)"
        )

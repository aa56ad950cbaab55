"""Arguments of Megatron-LM for a model: for its command line, and as the ``args`` that checkpoints hold."""

import shlex
from argparse import Namespace

import torch

from lit_ft.errors import RecipeError
from lit_ft.megatron.formats.names import Naming
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.shape import ModelShape

Value = str | int | float | bool | None


def model_arguments(shape: ModelShape) -> dict[str, Value]:
    """Arguments that describe the model, by the names of Megatron's ``args``."""
    values: dict[str, Value] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "ffn_hidden_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "group_query_attention": True,
        "num_query_groups": shape.groups,
        "kv_channels": shape.head_dim,
        "max_position_embeddings": shape.positions,
        "normalization": "RMSNorm",
        "norm_epsilon": shape.norm_epsilon,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": shape.family.qkv_bias,
        "qk_layernorm": shape.family.qk_norm,
        "position_embedding_type": "rope",
        "rotary_base": int(shape.rotary_base),
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not shape.is_tied,
        "use_rope_scaling": shape.rope_factor is not None,
        "window_size": None if shape.window is None else f"{shape.window - 1},0",  # before and after a token
    }
    if shape.rope_factor is not None:
        values["rope_scaling_factor"] = shape.rope_factor
    if shape.experts:
        values |= {
            "num_experts": shape.experts,
            "moe_ffn_hidden_size": shape.ffn,
            "moe_router_topk": shape.experts_per_token,
            # Megatron then takes the softmax over all experts and does not scale a token's experts to sum to 1.
            "moe_router_pre_softmax": not shape.normalizes_experts,
        }
    return values


def layout_arguments(layout: Layout, naming: Naming) -> dict[str, Value]:
    """Arguments that describe how the checkpoint is divided and which layers of Megatron load it."""
    return {
        "tensor_model_parallel_size": layout.tensor_parallel,
        "pipeline_model_parallel_size": layout.pipeline_parallel,
        "expert_model_parallel_size": layout.expert_parallel,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "decoder_first_pipeline_num_layers": layout.first_stage_layers,
        "decoder_last_pipeline_num_layers": layout.last_stage_layers,
        "make_vocab_size_divisible_by": layout.vocabulary_multiple,
        "transformer_impl": "transformer_engine" if naming.spec == "te" else "local",
        "ckpt_format": naming.format,
        "moe_grouped_gemm": naming.grouped and naming.has_experts,
        # Megatron refuses to train experts under tensor parallelism without it.
        "sequence_parallel": naming.has_experts and layout.tensor_parallel > 1,
    }


def saved_arguments(
    shape: ModelShape, layout: Layout, naming: Naming, dtype: torch.dtype, iteration: int = 0
) -> Namespace:
    """``args`` of a checkpoint, which ``--use-checkpoint-args`` reads."""
    return Namespace(
        **model_arguments(shape),
        **layout_arguments(layout, naming),
        layernorm_epsilon=shape.norm_epsilon,  # the name of norm_epsilon in 0.16
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        seq_length=shape.positions,
        vocab_size=shape.vocabulary,
        padded_vocab_size=layout.padded(shape.vocabulary),
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        iteration=iteration,
        no_save_rng=True,  # so that Megatron does not look for states of random numbers
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


_OPPOSITE_OPTIONS = {"add_bias_linear": "disable_bias_linear"}
"""Flags of the command line that set an argument to False."""


def command_line(
    shape: ModelShape, layout: Layout, naming: Naming, dtype: torch.dtype, tokenizer: str, has_state: bool
) -> str:
    """Arguments of ``pretrain_gpt.py`` that load the checkpoint, one option per line.

    Args:
        shape: sizes of the model.
        layout: parallel layout.
        naming: format and layer specification.
        dtype: dtype of the weights.
        tokenizer: folder or hub id of the tokenizer.
        has_state: whether the checkpoint holds the optimizer's state.
    """
    values = model_arguments(shape) | layout_arguments(layout, naming)
    values |= {
        "seq_length": min(shape.positions, 4096),
        "vocab_size": shape.vocabulary,
        "tokenizer_type": "HuggingFaceTokenizer",
        "tokenizer_model": tokenizer,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_distributed_optimizer": has_state,
        "dist_ckpt_optim_fully_reshardable": has_state,
        "override_opt_param_scheduler": has_state,
    }
    lines = []
    for name, value in values.items():
        if value is False and name in _OPPOSITE_OPTIONS:
            name, value = _OPPOSITE_OPTIONS[name], True
        option = f"--{name.replace('_', '-')}"
        if value is True:
            lines.append(option)
        elif value is not False and value is not None:
            lines.append(f"{option} {shlex.quote(str(value))}")
    return "\n".join(lines) + "\n"


_COMPARED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("norm_epsilon", "rotary_base", "num_experts", "moe_ffn_hidden_size", "moe_router_topk", "add_qkv_bias"),
    *("qk_layernorm", "swiglu", "normalization", "untie_embeddings_and_output_weights", "moe_router_pre_softmax"),
    "rope_scaling_factor",
)
"""Arguments that must be those of the model that ``--like`` names."""
_SWITCHES = ("use_rope_scaling", "window_size")
"""Further ones, which a model may have or not: one that is recorded as None or False is compared too."""


def check_arguments(saved: Namespace, shape: ModelShape, where: str, like: str) -> None:
    """Compare the ``args`` of a checkpoint with a model; arguments that are not recorded are not compared.

    Raises:
        RecipeError: they differ; the message names the argument.
    """
    expected = model_arguments(shape)
    recorded = {"norm_epsilon": getattr(saved, "layernorm_epsilon", None), **vars(saved)}
    for name in (*_COMPARED, *_SWITCHES):
        there, required = recorded.get(name), expected.get(name)
        if name == "ffn_hidden_size" and shape.experts:
            continue  # of dense layers, which the model does not have
        if name == "window_size" and isinstance(there, tuple | list):  # as Megatron parses the option
            there = ",".join(map(str, there))
        is_recorded = name in recorded if name in _SWITCHES else None not in (there, required)
        if is_recorded and (there or None) != (required or None):
            raise RecipeError(
                f"{where}: {name}={there} there, and {required} by --like {like}; name the model that the "
                "checkpoint was made of"
            )

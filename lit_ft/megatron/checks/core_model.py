"""Megatron-Core's own model on the CPU: it loads a checkpoint on all ranks of a layout, and computes logits.

Needs the extra ``megatron``.
"""

import re
import tempfile
import warnings
from argparse import Namespace
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed, multiprocessing
from torch.nn import functional as F
from torch.serialization import safe_globals

from lit_ft.internals.megatron_core import on_cpu
from lit_ft.megatron.formats import legacy, torch_dist
from lit_ft.megatron.formats.names import Naming, parse
from lit_ft.megatron.formats.safe_pickle import load
from lit_ft.megatron.layout import Layout, Rank
from lit_ft.megatron.shape import ModelShape

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class CoreCheckpoint:
    """Checkpoint that Megatron-Core's model loads."""

    folder: Path
    """Folder of the files, e.g. ``release``."""
    shape: ModelShape
    layout: Layout
    """Layout of its ranks; in the legacy format that of the checkpoint."""
    rows: int
    """Rows of the padded vocabulary."""


def is_installed() -> bool:
    """Whether Megatron-Core can be imported."""
    # Another package, or a folder, may have the same first name.
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


def logits(checkpoint: CoreCheckpoint, ids: Tensor) -> Tensor:
    """Logits of Megatron-Core's model, in fp32.

    Args:
        checkpoint: checkpoint to load.
        ids: token ids, ``(samples, tokens)``.

    Returns:
        Logits, ``(samples, tokens, vocabulary)``.
    """
    warnings.filterwarnings("ignore", module="megatron")  # about Transformer Engine and Apex, which a CPU does not need
    warnings.filterwarnings("ignore", "Please use DTensor instead")  # of torch, about what Megatron-Core calls
    import megatron.core.models.gpt  # noqa: F401  # once, before the ranks are forked

    layout = checkpoint.layout
    world = layout.tensor_parallel * layout.pipeline_parallel * layout.expert_parallel
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "logits"
        arguments = (world, checkpoint, ids, result)
        multiprocessing.start_processes(_run_rank, arguments, nprocs=world, start_method="fork")
        answer: Tensor = torch.load(result)
    return answer


def _run_rank(rank: int, world: int, checkpoint: CoreCheckpoint, ids: Tensor, result: Path) -> None:
    torch.set_num_threads(1)
    meeting_point = f"file://{result.with_name('ranks')}"
    distributed.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=world)
    with on_cpu(), torch.no_grad():
        modules = build(checkpoint.shape, checkpoint.layout, checkpoint.rows)
        _load(modules, checkpoint)
        answer = _forward(modules, checkpoint, ids)
    if answer is not None:
        torch.save(answer[..., : checkpoint.shape.vocabulary], result)
    distributed.barrier()
    distributed.destroy_process_group()


def build(shape: ModelShape, layout: Layout, rows: int, initialize: bool = False) -> "list[GPTModel]":
    """Megatron-Core's model on this rank, one module per virtual pipeline stage; its process groups are created.

    Args:
        shape: sizes of the model.
        layout: parallel layout.
        rows: rows of the padded vocabulary.
        initialize: whether weights are drawn; those that are loaded need no values before.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    virtual = layout.virtual_pipeline if layout.virtual_pipeline > 1 else None
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel,
        layout.pipeline_parallel,
        virtual,
        expert_model_parallel_size=layout.expert_parallel,
    )
    config = _config(shape, layout, initialize)
    spec = get_gpt_layer_local_spec(
        num_experts=shape.experts or None, qk_layernorm=shape.family.qk_norm, normalization="RMSNorm"
    )
    modules = []
    for stage in range(layout.virtual_pipeline):
        at = {"vp_stage": stage} if virtual else {}
        module = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=rows,
            max_sequence_length=shape.positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=not virtual, **at),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=not virtual, **at),
            share_embeddings_and_output_weights=shape.is_tied,
            position_embedding_type="rope",
            rotary_base=int(shape.rotary_base),
            rope_scaling=shape.rope_factor is not None,
            rope_scaling_factor=shape.rope_factor or 8.0,
            **at,
        )
        modules.append(module.eval())
    return modules


def _config(shape: ModelShape, layout: Layout, initialize: bool) -> "TransformerConfig":
    from megatron.core.transformer import TransformerConfig

    experts = {
        "num_moe_experts": shape.experts,
        "moe_ffn_hidden_size": shape.ffn,
        "moe_router_topk": shape.experts_per_token,
        "moe_router_pre_softmax": not shape.normalizes_experts,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.family.qkv_bias,
        qk_layernorm=shape.family.qk_norm,
        window_size=None if shape.window is None else (shape.window - 1, 0),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=initialize,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert_parallel,
        num_layers_in_first_pipeline_stage=layout.first_stage_layers,
        num_layers_in_last_pipeline_stage=layout.last_stage_layers,
        # Fused kernels are CUDA's.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        **(experts if shape.experts else {}),
    )


def _load(modules: "list[GPTModel]", checkpoint: CoreCheckpoint) -> None:
    """Load a checkpoint as Megatron-LM does: strictly."""
    from megatron.core import parallel_state

    layout = checkpoint.layout
    if not (checkpoint.folder / torch_dist.INDEX).is_file():
        rank = Rank(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        content = load(checkpoint.folder / layout.folder_of(rank) / legacy.FILE)
        for number, module in enumerate(modules):
            state = content[f"model{number}" if len(modules) > 1 else "model"]
            own = {_local_name(name): value for name, value in state.items() if not _GROUPED_STATE.search(name)}
            module.load_state_dict(own, strict=True)
        return
    from megatron.core import dist_checkpointing

    stored = torch_dist.TorchDistSource(checkpoint.folder).stored_names
    for module in modules:
        sharded = module.sharded_state_dict()
        for entry in sharded.values():
            # Transformer Engine's specification does not fuse the norm before experts.
            unfused = entry.key.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            if entry.key not in stored and unfused in stored:
                entry.key = unfused
        with safe_globals([Namespace]):  # as Megatron-LM does
            state = dist_checkpointing.load({"model": sharded}, str(checkpoint.folder))["model"]
        module.load_state_dict(state, strict=True)


_GROUPED_STATE = re.compile(r"\.mlp\.experts\.linear_fc\d\._extra_state")
"""State of experts that are one module in Transformer Engine, and several in the local specification."""
_LOCAL = Naming("torch", "local", has_experts=False, grouped=False)


def _local_name(name: str) -> str:
    """Name of the local layer specification, which runs without Transformer Engine."""
    own, layer, expert = parse(name)
    return own if layer is None else f"decoder.layers.{layer}.{_LOCAL.within_layer(own, expert)}"


def _forward(modules: "list[GPTModel]", checkpoint: CoreCheckpoint, ids: Tensor) -> Tensor | None:
    """Pass tokens through all stages in their order; the logits on one rank of the last stage, None on the others."""
    from megatron.core import parallel_state

    positions = torch.arange(ids.shape[1])[None].expand(len(ids), -1)
    mask = torch.triu(torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool), 1)
    answer = None
    for module in modules:
        if not module.pre_process:
            hidden = torch.empty(ids.shape[1], len(ids), checkpoint.shape.hidden)
            distributed.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
            module.set_input_tensor(hidden)
        output = module(ids, positions, attention_mask=mask)
        if not module.post_process:
            distributed.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            continue
        group = parallel_state.get_tensor_model_parallel_group()
        parts = [torch.empty_like(output) for _ in range(checkpoint.layout.tensor_parallel)]
        distributed.all_gather(parts, output.contiguous(), group=group)
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        if is_first and parallel_state.get_expert_model_parallel_rank() == 0:
            answer = torch.cat(parts, dim=-1)
    return answer


def layout_of(arguments: Namespace, source_layout: Layout | None, shape: ModelShape) -> Layout:
    """Layout on which a checkpoint is loaded: its own or, of a format without ranks, two by two where that divides."""
    recorded = vars(arguments)
    if source_layout is None:
        even = all(size % 2 == 0 for size in (shape.groups, shape.heads, shape.ffn, shape.layers))
        return Layout(tensor_parallel=2, pipeline_parallel=2) if even else Layout()
    return Layout(
        tensor_parallel=source_layout.tensor_parallel,
        pipeline_parallel=source_layout.pipeline_parallel,
        expert_parallel=source_layout.expert_parallel,
        virtual_pipeline=recorded.get("virtual_pipeline_model_parallel_size") or 1,
        first_stage_layers=recorded.get("decoder_first_pipeline_num_layers"),
        last_stage_layers=recorded.get("decoder_last_pipeline_num_layers"),
    )

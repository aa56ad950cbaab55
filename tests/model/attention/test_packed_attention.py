from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from architectures import OWN, save_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.varlen import varlen_attn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

from lit_ft import CausalLM
from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import attention_implementation
from lit_ft.model.activations.checkpointing import options
from lit_ft.model.attention.packed_attention import (
    PACKED,
    Variant,
    _ends,
    _order,
    attend_to_segments,
    in_chunks,
    packed_attention,
)
from lit_ft.model.attention.varlen import takes_varlen
from lit_ft.model.isolation.lengths import samples_of
from lit_ft.packed_batch import pack_samples

FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma3_text", "granite", "olmo2", "phi3", "cohere"]


def tiny(family: str, attention: str, **options: object) -> torch.nn.Module:
    config = AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_equals_its_samples_one_by_one(family: str) -> None:
    """Also with a sliding window shorter than a sample, where the family has one."""
    lengths = [5, 23, 11]
    ids = torch.randint(3, 97, (1, sum(lengths)))
    window = {"sliding_window": 7} if family in ("mistral", "gemma3_text") else {}
    packed, plain = tiny(family, PACKED, **window), tiny(family, "sdpa", **window)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        row = packed(input_ids=ids, position_ids=positions, segment_lengths=lengths, use_cache=False).logits[0]
        alone = torch.cat([plain(input_ids=part, use_cache=False).logits[0] for part in ids.split(lengths, dim=1)])
    torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-4)


class SdpaCalls(TorchDispatchMode):
    """Shapes of the queries that SDPA's kernel is given."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "flash_attention" in func.name() and "backward" not in func.name():
            self.queries.append((*args[0].shape,))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6, 3])
def test_samples_of_one_length_are_a_batch_of_one_call(window: int | None, dtype: torch.dtype) -> None:
    """Unless a window is shorter than they are, for which the kernel needs a mask."""
    inputs = [torch.randn(1, heads, 18, 16, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]
    given: dict[str, Any] = {"scaling": 0.3, "sliding_window": window}

    def attend(*inputs: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        return packed_attention(nn.Module(), *inputs, None, segment_lengths=lengths, **given)[0]

    with SdpaCalls() as calls:
        out = attend(*inputs, lengths=[6, 6, 6])
    assert calls.queries == ([(1, 4, 6, 16)] * 3 if window == 3 else [(3, 4, 6, 16)])
    parts = zip(*(one.split(6, dim=2) for one in inputs), strict=True)
    wanted = torch.cat([attend(*part, lengths=[6]) for part in parts], dim=1)
    assert out.is_contiguous()
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(out)
    found, others = (torch.autograd.grad(one, inputs, grad) for one in (out, wanted))
    torch.testing.assert_close(found, others)


def test_short_bf16_segments_are_computed_in_fp32() -> None:
    packed = tiny("qwen2", PACKED).to(torch.bfloat16)
    ids = torch.randint(3, 97, (1, 9))
    logits = packed(input_ids=ids, segment_lengths=[4, 5], use_cache=False).logits
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_queries_and_keys_that_rotary_embeddings_made_fp32_are_computed_in_autocast_s_dtype() -> None:
    query, key = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8)
    value = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = packed_attention(nn.Module(), query, key, value, None, segment_lengths=[4, 5])
    wanted = [
        torch.nn.functional.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True)
        for part in zip(*(one.bfloat16().split([4, 5], 2) for one in (query, key, value)), strict=True)
    ]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.cat(wanted, 2).transpose(1, 2))


class VarlenCalls(TorchDispatchMode):
    """Calls of the operator of variable-length attention, and the number of key heads that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.key_heads: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.torch_attn._varlen_attn.default:
            self.key_heads.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("checkpointing", "calls"), [(False, 1), (True, 2), ("selective", 1)])
def test_attention_to_several_samples_is_one_call_that_selective_checkpointing_keeps(
    checkpointing: Any, calls: int
) -> None:
    """On torch's ``meta`` device, which has the operator's shapes and gradients without its kernel."""
    query, key, value = (torch.randn(1, heads, 9, 8, device="meta", requires_grad=True) for heads in (4, 2, 2))

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        return attend_to_segments(*inputs, [4, 5], Variant())

    with VarlenCalls() as seen:
        if checkpointing:
            out = checkpoint(attend, query, key, value, **options(checkpointing))
        else:
            out = attend(query, key, value)
        out.sum().backward()
    assert out.shape == (1, 9, 4, 8)
    groups_heads = "enable_gqa" in signature(varlen_attn).parameters
    assert seen.key_heads == [2 if groups_heads else 4] * calls  # grouped heads are repeated with torch 2.11 alone


def test_a_rank_with_a_part_of_the_tokens_is_given_the_lengths_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled layers are given no lengths as arguments: those of the batch hold."""
    seen: list[list[int]] = []

    def attend(query: torch.Tensor, key: object, value: object, mesh: object, lengths: list[int], *_: object) -> Any:
        seen.append(lengths)
        return query

    monkeypatch.setattr("lit_ft.model.attention.packed_attention.attend_to_all_ranks", attend)
    layer, part = nn.Module(), torch.randn(1, 4, 5, 8)
    layer.context_mesh = None  # type: ignore[assignment]
    with samples_of([4, 6]):
        packed_attention(layer, part, part, part, None)
    assert seen == [[4, 6]]


@torch.inference_mode()
def test_what_an_evaluation_leaves_in_a_cache_can_be_trained_with() -> None:
    device = torch.device("cpu")
    for kept in (_ends, _order):
        kept.cache_clear()
    assert _ends((3, 5), device).tolist() == [0, 3, 8]
    assert _order(8, 2, device).tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert not any(tensor.is_inference() for tensor in (_ends((3, 5), device), _order(8, 2, device)))


def test_use_without_a_row_is_refused() -> None:
    with pytest.raises(RecipeError, match="packed training batches only"):
        tiny("qwen2", PACKED)(input_ids=torch.randint(3, 97, (2, 9)))


def test_capped_attention_logits_are_refused() -> None:
    with pytest.raises(RecipeError, match="set model.attn_implementation to eager"):
        tiny("gemma2", PACKED)(input_ids=torch.randint(3, 97, (1, 9)), segment_lengths=[9])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OWN)
def test_a_rows_loss_is_that_of_its_samples(architecture: str, tmp_path: Path) -> None:
    """With the attention, the head and the masks that a run takes for the architecture."""
    module = CausalLM(save_model(architecture, tmp_path))
    module.configure_model()
    module.eval()
    draw = np.random.default_rng(0)
    samples = [(draw.integers(3, 300, n), draw.integers(3, 300, n)) for n in (7, 25, 40)]
    with torch.no_grad():
        row = module(pack_samples(samples))
        alone = [module(pack_samples([sample])) for sample in samples]
    torch.testing.assert_close(row.per_token, torch.cat([one.per_token for one in alone]), atol=1e-5, rtol=1e-5)
    assert int(row.correct) == sum(int(one.correct) for one in alone)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compile": "eager"}], ids=["plain", "compiled"])
def test_chunks_and_positions_start_anew_with_each_sample(options: dict[str, Any], tmp_path: Path) -> None:
    """Llama 4, against transformers with masks: two of the samples are longer than a chunk."""
    folder = save_model("llama4_text", tmp_path)
    module = CausalLM(folder, **options)
    module.configure_model()
    module.eval()
    assert attention_implementation(module.base_model.config) == PACKED
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    samples = [torch.arange(3, 3 + length) for length in (7, 25, 40)]
    with torch.no_grad():
        row = module.hidden_states(pack_samples([(ids.numpy(), ids.numpy()) for ids in samples]))[0]
        alone = torch.cat([plain.model(input_ids=ids[None], use_cache=False).last_hidden_state[0] for ids in samples])
    torch.testing.assert_close(row, alone, atol=1e-5, rtol=1e-4)


def test_chunks_are_refused_with_an_attention_that_counts_them_over_the_packed_batch(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="sdpa attends in chunks of 16 tokens from the start of a packed batch"):
        CausalLM(save_model("llama4_text", tmp_path), attn_implementation="sdpa").check()


def test_in_chunks() -> None:
    assert in_chunks([5, 16, 33], 16) == [5, 16, 16, 16, 1]


def test_a_rank_with_a_part_of_the_tokens_attends_in_chunks_too() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    query, key, value = torch.randn(3, 1, 4, 16, 8)
    whole, part = nn.Module(), nn.Module()
    whole.tokens_of_chunk = part.tokens_of_chunk = 4  # type: ignore[assignment]
    part.context_mesh = init_device_mesh("cpu", (1,))  # type: ignore[assignment]
    wanted, got = (packed_attention(m, query, key, value, None, segment_lengths=[10, 6])[0] for m in (whole, part))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("widths", "options", "fits"),
    [
        ((64, 64), {}, True),
        ((256, 256), {"dtype": torch.float16}, True),
        ((12, 12), {}, False),  # not a multiple of 8
        ((320, 320), {}, False),
        ((192, 128), {}, True),  # multi-head latent attention
        ((64, 128), {}, False),
        ((64, 64), {"dtype": torch.float32}, False),
        ((64, 64), {"dropout": 0.1}, False),
        ((64, 64), {"device": "cpu"}, False),
        ((64, 64), {"capability": (7, 5)}, False),  # Turing
    ],
)
def test_inputs_that_flash_attention_takes(
    widths: tuple[int, int], options: dict[str, object], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensors that only say that they are on CUDA; tests/cuda runs the kernels."""
    given = {"dtype": torch.bfloat16, "device": "cuda", "dropout": 0.0, "capability": (9, 0), **options}
    capability, dropout = given.pop("capability"), given.pop("dropout")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    with FakeTensorMode():
        query, value = (torch.empty(1, 4, 9, width, **given) for width in widths)
    assert takes_varlen(query, value, dropout) == fits

"""Packed attention on a device against attention in fp64, segment by segment."""

from typing import NamedTuple

import pytest
import torch
from devices import DEVICES, Calls, cases, relative_distance

from lit_ft.model.attention.packed_attention import packed_attention
from lit_ft.model.isolation.lengths import SharedTokens, samples_of
from lit_ft.packed_batch import SharedPrefixes

HEADS = [(14, 2, 64, 64), (28, 4, 128, 128), (6, 2, 32, 32), (8, 8, 256, 256)]
SEGMENTS = [[1], [7, 1, 300, 64], [4096], [130] * 31]


class Case(NamedTuple):
    heads: tuple[int, int, int, int]
    """Heads of queries, heads of keys, width of both, width of values."""
    lengths: list[int]
    window: int | None
    dtype: torch.dtype
    has_sinks: bool = False


def name_of(case: Case) -> str:
    heads = "x".join(map(str, case.heads))
    sinks = "-sinks" if case.has_sinks else ""
    return f"{heads}-{len(case.lengths)}x{max(case.lengths)}-{case.window}-{str(case.dtype)[6:]}{sinks}"


def named(*made: Case) -> dict[str, Case]:
    return {name_of(case): case for case in made}


ON_CUDA = named(
    *(
        Case(heads, lengths, window, dtype)
        for heads in HEADS
        for lengths in SEGMENTS
        for window in (None, 32)
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *(
        Case((64, 8, 64, 64), lengths, window, torch.bfloat16, has_sinks=True)  # gpt-oss
        for lengths in ([7, 1, 300, 64], [1024])
        for window in (None, 128)
    ),
    *(
        Case((16, 16, 192, 128), lengths, None, torch.bfloat16)  # multi-head latent attention
        for lengths in SEGMENTS
    ),
    Case((64, 8, 192, 128), [7, 1, 300, 64], 128, torch.bfloat16, has_sinks=True),  # MiMo
)
ON_CPU = named(
    *(
        Case((6, 2, 32, 32), [7, 1, 30], window, dtype, has_sinks)
        for window in (None, 5)
        for dtype in (torch.float32, torch.bfloat16)
        for has_sinks in (False, True)
    )
)
FALLBACKS = named(
    Case((4, 2, 12, 12), [7, 1, 30], None, torch.bfloat16),  # not a multiple of 8
    Case((4, 2, 320, 320), [7, 1, 30], None, torch.bfloat16),
    Case((4, 2, 32, 32), [7, 1, 30], None, torch.float32),
    Case((4, 4, 32, 48), [7, 1, 30], None, torch.bfloat16),
    Case((4, 2, 32, 32), [7, 1, 30], 5, torch.float32, has_sinks=True),
)


def inputs_of(case: Case, device: str) -> list[torch.Tensor]:
    heads, kv_heads, width, value_width = case.heads
    shapes = [(heads, width), (kv_heads, width), (kv_heads, value_width)]
    draw = torch.Generator().manual_seed(0)
    tokens = sum(case.lengths)
    drawn = [torch.randn(1, count, tokens, size, generator=draw).to(device, case.dtype) for count, size in shapes]
    drawn += [torch.randn(heads, generator=draw).to(device, case.dtype)] if case.has_sinks else []
    return [tensor.requires_grad_() for tensor in drawn]


def in_fp64(inputs: list[torch.Tensor], case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention with explicit masks, ``(1, T, heads, width)``, and its own copies of the inputs."""
    own = [tensor.detach().double().requires_grad_() for tensor in inputs]
    sinks = own[3] if case.has_sinks else own[0].new_full((case.heads[0],), -torch.inf)
    outputs = []
    for q, k, v in zip(*(tensor.split(case.lengths, dim=2) for tensor in own[:3]), strict=True):
        groups = q.shape[1] // k.shape[1]
        logits = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
        places = torch.arange(q.shape[2], device=q.device)
        back = places[:, None] - places
        seen = (back >= 0) & (back < (case.window or len(places)))
        of_sinks = sinks[:, None, None].expand(1, -1, len(places), 1)
        weights = torch.cat([logits.masked_fill(~seen, -torch.inf), of_sinks], -1).softmax(-1)[..., :-1]
        outputs.append(weights @ v.repeat_interleave(groups, 1))
    return torch.cat(outputs, dim=2).transpose(1, 2), own


def check(case: Case, device: str) -> Calls:
    """Compare output and gradients, with the tolerances of half precision; returns the operators that ran."""
    inputs = inputs_of(case, device)
    options = {"sliding_window": case.window, "segment_lengths": case.lengths}
    options |= {"s_aux": inputs[3]} if case.has_sinks else {}
    with Calls() as calls:
        output, _ = packed_attention(torch.nn.Module(), *inputs[:3], None, **options)
    wanted, own = in_fp64(inputs, case)
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    output.backward(gradient.to(output.dtype))
    wanted.backward(gradient.double())
    forward, backward = (1e-5, 1e-5) if case.dtype == torch.float32 else (5e-3, 1e-2)
    assert relative_distance(output, wanted) < forward
    for got, reference in zip(inputs, own, strict=True):
        # Of one token the queries and keys have no gradient but for rounding.
        if reference.grad.norm() > 1e-6:
            assert relative_distance(got.grad, reference.grad) < backward
    return calls


@pytest.mark.parametrize(("device", "case"), cases(ON_CPU, ON_CUDA))
def test_it_is_attention_in_fp64(device: str, case: Case) -> None:
    check(case, device)


@pytest.mark.parametrize(("device", "case"), cases(FALLBACKS, FALLBACKS))
def test_what_flash_attention_does_not_take_goes_segment_by_segment(device: str, case: Case) -> None:
    assert check(case, device).count("_varlen_attn") == 0


SHARED = SharedPrefixes([40, 52, 33], [0, 30, 32])
"""The second sample begins as the first, the third as the second."""
WITH_SHARED = named(
    *(
        Case(heads, SHARED.own_lengths, window, dtype)
        for heads in HEADS[:3]
        for window in (None, 7)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    ),
    Case((64, 8, 64, 64), SHARED.own_lengths, 16, torch.bfloat16, has_sinks=True),
    Case((16, 16, 192, 128), SHARED.own_lengths, None, torch.bfloat16),
)
SMALL = {name: case for name, case in WITH_SHARED.items() if case.heads[0] < 16}


@pytest.mark.parametrize(("device", "case"), cases(SMALL, WITH_SHARED))
def test_tokens_that_samples_share_are_attended_to(device: str, case: Case) -> None:
    inputs = inputs_of(case, device)
    computed, places = (torch.from_numpy(one).to(device) for one in (SHARED.computed, SHARED.places))
    options = {"s_aux": inputs[3]} if case.has_sinks else {}
    with samples_of(case.lengths, SharedTokens(SHARED.lengths, case.lengths, computed, places)), Calls() as calls:
        output, _ = packed_attention(torch.nn.Module(), *inputs[:3], None, sliding_window=case.window, **options)
    own = [tensor.detach().double().requires_grad_() for tensor in inputs]
    whole, of_whole = in_fp64(
        [tensor.index_select(2, places) for tensor in own[:3]] + own[3:], case._replace(lengths=SHARED.lengths)
    )
    gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(device)
    output.backward(gradient.to(output.dtype))
    wanted = whole.index_select(1, computed)
    wanted.backward(gradient.double())
    for tensor, expanded in zip(own[:3], of_whole, strict=False):
        tensor.grad = torch.zeros_like(tensor).index_add_(2, places, expanded.grad)
    forward, backward = (1e-5, 1e-5) if case.dtype == torch.float32 else (5e-3, 1e-2)
    assert relative_distance(output, wanted) < forward
    for got, reference in zip(inputs[:3], own, strict=False):
        assert relative_distance(got.grad, reference.grad) < backward
    if device == "cuda" and case.dtype != torch.float32:
        assert calls.count("_varlen_attn") == 1


@pytest.mark.parametrize("device", DEVICES)
def test_several_segments_are_one_call_on_a_gpu(device: str) -> None:
    calls = check(Case((6, 2, 32, 32), [7, 1, 30], None, torch.bfloat16), device)
    varlen, by_segment = calls.count("_varlen_attn"), calls.count("scaled_dot_product")
    assert (varlen, by_segment) == ((1, 0) if device == "cuda" else (0, 3))
    of_one_length = check(Case((6, 2, 32, 32), [30] * 3, None, torch.bfloat16), device)
    assert (of_one_length.count("_varlen_attn"), of_one_length.count("scaled_dot_product")) == (0, 1)

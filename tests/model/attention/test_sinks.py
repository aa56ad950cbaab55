"""Attention sinks against softmax with a logit more in fp64."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lit_ft.model.attention.packed_attention import (
    Variant,
    attend_to_all_ranks,
    attend_to_segments,
    local_ranges,
    packed_attention,
)
from lit_ft.model.attention.segments import Segments, segments_of
from lit_ft.model.attention.varlen import _has_flash_attention

LENGTHS = [1, 40, 300, 7]


def inputs_of(dtype: torch.dtype, heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (16, 16)) -> list[Any]:
    draw, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = [(1, n, tokens, width) for n, width in zip((*heads, heads[1]), (widths[0], *widths), strict=True)]
    return [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in (*shapes, (heads[0],))]


def in_fp64(inputs: list[torch.Tensor], window: int | None, lengths: list[int]) -> list[torch.Tensor]:
    """Attention ``(1, T, heads, width)`` with explicit sinks, and its gradients for a fixed gradient of the result."""
    own = [tensor.detach().double().requires_grad_() for tensor in inputs]
    *qkv, sinks = own
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in qkv), strict=True):
        groups, places = q.shape[1] // k.shape[1], torch.arange(q.shape[2])
        back = places[:, None] - places
        seen = (back >= 0) & (back < (window or len(places)))
        logits = (q @ k.repeat_interleave(groups, 1).mT * 0.3).masked_fill(~seen, -torch.inf)
        weights = torch.cat([logits, sinks[:, None, None].expand(1, -1, len(places), 1)], -1).softmax(-1)
        outputs.append(weights[..., :-1] @ v.repeat_interleave(groups, 1))
    out = torch.cat(outputs, 2).transpose(1, 2)
    return [out, *torch.autograd.grad(out, own, gradient_of(out))]


def gradient_of(out: torch.Tensor) -> torch.Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


def assert_near(found: list[torch.Tensor], wanted: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert float((one.double() - other).norm() / other.norm()) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("lengths", [LENGTHS, [348]])
@pytest.mark.parametrize("widths", [(16, 16), (24, 16)])  # the last: MiMo
def test_results_are_those_of_a_softmax_with_a_logit_more(
    dtype: torch.dtype, tolerance: float, window: int | None, lengths: list[int], widths: tuple[int, int]
) -> None:
    *qkv, sinks = inputs = inputs_of(dtype, widths=widths)
    options: dict[str, Any] = {"sliding_window": window, "segment_lengths": lengths}
    out, _ = packed_attention(nn.Module(), *qkv, None, scaling=0.3, s_aux=sinks, **options)
    found = [out, *torch.autograd.grad(out, inputs, gradient_of(out))]
    assert [one.dtype for one in found] == [dtype] * 5
    assert_near(found, in_fp64(inputs, window, lengths), tolerance)


@pytest.mark.slow
def test_gradients_in_double_precision() -> None:
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8), (4,)]
    inputs = [torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True) for shape in shapes]
    torch.autograd.gradcheck(lambda q, k, v, s: attend_to_segments(q, k, v, [3, 6], Variant(window=4, sinks=s)), inputs)


def test_sinks_of_another_dtype_than_queries_are_taken() -> None:
    """As in mixed precision, where weights are fp32."""
    *qkv, sinks = inputs_of(torch.bfloat16)
    out, _ = packed_attention(nn.Module(), *qkv, None, s_aux=sinks.float(), segment_lengths=LENGTHS)
    assert out.dtype == torch.bfloat16


def test_ranks_that_have_parts_of_the_tokens_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, one after the other: each is given the keys and values of all tokens, in the order of the ranks."""
    *qkv, sinks = inputs_of(torch.float32)
    wanted = in_fp64([*qkv, sinks], 16, LENGTHS)[0]
    order = torch.tensor([place for rank in (0, 1) for part in local_ranges(348, 2, rank) for place in part])
    monkeypatch.setattr("lit_ft.model.attention.packed_attention._gather", lambda tensor, _: tensor[:, :, order])

    class Mesh:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def size(self) -> int:
            return 2

        def get_local_rank(self) -> int:
            return self.rank

    for rank in (0, 1):
        own = order[rank * 174 : (rank + 1) * 174]
        whole = [qkv[0][:, :, own], *qkv[1:]]
        out = attend_to_all_ranks(*whole, Mesh(rank), LENGTHS, Variant(0.0, 0.3, 16, sinks))  # type: ignore[arg-type]
        assert_near([out], [wanted[:, own]], 1e-5)


class VarlenCalls(TorchDispatchMode):
    """Operators of variable-length attention that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "torch_attn" in str(func):
            self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_on_a_gpu_it_is_one_call_forward_and_one_backward() -> None:
    """On torch's ``meta`` device, which has the operators' shapes without their kernels; tests/cuda runs them."""
    inputs = [tensor.detach().to("meta").requires_grad_() for tensor in inputs_of(torch.bfloat16)]
    with VarlenCalls() as seen:
        out = attend_to_segments(*inputs[:3], LENGTHS, Variant(window=16, sinks=inputs[3]))
        gradients = torch.autograd.grad(out.sum(), inputs)
    assert seen.names == ["_varlen_attn", "_varlen_attn_backward"]
    assert out.shape == (1, 348, 4, 16)
    assert [(g.shape, g.dtype) for g in gradients] == [(tensor.shape, tensor.dtype) for tensor in inputs]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_is_in_one_graph_forward_and_backward(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "lit_ft.model.attention.packed_attention"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    if device == "meta":
        monkeypatch.setattr(f"{module}.takes_varlen", lambda query, *_: _has_flash_attention(query.device))
        monkeypatch.setattr(f"{module}._in_one_dtype", lambda *tensors: tensors)  # the device knows no autocast
    torch.compiler.reset()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, segments: Segments) -> Any:
        return packed_attention(nn.Identity(), q, k, v, None, scaling=0.3, s_aux=sinks, segments=segments)[0]

    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for lengths in (LENGTHS, [348]):
        inputs = [tensor.detach().to(device).requires_grad_() for tensor in inputs_of(torch.float32)]
        out = compiled(*inputs, segments_of(lengths, torch.device(device)))
        gradients = torch.autograd.grad(out, inputs, gradient_of(out) if device == "cpu" else torch.ones_like(out))
        if device == "cpu":
            assert_near([out, *gradients], in_fp64(inputs, None, lengths), 1e-5)

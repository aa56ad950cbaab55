"""The operator of attention to several samples in compiled layers."""

from typing import Any

import pytest
import torch
from torch import nn

from lit_ft.model.attention.packed_attention import Variant, attend_to_segments, packed_attention
from lit_ft.model.attention.segments import Segments, attend, segments_of
from lit_ft.model.attention.varlen import _has_flash_attention

LENGTHS = [1, 40, 300, 7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "width"), [((4, 2), 12), ((3, 3), 16)])
def test_results_are_those_of_sdpa(dtype: torch.dtype, window: int | None, heads: tuple[int, int], width: int) -> None:
    """To the bit in fp32; in bf16 gradients of short samples, which SDPA computes in fp32, start at rounded outputs."""
    torch.manual_seed(0)
    tokens, (queries, keys) = sum(LENGTHS), heads
    inputs = [torch.randn(1, n, tokens, width, dtype=dtype, requires_grad=True) for n in (queries, keys, keys)]
    out = attend(*inputs, segments_of(LENGTHS, torch.device("cpu")).ends, 0.3, window)
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "segment_lengths": LENGTHS}
    wanted, _ = packed_attention(nn.Module(), *inputs, None, **options)
    grad = torch.randn_like(wanted)
    assert torch.equal(out.transpose(1, 2), wanted)
    found = torch.autograd.grad(out.transpose(1, 2), inputs, grad)
    for one, other in zip(found, torch.autograd.grad(wanted, inputs, grad), strict=True):
        tolerance = 0 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(other.abs().max()))


@pytest.mark.parametrize("window", [None, 16])
def test_values_may_be_narrower_than_keys(window: int | None) -> None:
    """Multi-head latent attention: values are padded, the result is not."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, sum(LENGTHS), width, requires_grad=True) for width in (24, 24, 16))
    out = attend_to_segments(q, k, v, LENGTHS, Variant(scaling=0.3, window=window))
    options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "segment_lengths": LENGTHS}
    wanted, _ = packed_attention(nn.Module(), q, k, v, None, **options)
    assert out.shape == (1, sum(LENGTHS), 3, 16)
    torch.testing.assert_close(out, wanted)
    grad = torch.randn_like(wanted)
    found, others = (torch.autograd.grad(one, (q, k, v), grad) for one in (out, wanted))
    torch.testing.assert_close(found, others)


def test_the_operator_keeps_torch_s_rules() -> None:
    """Shapes without data, gradients, and graphs with any number of samples."""
    inputs = [torch.randn(1, n, 12, 8, requires_grad=True) for n in (4, 2, 2)]
    arguments = (*inputs, torch.tensor([0, 5, 12], dtype=torch.int32), None, 3)
    torch.library.opcheck(torch.ops.lit_ft.attend_to_segments.default, arguments)


def test_boundaries_of_few_shapes_add_empty_samples() -> None:
    cpu = torch.device("cpu")
    assert segments_of([5], cpu) == segments_of([5, 5], cpu) == Segments(None, 5)
    exact, few = segments_of([5, 2, 3], cpu), segments_of([5, 2, 3], cpu, has_few_shapes=True)
    assert exact.ends is not None
    assert few.ends is not None
    assert (exact.ends.tolist(), exact.longest) == ([0, 5, 7, 10], 5)
    assert (few.ends.tolist(), few.longest) == ([0, 5, 7] + [10] * 30, 10)  # no longer than the row
    many = segments_of([2] * 33 + [600, 34], cpu, has_few_shapes=True)
    assert many.ends is not None
    assert (len(many.ends), many.longest) == (1 + 64, 700)
    assert segments_of([513, 600], cpu, has_few_shapes=True).longest == 1024
    assert segments_of([5, 1000], cpu, has_few_shapes=True).longest == 1005
    assert segments_of([300, 1000], cpu, has_few_shapes=True).longest == 1024
    alike = segments_of([5, 5], cpu, has_few_shapes=True)
    assert alike.ends is not None
    assert (len(alike.ends), alike.longest) == (1 + 32, 10)
    assert segments_of([512, 512], cpu, has_few_shapes=True) == Segments(None, 512)
    q, k, v = (torch.randn(1, 2, 10, 8) for _ in range(3))
    assert torch.equal(attend(q, k, v, few.ends, None, None), attend(q, k, v, exact.ends, None, None))


@pytest.mark.slow
def test_the_call_on_cuda_is_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's ``meta`` device, which has the operator's shapes: one graph, whose inputs the boundaries are."""
    module = "lit_ft.model.attention.packed_attention"
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(f"{module}.takes_varlen", lambda query, *_: _has_flash_attention(query.device))
    monkeypatch.setattr(f"{module}._in_one_dtype", lambda *tensors: tensors)  # the device knows no autocast
    torch.compiler.reset()
    calls: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        calls.append([node.name for node in graph.graph.nodes if "varlen" in str(node.target)])
        return graph

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Segments) -> torch.Tensor:
        return packed_attention(nn.Identity(), q, k, v, None, segments=segments, sliding_window=4)[0]

    compiled = torch.compile(attention, backend=backend, fullgraph=True, dynamic=True)
    for lengths in ([5, 9], [3, 4, 20], [7, 8, 1, 2]):
        segments = Segments(torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta"), max(lengths))
        q, k, v = (torch.empty(1, heads, sum(lengths), 8, device="meta") for heads in (4, 2, 2))
        assert compiled(q, k, v, segments).shape == (1, sum(lengths), 4, 8)
    assert [len(found) for found in calls] == [1]

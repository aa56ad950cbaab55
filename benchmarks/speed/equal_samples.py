"""Attention to samples of one length: one SDPA call, as packed attention has it, against a call with boundaries.

    python -m benchmarks.speed.equal_samples
    python -m benchmarks.speed.equal_samples --device cuda

Forward and backward pass with the heads of Qwen2.5-7B, in bfloat16 on CUDA, in fp32 on a CPU. SDPA may choose a kernel
that is planned anew for each length (cuDNN), so that the first call of a length is a column of its own: the mean of
lengths that had no call before. With boundaries, a call is torch's variable-length attention on CUDA, and one
operator that goes from sample to sample on a CPU.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from benchmarks.compare import environment
from lit_ft.model.attention.packed_attention import Variant, attend_to_segments, packed_attention

HEADS, KV_HEADS, HEAD_DIM = 28, 4, 128
BATCHES = {"cuda": [(1, 1024), (1, 4096), (4, 4096), (8, 512), (16, 128)], "cpu": [(1, 512), (4, 512), (16, 128)]}
"""Numbers of samples, and tokens of each."""


def attend(way: str, qkv: list[Tensor], lengths: list[int]) -> Tensor:
    """Results of one of the two ways, ``(1, T, heads, head_dim)``."""
    q, k, v = qkv
    if way == "boundaries":
        return attend_to_segments(q, k, v, lengths, Variant())
    return packed_attention(nn.Identity(), q, k, v, None, segment_lengths=lengths)[0]


def milliseconds(way: str, lengths: list[int], device: str) -> float:
    """Milliseconds of a forward and a backward pass."""
    shapes = [(1, sum(lengths), heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    qkv = [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_() for shape in shapes]
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    out = attend(way, qkv, lengths)
    torch.autograd.grad(out, qkv, torch.ones_like(out))
    wait()
    return (time.perf_counter() - started) * 1e3


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=11)
    options = parser.parse_args(arguments)
    print("| samples x tokens | SDPA | first call of a length | with boundaries | first call |\n|---|---|---|---|---|")
    for count, tokens in BATCHES[options.device]:
        cells = []
        for way in ("SDPA", "boundaries"):
            milliseconds(way, [tokens + 64] * count, options.device)  # loads what every length needs
            first = [milliseconds(way, [tokens - n] * count, options.device) for n in range(1, options.repeats + 1)]
            milliseconds(way, [tokens] * count, options.device)
            later = [milliseconds(way, [tokens] * count, options.device) for _ in range(options.repeats)]
            cells += [f"{statistics.median(later):.2f} ms", f"{statistics.mean(first):.2f} ms"]
        print(f"| {count} x {tokens:,} | {' | '.join(cells)} |", flush=True)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

"""Time of scaled_dot_product_attention on one segment of a packed batch, forward and backward, by length and dtype.

    python -m benchmarks.speed.attention

The result is the reason why ``lit_ft.model.attention`` computes short bf16 segments in fp32 on CPU. The heads are those
of Qwen2.5-0.5B.
"""

import time

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.compare import environment

HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64


def milliseconds(length: int, dtype: torch.dtype, repeats: int) -> float:
    """Median milliseconds of one forward and backward pass over a segment."""
    times = []
    for _ in range(repeats + 2):
        q = torch.randn(1, HEADS, length, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, KV_HEADS, length, HEAD_DIM, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        started = time.perf_counter()
        out = scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), is_causal=True, enable_gqa=True)
        out.to(torch.bfloat16).sum().backward()
        times.append(time.perf_counter() - started)
    return sorted(times[2:])[repeats // 2] * 1e3


def main() -> None:
    """Print the table."""
    print("| tokens | bf16 | in fp32, casts included |\n|---|---|---|")
    for length in (25, 50, 100, 200, 256, 400, 800):
        bf16, fp32 = (milliseconds(length, dtype, repeats=41) for dtype in (torch.bfloat16, torch.float32))
        print(f"| {length} | {bf16:.2f} ms | {fp32:.2f} ms |")
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

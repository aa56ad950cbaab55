"""Attention with sinks over a packed batch: packed attention against transformers' ``eager``, in time and memory.

    python -m benchmarks.speed.sinks
    python -m benchmarks.speed.sinks --device cuda

Heads are those of gpt-oss-20b; half of its layers have the sliding window. ``eager``, all that transformers has without
kernels of the hub, is called for each sample of the batch alone. In fp32 on a CPU, in bfloat16 on CUDA. On a CPU each
cell is measured in a process of its own, for its memory.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from benchmarks.compare import environment
from lit_ft.model.attention.packed_attention import Variant, attend_to_segments

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128
BATCHES = {"1 x 2,048": [2048], "8 x 256": [256] * 8, "40 x 51": [51] * 40}


def by_sample(qkv: list[Tensor], sinks: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Results of ``eager``, sample by sample, ``(1, T, heads, head_dim)``."""
    module, outputs = nn.Module(), []
    module.num_key_value_groups, module.sinks = HEADS // KV_HEADS, sinks  # type: ignore[assignment]
    for q, k, v in zip(*(one.split(lengths, dim=2) for one in qkv), strict=True):
        places = torch.arange(q.shape[2], device=q.device)
        back = places[:, None] - places
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        mask = q.new_zeros(seen.shape).masked_fill(~seen, -torch.inf)
        outputs.append(eager_attention_forward(module, q, k, v, mask, HEAD_DIM**-0.5)[0])
    return torch.cat(outputs, dim=1)


def measure(way: str, lengths: list[int], window: int | None, device: str, repeats: int = 3) -> tuple[float, float]:
    """Median milliseconds of a forward and a backward pass, and MiB that the passes added to the memory in use."""
    is_cuda, times = device == "cuda", []
    dtype = torch.bfloat16 if is_cuda else torch.float32
    if is_cuda:
        torch.cuda.reset_peak_memory_stats()  # to what is allocated now
    before = _peak_mib(is_cuda)
    for _ in range(repeats):
        shapes = [(1, heads, sum(lengths), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        qkv = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]
        sinks = torch.randn(HEADS, device=device, dtype=dtype, requires_grad=True)
        started = _now(is_cuda)
        if way == "packed":
            q, k, v = qkv
            out = attend_to_segments(q, k, v, lengths, Variant(window=window, sinks=sinks))
        else:
            out = by_sample(qkv, sinks, lengths, window)
        out.sum().backward()
        times.append(_now(is_cuda) - started)
    return statistics.median(times) * 1e3, _peak_mib(is_cuda) - before


def _peak_mib(is_cuda: bool) -> float:
    if is_cuda:
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _now(is_cuda: bool) -> float:
    if is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--one", nargs=3, metavar=("WAY", "BATCH", "WINDOW"), help="measure one cell in this process")
    options = parser.parse_args()
    if options.one is not None:
        way, batch, window = options.one
        print(*measure(way, BATCHES[batch], int(window) or None, options.device))
        return
    print("| samples x tokens | window | eager | packed |\n|---|---|---|---|")
    for batch in BATCHES:
        for window in (0, WINDOW):
            cells = []
            for way in ("eager", "packed"):
                if options.device == "cuda":
                    ms, mib = measure(way, BATCHES[batch], window or None, "cuda", repeats=11)
                else:
                    command = [sys.executable, "-m", "benchmarks.speed.sinks", "--one", way, batch, str(window)]
                    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
                    ms, mib = map(float, output.split()[-2:])
                cells.append(f"{ms:,.{0 if ms >= 100 else 2}f} ms, {mib:,.0f} MiB")
            print(f"| {batch} | {window or 'none'} | {cells[0]} | {cells[1]} |", flush=True)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

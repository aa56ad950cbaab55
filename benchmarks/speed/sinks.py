"""Attention with sinks over a packed batch: packed attention against transformers' ``eager``, in time and memory.

    python -m benchmarks.speed.sinks

Heads are those of gpt-oss-20b; half of its layers have the sliding window. ``eager``, all that transformers has without
kernels of CUDA, is called for each sample of the batch alone. Each is measured in a process of its own.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from benchmarks.compare import environment
from lit_ft.model.attention.packed_attention import Variant, attend_to_segments

HEADS, KV_HEADS, HEAD_DIM, WINDOW = 64, 8, 64, 128
BATCHES = {"1 x 2,048": [2048], "8 x 256": [256] * 8, "40 x 51": [51] * 40}


def by_sample(qkv: list[torch.Tensor], sinks: torch.Tensor, lengths: list[int], window: int | None) -> torch.Tensor:
    """Results of ``eager``, sample by sample, ``(1, T, heads, head_dim)``."""
    module, outputs = nn.Module(), []
    module.num_key_value_groups, module.sinks = HEADS // KV_HEADS, sinks  # type: ignore[assignment]
    for q, k, v in zip(*(one.split(lengths, dim=2) for one in qkv), strict=True):
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        seen = (back >= 0) if window is None else (back >= 0) & (back < window)
        mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        outputs.append(eager_attention_forward(module, q, k, v, mask, HEAD_DIM**-0.5)[0])
    return torch.cat(outputs, dim=1)


def measure(way: str, lengths: list[int], window: int | None, repeats: int = 5) -> tuple[float, float]:
    """Median milliseconds of a forward and a backward pass in fp32, and MiB that the passes added to the process."""
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(repeats):
        shapes = [(1, heads, sum(lengths), HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        qkv = [torch.randn(shape, requires_grad=True) for shape in shapes]
        sinks = torch.randn(HEADS, requires_grad=True)
        started = time.perf_counter()
        if way == "packed":
            q, k, v = qkv
            out = attend_to_segments(q, k, v, lengths, Variant(window=window, sinks=sinks))
        else:
            out = by_sample(qkv, sinks, lengths, window)
        out.sum().backward()
        times.append(time.perf_counter() - started)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return statistics.median(times) * 1e3, added / 1024


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "BATCH", "WINDOW"), help="measure one cell in this process")
    one = parser.parse_args().one
    if one is not None:
        way, batch, window = one
        print(*measure(way, BATCHES[batch], int(window) or None))
        return
    print("| samples x tokens | window | eager | packed |\n|---|---|---|---|")
    for batch in BATCHES:
        for window in (0, WINDOW):
            cells = []
            for way in ("eager", "packed"):
                command = [sys.executable, "-m", "benchmarks.speed.sinks", "--one", way, batch, str(window)]
                ms, mib = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split()
                cells.append(f"{float(ms):,.0f} ms, {float(mib):,.0f} MiB")
            print(f"| {batch} | {window or 'none'} | {cells[0]} | {cells[1]} |", flush=True)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

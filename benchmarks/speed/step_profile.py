"""Profile of an optimizer step of lit_ft on a CPU: matrix products with their FLOP/s, and other operators.

    python -m benchmarks.speed.step_profile --data huanhuan.json

Forward and backward passes of benchmarks.compare's workload at 16 samples per step, under torch's profiler; means over
all steps but the first. ``N`` stands for dimensions that differ from step to step. The optimizer, which updates four
small matrices per layer, is left out.
"""

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from peft import LoraConfig
from torch.profiler import profile

from benchmarks.compare import environment
from benchmarks.peers.bare_loop import windows
from benchmarks.peers.job import Job
from benchmarks.workload import MAX_LENGTH, SHAPES, prepare
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch


def pass_over(module: CausalLM, rows: list[PackedBatch]) -> None:
    """Run forward and backward passes over packed batches."""
    for row in rows:
        module(row).loss_sum.backward()


def product(sizes: set[int], shapes: list[list[int]]) -> tuple[str, int]:
    """Text ``rows x inner x columns`` of a matrix product, and its FLOPs.

    Args:
        sizes: dimensions that are printed as numbers; others are printed as ``N``.
        shapes: shapes of the two matrices.
    """
    (rows, inner), (_, columns) = shapes[:2]
    named = [str(n) if n in sizes else "N" for n in (rows, inner, columns)]
    return " x ".join(named), 2 * rows * inner * columns


def table(events: Any, sizes: set[int], steps: int, top: int) -> str:
    """Markdown table of the slowest operators by ``self_cpu_time_total``, with one row for the rest."""
    microseconds: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    for event in events:
        name = event.key
        if name == "aten::mm":
            dimensions, work = product(sizes, event.input_shapes)
            name = f"{name} {dimensions}"
            flops[name] += work * event.count
        microseconds[name] += event.self_cpu_time_total
    lines = ["| operator | ms a step | GFLOP/s |", "|---|---|---|"]
    for name, time in microseconds.most_common(top):
        rate = f"{flops[name] / time / 1e3:.0f}" if name in flops else ""
        lines.append(f"| {name} | {time / steps / 1e3:.1f} | {rate} |")
    products = sum(microseconds[name] for name in flops)
    lines.append(f"| all products | {products / steps / 1e3:.1f} | {sum(flops.values()) / products / 1e3:.0f} |")
    lines.append(f"| all | {sum(microseconds.values()) / steps / 1e3:.1f} | |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Profile the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help="shape; the weights are random")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=64, help="rows of the file, one epoch")
    parser.add_argument("--top", type=int, default=25, help="operators that get a row")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks")
    options = parser.parse_args(arguments)
    work = prepare(options.folder, options.model, options.data, options.rows)
    job = Job(str(work.model), str(work.rows), 16, 1, "cpu", MAX_LENGTH)
    module = CausalLM(job.model, dtype="bfloat16", peft=LoraConfig(**job.lora))
    module.configure_model()
    first, *others = windows(job)
    pass_over(module, first)
    with profile(record_shapes=True) as profiled:
        for rows in others:
            pass_over(module, rows)
    shape = SHAPES[options.model]
    key_width = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"], key_width, job.lora["r"]}
    print(table(profiled.key_averages(group_by_input_shape=True), sizes, len(others), options.top))
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

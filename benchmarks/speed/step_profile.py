"""Profile of an optimizer step of lit_ft: time by purpose and by operator, and memory by purpose.

    python -m benchmarks.speed.step_profile --data huanhuan.json
    python -m benchmarks.speed.step_profile --device cuda --shape qwen2.5-7b --row-tokens 4096 --rows 8 --all-linear
    python -m benchmarks.speed.step_profile --device cpu --shape tiny --row-tokens 64 --rows 8

Forward and backward passes over rows of a data set, 16 samples per step, or over random rows of one length, one per
step, under torch's profiler; means over all steps but the first two. On CUDA times are those of kernels, by the
operator that launched them; on a CPU those of operators. ``N`` stands for dimensions that differ from step to step.
The optimizer, which updates small matrices, is left out.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from torch.autograd import DeviceType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import environment
from benchmarks.peers.bare_loop import windows
from benchmarks.peers.job import LORA, LORA_ALL_LINEAR, Job
from benchmarks.workload import MAX_LENGTH, SHAPES, prepare, write_random_rows
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm")
PURPOSES = ("products", "attention", "LoRA", "elementwise", "rest")
_ELEMENTWISE = (
    "aten::mul aten::mul_ aten::add aten::add_ aten::sub aten::div aten::neg aten::cat aten::copy_ aten::_to_copy "
    "aten::pow aten::mean aten::rsqrt aten::sum aten::silu aten::silu_ aten::silu_backward aten::sigmoid aten::exp"
).split()


def on_device(row: PackedBatch, device: str) -> Any:
    """A packed batch with its tensors on a device."""
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in row.items()}


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


def purpose_of(name: str, shapes: Iterable[list[int]], rank: int) -> str:
    """One of ``PURPOSES`` for an operator.

    Args:
        name: name of the operator; fused kernels of Inductor begin with ``triton_``.
        shapes: shapes of its tensors.
        rank: rank r of LoRA; products with a dimension of r, or of up to three adapters side by side, are LoRA's.
    """
    if name in PRODUCTS:
        return "LoRA" if {rank, 2 * rank, 3 * rank} & {n for shape in shapes for n in shape} else "products"
    if "attention" in name or "varlen" in name:
        return "attention"
    return "elementwise" if name in _ELEMENTWISE or name.startswith("triton_") else "rest"


class Times(NamedTuple):
    """Microseconds of all profiled steps."""

    operators: Counter[str]
    flops: Counter[str]
    """FLOPs of matrix products, by operator."""
    purposes: Counter[str]

    @property
    def total(self) -> int:
        """Microseconds of all operators, or of all kernels."""
        return sum(self.purposes.values())


def times_of(events: Any, sizes: set[int], rank: int, device: str) -> Times:
    """Times by operator and by purpose.

    Args:
        events: ``key_averages(group_by_input_shape=True)``.
        sizes: dimensions that matrix products are told apart by.
        rank: rank of LoRA.
        device: ``cpu`` or ``cuda``.
    """
    found = Times(Counter(), Counter(), Counter())
    kernels = 0
    for event in events:
        if event.device_type != DeviceType.CPU:  # a kernel, which the operator that launched it has as its own time
            # A region of compiled code is an event too, beside the kernels in it.
            kernels += 0 if event.is_user_annotation else event.self_device_time_total
            continue
        microseconds = event.self_device_time_total if device == "cuda" else event.self_cpu_time_total
        name = event.key
        if name in ("aten::mm", "aten::addmm", "aten::addmm_"):
            matrices = event.input_shapes[0 if name == "aten::mm" else 1 :]  # the first of addmm's is added
            dimensions, work = product(sizes, matrices)
            name = f"{name} {dimensions}"
            found.flops[name] += work * event.count
        found.operators[name] += microseconds
        found.purposes[purpose_of(event.key, event.input_shapes, rank)] += microseconds
    if device == "cuda":  # what no operator launched
        found.purposes["rest"] += max(kernels - found.total, 0)
    return found


@contextmanager
def saved_storages(module: torch.nn.Module) -> Iterator[dict[int, int]]:
    """Context that yields the bytes of each storage that autograd keeps for the backward pass, without the weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield storages


def memory_of(module: CausalLM, row: PackedBatch, device: str) -> dict[str, int]:
    """Bytes by purpose of one forward and backward pass; on CUDA also the allocator's peak."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with saved_storages(module) as saved:
        loss = module(row).loss_sum
    loss.backward()
    trains = list(module.trainable_parameters().values())
    found = {
        "frozen weights": sum(p.nbytes for p in module.parameters() if not p.requires_grad),
        "trained weights": sum(p.nbytes for p in trains),
        "gradients": sum(p.grad.nbytes for p in trains if p.grad is not None),
        "kept for the backward pass": sum(saved.values()),
    }
    if device == "cuda":
        found["peak of the pass"] = torch.cuda.max_memory_allocated()
    return found


def summary(times: Times, seconds: float, steps: int) -> str:
    """Markdown table of times by purpose, with the share of the wall clock in which nothing ran.

    Args:
        times: times of the profiled steps.
        seconds: wall clock of as many steps without the profiler.
        steps: number of steps.
    """
    wall = seconds * 1e6
    lines = ["| purpose | ms a step | share of the wall clock |", "|---|---|---|"]
    rows = [(name, times.purposes[name]) for name in PURPOSES]
    for name, microseconds in [*rows, ("idle", max(wall - times.total, 0)), ("wall clock", wall)]:
        lines.append(f"| {name} | {microseconds / steps / 1e3:.2f} | {microseconds / wall:.1%} |")
    return "\n".join(lines)


def table(times: Times, steps: int, top: int) -> str:
    """Markdown table of the slowest operators, with one row for the rest."""
    microseconds, flops = times.operators, times.flops
    lines = ["| operator | ms a step | GFLOP/s |", "|---|---|---|"]
    for name, time_spent in microseconds.most_common(top):
        rate = f"{flops[name] / time_spent / 1e3:.0f}" if name in flops and time_spent else ""
        lines.append(f"| {name} | {time_spent / steps / 1e3:.1f} | {rate} |")
    products = sum(microseconds[name] for name in flops)
    lines.append(f"| all products | {products / steps / 1e3:.1f} | {sum(flops.values()) / products / 1e3:.0f} |")
    lines.append(f"| all | {sum(microseconds.values()) / steps / 1e3:.1f} | |")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", "--model", choices=SHAPES, default="qwen2.5-0.5b", help="the weights are random")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=64, help="rows of the file, or random rows: one epoch")
    parser.add_argument("--row-tokens", type=int, help="tokens of random rows, one a step, in place of the file's")
    parser.add_argument(
        "--all-linear", action="store_true", help="LoRA, r=16, on all linear layers, not r=8 on q and v"
    )
    parser.add_argument("--compile", action="store_true", help="compile the layers")
    parser.add_argument("--top", type=int, default=25, help="operators that get a row")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks")
    return parser.parse_args(arguments)


def job_of(options: argparse.Namespace) -> Job:
    """Write model and rows."""
    random_rows = options.row_tokens is not None
    # A model is always written with the tokenizer of the data, of which random rows take one row.
    work = prepare(options.folder, options.shape, options.data, 1 if random_rows else options.rows, options.device)
    rows = write_random_rows(work.model, options.rows, options.row_tokens) if random_rows else work.rows
    lora = LORA_ALL_LINEAR if options.all_linear else LORA
    length = options.row_tokens or MAX_LENGTH
    return Job(str(work.model), str(rows), 1 if random_rows else 16, 1, options.device, length, lora=lora)


def timed(module: CausalLM, steps: list[list[PackedBatch]], device: str) -> float:
    """Seconds of the wall clock for all steps."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for rows in steps:
        pass_over(module, rows)
    wait()
    return time.perf_counter() - started


def main(arguments: list[str] | None = None) -> None:
    """Profile the steps and print the tables."""
    options = parse(arguments)
    job, device = job_of(options), options.device
    module = CausalLM(job.model, dtype="bfloat16", peft=LoraConfig(**job.lora), compile=options.compile)
    with torch.device(device):
        module.configure_model()
    module.to(device)
    steps = [[on_device(row, device) for row in rows] for rows in windows(job)]
    timed(module, steps[:2], device)  # warm-up
    steps = steps[2:] or steps
    print("| memory | MiB |\n|---|---|")
    for name, size in memory_of(module, steps[0][0], device).items():
        print(f"| {name} | {size / 2**20:,.1f} |", flush=True)
    seconds = timed(module, steps, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities, record_shapes=True) as profiled:
        timed(module, steps, device)
    shape, rank = SHAPES[options.shape], job.lora["r"]
    key_width = shape["hidden_size"] // shape["num_attention_heads"] * shape["num_key_value_heads"]
    sizes = {shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"], key_width, rank}
    times = times_of(profiled.key_averages(group_by_input_shape=True), sizes, rank, device)
    print(f"\n{summary(times, seconds, len(steps))}\n\n{table(times, len(steps), options.top)}")
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

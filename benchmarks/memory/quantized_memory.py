"""Bytes of a quantized base model's weights, and the peak memory of loading it. Linux only.

    python -m benchmarks.memory.quantized_memory

Each base model is loaded in its own process. Weights are random: the bytes depend on the shape only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.compare import environment
from benchmarks.workload import SHAPES

MIB = 2**20
BASES: dict[str, dict[str, Any] | None] = {
    "bf16 (as fp16)": None,
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4, double quantization": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}


def write_checkpoint(folder: Path, shape: str) -> None:
    """Write a checkpoint with random weights in bf16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    config = Qwen2Config(**SHAPES[shape], tie_word_embeddings=True, dtype="bfloat16")
    Qwen2ForCausalLM(config).save_pretrained(folder)


def tensors(module: Any) -> Iterator[Any]:
    """Parameters and buffers of a module, and the quantization state of bitsandbytes."""
    import torch

    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        yield tensor
        beside = [getattr(tensor, "SCB", None), getattr(tensor, "quant_state", None)]
        while beside:
            part = beside.pop()
            if isinstance(part, torch.Tensor):
                yield part
            elif part is not None:
                beside += [part.absmax, part.code, part.offset, part.state2]


def resident(field: str) -> float:
    """Resident MiB of this process: anonymous (``RssAnon``), of files (``RssFile``), or peak of both (``VmHWM``)."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) / 1024


def measure(folder: str, base: str) -> dict[str, float]:
    """Load one base model in this process.

    Returns:
        MiB of the linear layers without the head, of all weights, and of the peak memory of loading without pages of
        mapped files, which the system may drop at any time.
    """
    import bitsandbytes  # noqa: F401  (its own memory is not the base's)
    from transformers import BitsAndBytesConfig

    from lit_ft.model.loading import load_base
    from lit_ft.model.quantization import linear_modules

    options = BASES[base]
    quantization = BitsAndBytesConfig(**options) if options is not None else None
    before = resident("RssAnon")
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    model = load_base(folder, quantization=quantization)
    peak = resident("VmHWM") - resident("RssFile")

    def mib(modules: Any) -> float:
        held = {tensor.data_ptr(): tensor.nbytes for module in modules for tensor in tensors(module)}
        return sum(held.values()) / MIB

    linear, weights = mib(linear_modules(model).values()), mib(model.modules())
    return {"linear": linear, "weights": weights, "reading": peak - before}


def main() -> None:
    """Measure each base model and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--one", nargs=2, metavar=("FOLDER", "BASE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), options.shape)
        # Return large freed blocks to the system; else the peak depends on the fragmentation of malloc's heap.
        environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MIB)}
        for base in BASES:
            command = [sys.executable, "-m", "benchmarks.memory.quantized_memory", "--one", folder, base]
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ)
            found[base] = json.loads(done.stdout.splitlines()[-1])
    dense = found[next(iter(BASES))]
    print("| base | linear layers | ratio | all weights | ratio | own memory while read, at most |")
    print(f"|{'---|' * 6}")
    for base, size in found.items():
        ratios = {part: f"{size[part] / dense[part]:.3f}" for part in ("linear", "weights")}
        print(
            f"| {base} | {size['linear']:.1f} MiB | {ratios['linear']} | {size['weights']:.1f} MiB | "
            f"{ratios['weights']} | {size['reading']:.0f} MiB |"
        )
    print(f"\n{environment()}, bitsandbytes {version('bitsandbytes')}")


if __name__ == "__main__":
    main()

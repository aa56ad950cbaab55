"""Peak memory and time of conversions between Hugging Face and Megatron, of a model with random weights.

    python -m benchmarks.memory.megatron_conversion --layers 24

Each conversion is a process of its own (``python -m lit_ft convert model``); its peak is the kernel's ``ru_maxrss``,
mapped files included. The shape is Qwen2.5-0.5B's: 494 million parameters in bf16 with 24 layers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config

from benchmarks.workload import SHAPES, train_tokenizer
from lit_ft.megatron.formats.hugging_face import TensorInfo, plan_files, write_file
from lit_ft.megatron.shape import ModelShape

GIB = 2**30


def write_model(folder: Path, layers: int) -> float:
    """Write a model of Qwen2.5-0.5B's shape, a tensor at a time; returns the GiB of its weights."""
    config = Qwen2Config(
        **{**SHAPES["qwen2.5-0.5b"], "num_hidden_layers": layers},
        max_position_embeddings=32768,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    train_tokenizer(["the quick brown fox"] * 4, vocab_size=320).save_pretrained(folder)
    shape = ModelShape.of(config, str(folder))
    parts = [(key, part) for key in shape.all_keys() for part in key.weight.parts]
    tensors = [TensorInfo(key.hugging_face(part), shape.shape_of(part), torch.bfloat16) for key, part in parts]
    shapes = {tensor.name: tensor.shape for tensor in tensors}

    def draw(name: str) -> Tensor:
        return torch.randn(shapes[name], dtype=torch.bfloat16) * 0.02

    for file in plan_files(tensors):
        write_file(folder / file.name, file.tensors, draw)
    return sum(tensor.bytes for tensor in tensors) / GIB


def measure(*arguments: str) -> tuple[float, float]:
    """Peak memory in GiB and seconds of a conversion."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "lit_ft", "convert", "model", *arguments, "--verify", "reduced"]
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"the conversion ended with {os.waitstatus_to_exitcode(status)}: {' '.join(arguments)}")
    return usage.ru_maxrss * 1024 / GIB, time.perf_counter() - began


def main() -> None:
    """Convert there and back in both formats, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    layers = parser.parse_args().layers
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        size = write_model(model, layers)
        for format, layout in (("torch_dist", []), ("torch", []), ("torch", ["--tensor_parallel", "2"])):
            out, back = folder / "ckpt", folder / "back"
            to = ["--from", "hf", "--to", "megatron", str(model), "--out", str(out), "--format", format, *layout]
            there = measure(*to)
            again = measure("--from", "megatron", "--to", "hf", str(out), "--like", str(model), "--out", str(back))
            title = f"{format} {' '.join(layout)}".strip()
            rows += [(f"hf -> {title}", *there), (f"{title} -> hf", *again)]
            for path in (out, back):
                subprocess.run(["rm", "-r", path], check=True)
    print(f"\nweights: {size:.2f} GiB\n\n| conversion | peak, GiB | seconds |\n|---|---|---|")
    for title, peak, seconds in rows:
        print(f"| {title} | {peak:.2f} | {seconds:.0f} |")


if __name__ == "__main__":
    main()

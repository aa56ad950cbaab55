"""Time and kept activations of LoRA's forward and backward passes, with `model.fused_lora` and as PEFT computes them.

    python -m benchmarks.speed.fused_lora --data huanhuan.json
    python -m benchmarks.speed.fused_lora --data huanhuan.json --nf4

Packed batches of benchmarks.compare's workload, bf16 or NF4 base, adapter in fp32. Both ways take turns on every batch,
with the same weights. Times are processor time of the process, which other work on the machine changes less. Kept are
the tensors that autograd saves for the backward pass, each storage once, without the model's weights.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

from benchmarks.compare import environment
from benchmarks.peers.bare_loop import windows
from benchmarks.peers.job import Job
from benchmarks.speed.step_profile import pass_over, saved_storages
from benchmarks.workload import MAX_LENGTH, SHAPES, prepare
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch
from lit_ft.tuning.lora.fused_lora import fused_classes

WAYS = {"PEFT": False, "fused_lora": True}
"""Whether ``model.fused_lora`` computes, by the name of the way."""


def let_compute(module: nn.Module, way: str) -> None:
    """Let one of ``WAYS`` compute the module's plain LoRA layers."""
    for layer in module.modules():
        for plain, fused in fused_classes().items():
            if type(layer) in (plain, fused):
                layer.__class__ = fused if WAYS[way] else plain


def kept_gib(module: CausalLM, batch: PackedBatch) -> float:
    """Size in GiB of what autograd keeps of a forward pass over a packed batch."""
    with saved_storages(module) as storages:
        loss = module(batch).loss_sum
    del loss
    return sum(storages.values()) / 2**30


def nf4(dtype: str) -> BitsAndBytesConfig:
    """NF4, with products in a dtype."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def main(arguments: list[str] | None = None) -> None:
    """Measure both ways for two choices of target modules, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-0.5b", help="shape; the weights are random")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--rows", type=int, default=96, help="rows of the file, 16 in a batch")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of the base's weights")
    parser.add_argument("--nf4", action="store_true", help="quantize the base's linear layers")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks")
    options = parser.parse_args(arguments)
    work = prepare(options.folder, options.model, options.data, options.rows)
    job = Job(str(work.model), str(work.rows), 16, 1, "cpu", MAX_LENGTH)
    quantization = nf4(options.dtype) if options.nf4 else None
    print("| adapter on | computed by | ms a step | tokens/s | speed in the same step (least to most) | kept, GiB |")
    print("|---|---|---|---|---|---|")
    for targets in (["q_proj", "v_proj"], "all-linear"):
        peft = LoraConfig(**{**job.lora, "target_modules": targets})
        module = CausalLM(job.model, dtype=options.dtype, peft=peft, quantization=quantization)
        module.configure_model()
        module.train()
        seconds: dict[str, list[float]] = {way: [] for way in WAYS}
        first, *others = windows(job)
        tokens = sum(batch["input_ids"].numel() for step in others for batch in step) / len(others)
        for step in (first, *others):
            for way in WAYS:
                let_compute(module, way)
                started = time.process_time()
                pass_over(module, step)
                seconds[way].append(time.process_time() - started)
        for way, times in seconds.items():
            let_compute(module, way)
            kept = kept_gib(module, first[0])
            mean = statistics.mean(times[1:])
            speeds = [before / now for before, now in zip(seconds["PEFT"][1:], times[1:], strict=True)]
            spread = f"{statistics.median(speeds):.2f}x ({min(speeds):.2f} to {max(speeds):.2f})"
            name = targets if isinstance(targets, str) else ", ".join(targets)
            print(f"| {name} | {way} | {mean * 1e3:,.0f} | {tokens / mean:,.0f} | {spread} | {kept:.3f} |")
    base = f"{options.dtype} base" + ", NF4" * options.nf4
    print(f"\n{environment()}; {torch.get_num_threads()} threads, {base}, r={job.lora['r']}")


if __name__ == "__main__":
    main()

"""Time of training passes over packed batches whose mixers run sample by sample, and over batches of one sample each.

    python -m benchmarks.speed.token_mixers

A Qwen3.5 with three gated delta nets and one attention layer, random weights, the same tokens in both ways: one packed
batch of all samples, or one batch for each. Times are processor time of the process, which other work changes less.
"""

import statistics
import tempfile
import time

import numpy as np
import torch

from benchmarks.compare import environment
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch, pack_samples

WIDTH = {"hidden_size": 512, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 8}
SAMPLES, LENGTHS = 8, (32, 64, 128)


def seconds(module: CausalLM, batches: list[PackedBatch]) -> float:
    """Processor time of a forward and backward pass over batches."""
    started = time.process_time()
    for batch in batches:
        module(batch).loss_sum.backward()
    return time.process_time() - started


def main(rounds: int = 3) -> None:
    """Measure both ways in turns, and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_config("qwen3_5_text", **WIDTH).save_pretrained(folder)
        module = CausalLM(folder, init="random", dtype="float32")
        module.configure_model()
    generator = np.random.default_rng(0)
    print(environment())
    print("| tokens of a sample | one packed batch, s | one batch for each sample, s | ratio |\n|---|---|---|---|")
    for length in LENGTHS:
        ids = [generator.integers(0, 512, length) for _ in range(SAMPLES)]
        packed, apart = [pack_samples([(one, one) for one in ids])], [pack_samples([(one, one)]) for one in ids]
        torch.manual_seed(0)
        seconds(module, packed)
        times = [(seconds(module, packed), seconds(module, apart)) for _ in range(rounds)]
        in_one, in_each = (statistics.median(of) for of in zip(*times, strict=True))
        print(f"| {length} | {in_one:.2f} | {in_each:.2f} | {in_each / in_one:.2f} |")


if __name__ == "__main__":
    main()

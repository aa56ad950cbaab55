"""Time of a step over samples that share first tokens: where these are computed once, and for each sample.

    python -m benchmarks.speed.shared_prefixes --shape 0.1b
    python -m benchmarks.speed.shared_prefixes --shape 0.1b --dtype bfloat16

All weights of a model of random numbers train, without an optimizer: a forward and a backward pass. The samples are
``answers`` to one prompt, as the two of a preference pair, or those that a model gives in policy optimization. Time is
that of the processor on a CPU, of the clock on a GPU; medians of several steps.
"""

import argparse
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.compare import environment
from benchmarks.workload import SHAPES
from lit_ft.model.loading import PACKED
from lit_ft.packed_batch import IGNORE_INDEX, PackedBatch, pack_samples
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.spec import prepare_for_packed_batches

CASES = ((2, 50, 150), (2, 100, 100), (2, 300, 100), (8, 30, 70), (8, 100, 100), (8, 400, 100))
"""Answers to a prompt, tokens of the prompt, and of each answer."""
REPEATS = 5


def batch_of(answers: int, prompt: int, answer: int, vocabulary: int) -> PackedBatch:
    """Answers to one prompt, all of random tokens; the prompt is not supervised."""
    generator = np.random.default_rng(0)
    asked, samples = generator.integers(5, vocabulary, prompt), []
    for _ in range(answers):
        ids = np.concatenate([asked, generator.integers(5, vocabulary, answer)])
        samples.append((ids, np.where(np.arange(len(ids)) < prompt, IGNORE_INDEX, ids)))
    return pack_samples(samples)


def seconds(forward: PackedForward, batch: PackedBatch) -> float:
    """Median time of a forward and a backward pass."""
    is_cuda, times = batch["input_ids"].is_cuda, []
    clock = time.perf_counter if is_cuda else time.process_time
    for _ in range(REPEATS):
        forward.model.zero_grad()
        started = clock()
        forward(batch).loss_sum.backward()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(clock() - started)
    return sorted(times)[REPEATS // 2]


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.1b", choices=SHAPES)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen2", **SHAPES[options.shape])
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=dtype).to(options.device)
    prepare_for_packed_batches(model)
    forward = PackedForward(model)
    print("| answers | prompt | answer | tokens that are computed | s for each sample | s once | time |")
    print("|---|---|---|---|---|---|---|")
    for answers, prompt, answer in CASES:
        batch = batch_of(answers, prompt, answer, config.vocab_size)
        for name in ("input_ids", "position_ids", "predict_at", "targets"):
            batch[name] = batch[name].to(options.device)
        own, tokens = sum(batch["shared_prefixes"].own_lengths), batch["input_ids"].numel()
        once = seconds(forward, batch)
        batch.pop("shared_prefixes")
        each = seconds(forward, batch)
        cells = f"{own:,} of {tokens:,} | {each:.3f} | {once:.3f} | {once / each:.2f}"
        print(f"| {answers} | {prompt} | {answer} | {cells} |", flush=True)
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

"""Benchmarks for a GPU: TFLOP/s on a 7B shape, small models, long rows, quantized base models.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --measure small --data huanhuan.json --all --rounds 3 --minutes 60
    python -m benchmarks.gpu --shape tiny --device cpu --measure nf4

Ends within ten minutes (``--minutes``), with a row printed as soon as it is known; what there was no time for is said.
By default it has the contestants that the targets name; ``--all`` adds lit_ft's and the peers' other settings. Each
imports its packages while the one before it runs.
Peers run with this interpreter, or in environments of their own:

    python -m benchmarks.peers.environments --root ENVIRONMENTS --cuda transformers trl
    python -m benchmarks.gpu --environments ENVIRONMENTS

Weights are random. Rows of a given length are random tokens, all supervised, each row one sample, so that every
contestant does the same work. TFLOP/s by 4N: 4 FLOPs per frozen weight and token, for the head per supervised token
only; those with attention add 6 x layers x width x length^2 for each row (two causal products forward, four backward).
Adapters are not counted. The peak is that of the model's own products, with weights from memory, measured in the same
run. Loss differences are those of all steps, timed or not. ``--shape tiny`` uses a tiny model and short rows in all
measurements, to try the script.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.compare import environment, loss_difference
from benchmarks.contestants import Contestant, contestants
from benchmarks.peers.job import LORA, LORA_ALL_LINEAR, Job
from benchmarks.processes import ContestantProcess, Run, run_peak
from benchmarks.workload import SHAPES, head_weights, layer_weights, prepare, texts_of, write_model, write_random_rows

NF4 = json.dumps(
    {
        "class_path": "transformers.BitsAndBytesConfig",
        "init_args": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"},
    }
)

OWN = [
    Contestant(
        "lit_ft_liger", "lit_ft, Liger's kernels", "lit_ft_command", None, {"arguments": ["--model.liger=true"]}
    ),
    Contestant(
        "lit_ft_nf4",
        "lit_ft, NF4 base",
        "lit_ft_command",
        None,
        {"arguments": [f"--model.quantization={NF4}"]},
    ),
    Contestant(
        "lit_ft_nf4_checkpointing",
        "lit_ft, NF4 base, activation checkpointing",
        "lit_ft_command",
        None,
        {"arguments": [f"--model.quantization={NF4}", "--model.gradient_checkpointing=true"]},
    ),
    Contestant(
        "lit_ft_nf4_compiled",
        "lit_ft, NF4 base, compiled",
        "lit_ft_command",
        None,
        {"arguments": [f"--model.quantization={NF4}", "--model.compile=true"]},
    ),
    Contestant(
        "lit_ft_graphs",
        "lit_ft, CUDA graphs, rows padded to multiples of 256 tokens",
        "lit_ft_command",
        None,
        {"arguments": ["--model.cuda_graphs=true", "--model.pad_rows_to=256"]},
    ),
    Contestant(
        "lit_ft_compiled_graphs",
        "lit_ft, compiled, CUDA graphs, rows padded to multiples of 256 tokens",
        "lit_ft_command",
        None,
        {"arguments": ["--model.compile=true", "--model.cuda_graphs=true", "--model.pad_rows_to=256"]},
    ),
]
"""Contestants that are not in ``benchmarks.compare``."""


class Measurement(NamedTuple):
    """One measurement, printed as a table."""

    title: str
    target: str
    shape: str
    """Key of ``SHAPES``."""
    row_tokens: int | None
    """Tokens of each random row; None takes the rows of the data."""
    rows: int
    keys: Sequence[str]
    """Keys of the contestants that its target names."""
    more: Sequence[str] = ()
    """Keys of those that ``--all`` adds."""
    lora: dict[str, Any] = LORA
    """Arguments of ``peft.LoraConfig``."""
    micro_batch_size: int = 1
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    warm_up: int = 1
    """Optimizer steps that are not timed."""
    has_peak: bool = False
    """Whether the peak of the model's products is measured too."""

    @property
    def samples(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch_size * self.accumulate


MEASUREMENTS = {
    "nf4": Measurement(
        "Qwen2.5-7B shape, NF4 base beside a bf16 one, 4 rows of 4,096 tokens a step",
        target="NF4 within 1.3x of bf16's step time; 12 GiB",
        shape="qwen2.5-7b",
        row_tokens=4096,
        rows=8,
        accumulate=4,
        lora=LORA_ALL_LINEAR,
        keys=["lit_ft", "lit_ft_nf4", "lit_ft_nf4_checkpointing"],
    ),
    "long": Measurement(
        "Qwen2.5-0.5B shape, rows of 16,384 tokens",
        target="under 0.5x transformers.Trainer's peak memory",
        shape="qwen2.5-0.5b",
        row_tokens=16_384,
        rows=6,
        keys=["lit_ft", "trainer_bf16"],
    ),
    "small": Measurement(
        "Qwen2.5-0.5B shape on the data, 16 samples a step",
        target="40,000 tokens/s, 4x transformers.Trainer's default",
        shape="qwen2.5-0.5b",
        row_tokens=None,
        rows=1920,
        micro_batch_size=16,
        warm_up=60,  # CUDA graphs are recorded in them
        keys=["lit_ft_graphs", "trainer"],
        more=["lit_ft_compiled_graphs", "lit_ft", "lit_ft_compiled", "trainer_best", "trl_best"],
    ),
    "7b": Measurement(
        "Qwen2.5-7B shape, LoRA r=16 on all linears, 4 rows of 4,096 tokens a step",
        target="17,700 tokens/s, 500 TFLOP/s (4N), 1.5x transformers.Trainer + PEFT, 1.25x TRL + Liger",
        shape="qwen2.5-7b",
        row_tokens=4096,
        rows=16,
        accumulate=4,
        lora=LORA_ALL_LINEAR,
        warm_up=2,
        keys=["lit_ft_compiled", "trainer_bf16", "trl_best"],
        more=["lit_ft_compiled_graphs", "lit_ft", "lit_ft_liger"],
        has_peak=True,
    ),
}


class Steps(NamedTuple):
    """Tokens and model FLOPs of the optimizer steps that are timed, and how many they are."""

    steps: int
    tokens: int
    supervised: int
    flops: int
    """By the 4N formula."""
    attention_flops: int


def steps_of(shape: dict[str, int], lengths: Sequence[tuple[int, int]], samples: int, warm_up: int) -> Steps:
    """Work of the steps that are timed.

    Args:
        shape: config values of the model.
        lengths: tokens and supervised tokens of each row.
        samples: rows of an optimizer step.
        warm_up: steps that are not timed.
    """
    timed = lengths[samples * warm_up :]
    tokens, supervised = (sum(numbers) for numbers in zip(*timed, strict=True))
    weights = layer_weights(shape) * tokens + head_weights(shape) * supervised
    squares = sum(length**2 for length, _ in timed)
    attention = 6 * shape["num_hidden_layers"] * shape["hidden_size"] * squares
    return Steps(-(-len(timed) // samples), tokens, supervised, 4 * weights, attention)


class Benchmark:
    """One measurement: its files, and the runs of its contestants."""

    def __init__(self, measurement: Measurement, options: argparse.Namespace, deadline: float) -> None:
        """Write the files.

        Args:
            measurement: what to measure.
            options: options of the command line.
            deadline: ``time.monotonic()`` after which no run starts, and at which a run is ended.
        """
        if options.shape is not None:
            measurement = measurement._replace(
                title=f"With a tiny model and short rows: {measurement.title}",
                shape=options.shape,
                row_tokens=measurement.row_tokens and 64,
                rows=min(measurement.rows, 6 * measurement.samples),
                warm_up=1,
            )
        if options.rows is not None:
            measurement = measurement._replace(rows=options.rows)
        if (size := options.micro_batch_size) is not None:
            if measurement.samples % size:
                sys.exit(f"--micro-batch-size {size}: {options.measure} has {measurement.samples} samples a step")
            measurement = measurement._replace(micro_batch_size=size, accumulate=measurement.samples // size)
        self.measurement, self.options, self.deadline = measurement, options, deadline
        self.shape = SHAPES[measurement.shape]
        self.chosen = self._contestants()
        # The last round is in order, so that the first contestant, which others are compared with, is complete.
        rounds = [(number, number % 2 == 0) for number in reversed(range(options.rounds))]
        self.order = [(number, one) for number, is_even in rounds for one in self.chosen[:: 1 if is_even else -1]]
        self.started = self._start(self.order[0][1])
        model, rows, lengths = self._files()
        self.lengths = lengths
        self.steps = steps_of(self.shape, lengths, measurement.samples, measurement.warm_up)
        self.job = Job(
            model=str(model),
            rows=str(rows),
            micro_batch_size=measurement.micro_batch_size,
            accumulate=measurement.accumulate,
            device=options.device,
            max_length=max(tokens for tokens, _ in lengths),
            lora=measurement.lora,
        )
        self.runs: dict[str, list[Run]] = {one.key: [] for one in self.chosen}

    def _contestants(self) -> list[Contestant]:
        measurement, options = self.measurement, self.options
        everyone = [
            *contestants(options.device, row_tokens=measurement.row_tokens or 0, attention=options.attention),
            *OWN,
        ]
        (best,) = (one for one in everyone if one.key == "trl_best")
        name, options_of_rows = best.name.replace(" padding-free,", ""), {**best.options, "padding_free": False}
        everyone.append(best._replace(key="trl_rows", name=name, options=options_of_rows))
        keys = [*measurement.keys, *measurement.more] if options.all else measurement.keys
        keys = options.only.split(",") if options.only else keys
        if unknown := sorted({*keys} - {one.key for one in everyone}):
            sys.exit(f"--only {unknown}: there are {', '.join(one.key for one in everyone)}")
        return [one for key in keys for one in everyone if one.key == key]

    def _files(self) -> tuple[Path, Path, list[tuple[int, int]]]:
        """Folder of the model, file of rows, and the rows' tokens and supervised tokens."""
        measurement, options = self.measurement, self.options
        if measurement.row_tokens is None:
            work = prepare(options.folder, measurement.shape, options.data, measurement.rows, options.device)
            return work.model, work.rows, work.lengths
        model = options.folder / f"{measurement.shape}-{Path(options.data).stem}"  # that of benchmarks.workload.prepare
        texts = texts_of(json.loads(Path(options.data).read_text(encoding="utf-8")))
        write_model(model, self.shape, texts, options.device)
        lengths = [(measurement.row_tokens, measurement.row_tokens - 1)] * measurement.rows
        return model, write_random_rows(model, measurement.rows, measurement.row_tokens), lengths

    def run(self) -> None:
        """Measure, and print the peak and each contestant's row as soon as it is known."""
        print(f"{self.measurement.title} (target: {self.measurement.target})\n")
        if self.measurement.has_peak and not self.options.only:
            print(f"{self.peak()}\n")
        print(HEADER, flush=True)
        for (number, one), following in zip_longest(self.order, self.order[1:]):
            process, self.started = self.started, self._start(following[1]) if following else None
            self.runs[one.key].append(self._run_once(one, process))
            if number == 0:
                print(self.row(one), flush=True)
        print(flush=True)

    def _start(self, one: Contestant) -> ContestantProcess | None:
        """Start a contestant's process, which waits for its job; None if no time is left."""
        if time.monotonic() > self.deadline:
            return None
        return ContestantProcess(one, self.options.environments, self.options.folder / f"{one.key}.txt")

    def _run_once(self, one: Contestant, process: ContestantProcess | None) -> Run:
        seconds = self.deadline - time.monotonic()
        if process is None or seconds <= 0:
            if process is not None:
                process.end()
            return {"error": f"no time left (--minutes {self.options.minutes:g})"}
        print(f"{one.key} ...", file=sys.stderr, flush=True)
        return process.run(self.job, seconds)

    def peak(self) -> str:
        """Sustained rate of the model's products, at the tokens of a micro-batch."""
        steps, passes = self.steps, self.steps.steps * self.measurement.accumulate
        asked: dict[str, Any] = {"shape": self.measurement.shape, "device": self.options.device, "seconds": 0.05}
        asked |= {"tokens": steps.tokens // passes, "supervised": max(steps.supervised // passes, 1)}
        seconds = max(self.deadline - time.monotonic(), 1)
        result = run_peak(asked, self.options.folder / "matrix_peak.txt", seconds)
        if "error" in result:
            return f"Peak of the products: {result['error']}"
        rates = (result[name] / 1e12 for name in ("streamed_flops_per_second", "flops_per_second"))
        return "Peak of the products: {:.3g} TFLOP/s with weights from memory, {:.3g} each by itself".format(*rates)

    def row(self, one: Contestant) -> str:
        """Markdown row of medians; the ratios are relative to the first contestant that ran."""
        if failed := [run["error"] for run in self.runs[one.key] if "error" in run]:
            return f"| {one.name} | did not run: {failed[0]} | | | | | | | |"
        runs, steps, before = self.runs[one.key], self.steps, self.measurement.warm_up - 1
        first = next(of for of in self.runs.values() if of and not any("error" in run for run in of))
        seconds, own = (statistics.median(run["ends"][-1] - run["ends"][before] for run in of) for of in (runs, first))
        memory, least = (statistics.median(run["peak_memory_bytes"] for run in of) for of in (runs, first))
        return (
            f"| {one.name} | {seconds / steps.steps * 1e3:.1f} | {steps.tokens / seconds:.0f} "
            f"| {steps.flops / seconds / 1e12:.3g} | {(steps.flops + steps.attention_flops) / seconds / 1e12:.3g} "
            f"| {seconds / own:.2f}x | {memory / 2**30:.2f} GiB | {memory / least:.2f}x "
            f"| {loss_difference(runs, first[0]['losses'])} |"
        )


HEADER = (
    "| trainer | ms a step | tokens/s | TFLOP/s (4N) | with attention | takes | peak memory | needs "
    "| loss differs by |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one of them; by default all")
    parser.add_argument("--only", help="keys of contestants, with commas, and no peak; by default those of the target")
    parser.add_argument("--all", action="store_true", help="all contestants of a measurement")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--shape", choices=SHAPES, help="in place of each measurement's own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rows", type=int, help="in place of each measurement's own number")
    parser.add_argument("--micro-batch-size", type=int, help="in place of each measurement's own; as many rows a step")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=9.5, help="time for all runs together")
    parser.add_argument("--attention", default="sdpa", help="attention of the peers' best settings on CUDA")
    folder = Path(tempfile.gettempdir()) / "lit_ft_benchmarks"
    parser.add_argument("--folder", type=Path, default=folder, help="where models and rows are kept")
    parser.add_argument("--environments", type=Path, help="folder of the peers'; by default they run with this Python")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Run the measurements and print tables."""
    options = parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    options.folder.mkdir(parents=True, exist_ok=True)
    print(f"{environment()}\n", flush=True)
    for name in [options.measure] if options.measure else MEASUREMENTS:
        Benchmark(MEASUREMENTS[name], options, deadline).run()


if __name__ == "__main__":
    main()

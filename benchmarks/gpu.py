"""Benchmarks for a GPU: TFLOP/s on a 7B shape, small models, long rows, quantized base models.

    python -m benchmarks.peers.environments --root ENVIRONMENTS --cuda transformers trl
    python -m benchmarks.gpu --data huanhuan.json --environments ENVIRONMENTS
    python -m benchmarks.gpu --shape tiny --device cpu --measure nf4

Weights are random. Rows of a given length are random tokens, all supervised, each row one sample, so that every
contestant does the same work. TFLOP/s follow the 4N count: 4 FLOPs per frozen weight and token, for the head per
supervised token only; attention and adapters are not counted. ``--shape tiny`` uses a tiny model and short rows in all
measurements, to try the script.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.compare import Run, environment, loss_difference, run_contestant
from benchmarks.contestants import Contestant, contestants
from benchmarks.peers.job import LORA, Job
from benchmarks.workload import SHAPES, head_weights, layer_weights, prepare, texts_of, write_model

SEVEN_B = {
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
}
"""Shape of Qwen/Qwen2.5-7B, whose output head is not tied."""

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

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
]
"""Contestants that are not in ``benchmarks.compare``."""


class Measurement(NamedTuple):
    """One measurement, printed as a table."""

    title: str
    target: str
    shape: dict[str, int]
    row_tokens: int | None
    """Tokens of each random row; None takes the rows of the data."""
    rows: int
    samples: int
    """Samples per optimizer step."""
    lora_targets: list[str]
    keys: list[str]
    """Keys of the contestants."""


MEASUREMENTS = {
    "7b": Measurement(
        "Qwen2.5-7B shape, LoRA on all linears, rows of 4,096 tokens",
        "500 TFLOP/s, 1.5x transformers.Trainer + PEFT, ahead of TRL + Liger",
        SEVEN_B,
        4096,
        24,
        1,
        ALL_LINEAR,
        ["lit_ft", "lit_ft_compiled", "lit_ft_liger", "trainer", "trainer_bf16", "trainer_best", "trl_best"],
    ),
    "small": Measurement(
        "Qwen2.5-0.5B shape on the data, 16 samples a step",
        "4x transformers.Trainer's default",
        SHAPES["qwen2.5-0.5b"],
        None,
        1024,
        16,
        LORA["target_modules"],
        ["lit_ft", "lit_ft_compiled", "lit_ft_liger", "bare", "trainer", "trainer_best", "trl_best"],
    ),
    "long": Measurement(
        "Qwen2.5-0.5B shape, rows of 16,384 tokens",
        "under 0.5x transformers.Trainer's peak memory",
        SHAPES["qwen2.5-0.5b"],
        16_384,
        8,
        1,
        LORA["target_modules"],
        ["lit_ft", "trainer", "trainer_bf16"],
    ),
    "nf4": Measurement(
        "Qwen2.5-7B shape, NF4 base beside a bf16 one, rows of 4,096 tokens",
        "NF4 within 1.3x of bf16's step time",
        SEVEN_B,
        4096,
        12,
        1,
        ALL_LINEAR,
        ["lit_ft", "lit_ft_nf4"],
    ),
}


def rows_of(measurement: Measurement, model: Path) -> Path:
    """Write a file of random rows for the model; returns its path."""
    vocabulary = json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    draw = random.Random(0)
    rows = [[draw.randrange(vocabulary) for _ in range(measurement.row_tokens or 0)] for _ in range(measurement.rows)]
    path = model.parent / f"{model.name}-{measurement.rows}x{measurement.row_tokens}.json"
    path.write_text(json.dumps([{"input_ids": ids, "labels": ids} for ids in rows]), encoding="utf-8")
    return path


def measure(measurement: Measurement, options: argparse.Namespace) -> str:
    """Run all contestants of a measurement in turn; returns a Markdown table."""
    if options.shape == "tiny":
        measurement = measurement._replace(
            title=f"With a tiny model and short rows: {measurement.title}",
            shape=SHAPES["tiny"],
            row_tokens=measurement.row_tokens and 64,
            rows=min(measurement.rows, 6 * measurement.samples),
        )
    data = json.loads(Path(options.data).read_text(encoding="utf-8"))
    if measurement.row_tokens is None:
        work = prepare(options.folder, options.shape or "qwen2.5-0.5b", options.data, measurement.rows)
        model, path, lengths = work.model, work.rows, work.lengths
    else:
        model = options.folder / f"{measurement.shape['num_hidden_layers']}x{measurement.shape['hidden_size']}"
        write_model(model, measurement.shape, texts_of(data), is_tied=measurement.shape is not SEVEN_B)
        path = rows_of(measurement, model)
        lengths = [(measurement.row_tokens, measurement.row_tokens - 1)] * measurement.rows
    everyone = [*contestants(options.device, row_tokens=measurement.row_tokens or 0), *OWN]
    chosen = [one for key in measurement.keys for one in everyone if one.key == key]
    job = Job(
        model=str(model),
        rows=str(path),
        micro_batch_size=measurement.samples,
        accumulate=1,
        device=options.device,
        max_length=max(tokens for tokens, _ in lengths),
        lora={**LORA, "target_modules": measurement.lora_targets},
    )
    runs: dict[str, list[Run]] = {one.key: [] for one in chosen}
    for number in range(options.rounds):
        for one in chosen if number % 2 == 0 else chosen[::-1]:
            runs[one.key].append(
                run_contestant(one, job, options.environments, options.folder / f"{one.key}.txt", options.limit)
            )
            print(f"round {number + 1}: {one.key}: {runs[one.key][-1].get('error', 'ran')}", file=sys.stderr)
    return f"{measurement.title} (target: {measurement.target})\n\n{table(measurement, chosen, runs, lengths)}\n"


def table(
    measurement: Measurement, chosen: list[Contestant], runs: dict[str, list[Run]], lengths: list[tuple[int, int]]
) -> str:
    """Markdown table of medians; the ratios are relative to the first contestant."""
    lines = [
        "| trainer | ms a step | tokens/s | TFLOP/s (4N) | takes | peak memory | needs | loss differs by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    timed, supervised = (sum(numbers) for numbers in zip(*lengths[measurement.samples :], strict=True))
    flops = 4 * (layer_weights(measurement.shape) * timed + head_weights(measurement.shape) * supervised)
    first: list[Run] = []
    for one in chosen:
        if failed := [run["error"] for run in runs[one.key] if "error" in run]:
            lines.append(f"| {one.name} | did not run: {failed[0]} | | | | | | |")
            continue
        first = first or runs[one.key]
        seconds, own = (statistics.median(r["ends"][-1] - r["ends"][0] for r in of) for of in (runs[one.key], first))
        memory, least = (statistics.median(r["peak_memory_bytes"] for r in of) for of in (runs[one.key], first))
        steps = len(first[0]["ends"]) - 1
        lines.append(
            f"| {one.name} | {seconds / steps * 1e3:.1f} | {timed / seconds:.0f} "
            f"| {flops / seconds / 1e12:.3g} | {seconds / own:.2f}x | {memory / 2**30:.2f} GiB "
            f"| {memory / least:.2f}x | {loss_difference(runs[one.key], first[0]['losses'])} |"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the measurements and print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one of them; by default all")
    parser.add_argument("--data", default="recipes/data/quickstart_train.json", help="alpaca-style JSON file")
    parser.add_argument("--shape", choices=["tiny"], help="in place of each measurement's own")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds that a run may take")
    folder = Path(tempfile.gettempdir()) / "lit_ft_benchmarks"
    parser.add_argument("--folder", type=Path, default=folder, help="where models and rows are kept")
    parser.add_argument("--environments", type=Path, default=folder / "environments", help="folder of the peers'")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in [options.measure] if options.measure else MEASUREMENTS:
        print(measure(MEASUREMENTS[name], options), flush=True)
    print(environment())


if __name__ == "__main__":
    main()

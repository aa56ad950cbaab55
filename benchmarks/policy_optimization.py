"""Policy optimization beside TRL's GRPOTrainer: what a step takes in time and memory, and that both learn.

    python -m benchmarks.peers.environments --root ENVIRONMENTS trl
    python -m benchmarks.policy_optimization --environments ENVIRONMENTS --shape 0.1b --rounds 3

GRPO of all weights (with ``--lora``: of one adapter on all linear layers) in float32, on the prompts of alpaca-style
rows: several answers to each, drawn at temperature 1 from the whole vocabulary, a reward of their text, no term of a
reference, one step for each set of answers. Random weights nearly never end an answer, so that almost all have
``--new-tokens``. Time is that from the beginning of training to the end of the last step; each contestant runs in its
own process, in alternating order, and medians are printed. The trainers draw other numbers, so that their answers and
losses differ; mean rewards of the first and of the last quarter of the steps show that both learn. On a machine that
others use, run it with ``OMP_NUM_THREADS=1``: the seconds of the processor that the process itself has worked depend
less on them.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.beside_trl import (
    chosen_of,
    error_of,
    parser_of,
    peak_of,
    run_rounds,
    seconds_of,
    times_of,
    write_conversations,
    write_weights,
)
from benchmarks.compare import environment
from benchmarks.contestants import Contestant
from benchmarks.peers.job import Job
from benchmarks.processes import Run

CONTESTANTS = [
    Contestant("lit_ft", "lit_ft", "lit_ft_grpo", None),
    Contestant("trl", "TRL GRPOTrainer", "trl_grpo", "trl"),
]
HEAD = (
    "| trainer | s a step | takes | processor, s a step | takes | answer tokens/s | peak memory | reward, first steps "
    "| reward, last steps |\n|---|---|---|---|---|---|---|---|---|"
)


def prepare(folder: Path, options: argparse.Namespace) -> Job:
    """Write the model, its adapter and the prompts."""
    model, _, rows = write_weights(folder, options)
    path = folder / "prompts.json"
    write_conversations(path, rows[: options.prompts])
    size = options.micro_batch_size
    return Job(str(model), str(path), size, options.accumulate, options.device, options.max_length)


def row_of(name: str, runs: list[Run], first: list[Run]) -> str:
    """Row of the table; ``first`` are the runs of the contestant that others are compared with."""
    if error := error_of(runs):
        return f"| {name} | {error} |{' |' * 7}"
    steps = len(runs[0]["losses"])
    rate = statistics.median(sum(one["tokens"]) / seconds_of(one) for one in runs)
    quarter = max(steps // 4, 1)
    begins, ends = (statistics.mean(runs[0]["rewards"][part]) for part in (slice(quarter), slice(-quarter, None)))
    return f"| {name} | {times_of(runs, first)} | {rate:.0f} | {peak_of(runs)} | {begins:.3f} | {ends:.3f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__, micro_batch_size=2, max_length=256)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of prompts in an optimizer step")
    parser.add_argument("--answers", type=int, default=8, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="largest number of tokens of an answer")
    parser.add_argument("--lora", action="store_true", help="train one adapter in place of all weights")
    options = parser.parse_args(arguments)
    chosen = chosen_of(CONTESTANTS, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = prepare(folder, options)
        given = {
            "adapter": str(folder / "adapter") if options.lora else None,
            "epochs": options.epochs,
            "answers": options.answers,
            "new_tokens": options.new_tokens,
        }
        runs = run_rounds(chosen, job, given, options, folder)
    print(f"{environment()}\n\n{HEAD}")
    for one in chosen:
        print(row_of(one.name, runs[one.key], runs[chosen[0].key]))


if __name__ == "__main__":
    main()

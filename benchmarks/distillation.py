"""Distillation beside TRL's GKDTrainer: what a step takes in time and memory, and that both learn.

    python -m benchmarks.peers.environments --root ENVIRONMENTS trl
    python -m benchmarks.distillation --environments ENVIRONMENTS --shape 0.1b --rounds 3
    python -m benchmarks.distillation --environments ENVIRONMENTS --shape 0.1b --rounds 3 --new-tokens 64

All weights of a student in float32 learn a teacher of twice as many layers, with other random weights, by the
Jensen-Shannon divergence (beta 0.5, temperature 1) over the answers of alpaca-style rows; with ``--new-tokens`` over
answers of that many tokens that the student draws itself, at temperature 1 from the whole vocabulary. Time is that from
the beginning of training to the end of the last step; each contestant runs in its own process, in alternating order,
and medians are printed. Own answers differ between the trainers, and so do their losses. On a machine that others use,
run it with ``OMP_NUM_THREADS=1``: the seconds of the processor that the process itself has worked depend less on them.
"""

import argparse
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.beside_trl import (
    chosen_of,
    error_of,
    parser_of,
    peak_of,
    run_rounds,
    times_of,
    write_conversations,
    write_weights,
)
from benchmarks.compare import environment
from benchmarks.contestants import Contestant
from benchmarks.peers.job import Job
from benchmarks.processes import Run
from benchmarks.workload import SHAPES, texts_of, write_model

CONTESTANTS = [
    Contestant("lit_ft", "lit_ft", "lit_ft_distillation", None),
    Contestant("trl", "TRL GKDTrainer", "trl_gkd", "trl"),
]
HEAD = (
    "| trainer | s a step | takes | processor, s a step | takes | peak memory | loss, first step | loss, last step |\n"
    "|---|---|---|---|---|---|---|---|"
)


def prepare(folder: Path, options: argparse.Namespace) -> Job:
    """Write the student, its teacher in ``folder / "teacher"``, and the rows."""
    model, _, rows = write_weights(folder, options)
    shape = SHAPES[options.shape]
    deeper = {**shape, "num_hidden_layers": 2 * shape["num_hidden_layers"]}
    write_model(folder / "teacher", deeper, texts_of(rows), options.device)
    # All embeddings have tokens, as nearly all of real models do: lit_ft compares the probabilities of tokens alone.
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<|unused_{number}|>" for number in range(shape["vocab_size"] - len(tokenizer))])
    for one in (model, folder / "teacher"):
        tokenizer.save_pretrained(one)
    path = folder / "rows.json"
    write_conversations(path, rows[: options.samples])
    return Job(str(model), str(path), options.micro_batch_size, options.accumulate, options.device, options.max_length)


def row_of(name: str, runs: list[Run], first: list[Run]) -> str:
    """Row of the table; ``first`` are the runs of the contestant that others are compared with."""
    if error := error_of(runs):
        return f"| {name} | {error} |{' |' * 6}"
    losses = runs[0]["losses"]
    return f"| {name} | {times_of(runs, first)} | {peak_of(runs)} | {losses[0]:.4f} | {losses[-1]:.4f} |"


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = parser_of(__doc__, micro_batch_size=8, max_length=256)
    parser.add_argument("--samples", type=int, default=96)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches in an optimizer step")
    parser.add_argument("--new-tokens", type=int, default=0, help="tokens of the student's own answers; 0 for none")
    options = parser.parse_args(arguments)
    chosen = chosen_of(CONTESTANTS, options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = prepare(folder, options)
        given = {
            "teacher": str(folder / "teacher"),
            "epochs": options.epochs,
            "new_tokens": options.new_tokens,
        }
        runs = run_rounds(chosen, job, given, options, folder)
    print(f"{environment()}\n\n{HEAD}")
    for one in chosen:
        print(row_of(one.name, runs[one.key], runs[chosen[0].key]))


if __name__ == "__main__":
    main()

"""Report on an out-of-memory error: the settings that reduce memory, and the bytes that each saves."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lit_callbacks.memory.storage_ledger import PURPOSES, Breakdown
from lit_callbacks.output.quantities import MIB

_IN_A_STACK = re.compile(r"\.\*(\.|$)")


@dataclass(frozen=True)
class Setting:
    """A setting that the user can change, and the bytes that the change would save."""

    name: str
    saves: int
    how: str


def settings(breakdown: Breakdown, ranks: int, is_sharded: bool) -> list[Setting]:
    """Settings that reduce memory, in descending order of the bytes saved.

    Args:
        breakdown: memory breakdown of the failed step, or of an earlier one.
        ranks: number of devices in the run.
        is_sharded: whether the weights are already sharded over the devices.
    """
    by = breakdown.bytes
    held = by["parameters"] + by["gradients"] + by["optimizer_state"]
    then = ranks * 2 if is_sharded or ranks == 1 else ranks
    now = ranks if is_sharded else 1
    # Temporary tensors as wide as the vocabulary scale with the batch; for the other ones it is not known.
    scales_with_batch = by["activations"] + min(breakdown.vocabulary_bytes, by["other"])
    layers = sum(size for name, _, size in breakdown.modules if _IN_A_STACK.search(name))
    kept = sum(breakdown.layer_outputs.values())
    one_again = layers // max(len(breakdown.layer_outputs), 1)
    candidates = [
        Setting("micro-batch", scales_with_batch // 2, "half as many samples or tokens at a time"),
        Setting(
            "activation checkpointing",
            max(layers - kept - one_again, 0),
            "keep the inputs of layers only, and compute one layer's activations again at a time",
        ),
        Setting("chunked loss", breakdown.vocabulary_bytes * 7 // 8, "compute logits and loss an eighth at a time"),
        Setting("sharding", held - held * now // then, f"weights, gradients and optimizer state over {then} devices"),
    ]
    return sorted(candidates, key=lambda setting: -setting.saves)


def out_of_memory_page(
    error: str,
    phase: str,
    breakdown: Breakdown,
    when: str,
    device: Sequence[str],
    ranks: int,
    is_sharded: bool,
) -> str:
    """Markdown page that reports an out-of-memory error.

    Args:
        error: message of the allocator.
        phase: phase of the step in which the error was raised.
        breakdown: memory breakdown at the peak.
        when: name of the step that the breakdown is of.
        device: lines on the memory of the device and the process.
        ranks: number of devices in the run.
        is_sharded: whether the weights are sharded over the devices.
    """
    ranked = settings(breakdown, ranks, is_sharded)
    best = ranked[0]
    total = max(breakdown.total, 1)
    shares = [
        f"| {name.replace('_', ' ')} | {size_text(breakdown.bytes[name])} | {breakdown.bytes[name] / total:.0%} |"
        for name in PURPOSES
    ]
    modules = [f"| `{name}` | {count} | {size_text(size)} |" for name, count, size in breakdown.modules[:10]]
    lines = [
        "# Out of memory",
        "",
        f"In the {phase} phase: {' '.join(error.split())}",
        "",
        f"**{best.name.capitalize()} helps most: about {size_text(best.saves)} less** ({best.how}).",
        "",
        "| setting | saves about | how |",
        "|---|---|---|",
        *(f"| {setting.name} | {size_text(setting.saves)} | {setting.how} |" for setting in ranked),
        "",
        f"## What memory was for, at its fullest ({when}, {breakdown.phase} phase)",
        "",
        "| | size | share |",
        "|---|---|---|",
        *shares,
        "",
        *device,
        "",
        "## Activations by module",
        "",
        *(["| module | how many | together |", "|---|---|---|", *modules] if modules else ["None were held then."]),
    ]
    return "\n".join(lines) + "\n"


def size_text(size: int) -> str:
    """Text of a size in bytes: in MiB with one decimal; below 1 MiB in KiB, below 1 KiB in bytes."""
    if size >= MIB or size == 0:
        return f"{size / MIB:,.1f} MiB"
    return f"{size / 1024:,.1f} KiB" if size >= 1024 else f"{size} B"

"""The figures of a run that its report shows first: losses, accuracy, speed, time and memory."""

import math
import re
from typing import NamedTuple

from lit_callbacks.output.quantities import MIB, as_count, as_size, as_time
from lit_callbacks.report.report_data import Points, RunData


class Figure(NamedTuple):
    """A figure with its label, and a note on what exactly it is."""

    label: str
    value: str
    note: str


def headline(run: RunData) -> list[Figure]:
    """Figures of a run, as far as they were logged: loss and accuracy before and after, tokens/s, time, peak memory."""
    losses = _matching(run, r"((.*[/_])?(train|val)[/_])?loss(_step|_epoch)?")
    figures = [_before_and_after(name, run.curves[name], "{:.3g}") for name in losses]
    shares = _matching(run, r"(.*/)?(exact_match|rougeL|bleu)|val/reward_accuracy")
    figures += [_before_and_after(name, run.curves[name], "{:.1%}") for name in shares]
    rewards = _matching(run, r"(train|val)/reward")
    figures += [_before_and_after(name, run.curves[name], "{:.3g}") for name in rewards]
    if len(run.forgetting) > 1:
        before, after = run.forgetting[0]["loss"], run.forgetting[-1]["loss"]
        note = f"nats per token, {after - before:+.3f}"
        figures.append(Figure("loss on general text", f"{before:.3f}\u00a0→ {after:.3f}", note))
    if speed := run.curves.get("throughput/run/tokens_per_second"):
        figures.append(Figure("tokens per second", f"{speed[-1][1]:,.0f}", "mean of all training steps"))
    if times := run.environment.get("seconds"):
        figures.append(Figure("time", as_time(sum(times.values())), _steps(run)))
    if (peak := _peak_memory(run)) is not None:
        figures.append(peak)
    return figures


def _matching(run: RunData, pattern: str) -> list[str]:
    return [name for name in sorted(run.curves) if re.fullmatch(pattern, name) and not name.startswith("forgetting/")]


def _steps(run: RunData) -> str:
    first, last = run.environment["first_step"], run.environment["optimizer_steps"]
    earlier = f" after {first:,} earlier ones" if first else ""
    return as_count(last - first, "optimizer step") + earlier


def _before_and_after(name: str, points: Points, form: str) -> Figure:
    values = [value for _, value in points]
    if len(values) == 1:
        return Figure(name, form.format(values[0]), "logged once")
    return Figure(name, f"{form.format(values[0])}\u00a0→ {form.format(values[-1])}", "first and last logged")


def _peak_memory(run: RunData) -> Figure | None:
    on_device, of_process = run.environment.get("peak_device_bytes"), run.environment.get("peak_process_bytes")
    # MemoryProfiler resets the device's counter, but logs what it has read before.
    logged = [value * MIB for _, value in run.curves.get("memory/peak_allocated_mib", []) if math.isfinite(value)]
    if on_device is not None:
        return Figure("peak memory", as_size(max(on_device, *logged, 0)), "tensors on the device of rank 0")
    return None if of_process is None else Figure("peak memory", as_size(of_process), "of the process, rank 0")

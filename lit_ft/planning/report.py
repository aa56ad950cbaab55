"""Report of a parallel layout: parameters and layers of each rank, and the bytes that it sends."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lit_ft.gradient_norm import local
from lit_ft.model.loading import decoder_layers
from lit_ft.planning import communication_formulas, pipeline_timeline
from lit_ft.planning.communication import Communication, Step
from lit_ft.planning.layout import Layout
from lit_ft.strategies.parallel import pipeline_parallel

MIB = 2**20


@dataclass(frozen=True)
class RankContents:
    """Contents of one rank, and the bytes that it sends in an optimizer step."""

    rank: int
    layers: str
    """Indices of its layers, and whether it holds embedding and head."""
    parameters: int
    trained: int
    sends: dict[str, float]
    """Bytes sent, by mesh dimension."""


def rank_contents(layout: Layout, module: nn.Module, step: Step) -> RankContents:
    """Contents of this rank, and the bytes that it sends.

    Args:
        layout: layout of the distributed model.
        module: LightningModule.
        step: amount of data in an optimizer step.
    """
    parameters = list(module.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return RankContents(
        rank=torch.distributed.get_rank(),
        layers=_layers(layout),
        parameters=sum(local(p).numel() for p in parameters),
        trained=sum(local(p).numel() for p in trained),
        sends=Communication(layout, parameters, step).by_dimension(),
    )


def _layers(layout: Layout) -> str:
    if not layout.stages:
        return f"embedding, {_span(range(len(decoder_layers(layout.base))))}, head"
    parts: list[str] = []
    for stage in layout.stages:
        parts += [*(["embedding"] if stage.is_first else []), _span(stage.layers), *(["head"] if stage.is_last else [])]
    return ", ".join(parts)


def _span(places: range) -> str:
    return str(places[0]) if len(places) == 1 else f"{places[0]}-{places[-1]}"


def format_layout(layout: Layout, shares: Sequence[RankContents], step: Step) -> str:
    """Format a layout as text: mesh, schedule, and one line for each pipeline rank.

    Args:
        layout: layout of the distributed model.
        shares: contents of all ranks, or of some ranks of each stage; the line shows their maximum.
        step: amount of data in an optimizer step.
    """
    pipeline_ranks = layout.sizes.pipeline
    kinds = list(shares[0].sends)
    lines = [("ranks", "layers", "parameters", "trained", *(f"{kind} MiB" for kind in kinds))]
    for ranks, of_stage in by_stage(shares, layout.world, pipeline_ranks):
        lines.append(_line(ranks, of_stage, kinds))
    return "\n".join([_mesh(layout), *_schedule(layout), _header(step), *aligned(lines)])


def by_stage(shares: Sequence[RankContents], world: int, pipeline_ranks: int) -> list[tuple[str, list[RankContents]]]:
    """Group shares by pipeline rank: each group's ranks, as text, and its shares."""
    size = world // pipeline_ranks
    places = [range(start, start + size) for start in range(0, world, size)]
    return [(_span(ranks), [share for share in shares if share.rank in ranks]) for ranks in places]


def _mesh(layout: Layout) -> str:
    sizes = layout.sizes
    extras = ["sequence parallel"] if sizes.tensor > 1 and layout.sequence_parallel else []
    extras += ["loss parallel"] if sizes.tensor > 1 and layout.loss_parallel else []
    extras += [f"experts over {layout.expert_parallel_size}"] if layout.expert_parallel_size > 1 else []
    product = " x ".join(f"{name} {size}" for name, size in sizes._asdict().items() if size > 1)
    return ", ".join([f"layout: {product or 'data 1'} = {layout.world} ranks", *extras])


def _schedule(layout: Layout) -> list[str]:
    ranks, schedule = layout.sizes.pipeline, layout.schedule
    if ranks == 1:
        return []
    count, per_rank = layout.micro_batches, pipeline_parallel.stages_per_rank(schedule)
    idle = pipeline_timeline.idle_fraction(pipeline_timeline.timeline(schedule, ranks, count))
    formula = "(p-1)/(m+p-1)" if per_rank == 1 else f"(p-1)/(vm+p-1), v={per_rank},"
    share = communication_formulas.bubble_fraction(ranks, count, per_rank)
    facts = f"schedule: {schedule}, p={ranks} ranks, m={count} micro-batches: bubble {idle:.1%}"
    return [f"{facts} ({formula} is {share:.1%})"]


def _header(step: Step) -> str:
    known = "at most" if step.is_known else "(assumed: the data does not say)"
    return f"a rank holds, and sends in an optimizer step of {known} {step.batches} x {step.tokens:,} tokens a replica:"


def _line(ranks: str, shares: Sequence[RankContents], kinds: Sequence[str]) -> tuple[str, ...]:
    held = (max(share.parameters for share in shares), max(share.trained for share in shares))
    sends = [max(share.sends[kind] for share in shares) / MIB for kind in kinds]
    return (ranks, shares[0].layers, *(f"{count:,}" for count in held), *(f"{mib:,.2f}" for mib in sends))


def aligned(lines: Sequence[Sequence[str]], left: int = 2) -> list[str]:
    """Align cells in columns: the first ``left`` columns to the left, the others, which are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = [str.ljust] * left + [str.rjust] * (len(widths) - left)
    return ["  ".join(pad(cell, w) for pad, cell, w in zip(sides, line, widths, strict=True)) for line in lines]

"""What a layout costs, as arithmetic: the pipeline's bubble, and the bytes that a rank sends.

The formulas are Megatron-LM's (Narayanan et al. 2021, arXiv:2104.04473, sections 2.2 and 3.2; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2), counting what this code sends: a gradient that nobody needs is not exchanged.
``benchmarks.parallel.parallel_bytes`` sets what is sent beside them.

Legend: t ranks that exchange, n supervised tokens, V vocabulary. Collectives are counted as rings send them, which no
algorithm undercuts (Patarasuk and Yuan 2009).
"""


def bubble_share(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Share of a step in which a rank of a pipeline waits: (p - 1) / (v m + p - 1).

    GPipe and 1F1B have v = 1 stage a rank, interleaved schedules v. Narayanan et al. set the bubble against the ideal
    time, (p - 1) / (v m); this is its share of the time that a step takes. Zero-bubble schedules (Qi et al. 2024,
    arXiv:2401.10241) fall below it: ``timetable.idle_share``.

    Args:
        ranks: p, of the pipeline.
        micro_batches: m, of a row.
        stages_per_rank: v.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def gathered(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather or a reduce-scatter of ``size`` bytes in all: (t - 1) / t of them."""
    return size * (ranks - 1) / ranks


def reduced(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes: a reduce-scatter and an all-gather."""
    return 2 * gathered(size, ranks)


def block_bytes(
    stream: float, ranks: int, blocks: int, into: int, out: int, recomputed: int = 0, sequence_parallel: bool = False
) -> float:
    """Bytes that a tensor-parallel rank sends for the blocks (attention, MLP) of its layers.

    A block's results are summed forward, and the gradients of what comes in backward. With sequence parallelism each
    of these all-reduces is a reduce-scatter, with an all-gather at the block's other end, forward and backward.

    Args:
        stream: bytes of the residual stream, whole.
        ranks: t.
        blocks: how many there are.
        into: how many of them want a gradient of what comes in: not those before which nothing trains.
        out: how many get a gradient of what goes out.
        recomputed: layers that are computed again in the backward pass. That ends with the last value wanted, which
            is before the last block's sum.
        sequence_parallel: whether the stream is cut along the sequence.
    """
    if not sequence_parallel:
        again = blocks - recomputed if recomputed else 0
        return reduced(stream, ranks) * (blocks + into + again)
    again = 2 * blocks - recomputed if recomputed else 0
    return gathered(stream, ranks) * (2 * blocks + into + out + again)


def head_bytes(
    tokens: int, hidden: float, ranks: int, vocabulary: int, itemsize: int = 4, loss_parallel: bool = True
) -> float:
    """Bytes that a tensor-parallel rank sends for logits and loss.

    The gradient of the hidden states is summed. Logits are gathered, or, with ``loss_parallel``, five numbers a token:
    maximum, sum of exponentials and the target's logit in the loss; the best logit and its place for the accuracy.

    Args:
        tokens: n.
        hidden: bytes of a token's hidden state.
        ranks: t.
        vocabulary: V.
        itemsize: bytes of a logit.
        loss_parallel: whether logits stay cut along the vocabulary.
    """
    gradient = reduced(tokens * hidden, ranks)
    if not loss_parallel:
        return gradient + gathered(tokens * vocabulary * itemsize, ranks)
    return gradient + 3 * reduced(tokens * 4, ranks) + gathered(ranks * tokens * (itemsize + 8), ranks)


def context_bytes(keys_values: float, ranks: int, layers: int, back: int, recomputed: int = 0) -> float:
    """Bytes that a context-parallel rank sends: keys and values are gathered, their gradients scattered.

    Args:
        keys_values: bytes of a layer's keys and values, of all ranks' tokens.
        ranks: t.
        layers: how many there are.
        back: how many of them go backward.
        recomputed: how many of them are computed again in the backward pass.
    """
    return gathered(keys_values, ranks) * (layers + back + recomputed)


def expert_bytes(tokens: float, experts_per_token: int, hidden: float, ranks: int, back: bool = True) -> float:
    """Bytes that an expert-parallel rank sends for a layer: tokens to their experts, and the answers back.

    Args:
        tokens: of this rank; as many go to each rank as to any other.
        experts_per_token: how many experts answer each.
        hidden: bytes of a token's hidden state.
        ranks: t.
        back: whether gradients travel as well.
    """
    return (4 if back else 2) * gathered(tokens * experts_per_token * hidden, ranks)

"""Formulas for the cost of a parallel layout: the pipeline's bubble, and the bytes that a rank sends.

The formulas are Megatron-LM's (Narayanan et al. 2021, arXiv:2104.04473, sections 2.2 and 3.2; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2), for what this code sends: gradients that are not needed are not exchanged.
``benchmarks.parallel.parallel_bytes`` compares them with the bytes that are sent.

Legend: t communicating ranks, n supervised tokens, V vocabulary. Bytes of collectives are those of ring algorithms,
which are a lower bound (Patarasuk and Yuan 2009).
"""


def bubble_fraction(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> float:
    """Fraction of a step in which a pipeline rank is idle: (p - 1) / (v m + p - 1).

    GPipe and 1F1B have v = 1 stage per rank, interleaved schedules v stages. Narayanan et al. divide the bubble by the
    ideal time, (p - 1) / (v m); here it is divided by the full time of a step. Zero-bubble schedules (Qi et al. 2024,
    arXiv:2401.10241) have a smaller one: see ``pipeline_timeline.idle_fraction``.

    Args:
        ranks: number p of pipeline ranks.
        micro_batches: number m of micro-batches that a packed batch is split into.
        stages_per_rank: number v of stages per rank.
    """
    return (ranks - 1) / (stages_per_rank * micro_batches + ranks - 1)


def gathered(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-gather or reduce-scatter of ``size`` bytes in total: (t - 1) / t of them."""
    return size * (ranks - 1) / ranks


def reduced(size: float, ranks: int) -> float:
    """Bytes that a rank sends in an all-reduce of ``size`` bytes: a reduce-scatter and an all-gather."""
    return 2 * gathered(size, ranks)


def block_bytes(
    stream: float, ranks: int, blocks: int, into: int, out: int, recomputed: int = 0, sequence_parallel: bool = False
) -> float:
    """Bytes that a tensor-parallel rank sends for the blocks (attention, MLP) of its layers.

    An all-reduce sums a block's outputs in the forward pass, and the gradients of its inputs in the backward pass. With
    sequence parallelism each of these is a reduce-scatter, with an all-gather at the block's other end, forward and
    backward.

    Args:
        stream: bytes of the full residual stream.
        ranks: number t of tensor-parallel ranks.
        blocks: number of blocks.
        into: number of blocks whose input needs a gradient: those with trainable parameters before them.
        out: number of blocks whose output gets a gradient.
        recomputed: number of layers that are recomputed in the backward pass. Recomputation stops at the last value
            that is needed, which is before the sum of the last block.
        sequence_parallel: whether the residual stream is sharded along the sequence.
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
    maximum, sum of exponentials and the target's logit for the loss; the largest logit and its index for the accuracy.

    Args:
        tokens: number n of supervised tokens.
        hidden: bytes of a token's hidden state.
        ranks: number t of tensor-parallel ranks.
        vocabulary: number V of logits of a token.
        itemsize: bytes of a logit.
        loss_parallel: whether logits stay sharded along the vocabulary.
    """
    gradient = reduced(tokens * hidden, ranks)
    if not loss_parallel:
        return gradient + gathered(tokens * vocabulary * itemsize, ranks)
    return gradient + 3 * reduced(tokens * 4, ranks) + gathered(ranks * tokens * (itemsize + 8), ranks)


def context_bytes(keys_values: float, ranks: int, layers: int, back: int, recomputed: int = 0) -> float:
    """Bytes that a context-parallel rank sends: keys and values are gathered, their gradients reduce-scattered.

    Args:
        keys_values: bytes of one layer's keys and values for the tokens of all ranks.
        ranks: number t of context-parallel ranks.
        layers: number of layers.
        back: number of layers that take part in the backward pass.
        recomputed: number of layers that are recomputed in the backward pass.
    """
    return gathered(keys_values, ranks) * (layers + back + recomputed)


def expert_bytes(tokens: float, experts_per_token: int, hidden: float, ranks: int) -> float:
    """Bytes that an expert-parallel rank sends for a layer's forward pass: tokens to their experts, outputs back.

    Args:
        tokens: number of this rank's tokens; every rank is assumed to receive equally many of them.
        experts_per_token: number of experts per token.
        hidden: bytes of a token's hidden state.
        ranks: number t of expert-parallel ranks.
    """
    return 2 * gathered(tokens * experts_per_token * hidden, ranks)

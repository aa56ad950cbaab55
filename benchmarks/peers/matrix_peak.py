"""Peak FLOP/s of bf16 matrix products with a model's shapes, in a process like a contestant's.

The products of each linear layer, forward ``(tokens, in) x (in, out)`` and for the gradient of its input ``(tokens,
out) x (out, in)``, are repeated for a while; the best time counts. The peak is the FLOPs of all layers of the model
(the head on the supervised tokens only) divided by the sum of their best times. Small weights stay in the caches then,
which is not so in training; so all products of all layers are also run once in order, forward and backward, as in a
training step: this is the rate with weights from memory.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.peers.job import asked
from benchmarks.workload import SHAPES, linear_shapes


def best_seconds(work: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of repeated calls within ``seconds``."""
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        _wait()
        started = time.perf_counter()
        work()
        _wait()
        best = min(best, time.perf_counter() - started)
    return best


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Product:
    """Linear layers of one shape: their weights, inputs ``(tokens, in)`` and output gradients ``(tokens, out)``."""

    def __init__(self, count: int, rows: int, out: int, inner: int, device: str) -> None:
        """Draw random tensors."""
        self.rows = torch.randn(rows, inner, device=device).to(torch.bfloat16)
        self.gradients = torch.randn(rows, out, device=device).to(torch.bfloat16)
        self.weights = [torch.randn(out, inner, device=device).to(torch.bfloat16) for _ in range(count)]
        self.flops = 2 * count * 2 * rows * out * inner
        """FLOPs of all layers, forward and backward."""


def peaks(shape: dict[str, int], tokens: int, supervised: int, device: str, seconds: float = 0.2) -> dict[str, float]:
    """FLOP/s from the best time of each product, and from the best time of all of them in order.

    Args:
        shape: config values of the model, as in ``SHAPES``.
        tokens: rows of the products, about the tokens of an optimizer step.
        supervised: rows of the head's products, about the supervised tokens of an optimizer step.
        device: ``cpu`` or ``cuda``.
        seconds: time for each product; all of them in order get ten times as much.
    """
    layers = shape["num_hidden_layers"]
    products = [Product(layers, tokens, *one, device=device) for one in linear_shapes(shape)]
    head = Product(1, supervised, shape["vocab_size"], shape["hidden_size"], device)
    order = [(product, i) for i in range(layers) for product in products] + [(head, 0)]

    def through() -> None:
        for product, i in order:
            product.rows @ product.weights[i].T
        for product, i in reversed(order):
            product.gradients @ product.weights[i]

    flops = sum(product.flops for product in [*products, head])
    spent = sum(
        len(product.weights) * best_seconds(partial(torch.matmul, left, right), seconds)
        for product in [*products, head]
        for left, right in ((product.rows, product.weights[0].T), (product.gradients, product.weights[0]))
    )
    return {
        "flops_per_second": flops / spent,
        "streamed_flops_per_second": flops / best_seconds(through, 10 * seconds),
    }


def main() -> None:
    """Read the arguments from a JSON file, measure, and write the result as JSON."""
    of = asked()
    result = peaks(SHAPES[of.pop("shape")], **of)
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Results of operators that are kept for the second pass, also those that a model changes in place afterwards."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lit_ft.model.activations import kept_results

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


class Calls(TorchDispatchMode):
    """Number of calls of each operator that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))


def changes_a_product(layer: nn.Linear, x: Tensor) -> Tensor:
    product = layer(x)
    doubled = 2 * product
    product += x  # of three dimensions it is a view of the result, of two it is the result
    return product.sin() + doubled


def changes_a_part(layer: nn.Linear, x: Tensor) -> Tensor:
    product = layer(x)
    product[..., 1:].mul_(x[..., 1:])
    return product.sin()


def changes_nothing(layer: nn.Linear, x: Tensor) -> Tensor:
    return layer(x).sin() + x


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
@pytest.mark.parametrize("function", [changes_a_product, changes_a_part, changes_nothing])
def test_a_result_is_taken_as_it_was_before_the_model_changed_it(
    function: Any, shape: tuple[int, ...], has_bias: bool
) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4, bias=has_bias), torch.randn(shape, requires_grad=True)
    wanted = torch.autograd.grad(function(layer, x).square().sum(), [x, *layer.parameters()])
    contexts = partial(kept_results.contexts, PRODUCTS)
    out = checkpoint(function, layer, x, use_reentrant=False, context_fn=contexts)
    with Calls() as backward:
        found = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert backward.found["aten.addmm.default"] == 0
    assert backward.found["aten.mm.default"] == 2  # those of the two gradients


def test_only_what_is_changed_is_copied() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    for function, copies in ((changes_a_product, 1), (changes_a_part, 1), (changes_nothing, 0)):
        with Calls() as seen, kept_results.contexts(PRODUCTS)[0]:
            function(layer, x)
        assert seen.found["aten.clone.default"] == copies

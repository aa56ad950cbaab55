"""Results of operators that are kept for the second pass, also those that a model changes in place afterwards."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from shared_fixtures import make_tokenizer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM
from lit_ft.model.activations import kept_results
from lit_ft.packed_batch import pack_samples

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


# --- architectures that do so -------------------------------------------------------------------------

LORA = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


def gradients(folder: str, peft: LoraConfig | None, checkpointing: Any) -> dict[str, Tensor]:
    module = CausalLM(folder, init="random", dtype="float32", peft=peft, gradient_checkpointing=checkpointing)
    module.configure_model()
    module.train()
    torch.manual_seed(1)  # of dropout
    ids = torch.arange(5, 35).numpy()
    module(pack_samples([(ids[:13], ids[:13]), (ids[13:], ids[13:])])).loss_sum.backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("peft", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("architecture", ["gemma3n_text", "git", "roc_bert"])
def test_in_place_changes_of_products_and_embeddings(architecture: str, peft: Any, tmp_path: Path) -> None:
    """Gemma 3n and RoCBert change results of linear layers, GIT that of its embeddings."""
    tiny_config(architecture).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    wanted = gradients(str(tmp_path), peft, False)
    for checkpointing in (True, "selective"):
        found = gradients(str(tmp_path), peft, checkpointing)
        assert found.keys() == wanted.keys()
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        for name, gradient in wanted.items():
            assert float((found[name] - gradient).abs().max()) < 1e-5 * largest, name

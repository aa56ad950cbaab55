"""Operators of a decoder layer in a training step: on a GPU each is at least one launch of a kernel.

    python -m benchmarks.speed.operator_counts

A small model on short batches is bound by launches. The operators that torch runs are counted on a CPU, in the forward
and the backward pass of one sample, with and without the last layer: the difference is a layer's. Operators that only
describe a tensor anew (views) launch nothing and are left out.
"""

import argparse
from collections import Counter
from typing import Any

import torch
from peft import LoraConfig
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.speed.fused_lora import let_compute
from lit_ft import CausalLM
from lit_ft.model.loading import decoder_layers, decoder_of
from lit_ft.packed_batch import PackedBatch, pack_samples

WITHOUT_KERNEL = {"detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh"}
"""Operators that are no view and launch nothing."""


class Operators(TorchDispatchMode):
    """Context that counts the operators which launch a kernel, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one operator, and run it."""
        if not func.is_view and func.overloadpacket.__name__ not in WITHOUT_KERNEL | {"_unsafe_view"}:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators_of_a_layer(module: CausalLM, batch: PackedBatch) -> Counter[str]:
    """Operators of a module's last decoder layer, by name; the layer is removed.

    Args:
        module: module with a built model of at least two layers.
        batch: packed batch of one step.
    """
    whole = _operators(module, batch)
    layers = decoder_of(module.base_model).layers
    assert isinstance(layers, torch.nn.ModuleList)
    del layers[-1]
    return whole - _operators(module, batch)


def _operators(module: CausalLM, batch: PackedBatch) -> Counter[str]:
    module.zero_grad()
    module(batch).loss_sum.backward()  # the first gradient is stored, later ones are added
    with Operators() as operators:
        module(batch).loss_sum.backward()
    return operators.counts


def counts(pretrained: str, way: str, targets: str | list[str]) -> Counter[str]:
    """Operators of a layer under LoRA on a bf16 base.

    Args:
        pretrained: folder of the model.
        way: ``none`` (all weights frozen but the embedding's), ``PEFT`` or ``fused_lora``.
        targets: linear layers with adapters.
    """
    peft = None if way == "none" else LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM")
    module = CausalLM(pretrained, dtype="bfloat16", peft=peft)
    module.configure_model()
    module.train()
    if way == "none":
        for layer in decoder_layers(module):
            layer.requires_grad_(False)
    else:
        let_compute(module, way)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (300,), generator=draw).numpy()  # longer than what a CPU computes in fp32
    return operators_of_a_layer(module, pack_samples([(ids, ids)]))


def main(arguments: list[str] | None = None) -> None:
    """Print the table of counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="checkpoints/tiny-qwen2", help="folder of a small model")
    parser.add_argument("--names", action="store_true", help="print the count of each operator too")
    options = parser.parse_args(arguments)
    print("| adapter on | computed by | operators of a layer, forward and backward |")
    print("|---|---|---|")
    ways: list[tuple[str, str | list[str], str]] = [("-", "all-linear", "none")]
    ways += [
        (name, of, way)
        for name, of in (("q_proj, v_proj", ["q_proj", "v_proj"]), ("all linear layers", "all-linear"))
        for way in ("PEFT", "fused_lora")
    ]
    for name, targets, way in ways:
        found = counts(options.model, way, targets)
        print(f"| {name} | {way} | {found.total()} |", flush=True)
        if options.names:
            print(", ".join(f"{operator} {count}" for operator, count in found.most_common()))


if __name__ == "__main__":
    main()

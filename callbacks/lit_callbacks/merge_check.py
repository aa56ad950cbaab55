"""Whether a merged model is the model that was trained, and whether its files hold it whole."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a logit by dtype of the merged weights, as a share of the largest logit. Rounding each
weight once to a dtype with n bits of mantissa moves it by up to 2^-n of itself: 2^-24, 2^-11, 2^-8."""

PROMPTS = ("The capital of France is", "def add(a, b):\n    return", "今天天气很好，我们")


class MergeFailed(RuntimeError):
    """The merged model is not what was trained; nothing was written."""


@dataclass(frozen=True)
class MergeReport:
    """How far the merged model is from base and adapter."""

    largest_difference: float
    """Of any logit."""
    largest_logit: float
    divergence: float
    """Kullback-Leibler divergence of the next token's distribution, in nats, mean over positions."""
    bound: float
    """What ``largest_difference`` must stay below."""

    def __str__(self) -> str:
        return (
            f"logits differ by {self.largest_difference:.1e} at most (of {self.largest_logit:.1f}, bound "
            f"{self.bound:.1e}), KL divergence {self.divergence:.1e}"
        )


def sample_ids(model: Any, tokenizer: Any = None) -> list[Tensor]:
    """Token ids of some prompts, each ``(1, tokens)``; arbitrary ids where there is no tokenizer."""
    if tokenizer is None:
        rows = model.config.get_text_config().vocab_size
        return [torch.arange(start, start + 64, 4)[None] % rows for start in range(3)]
    return [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS]


@torch.no_grad()
def logits_of(model: Any, ids: list[Tensor]) -> Tensor:
    """Logits of all positions of all prompts, ``(tokens, vocabulary)``, fp32."""
    return torch.cat([model(input_ids=prompt).logits[0].float() for prompt in ids])


def compare(wanted: Tensor, got: Tensor, dtype: torch.dtype) -> MergeReport:
    """Compare logits ``(tokens, vocabulary)``.

    Raises:
        MergeFailed: they are not finite, or differ by more than the dtype accounts for.
    """
    largest = float(wanted.abs().max())
    difference = float((wanted - got).abs().max())
    divergence = torch.nn.functional.kl_div(
        got.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    report = MergeReport(difference, largest, float(divergence), BOUNDS.get(dtype, 1e-4) * max(largest, 1.0))
    if not difference <= report.bound:  # NaN is not
        raise MergeFailed(f"the merged model is not what was trained: {report}; nothing was written")
    return report


def check_files(folder: Path, merged: Any) -> None:
    """Read back what was written and compare it with the model's own architecture.

    Raises:
        MergeFailed: a tensor is missing, too many, empty, of another shape or dtype, or not finite.
    """
    from safetensors import safe_open

    with torch.device("meta"):
        reference = type(merged)(copy.deepcopy(merged.config))
    shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    held = merged.state_dict()
    tied = {name for name in shapes if name not in dict(reference.named_parameters())} & set(held)
    found: set[str] = set()
    wrong: list[str] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = tensors.get_tensor(name)
                found.add(name)
                if name not in shapes:
                    wrong.append(f"{name} is not in {type(merged).__name__}")
                elif tuple(tensor.shape) != shapes[name]:
                    wrong.append(f"{name} is {tuple(tensor.shape)}, the config says {shapes[name]}")
                elif tensor.dtype != held[name].dtype:
                    wrong.append(f"{name} is {tensor.dtype}, not {held[name].dtype}")
                elif tensor.is_floating_point() and not tensor.isfinite().all():
                    wrong.append(f"{name} holds values that are not finite")
    wrong += [f"{name} is missing" for name in sorted(set(shapes) - found - tied)]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise MergeFailed(f"the merged files are wrong: {'; '.join(wrong[:3])}{more}; nothing was written")

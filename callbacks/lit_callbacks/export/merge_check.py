"""Whether a merged model, read back from its files, is the model that was trained."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_callbacks.distributed.gather import persistent_buffers

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of a logit by dtype of the merged weights, as a share of the largest logit. Rounding each
weight once to a dtype with n bits of mantissa moves it by up to 2^-n of itself: 2^-24, 2^-11, 2^-8."""

DEQUANTIZED_BOUND = 1e-1
"""The same where the base was trained on in 8 or 4 bits: kernels of 8 bits round activations too, a dequantized
model does not."""

MOST_LOST = 0.5
"""Largest share of what training changed that rounding the merged weights to a base's bits may take back. The weights
of a 4-bit base lie on its grid: changes of less than half a step all vanish."""

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
    """What ``largest_difference`` must stay below; infinite where it is only measured."""

    def __str__(self) -> str:
        bound = "" if self.bound == float("inf") else f", bound {self.bound:.1e}"
        return (
            f"logits differ by {self.largest_difference:.1e} at most (of {self.largest_logit:.1f}{bound}), "
            f"KL divergence {self.divergence:.1e}"
        )


def sample_ids(model: Any, tokenizer: Any = None) -> list[Tensor]:
    """Token ids of some prompts, each ``(1, tokens)``; arbitrary ids where there is no tokenizer.

    The embedding's last rows are among them: those of tokens that were added.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    rows = rows if tokenizer is None else min(rows, len(tokenizer))
    last = torch.arange(max(0, rows - 16), rows)[None]
    if tokenizer is None:
        return [torch.arange(start, start + 64, 4)[None] % rows for start in range(3)] + [last]
    return [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS] + [last]


@torch.no_grad()
def logits_of(model: Any, ids: list[Tensor]) -> Tensor:
    """Logits of all positions of all prompts, ``(tokens, vocabulary)``, fp32."""
    return torch.cat([model(input_ids=prompt).logits[0].float() for prompt in ids])


def compare(wanted: Tensor, got: Tensor, tolerance: float) -> MergeReport:
    """Compare logits ``(tokens, vocabulary)``.

    Args:
        wanted: of base and adapter.
        got: of the merged model.
        tolerance: largest difference, as a share of the largest logit; one of BOUNDS, or infinite to measure only.

    Raises:
        MergeFailed: they are not finite, or differ by more.
    """
    if wanted.shape != got.shape:
        raise MergeFailed(
            f"the merged model has {got.shape[1]:,} logits a token, the trained one {wanted.shape[1]:,}: its "
            "embeddings were resized; nothing was written"
        )
    largest = float(wanted.abs().max())
    difference = float((wanted - got).abs().max())
    logs = got.double().log_softmax(-1), wanted.double().log_softmax(-1)
    divergence = torch.nn.functional.kl_div(*logs, log_target=True, reduction="batchmean")
    report = MergeReport(difference, largest, float(divergence), tolerance * max(largest, 1.0))
    if not (torch.isfinite(got).all() and difference <= report.bound):
        raise MergeFailed(f"the merged model is not what was trained: {report}; nothing was written")
    return report


def share_lost(wanted: Tensor, got: Tensor, untrained: Tensor) -> float:
    """How much of what training did to the logits is not in the merged model: 0 for none, 1 for as much as all.

    Args:
        wanted: logits of base and adapter, ``(tokens, vocabulary)``.
        got: of the merged model.
        untrained: of the base alone.
    """
    return float((got - wanted).norm() / (untrained - wanted).norm())


def check_kept(lost: float, report: MergeReport) -> None:
    """Refuse a merge into quantized weights that forgets what was learned.

    Raises:
        MergeFailed: more than half is lost.
    """
    if not lost <= MOST_LOST:
        raise MergeFailed(
            f"rounded to the base's bits again, the merged weights lose {lost:.0%} of what training did to the logits "
            f"({report}); nothing was written. Dequantize the base, or use the adapter on it"
        )


@dataclass(frozen=True)
class Layout:
    """What a merged model's tensors must be: the base's names and shapes, in the dtypes that were saved."""

    model_class: Any
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    is_tied: bool
    """Whether the base's head is its embedding."""
    is_packed: bool = False
    """Whether it holds weights in 4 or 8 bits, whose shapes are their own."""

    @classmethod
    def of(cls, base: Any) -> "Layout":
        """The layout of a base, taken before anything is merged: merging may change its config.

        Args:
            base: a ``transformers.PreTrainedModel``, with or without adapter layers in it.
        """
        with torch.device("meta"):
            reference = type(base)(copy.deepcopy(base.config))
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
        return cls(type(base), shapes, {}, bool(getattr(base.config, "tie_word_embeddings", False)))

    def saved_as(self, merged: Any) -> "Layout":
        """The layout with the dtypes of a merged model, and with its shapes where it holds packed weights."""
        state, is_packed = merged.state_dict(), bool(getattr(merged, "is_quantized", False))
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()} if is_packed else self.shapes
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
        return Layout(self.model_class, shapes, dtypes, self.is_tied, is_packed)


def read_back(folder: Path, layout: Layout) -> Any:
    """Load a merged model from its files, as anyone would, and compare it with the base's layout.

    Raises:
        MergeFailed: a tensor is missing, too many, empty, of another shape or dtype, or not finite; the head is tied
            in the config and not in the files.
    """
    _fail_if(_wrong_in_files(folder, layout))
    placement = {"device_map": {"": "cpu"}} if layout.is_packed else {}
    try:
        model, info = layout.model_class.from_pretrained(folder, output_loading_info=True, **placement)
    except RuntimeError as error:
        raise MergeFailed(f"the merged files do not load: {error}; nothing was written") from error
    found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    name_of_class = layout.model_class.__name__
    wrong = [f"{name} is missing" for name in sorted({*info["missing_keys"], *(layout.shapes.keys() - found.keys())})]
    extra = {*info["unexpected_keys"], *(found.keys() - layout.shapes.keys())}
    wrong += [f"{name} is not in {name_of_class}" for name in sorted(extra)]
    wrong += [
        f"{name} is {found[name]}, in the base {shape}"
        for name, shape in layout.shapes.items()
        if name in found and found[name] != shape
    ]
    _fail_if(wrong)
    if layout.is_tied:
        _look_at_the_head(model)
    return _as_it_was_saved(model)


def _wrong_in_files(folder: Path, layout: Layout) -> list[str]:
    """Tensor by tensor, what is wrong with each alone."""
    from safetensors import safe_open

    dtypes = set(layout.dtypes.values()) | (_STATISTICS if layout.is_packed else set())
    wrong = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = tensors.get_tensor(name)
                dtype = layout.dtypes.get(name)
                if tensor.numel() == 0:
                    wrong.append(f"{name} is empty, {tuple(tensor.shape)}")
                elif tensor.dtype != dtype and (dtype is not None or tensor.dtype not in dtypes):
                    wrong.append(f"{name} is {tensor.dtype}, not {dtype or sorted(map(str, dtypes))}")
                elif tensor.is_floating_point() and not tensor.isfinite().all():
                    wrong.append(f"{name} holds values that are not finite")
    return wrong


_STATISTICS = {torch.uint8, torch.int8, torch.float32}
"""Dtypes of what belongs to packed weights; bitsandbytes writes it beside them."""


def _look_at_the_head(model: Any) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight.data_ptr() == head.weight.data_ptr():
        return
    if getattr(model.config, "tie_word_embeddings", False):
        raise MergeFailed(
            "the head and the embeddings in the merged files are two tensors, and the config ties them to one: other "
            "programs would load one of the two for both; nothing was written"
        )
    rank_zero_info(
        "the base's head is its embedding; training has parted them, so the merged model holds both "
        f"({head.weight.numel():,} weights more, tie_word_embeddings: false)"
    )


def _as_it_was_saved(model: Any) -> Any:
    for module in model.modules():
        # bitsandbytes repacks 4-bit weights on CPUs with AVX512-BF16, and computes with another rounding after.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def check_same(got: Any, wanted: Any) -> None:
    """Compare the tensors of a model that was read back with those that were written, bit by bit.

    Raises:
        MergeFailed: some differ.
    """
    held = wanted.state_dict()
    _fail_if(
        [f"{name} has other values" for name, t in got.state_dict().items() if not torch.equal(t, held[name].cpu())]
    )


def check_buffers(got: Any, wanted: dict[str, Tensor]) -> None:
    """Compare persistent buffers of a model that was read back with the base's, bit by bit; no merge changes them.

    Args:
        got: the model.
        wanted: the base's, by name.

    Raises:
        MergeFailed: some differ.
    """
    held = dict(persistent_buffers(got))
    _fail_if(
        [
            f"the buffer {name} {'has other values' if name in held else 'is missing'}"
            for name, buffer in wanted.items()
            if name not in held or not torch.equal(held[name], buffer.to(held[name].dtype))
        ]
    )


def _fail_if(wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise MergeFailed(f"the merged files are wrong: {'; '.join(wrong[:3])}{more}; nothing was written")

"""Checks that a merged model, read back from its files, equals the trained model."""

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lit_callbacks.distributed.gather import persistent_buffers
from lit_callbacks.export.weight_files import opened
from lit_callbacks.internals.bitsandbytes_internals import without_faults
from lit_callbacks.internals.transformers_internals import is_quantized, ties_embeddings

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Bound of the largest logit difference, relative to the largest logit, by dtype of the merged weights. Rounding a
weight once to a dtype with n bits of mantissa changes it by up to 2^-n of itself: 2^-24, 2^-11, 2^-8."""

DEQUANTIZED_BOUND = 1e-1
"""The same bound for a dequantized 8-bit or 4-bit base model: 8-bit kernels round activations too, a dequantized
model does not."""

SHARE_WHERE_ROUNDED = 0.5
"""Share of the positions that must be within the bound in half precision, and of a dequantized base. Models amplify
rounding at some of them, and by attention at all later ones of a prompt: in a mixture of experts an undecided router
chooses another expert; gated delta nets divide what they read from their state by its norm, which may be small. A merge
that is lost shows at nearly all positions, that of one layer in its weight (``check_changes``)."""

MOST_LOST = 0.5
"""Largest share of the trained change that a merge may lose to rounding. The weights of a 4-bit base model lie on its
quantization grid: where merged weights are quantized again, changes of less than half a grid step all vanish."""

PROMPTS = ("The capital of France is", "def add(a, b):\n    return", "今天天气很好，我们")


class MergeFailed(RuntimeError):
    """The merged model differs from the trained model; nothing was written."""


@dataclass(frozen=True)
class MergeReport:
    """Difference between the merged model and the base model with its adapter."""

    largest_difference: float
    """Largest absolute difference of a logit, at ``share`` of the positions."""
    largest_logit: float
    divergence: float | None
    """Kullback-Leibler divergence of the next-token distribution, in nats, mean over positions; None of scores."""
    bound: float
    """Upper bound of ``largest_difference``; infinite where it is only measured."""
    share: float = 1.0
    """Share of the positions that are within ``largest_difference``."""

    def __str__(self) -> str:
        bound = "" if self.bound == float("inf") else f", bound {self.bound:.1e}"
        return (
            f"logits differ by {self.largest_difference:.1e} at most (of {self.largest_logit:.1f}{bound}"
            f"{'' if self.share == 1 else f', at {self.share:.0%} of the positions'})"
            f"{'' if self.divergence is None else f', KL divergence {self.divergence:.1e}'}"
        )


def sample_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None" = None) -> list[Tensor]:
    """Token ids of some prompts, each ``(1, tokens)``, int64; arbitrary ids without a tokenizer.

    They include the last ids of the vocabulary, which added tokens have.
    """
    vocabulary = model.get_input_embeddings().weight.shape[0]
    vocabulary = vocabulary if tokenizer is None else min(vocabulary, len(tokenizer))
    last = torch.arange(max(0, vocabulary - 16), vocabulary)[None]
    if tokenizer is None:
        return [torch.arange(start, start + 64, 4)[None] % vocabulary for start in range(3)] + [last]
    return [torch.tensor([tokenizer(prompt)["input_ids"]]) for prompt in PROMPTS] + [last]


@torch.no_grad()
def logits_of(model: "PeftModel | PreTrainedModel", ids: list[Tensor]) -> Tensor:
    """Logits at all positions of all prompts, ``(tokens, vocabulary)``, fp32; or the score of each prompt."""
    # Without a cache, with which xLSTM and Dory of transformers 5.24 fail.
    logits = [model(input_ids=prompt, use_cache=False).logits for prompt in ids]
    return torch.cat([of_prompt.flatten(0, -2).float() for of_prompt in logits])


def compare(expected: Tensor, got: Tensor, tolerance: float, share: float = 1.0) -> MergeReport:
    """Compare the logits of a merged model with those of the trained model.

    Args:
        expected: logits of the base model with its adapter, ``(tokens, vocabulary)``.
        got: logits of the merged model, ``(tokens, vocabulary)``.
        tolerance: largest difference, relative to the largest logit; infinite to measure only.
        share: share of the positions where it holds.

    Raises:
        MergeFailed: the merged model's logits are not finite, differ by more, or have another shape.
    """
    if expected.shape != got.shape:
        raise MergeFailed(
            f"the merged model has {got.shape[1]:,} logits a token, the trained one {expected.shape[1]:,}: its "
            "embeddings were resized; nothing was written"
        )
    largest = float(expected.abs().max())
    count = math.ceil(share * len(got) - 1e-9)  # 0.55 * 20 is above 11 in floating point
    difference = float((expected - got).abs().amax(1).sort().values[count - 1])
    divergence = None
    if expected.shape[1] > 1:  # one score has no distribution
        logs = got.double().log_softmax(-1), expected.double().log_softmax(-1)
        divergence = float(torch.nn.functional.kl_div(*logs, log_target=True, reduction="batchmean"))
    report = MergeReport(difference, largest, divergence, tolerance * max(largest, 1.0), share)
    if not (torch.isfinite(got).all() and difference <= report.bound):
        raise MergeFailed(f"the merged model is not what was trained: {report}; nothing was written")
    return report


def compare_in_fp32(expected: Tensor, got: Tensor, tolerance: float) -> MergeReport:
    """Compare the logits of a merged model in float32 with those of the trained model.

    They are within the bound at all positions; or at most of them, in a model that selects by scores: where two experts
    of a router, or two tokens of sparse attention, score the same but for rounding, it may select the other one.

    Args:
        expected: logits of the base model with its adapter, ``(tokens, vocabulary)``.
        got: logits of the merged model, ``(tokens, vocabulary)``.
        tolerance: largest difference, relative to the largest logit.

    Raises:
        MergeFailed: less than half of the positions are within the bound, or the logits are not finite.
    """
    try:
        return compare(expected, got, tolerance)
    except MergeFailed:
        if expected.shape != got.shape:
            raise
        bound = tolerance * max(float(expected.abs().max()), 1.0)
        within = int(((expected - got).abs().amax(1) <= bound).sum()) / len(got)
        if within < SHARE_WHERE_ROUNDED:
            raise
        return compare(expected, got, tolerance, within)


def compare_rounded(expected: Tensor, got: Tensor, untrained: Tensor, tolerance: float) -> MergeReport:
    """Compare the logits of a merged model, whose weights were rounded, with those of the trained model.

    They are within the bound at half of the positions; or, in a model that amplifies rounding more than that, they
    have most of what training did.

    Args:
        expected: logits of the base model with its adapter, ``(tokens, vocabulary)``.
        got: logits of the merged model, ``(tokens, vocabulary)``.
        untrained: logits of the base model alone, ``(tokens, vocabulary)``.
        tolerance: largest difference, relative to the largest logit.

    Raises:
        MergeFailed: neither holds, or the merged model's logits are not finite, or have another shape.
    """
    try:
        return compare(expected, got, tolerance, SHARE_WHERE_ROUNDED)
    except MergeFailed:
        report = compare(expected, got, float("inf"), SHARE_WHERE_ROUNDED)
        if share_lost(expected, got, untrained) > MOST_LOST:
            raise
        return report


def share_lost(expected: Tensor, got: Tensor, untrained: Tensor) -> float:
    """Share of the trained change of the logits that the merged model lacks: 0 is none, 1 is as much as all of it.

    Args:
        expected: logits of the base model with its adapter, ``(tokens, vocabulary)``.
        got: logits of the merged model, ``(tokens, vocabulary)``.
        untrained: logits of the base model alone, ``(tokens, vocabulary)``.
    """
    return float((got - expected).norm() / (untrained - expected).norm())


def check_kept(lost: float, report: MergeReport) -> None:
    """Check that a merge into quantized weights keeps at least half of the trained change.

    Raises:
        MergeFailed: more than ``MOST_LOST`` is lost.
    """
    if not lost <= MOST_LOST:
        raise MergeFailed(
            f"rounded to the base's bits again, the merged weights lose {lost:.0%} of what training did to the logits "
            f"({report}); nothing was written. Dequantize the base, or use the adapter on it"
        )


@dataclass(frozen=True)
class Layout:
    """Expected tensors of a merged model: names and shapes of the base model, dtypes of the saved model."""

    model_class: type["PreTrainedModel"]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    is_tied: bool
    """Whether the base model's output head and input embedding are tied."""
    is_packed: bool = False
    """Whether it holds packed 4-bit or 8-bit weights, whose shapes differ from the unquantized ones."""

    @classmethod
    def of(cls, base: "PreTrainedModel") -> "Layout":
        """Layout of a base model, read before the merge: merging may change its config.

        Args:
            base: a ``transformers.PreTrainedModel``, with or without adapter layers.
        """
        reference = skeleton(type(base), base.config).state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in reference.items()}
        return cls(type(base), shapes, {}, ties_embeddings(base.config))

    def saved_as(self, merged: "PreTrainedModel") -> "Layout":
        """This layout with the dtypes of a merged model, and with its shapes if it holds packed weights."""
        state, is_packed = merged.state_dict(), is_quantized(merged)
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()} if is_packed else self.shapes
        dtypes = {name: tensor.dtype for name, tensor in state.items()}
        return replace(self, shapes=shapes, dtypes=dtypes, is_packed=is_packed)


@contextmanager
def quantized_again() -> Iterator[None]:
    """Say what to do where transformers (5.24) does not write or read an architecture's merged quantized weights.

    Raises:
        MergeFailed: in place of its own exceptions.
    """
    try:
        yield
    except RuntimeError as error:
        failed = isinstance(error, MergeFailed)
        what = error if failed else f"transformers cannot write the merged weights: {error}; nothing was written"
        raise MergeFailed(f"{what}. Dequantize the base, or use the adapter on it") from error


def read_back(folder: Path, layout: Layout) -> "PreTrainedModel":
    """Load a merged model from its files with ``from_pretrained``, and compare it with the base model's layout.

    Raises:
        MergeFailed: the files do not load; a tensor is missing, unexpected, empty, not finite, or of another shape or
            dtype; or the config ties the output head and the files hold two tensors.
    """
    _fail_if(_wrong_in_files(folder, layout))
    placement = {"device_map": {"": "cpu"}} if layout.is_packed else {}
    try:
        model, info = layout.model_class.from_pretrained(folder, output_loading_info=True, **placement)
    except (RuntimeError, AttributeError) as error:
        raise MergeFailed(f"the merged files do not load: {error}; nothing was written") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    name_of_class = layout.model_class.__name__
    wrong = [f"{name} is missing" for name in sorted({*info["missing_keys"], *(layout.shapes.keys() - shapes.keys())})]
    extra = {*info["unexpected_keys"], *(shapes.keys() - layout.shapes.keys())}
    wrong += [f"{name} is not in {name_of_class}" for name in sorted(extra)]
    wrong += [
        f"{name} is {shapes[name]}, in the base {shape}"
        for name, shape in layout.shapes.items()
        if name in shapes and shapes[name] != shape
    ]
    _fail_if(wrong)
    if layout.is_tied:
        _check_head(model)
    without_faults(model)
    return model


def skeleton(model_class: type["PreTrainedModel"], config: "PretrainedConfig") -> "PreTrainedModel":
    """Model on the meta device."""
    config = copy.deepcopy(config)
    if isinstance(config.dtype, str):  # its name, since save_pretrained; Apertus takes the dtype alone
        config.dtype = getattr(torch, config.dtype)
    with torch.device("meta"):
        return model_class(config)


def _wrong_in_files(folder: Path, layout: Layout) -> list[str]:
    """Errors of single tensors in the files: empty, of another dtype, or not finite."""
    dtypes = set(layout.dtypes.values()) | (_STATISTICS if layout.is_packed else set())
    wrong = []
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file) as weights:
            for name in weights.names:
                tensor = weights.tensor(name)
                dtype = layout.dtypes.get(name)
                if tensor.numel() == 0:
                    wrong.append(f"{name} is empty, {tuple(tensor.shape)}")
                elif tensor.dtype != dtype and (dtype is not None or tensor.dtype not in dtypes):
                    wrong.append(f"{name} is {tensor.dtype}, not {dtype or sorted(map(str, dtypes))}")
                elif tensor.is_floating_point() and not tensor.isfinite().all():
                    wrong.append(f"{name} holds values that are not finite")
    return wrong


_STATISTICS = {torch.uint8, torch.int8, torch.float32}
"""Dtypes of the quantization state that bitsandbytes writes beside packed weights."""


def _check_head(model: "PreTrainedModel") -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is None or embedding.weight.data_ptr() == head.weight.data_ptr():
        return
    if ties_embeddings(model.config):
        raise MergeFailed(
            "the head and the embeddings in the merged files are two tensors, and the config ties them to one: other "
            "programs would load one of the two for both; nothing was written"
        )
    rank_zero_info(
        "the base's head is its embedding; training has parted them, so the merged model holds both "
        f"({head.weight.numel():,} weights more, tie_word_embeddings: false)"
    )


def check_same(got: "PreTrainedModel", written: "PreTrainedModel") -> None:
    """Compare the tensors of a model that was read back with those that were written, bit by bit.

    Raises:
        MergeFailed: some tensors differ.
    """
    weights = written.state_dict()
    _fail_if(
        [f"{name} has other values" for name, t in got.state_dict().items() if not torch.equal(t, weights[name].cpu())]
    )


def check_buffers(got: "PreTrainedModel", expected: dict[str, Tensor]) -> None:
    """Compare the persistent buffers of a merged model with the base model's, bit by bit; no merge changes them.

    Args:
        got: merged model that was read back from its files.
        expected: persistent buffers of the base model by name.

    Raises:
        MergeFailed: some buffers differ or are missing.
    """
    buffers = dict(persistent_buffers(got))
    _fail_if(
        [
            f"the buffer {name} {'has other values' if name in buffers else 'is missing'}"
            for name, buffer in expected.items()
            if name not in buffers or not torch.equal(buffers[name], buffer.to(buffers[name].dtype))
        ]
    )


def check_changes(model: "PeftModel", got: "PreTrainedModel") -> int:
    """Compare each weight under plain LoRA in a merged model with the base's plus what was trained.

    The logits of a few prompts would not tell of one layer, or of an expert that they do not reach, whose change is
    lost.

    Args:
        model: trained model, not merged.
        got: merged model that was read back from its files.

    Returns:
        Number of experts that were compared one by one.

    Raises:
        MergeFailed: a weight or an expert lacks more than ``MOST_LOST`` of what was trained.
    """
    from peft.tuners.lora import Linear, ParamWrapper

    wrong, count, base = [], 0, model.get_base_model()
    for path, layer in base.named_modules():
        if isinstance(layer, ParamWrapper):
            name, parts = f"{path.replace('.base_layer', '')}.{layer.parameter_name}", layer.num_experts
            lost = _lost_parts(layer, layer.get_param(), got.get_parameter(name), parts)
            wrong += [f"expert {place} of {name} lacks what was trained" for place in lost.nonzero().flatten().tolist()]
            count += parts
        elif isinstance(layer, Linear) and not layer.lora_variant and not is_quantized(base):
            name = f"{path}.weight"
            if _lost_parts(layer, layer.get_base_layer().weight, got.get_parameter(name), 1):
                wrong.append(f"{name} lacks what was trained")
    _fail_if(wrong)
    return count


def _lost_parts(layer: "LoraLayer", base: Tensor, got: Tensor, parts: int) -> Tensor:
    """Whether each part of a merged weight lacks its change, ``(parts,)``; changes are rounded as merges do."""
    base, got = base.detach().cpu(), got.detach()
    wide = torch.promote_types(base.dtype, got.dtype)
    merged = base.to(wide)
    for adapter in (name for name in layer.active_adapters if name in layer.lora_A):
        merged = merged + layer.get_delta_weight(adapter).detach().to("cpu", wide)
    merged, at_least = merged.to(got.dtype), torch.promote_types(got.dtype, torch.float32)
    change = (merged.to(at_least) - base.to(got.dtype).to(at_least)).view(parts, -1).norm(dim=1)
    missing = (merged.to(at_least) - got.to(at_least)).view(parts, -1).norm(dim=1)
    return missing > MOST_LOST * change


def _fail_if(wrong: list[str]) -> None:
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise MergeFailed(f"the merged files are wrong: {'; '.join(wrong[:3])}{more}; nothing was written")

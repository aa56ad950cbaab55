"""Checks that a GGUF file, read back, holds the model that it was made of.

Its tensors are read with the package gguf and compared with the model's. Where llama.cpp is installed (the package
xllamacpp), it also computes log-probabilities and tokenizes texts, which are compared with those of transformers.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from lit_callbacks.export.merge_check import (
    BOUNDS,
    DEQUANTIZED_BOUND,
    PROMPTS,
    SHARE_WHERE_ROUNDED,
    MergeFailed,
    sample_ids,
)
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.errors import RecipeError
from lit_ft.gguf import WeightType
from lit_ft.gguf.architectures import Family
from lit_ft.gguf.llama_server import LlamaFailed, llama_server
from lit_ft.gguf.weights import Weight
from lit_ft.inference.openai.client import Lacking, OpenAIClient

_BOUNDS: dict[WeightType, float] = {
    "f32": BOUNDS[torch.float32],
    "f16": BOUNDS[torch.float16],
    "bf16": BOUNDS[torch.bfloat16],
    "q8_0": DEQUANTIZED_BOUND,
}
"""Bound of the largest difference of a log-probability, relative to the largest logit: those of merged models in the
same dtype. llama.cpp rounds activations to the type of the weights too; in Q8_0, to 8 bits in blocks of 32, as the
8-bit kernels do whose bound this is."""


@dataclass(frozen=True)
class Tolerance:
    """What llama.cpp's log-probabilities may differ by."""

    bound: float
    """Largest difference, relative to the largest logit."""
    share: float
    """Share of the positions where it holds."""


def tolerance_of(weight_type: WeightType, family: Family) -> Tolerance:
    """What llama.cpp's log-probabilities may differ by for a model.

    Args:
        weight_type: type of the weights in the file.
        family: family of the model.
    """
    return Tolerance(
        max(_BOUNDS[weight_type], _BOUNDS["f16"] if family.rounds_activations else 0.0),
        1.0 if weight_type == "f32" else SHARE_WHERE_ROUNDED,
    )


ROUNDING = {
    GGMLQuantizationType.F32: 0.0,
    GGMLQuantizationType.F16: 2.0**-11,
    GGMLQuantizationType.BF16: 2.0**-8,
    GGMLQuantizationType.Q8_0: 1 / 254 + 2.0**-11,
}
"""Largest rounding of a value, relative to itself, in Q8_0 to the largest of its block: half a step of 1/127 of that,
and the rounding of the scale, which is a float16. A bfloat16 has 8 bits; rounding to the nearest gives half of this."""

_SMALLEST = 2.0**-17
"""Rounding of the smallest values: float16 has steps of 2^-24, and a scale of Q8_0 is multiplied by up to 127."""

TOKENIZED = (
    *PROMPTS,
    "It's 12345 o'clock,\n\n  isn't  it?\t(50%) ÄÖÜ naïve ...\r\n",
    "   leading and trailing   ",
    "def f(x):\n\treturn {'a': [x**2, -1.5e-3]}  # 注释\n",
    "🙂👍🏽 русский العربية हिन्दी ไทย 日本語 한국어",
)
"""Texts that are tokenized by both. They are in NFC: some tokenizers bring a text into it first, llama.cpp does not."""

_CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "What is blue?"}],
    [
        {"role": "user", "content": "What is blue?"},
        {"role": "assistant", "content": "A color."},
        {"role": "user", "content": "今天呢？"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is blue?"}],
)


@dataclass(frozen=True)
class LlamaReport:
    """Difference between llama.cpp on a GGUF file and transformers on the model."""

    largest: float
    """Largest absolute difference of a log-probability, over the most probable tokens at each position."""
    mean: float
    positions: int
    bound: float
    share: float
    """Share of the positions that must be within the bound."""
    templates: str
    """What llama.cpp makes of the chat template."""

    def __str__(self) -> str:
        return (
            f"llama.cpp's log-probabilities differ by {self.largest:.1e} at most, {self.mean:.1e} on average "
            f"(bound {self.bound:.1e}, at {self.share:.0%} of {self.positions} positions); {self.templates}"
        )


def check_tensors(path: Path, weights: Iterable[Weight]) -> int:
    """Compare the tensors of a file, read back, with those that it was made of; returns their number.

    Args:
        path: GGUF file.
        weights: the tensors, in any order; each is read when its turn comes.

    Raises:
        MergeFailed: a tensor is missing or surplus, or has another type or shape, or values that rounding does not
            explain.
    """
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    count = 0
    for weight in weights:
        count += 1
        tensor = tensors.pop(weight.name, None)
        shape = tuple(weight.values.shape)
        if tensor is None:
            raise MergeFailed(f"{path.name} lacks the tensor {weight.name}; nothing was written")
        stored = tuple(int(size) for size in reversed(tensor.shape))
        if tensor.tensor_type != weight.type or stored != shape:
            raise MergeFailed(
                f"{path.name}: {weight.name} is {tensor.tensor_type.name} {stored}, not {weight.type.name} {shape}; "
                "nothing was written"
            )
        values = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))  # a copy
        if not _is_rounded(values.view(shape), weight.values.to(torch.float32), weight.type):
            raise MergeFailed(
                f"{path.name}: {weight.name} has other values than rounding to {weight.type.name} explains; nothing "
                "was written"
            )
    if tensors:
        raise MergeFailed(f"{path.name} has the surplus tensor {next(iter(tensors))}; nothing was written")
    return count


def _is_rounded(values: Tensor, exact: Tensor, type_: GGMLQuantizationType) -> bool:
    scale = exact.abs()
    if type_ == GGMLQuantizationType.Q8_0:
        block, _ = gguf.GGML_QUANT_SIZES[type_]
        blocks = scale.view(-1, block)
        scale = blocks.amax(1, keepdim=True).expand_as(blocks).reshape(exact.shape)
    smallest = 0.0 if type_ == GGMLQuantizationType.F32 else _SMALLEST
    return bool(((values - exact).abs() <= ROUNDING[type_] * scale + smallest).all())  # false for NaN too


def check_with_llama(
    path: Path,
    reference: PeftModel | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ends: Sequence[int],
    tolerance: Tolerance,
    lora: Path | None,
) -> LlamaReport:
    """Let llama.cpp read a file, and compare it with transformers: log-probabilities, tokens of texts, end tokens.

    Args:
        path: GGUF file of the model.
        reference: the model that it was made of, with its adapter where ``lora`` is given.
        tokenizer: its tokenizer.
        ends: tokens that end an answer.
        tolerance: what the log-probabilities may differ by.
        lora: GGUF file of the adapter; None for a model alone.

    Raises:
        MergeFailed: llama.cpp does not read the file, or differs.
    """
    base = reference.get_base_model() if isinstance(reference, PeftModel) else reference
    samples = [ids[:, : base.config.max_position_embeddings - 1] for ids in sample_ids(base, tokenizer)]
    longest = max(len(tokenizer(text)["input_ids"]) for text in TOKENIZED)
    try:
        with llama_server(path, lora, positions=max(longest, *(ids.shape[1] for ids in samples)) + 8) as url:
            client = OpenAIClient(url)
            model = client.models()[0]
            _check_tokens(client, tokenizer)
            if passed := [end for end in ends if not client.ends_at(end)]:
                tokens = tokenizer.convert_ids_to_tokens(passed)
                raise MergeFailed(f"llama.cpp does not end an answer at {tokens}; nothing was written")
            differences, largest = _differences(client, model, reference, samples)
            templates = _templates(client, model, tokenizer)
    except (LlamaFailed, Lacking, RecipeError) as error:
        raise MergeFailed(f"{error}; nothing was written") from error
    report = LlamaReport(
        largest=float(differences.max()),
        mean=float(differences.mean()),
        positions=len(differences),
        bound=tolerance.bound * max(largest, 1.0),
        share=tolerance.share,
        templates=templates,
    )
    if not np.quantile(differences, tolerance.share, method="higher") <= report.bound:  # true for NaN too
        raise MergeFailed(f"{path.name} is not the model that was trained: {report}; nothing was written")
    return report


COMPARED = 20
"""Most probable tokens of llama.cpp whose log-probabilities are compared at each position."""


@torch.no_grad()
def _differences(
    client: OpenAIClient, model: str, reference: PeftModel | PreTrainedModel, samples: Sequence[Tensor]
) -> tuple[np.ndarray, float]:
    """Largest difference at each position, ``(positions,)``, and the largest logit of the reference."""
    differences, largest = [], 0.0
    for ids in samples:
        logits = reference(input_ids=ids.to(reference.device)).logits[0].float().cpu()
        largest = max(largest, float(logits.abs().max()))
        own, tokens = logits.log_softmax(-1), ids[0].tolist()
        for end in range(1, len(tokens) + 1):
            served = client.next_logprobs(model, tokens[:end], COMPARED)
            expected = own[end - 1, list(served)].numpy()
            differences.append(np.abs(expected - np.fromiter(served.values(), float)).max())
    return np.array(differences), largest


def _check_tokens(client: OpenAIClient, tokenizer: PreTrainedTokenizerBase) -> None:
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    for text in (*TOKENIZED, *(f"a {token}b" for token in added[-64:])):
        own, other = tokenizer(text)["input_ids"], client.text_ids(text)
        if own != other:
            raise MergeFailed(
                f"llama.cpp tokenizes {text!r} as {tokenizer.convert_ids_to_tokens(other)}, the model's tokenizer as "
                f"{tokenizer.convert_ids_to_tokens(own)}; nothing was written"
            )


_WITHOUT_THINKING = {"enable_thinking": False}


def _templates(client: OpenAIClient, model: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Sentence on the tokens of conversations: llama.cpp renders the template by an engine of its own."""
    if not tokenizer.chat_template:
        return "the model has no chat template"
    template = ChatTemplate(tokenizer)
    trained: list[tuple[list[dict[str, str]], list[int]]] = []
    refused = 0
    for messages in _CONVERSATIONS:
        try:
            trained.append((messages, template.ids(messages, generation=True)))
        except RecipeError:
            raise
        except Exception:  # a template may refuse, with any exception, a system prompt for example
            refused += 1

    def equal(options: dict[str, bool] | None) -> int:
        return sum(ids == client.prompt_ids(model, messages, None, options) for messages, ids in trained)

    same, advice = equal(None), ""
    if same < len(trained):
        advice = "; compare with `parity`, and give llama-server --chat-template-file"
        if equal(_WITHOUT_THINKING) == len(trained):  # llama-server asks for thinking, which the template does not
            advice = f"; all have them with llama-server --chat-template-kwargs '{json.dumps(_WITHOUT_THINKING)}'"
    left_out = f" (the template refuses {refused} more)" if refused else ""
    return f"prompts of {same} of {len(trained)} conversations{left_out} have the tokens of training{advice}"

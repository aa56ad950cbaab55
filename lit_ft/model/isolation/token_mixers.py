"""Modules that mix tokens in other ways than packed attention, called once for each sample of a packed batch.

A gated delta net, Mamba, a short convolution or indexed attention carries something from token to token, and would
carry it into the next sample. So the module that mixes is called sample by sample, on slices of its inputs; norms, MLPs
and experts around it compute all samples at once.

These modules are found by their place and signature. What mixes tokens needs a cache in generation: it is the outermost
module of a layer whose ``forward`` takes one.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import Any

import torch
from lit_callbacks.distributed.host_copy import queued_copy
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import __version__ as transformers_version

from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import attention_implementation, calls_attention_interface, reads_boundaries
from lit_ft.model.architecture import Architecture
from lit_ft.model.isolation import architectures, lengths

ISOLATING_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""Kinds of layers that attention alone mixes tokens in."""
_CACHES = {"cache", "past_key_values", "past_key_value", "layer_past", "cache_params", "state", "mems", "use_cache"}


def keep_samples_apart(model: PreTrainedModel) -> None:
    """Make a model's token mixers start anew with each sample of a packed batch; it is changed in place.

    Raises:
        RecipeError: nothing that mixes tokens is found in an architecture that was compared.
    """
    of_model = list(mixers(model))
    if not of_model and model.config.model_type in architectures.COMPARED:
        raise RecipeError(
            f"no layer of {type(model).__name__} takes a cache under a name that lit_ft knows (transformers "
            f"{transformers_version}), so that the samples of a packed batch could not be kept apart; install "
            "transformers 5.24"
        )
    chunk = Architecture.of(model.config).attention_chunk
    for mixer in of_model:
        if chunk is not None and _kinds(model, mixer) == {"chunked_attention"}:
            mixer.tokens_of_chunk = chunk  # type: ignore[assignment]
        if not isolates(model, mixer):
            # Not a closure, which a copy of the model would share: it would compute with this model's weights.
            mixer.forward = partial(_sample_by_sample, mixer, mixer.forward)


def mixers(module: nn.Module, in_layer: bool = False) -> Iterator[nn.Module]:
    """Modules that mix tokens, from first to last: the outermost ones of each layer whose ``forward`` takes a cache.

    Args:
        module: model or a part of it.
        in_layer: whether it lies within a layer, which is an entry of an outermost ``nn.ModuleList``.
    """
    for child in module.children():
        is_layer = isinstance(module, nn.ModuleList) and not in_layer
        if in_layer and _CACHES & inspect.signature(type(child).forward).parameters.keys():
            yield child
        else:
            yield from mixers(child, in_layer or is_layer)


def isolates(model: PreTrainedModel, mixer: nn.Module) -> bool:
    """Whether a module keeps the samples of a packed batch apart when it is called with all of them.

    Attention does, by the attention function that transformers calls, unless it is one that needs a mask: models build
    masks for all tokens of a packed batch, and some ignore where its samples begin.
    """
    return attention_implementation(model.config) not in ("eager", "sdpa") and _is_attention(model, mixer)


def _is_attention(model: PreTrainedModel, mixer: nn.Module) -> bool:
    kinds = _kinds(model, mixer)
    counts_tokens = {(model.config.model_type, kind) for kind in kinds} & architectures.COUNTS_TOKENS
    return kinds <= ISOLATING_KINDS and not counts_tokens and calls_attention_interface(mixer)


def _kinds(model: PreTrainedModel, mixer: nn.Module) -> set[str]:
    """Kind of a mixer's layer; those of all layers where it does not know its own."""
    kinds, layer = Architecture.of(model.config).layer_kinds, getattr(mixer, "layer_idx", None)
    return set(kinds if layer is None else kinds[layer : layer + 1])


def other_than_attention(model: PreTrainedModel) -> list[str]:
    """Names of classes that mix tokens in other ways than by an attention function alone, each once."""
    names = [type(mixer).__name__ for mixer in mixers(model) if not _is_attention(model, mixer)]
    return list(dict.fromkeys(names))


# Excluded from torch.compile, which would recompile it for every list of lengths.
@torch.compiler.disable
def _sample_by_sample(mixer: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Result of a mixer's ``forward`` for a packed batch, computed for each sample separately."""
    hidden = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    samples = lengths.lengths_of(hidden.shape[1])
    if samples is None or len(samples) == 1:
        return forward(*args, **kwargs)
    if hidden.is_cuda and reads_boundaries(mixer) and _has_kernels():
        return forward(*args, **kwargs, **_boundaries(tuple(samples), hidden.device))
    results, start = [], 0
    for number, length in enumerate(samples):
        part = _Part(number, start, start + length, sum(samples))
        with lengths.samples_of([length]):
            results.append(forward(*part.of(args), **part.of(kwargs)))
        start += length
    return _join(results, samples)


@cache
def _has_kernels() -> bool:
    """Whether both kernels are there that start anew at boundaries; without them transformers refuses boundaries."""
    return all(find_spec(package) is not None for package in ("fla", "causal_conv1d"))


@lru_cache(maxsize=4)  # once for all layers and both passes of a batch
@torch.inference_mode(False)  # a training step may have the lengths of an evaluation before it, and keeps the result
def _boundaries(samples: tuple[int, ...], device: torch.device) -> Mapping[str, Tensor]:
    """Arguments of transformers' mixers: where samples begin and end, ``(S + 1,)``; each token's sample, ``(1, T)``.

    They are made on the host, which would wait for a GPU. Kernels compute more from boundaries, once for each tensor.
    """
    counts = torch.tensor(samples, dtype=torch.int32)
    number = torch.arange(len(samples), dtype=torch.int32).repeat_interleave(counts)
    ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return {"cu_seq_lens_q": queued_copy(ends, device), "seq_idx": queued_copy(number, device)[None]}


class _Pieces(list[Tensor]):
    """Results of the samples that have different shapes, such as the keys that an indexer chose for another layer."""


class _Part:
    """The tokens ``[start, stop)`` of a packed batch of ``tokens`` tokens, one sample of it."""

    def __init__(self, number: int, start: int, stop: int, tokens: int) -> None:
        self.number, self.slice, self.tokens = number, slice(start, stop), tokens

    def of(self, value: Any) -> Any:
        """The sample's part of an argument: of tensors in tuples, lists and dicts too."""
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, _Pieces):
            return value[self.number]
        if type(value) in (tuple, list):
            return type(value)(self.of(item) for item in value)
        if type(value) is dict:
            of_lengths = {"segment_lengths": [self.slice.stop - self.slice.start], "segments": None}
            return {key: of_lengths[key] if key in of_lengths else self.of(item) for key, item in value.items()}
        return value

    def _of_tensor(self, tensor: Tensor) -> Tensor:
        """Both last dimensions of ``(.., T, T)``, a mask or distances; else the first of T after that of the batch."""
        if tensor.ndim != 3 and tensor.shape[-2:] == (self.tokens, self.tokens):
            return tensor[..., self.slice, self.slice]
        for dimension in range(int(tensor.ndim > 1), tensor.ndim):
            if tensor.shape[dimension] == self.tokens:
                return tensor.narrow(dimension, self.slice.start, self.slice.stop - self.slice.start)
        return tensor


def _join(results: list[Any], samples: list[int]) -> Any:
    """Results of all samples as that of the packed batch; what has no tokens is that of the first sample."""
    first = results[0]
    if isinstance(first, tuple):
        return tuple(_join(list(parts), samples) for parts in zip(*results, strict=True))
    if not isinstance(first, Tensor) or all(result is first for result in results):
        return first
    is_alike = len({tensor.shape[2:] for tensor in results}) == 1
    return torch.cat(results, dim=1) if is_alike and [len(t[0]) for t in results] == samples else _Pieces(results)

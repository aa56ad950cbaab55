"""Loading of tokenizer, config and base model from a folder or from the Hugging Face hub."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, cast

import torch
from huggingface_hub import HfApi, constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, StrictDataclassError
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.distributed.gather import full_shape, is_zero3
from lit_callbacks.export.base_files import BaseFiles
from lit_callbacks.internals.transformers_internals import names_in_model
from lit_callbacks.output.heartbeat import heartbeat
from lit_callbacks.protocols import HasScore
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.errors import LIBRARY_ERRORS, NoSuchModel, RecipeError, explained, first_line
from lit_ft.internals.hub import remedy, use_the_cache_without_a_network
from lit_ft.internals.transformers import (
    attention_functions,
    declare_decoder,
    decoder_layer_classes,
    global_value,
    has_sinks,
    outline_in,
    with_decoder,
    without_load_report,
)
from lit_ft.model import quantization as quantized_base
from lit_ft.model.architecture import Architecture, head_layer
from lit_ft.model.attention.packed_attention import PACKED
from lit_ft.model.config.head import CLASSES, Head, with_head
from lit_ft.model.config.known import unknown_architecture
from lit_ft.model.config.overrides import Overrides, with_overrides
from lit_ft.model.files import deferred_cast, finite_weights, size_check, text_part
from lit_ft.model.files.weight_files import check_weight_files
from lit_ft.model.isolation import architectures

CONFIG_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, StrictDataclassError)
"""Exceptions of transformers for a bad config.json."""
WEIGHT_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, SafetensorError, UnpicklingError)
"""Exceptions of transformers for bad weight files."""
_LEAST_VOCABULARY = 8
"""Smallest vocabulary of a tokenizer. Without its file, transformers builds one of a few special tokens."""
Init = Literal["pretrained", "random"]
Reading = tuple[PreTrainedModel, dict[str, set[str]]]
"""A model, and transformers' report of what was missing in its files."""
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_SCORE = "score.weight"
"""Name of the weight of transformers' heads that score texts."""
_STANDARD_DEVIATION = 0.02
"""That of new weights in transformers, where a config has no ``initializer_range``."""


def load_tokenizer(pretrained: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub id.

    Raises:
        RecipeError: there is no tokenizer, or the hub cannot be reached.
    """
    # A folder may hold a tokenizer only.
    if not os.path.isfile(Path(pretrained).expanduser() / "tokenizer_config.json"):
        _check_folder(pretrained)
    try:
        tokenizer = AutoTokenizer.from_pretrained(pretrained, trust_remote_code=False)
        tokenizer("a")  # some settings are checked only on use
        if len(tokenizer.get_vocab()) - len(tokenizer.get_added_vocab()) < _LEAST_VOCABULARY:
            raise ValueError("without the file of its vocabulary, e.g. tokenizer.json, it would leave out all text")
        json.dumps(tokenizer.init_kwargs, default=str, ensure_ascii=False).encode()  # half of a surrogate pair fails
        return tokenizer
    except Exception as error:  # tokenizers raises no more specific class for a file that does not parse
        if os.path.isdir(pretrained):
            raise RecipeError(
                f"model.pretrained={pretrained!r} holds no tokenizer that loads ({first_line(error)}); put "
                "tokenizer.json and tokenizer_config.json there, or set model.tokenizer"
            ) from error
        raise _unreachable(pretrained, error) from error


def load_config(pretrained: str, overrides: Overrides | None = None) -> PretrainedConfig:
    """Load the model config of a folder or hub id; of a model for images and text, the part for text.

    Raises:
        RecipeError: there is no config, it does not parse, the hub cannot be reached, or the overrides do not fit.
    """
    _check_folder(pretrained)
    if os.path.isfile(path := Path(pretrained).expanduser() / "config.json"):
        size_check.check_sizes(path, _named(pretrained))
    try:
        config = text_part.config_of_text(AutoConfig.from_pretrained(pretrained, trust_remote_code=False))
    except CONFIG_ERRORS as error:
        if reason := unknown_architecture(pretrained):
            raise RecipeError(f"{_named(pretrained)}: {reason}") from error
        if os.path.isdir(pretrained):
            raise RecipeError(f"{_named(pretrained)}: config.json: {_reason(error)}") from error
        raise _unreachable(pretrained, error) from error
    return with_overrides(config, overrides)


def _named(pretrained: str) -> str:
    return f"model.pretrained={pretrained!r}"


def _check_folder(pretrained: str) -> None:
    folder = Path(pretrained).expanduser()
    if not pretrained.strip():
        raise RecipeError(f"model.pretrained={pretrained!r} names nothing; give a model folder or a hub id")
    if os.path.isdir(folder) and not (folder / "config.json").is_file():
        raise RecipeError(f"model.pretrained={pretrained!r} is {_kind_of_folder(folder)}")
    if os.path.isfile(folder):
        here = f": {folder.parent}" if (folder.parent / "config.json").is_file() else ""
        raise RecipeError(
            f"model.pretrained={pretrained!r} is a file; name a folder with config.json, weights and tokenizer{here}"
        )
    looks_like_path = pretrained.startswith((".", "/", "~")) or pretrained.count("/") > 1
    if looks_like_path and not os.path.exists(folder):
        near = _near_folder(folder)
        advice = f"did you mean {near!r}?" if near is not None else "name a model folder or a hub id"
        raise NoSuchModel(f"model.pretrained={pretrained!r} does not exist", advice)
    if os.path.isdir(folder):  # unlike Path.is_dir, it accepts names that are too long
        return
    try:
        is_cached = try_to_load_from_cache(pretrained, "config.json") is not None
    except HFValidationError as error:
        raise RecipeError(
            f"model.pretrained={pretrained!r} is no folder here (in {os.getcwd()}), and no hub id is spelled like that "
            f"({first_line(error)}); name a model folder or a hub id"
        ) from error
    if is_cached:
        use_the_cache_without_a_network()
    else:
        _check_hub(pretrained)


def _kind_of_folder(folder: Path) -> str:
    """What a folder without ``config.json`` is, and what to name instead."""
    if (folder / "adapter_config.json").is_file():
        return (
            "an adapter, no model; name its base, or the model that `python -m lit_ft export --adapter "
            f"{folder} --merge --out DIR` writes"
        )
    if (folder / "config.yaml").is_file() and (folder / "checkpoints").is_dir():
        return f"a run, no model; name the model that `python -m lit_ft export --run {folder} --merge` writes"
    return "a folder without config.json; name one that save_pretrained wrote (config.json, weights, tokenizer)"


_REPOSITORY = Path(__file__).parents[2]


def _near_folder(path: Path) -> str | None:
    """Folder of a model for a path that does not exist: in this repository, or beside it with almost its name."""
    if ((here := _REPOSITORY / path) / "config.json").is_file():
        return str(here)
    with suppress(OSError):
        names = [one.name for one in path.parent.iterdir() if (one / "config.json").is_file()]
        return next((str(path.parent / name) for name in get_close_matches(path.name, names, n=1, cutoff=0.75)), None)
    return None


def _check_hub(pretrained: str) -> None:
    """Query the hub once; without a network, transformers would try ten times, for a minute."""
    try:
        HfApi().model_info(pretrained, timeout=10)
    except Exception as error:  # any error, from DNS to a wrong name, means that the model is not available
        raise _unreachable(pretrained, error) from error


def _unreachable(pretrained: str, error: Exception) -> RecipeError:
    near = _near_folder(Path(pretrained)) if "/" in pretrained else None
    advice = remedy(pretrained, error) or (
        f"name a mirror of {constants.ENDPOINT} with HF_ENDPOINT; or download it where there is a network with `hf "
        f"download {pretrained} --local-dir models/{pretrained.split('/')[-1]}` and name that folder; or try the "
        "embedded model: python -m lit_ft fit --config recipes/quickstart.yaml"
    )
    return NoSuchModel(
        f"model.pretrained={pretrained!r} is no folder here (in {os.getcwd()}) and cannot be had from the hub "
        f"({first_line(error)})",
        advice if near is None else f"did you mean {near!r}?",
    )


def _reason(error: Exception) -> str:
    """Reason for a bad config: the first line of some names the failed check, the next one the value."""
    return " ".join(str(error).split())[:160] if isinstance(error, StrictDataclassError) else first_line(error)


DENSE = "dense"
"""Name for ``pick_attention``, which no recipe can give."""


def pick_attention(config: PretrainedConfig, requested: str) -> str:
    """Name of the attention function: ``auto`` is packed attention where flash attention and SDPA are supported too.

    Both take queries, keys and values alone: no mask of the model's own making, no capped logits. SDPA has no attention
    sinks, and flash attention no chunks; packed attention computes both. Where it does not apply, SDPA or ``eager``
    computes what the model needs, sample by sample. ``DENSE`` is the one of these two, for padded batches and a KV
    cache.
    """
    if requested not in ("auto", DENSE):
        check_attention(requested, config)
        return requested
    functions = attention_functions(config)
    is_packed = "flash" in functions and ("sdpa" in functions or has_sinks(config))
    is_packed = is_packed or Architecture.of(config).attention_chunk is not None
    return PACKED if is_packed and requested == "auto" else "sdpa" if "sdpa" in functions else "eager"


def check_attention(requested: str, config: PretrainedConfig) -> None:
    """Refuse a name of no attention function, and one that the model lacks or whose package is not installed.

    Raises:
        RecipeError: it cannot be used.
    """
    known = ["auto", "eager", *sorted(name for name in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in name)]
    if requested not in known and "/" not in requested:  # a kernel of the hub has an owner
        near = get_close_matches(requested, known, n=1)
        advice = f"did you mean {near[0]}?" if near else "leave it out: auto is right for packed batches"
        raise RecipeError(f"model.attn_implementation={requested!r} is none of {', '.join(known)}; {advice}")
    if requested == "sdpa" and "sdpa" not in attention_functions(config):
        raise RecipeError(
            f"model.attn_implementation=sdpa does not compute the attention of {config.model_type}; leave it out: auto "
            "is right for packed batches"
        )
    chunk = Architecture.of(config).attention_chunk
    if chunk is not None and requested not in ("auto", PACKED):
        raise RecipeError(
            f"model.attn_implementation={requested} attends in chunks of {chunk:,} tokens from the start of a packed "
            f"batch, and {config.model_type} from that of each sample; leave it out: auto is right for packed batches"
        )
    is_installed = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    if requested in is_installed and not is_installed[requested]():
        raise RecipeError(
            f"model.attn_implementation={requested} needs the package flash-attn and a GPU, and one is missing; leave "
            "it out: auto is right for packed batches"
        )


def load_base(
    pretrained: str,
    init: Init = "pretrained",
    dtype: Dtype = "auto",
    attn_implementation: str = "auto",
    quantization: QuantizationConfigMixin | None = None,
    overrides: Overrides | None = None,
    head: Head = "logits",
) -> PreTrainedModel:
    """Build the base model, in training mode.

    Args:
        pretrained: folder or hub id.
        init: ``pretrained`` reads the weights; ``random`` draws them (config.json is enough).
        dtype: dtype of the weights; ``auto`` is that of the config.
        attn_implementation: name of an attention function of transformers, or ``auto``.
        quantization: quantization that is applied while the weights are read; None for none.
        overrides: values in place of those of config.json.
        head: what is computed from the final hidden states.

    Raises:
        RecipeError: weights are missing, or quantized in a way that cannot be trained on.
    """
    config = with_head(load_config(pretrained, overrides), head)
    architectures.check(config)
    attention = pick_attention(config, attn_implementation)
    if init == "pretrained":
        return _read(pretrained, config, dtype, attention, quantization, head)
    if quantization is not None:
        raise RecipeError("model.quantization needs weights to quantize; set model.init to pretrained")
    return _draw(pretrained, config, dtype, attention, overrides, head)


def _draw(
    pretrained: str, config: PretrainedConfig, dtype: Dtype, attention: str, overrides: Overrides | None, head: Head
) -> PreTrainedModel:
    config.quantization_config = None  # random weights are dense, even if the checkpoint is quantized
    of_weights = dtype_of_weights(config, dtype)
    outline = skeleton(pretrained, overrides=overrides, head=head)
    size_check.check_memory(outline, of_weights, _named(pretrained))
    with explained(f"{_named(pretrained)}: config.json", "put back the file", also=(StrictDataclassError,)):
        model = CLASSES[head].from_config(
            config, trust_remote_code=False, dtype=of_weights, attn_implementation=attention
        )
    declare_decoder(model)
    if (Path(pretrained) / "generation_config.json").is_file():
        with explained(f"{_named(pretrained)}: generation_config.json", "correct or remove it"):
            model.generation_config = GenerationConfig.from_pretrained(pretrained)
    return model.train()


def _read(
    pretrained: str,
    config: PretrainedConfig,
    dtype: Dtype,
    attention: str,
    quantization: QuantizationConfigMixin | None,
    head: Head,
) -> PreTrainedModel:
    check_weight_files(pretrained)
    options = quantized_base.reading_options(config, quantization)
    options = {**options, "config": config, "attn_implementation": attention}
    try:
        if deferred_cast.is_wanted() and dtype != "auto" and "device_map" not in options:
            model, report = _read_to_cast_later(pretrained, getattr(torch, dtype), options, head)
        else:
            model, report = _read_in(pretrained, "auto" if dtype == "auto" else getattr(torch, dtype), options, head)
    except WEIGHT_ERRORS as error:
        under, helps = "", ""
        if is_deepspeed_zero3_enabled():  # code of some models reads the shapes of whole weights there, which are empty
            under, helps = " under DeepSpeed's stage 3", "take stage 2 or lit_ft.strategies.FSDPStrategy, "
        raise RecipeError(
            f"model.pretrained={pretrained!r} has no weights that load{under} ({first_line(error)}); {helps}add "
            "model.safetensors, or train from scratch with --model.init random"
        ) from error
    missing = sorted(report["missing_keys"])
    if head == "score" and missing == [_SCORE]:
        rank_zero_info(f"model.pretrained={pretrained!r} has no head that scores texts: a new one is drawn")
        _draw_score(model)
    elif missing:
        raise RecipeError(
            f"model.pretrained={pretrained!r} lacks weights of the model, which would be random "
            f"({len(missing)}: {', '.join(missing[:3])}, ...); name a checkpoint that has them all"
        )
    model.train()
    if not deferred_cast.is_wanted():  # otherwise the strategy checks each rank's shards
        finite_weights.check_base(model, pretrained)
    quantized_base.prepare_for_training(model)
    return model


def _draw_score(model: PreTrainedModel) -> None:
    """Draw the weight of a new head, the same on every rank, for each dtype that files are read in, and on any device.

    Its distribution is that of transformers' new layers.
    """
    own = torch.Generator().manual_seed(torch.initial_seed())
    std = global_value(model.config.get_text_config(), "initializer_range") or _STANDARD_DEVIATION
    assert isinstance(model, HasScore)
    weight = model.score.weight
    drawn = torch.empty(full_shape(weight), device="cpu").normal_(std=std, generator=own)
    if not is_zero3(weight):
        weight.data = drawn.to(weight.device, deferred_cast.final_dtype(weight) or weight.dtype)
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(drawn)


def _read_in(pretrained: str, dtype: torch.dtype | Literal["auto"], options: dict[str, object], head: Head) -> Reading:
    said = ("UNEXPECTED",) if head == "logits" else ("UNEXPECTED", "MISSING")
    with heartbeat(f"reading the weights of {pretrained}"), without_load_report(of=said):
        read: Reading = CLASSES[head].from_pretrained(
            pretrained, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
        declare_decoder(read[0])
        return read


def _read_to_cast_later(pretrained: str, dtype: torch.dtype, options: dict[str, object], head: Head) -> Reading:
    """Read a model in the dtype of its files, and mark its final dtypes; with files of several dtypes, cast at once."""
    model, report = _read_in(pretrained, "auto", options, head)
    of_files = _dtypes_of_files(model)
    if of_files:
        if len(of_files) > 1 and dtype not in of_files:
            found = " and ".join(sorted(map(str, of_files)))
            rank_zero_info(
                f"model.pretrained={pretrained!r}: its files have weights in {found}: until it is sharded, each rank "
                f"holds the whole model in {dtype}; save it in one dtype to avoid that"
            )
        model, report = _read_in(pretrained, of_files.pop() if len(of_files) == 1 else dtype, options, head)
    deferred_cast.mark(model, outline_in(model, dtype))
    return model, report


def _dtypes_of_files(model: PreTrainedModel) -> set[torch.dtype]:
    """Dtypes of the weights in a model's files if it has lost digits of them: its config named another dtype."""
    files, own = BaseFiles.of(model), model.state_dict()
    dtypes = {} if files is None else files.float_dtypes()
    names = names_in_model(model, dtypes)
    read_in = {name: tensor.dtype if (tensor := own.get(names[name])) is not None else model.dtype for name in dtypes}
    is_exact = all(torch.promote_types(dtype, read_in[name]) == read_in[name] for name, dtype in dtypes.items())
    return set() if is_exact else set(dtypes.values())


def skeleton(
    pretrained: str, dtype: Dtype = "auto", overrides: Overrides | None = None, head: Head = "logits"
) -> PreTrainedModel:
    """Base model on the meta device, without weights but with their dtype, for checks before weights are read."""
    config = with_head(load_config(pretrained, overrides), head)
    architectures.check(config)
    with (
        torch.device("meta"),
        explained(f"{_named(pretrained)}: config.json", "put back the file", also=(StrictDataclassError,)),
    ):
        of_weights = dtype_of_weights(config, dtype)
        model = CLASSES[head].from_config(config, trust_remote_code=False, dtype=of_weights)
    if head == "score" and not isinstance(model, HasScore):
        raise RecipeError(
            f"{_named(pretrained)} becomes a {type(model).__name__}, which has other layers than one linear layer "
            "`score` behind its decoder; take another architecture, e.g. qwen3, llama, mistral or gemma3_text"
        )
    declare_decoder(model)
    return model


def dtype_name(dtype: Dtype | torch.dtype) -> Dtype:
    """Name of a dtype, which Python may give as one of torch."""
    return cast(Dtype, str(dtype).removeprefix("torch."))


def dtype_of_weights(config: PretrainedConfig, dtype: Dtype) -> torch.dtype:
    """Dtype that a base is loaded in; ``auto`` is that of its config."""
    return (config.dtype or torch.float32) if dtype == "auto" else getattr(torch, dtype)


class _DecoderOutput(MoeModelOutputWithPast):
    """Output of a decoder; fields that only some architectures have (cross attentions, states) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _HiddenStates(nn.Module):
    """Replacement for the decoder that returns the hidden states it is given."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self._replaced = (decoder,)  # in a tuple, so that it is not registered as a submodule

    def __getattr__(self, name: str) -> Any:
        """A constant that the model's ``forward`` takes from its decoder; OPT's calls the ``decoder`` within."""
        return self if name == "decoder" else getattr(self._replaced[0], name)

    def forward(self, input_ids: None = None, *, inputs_embeds: Tensor, **_: object) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def head_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Function from hidden states ``(n, H)`` to logits ``(n, V)``, as the model itself computes them.

    It runs the model's ``forward`` without its decoder, so that soft-capping (gemma2) and scaling (granite, cohere)
    are applied. Of a model that scores texts it gives the score of the text up to each token, ``(n, 1)``.
    """
    if isinstance(model, HasScore):
        return partial(_scores, model)
    head = with_decoder(model, _HiddenStates(decoder_of(model)))
    return partial(_logits, head)  # a copy of it, as of the module that holds it, has the copy of the model


def _scores(model: HasScore, hidden: Tensor) -> Tensor:
    """Scores in the dtype of the head: rounded to half precision, answers that are nearly as good would be equal."""
    with torch.autocast(hidden.device.type, enabled=False):
        scores: Tensor = model.score(hidden.to(model.score.weight.dtype))
        return scores


def _logits(head: nn.Module, hidden: Tensor) -> Tensor:
    logits: Tensor = head(inputs_embeds=hidden[None], use_cache=False).logits[0]
    return logits


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Part of a causal LM from token ids to final hidden states."""
    return getattr(model, model.base_model_prefix)


def head_parameters(model: PreTrainedModel) -> list[Tensor]:
    """Parameters that logits are computed from: those of the output embeddings, and all outside of the decoder."""
    outside = _parameters_without(model, decoder_of(model))
    return list(dict.fromkeys([*head_layer(model).parameters(), *outside]))


def _parameters_without(module: nn.Module, part: nn.Module) -> Iterator[Tensor]:
    """Parameters of a module, without a walk over those of a part of it, which takes a millisecond a step."""
    if module is not part:
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _parameters_without(child, part)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """Decoder layers of a module: those of the classes that Hugging Face names for its models, the outermost ones."""
    names: set[str] = set()
    for model in module.modules():
        if isinstance(model, PreTrainedModel):
            names |= decoder_layer_classes(model)
    # Base classes count too, because fully_shard replaces a layer's class by a derived one.
    layers = [layer for layer in module.modules() if names & {kind.__name__ for kind in type(layer).__mro__}]
    inner = {part for layer in layers for part in layer.modules() if part is not layer}  # Mamba lists its mixers too
    return [layer for layer in layers if layer not in inner]

"""Export of a trained model: its adapter, or the adapter merged into the base model."""

import copy
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lit_callbacks.distributed.gather import full_weights, persistent_buffers
from lit_callbacks.export.atomic_folder import write_atomically
from lit_callbacks.export.base_files import BaseFiles, add_files
from lit_callbacks.export.merge_check import (
    BOUNDS,
    DEQUANTIZED_BOUND,
    Layout,
    MergeFailed,
    MergeReport,
    check_buffers,
    check_changes,
    check_kept,
    check_same,
    compare,
    compare_in_fp32,
    compare_rounded,
    logits_of,
    quantized_again,
    read_back,
    sample_ids,
    share_lost,
    skeleton,
)
from lit_callbacks.internals.bitsandbytes_internals import without_faults
from lit_callbacks.internals.transformers_internals import (
    attention_implementation,
    dequantize,
    is_encoder_decoder,
    is_quantized,
    kept_in_fp32,
    portable_attention,
    save_under_names_of,
    save_under_names_read,
    save_under_own_names,
    scale_embeddings_as,
)
from lit_callbacks.protocols import HasScore, SavesAdapter

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_Model = TypeVar("_Model", bound=nn.Module)


@runtime_checkable
class Merges(Protocol):
    """A tuning method of PEFT that can be merged into the weights of the base model."""

    def merge_and_unload(self, safe_merge: bool = False) -> nn.Module:
        """The base model, with the adapter merged."""


def unsplit(
    model: "PeftModel | PreTrainedModel", keep: bool, gather: Callable[..., dict[str, Tensor]] = full_weights
) -> "PeftModel | PreTrainedModel | None":
    """Full copy of a sharded model on this rank's CPU; a collective.

    Args:
        model: a sharded ``PeftModel`` or ``PreTrainedModel``.
        keep: whether this rank gets the copy; None if not.
        gather: function that gathers the full weights and persistent buffers by name.

    Raises:
        MergeFailed: some weights of the base model are on no rank.
    """
    weights = gather(model, keep=keep)
    if not keep:
        return None
    base = model.get_base_model() if is_peft(model) else model
    known = set(skeleton(type(base), base.config).state_dict())
    of_base = {_name_in_base(name): weight for name, weight in weights.items() if _name_in_base(name) in known}
    if missing := sorted(known - of_base.keys()):
        raise MergeFailed(f"{', '.join(missing[:3])} of the base are on no rank; nothing was written")
    full = type(base).from_pretrained(None, config=copy.deepcopy(base.config), state_dict=of_base, dtype=base.dtype)
    save_under_names_of(full, base)
    full.name_or_path = base.name_or_path
    if base.can_generate():
        full.generation_config = base.generation_config
    if not is_peft(model):
        return full
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    name = model.active_adapter
    adapted = get_peft_model(full, copy.deepcopy(model.active_peft_config), name)
    adapter = get_peft_model_state_dict(adapted, state_dict=weights, adapter_name=name)
    set_peft_model_state_dict(adapted, adapter, name)
    return adapted


def _name_in_base(name: str) -> str:
    for wrapping in (".base_layer", ".original_module", ".token_adapter"):
        name = name.replace(wrapping, "")  # wrappers of a layer's experts are inside each other
    return name.removeprefix("base_model.model.")


def _buffers_of_base(base: nn.Module) -> dict[str, Tensor]:
    """Copies of a base model's persistent buffers by name, without those of adapters (the factors of VeRA)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [name for name, part in base.named_modules() if isinstance(part, BaseTunerLayer)]
    return {
        _name_in_base(name): buffer.clone()
        for name, buffer in persistent_buffers(base)
        if "modules_to_save" not in name
        and not any(name.startswith(f"{layer}.") and not name.startswith(f"{layer}.base_layer.") for layer in layers)
    }


def find_model(module: nn.Module) -> Any:
    """The first of ``find_models``, else the module if it has ``save_adapter``.

    Raises:
        ValueError: the module has none of these.
    """
    if models := find_models(module):
        return next(iter(models.values()))
    if isinstance(module, SavesAdapter):
        return module
    raise ValueError(
        f"{type(module).__name__} holds no peft.PeftModel and no transformers.PreTrainedModel to save; give it a "
        "method save_adapter(folder, state_dict) that writes what it trains"
    )


def find_models(module: nn.Module) -> "dict[str, PeftModel | PreTrainedModel]":
    """Models that a module trains, by name: each outermost ``PeftModel``, else each outermost ``PreTrainedModel``.

    If it trains none of them, these are all of them: each of its weights is frozen, or it trains something else.
    """
    for is_of_kind in (is_peft, is_pretrained):
        found: dict[str, Any] = {}
        for name, part in module.named_modules():
            if is_of_kind(part) and not any(name.startswith(f"{outer}.") or not outer for outer in found):
                found[name] = part
        trained = {name: model for name, model in found.items() if any(p.requires_grad for p in model.parameters())}
        if found:
            return trained or found
    return {}


def is_pretrained(model: nn.Module) -> "TypeGuard[PreTrainedModel]":
    """Whether a module is a ``PreTrainedModel``; False where transformers is not installed."""
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        return False
    return isinstance(model, PreTrainedModel)


def is_peft(model: nn.Module) -> "TypeGuard[PeftModel]":
    """Whether a module is a ``PeftModel``; False where peft is not installed."""
    try:
        from peft import PeftModel
    except ModuleNotFoundError:
        return False
    return isinstance(model, PeftModel)


def save_adapter(
    model: "PeftModel",
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    texts: Mapping[str, str] | None = None,
    write: Callable[[Path], object] | None = None,
) -> None:
    """Write a ``PeftModel``'s adapter, with the tokenizer, for ``PeftModel.from_pretrained``.

    Args:
        model: model with the adapter.
        folder: path of the adapter folder; an earlier model there is replaced.
        tokenizer: tokenizer to save in the folder; None saves none.
        texts: text files to add to the folder, by name.
        write: function that writes the adapter into a given folder; None is ``write_adapter``.
    """
    write = write or partial(write_adapter, model)

    def write_in_order(temporary: Path) -> None:
        write(temporary)
        _sort_sets(temporary)

    write_atomically(folder, write_in_order, tokenizer, texts)


def _sort_sets(folder: Path) -> None:
    """Sort what PEFT's configs have as sets, whose order is another one in each process."""
    for path in folder.rglob("adapter_config.json"):
        config = json.loads(path.read_text(encoding="utf-8"))
        sets = {name: config[name] for name in _SETS if isinstance(config.get(name), list)}
        config |= {name: sorted(modules) for name, modules in sets.items()}
        path.write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")


_SETS = ("target_modules", "exclude_modules", "feedforward_modules")
"""Options of PEFT's configs that name modules and become sets."""


def write_adapter(model: "PeftModel", folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Write a ``PeftModel``'s adapters into a folder: one of them where ``PeftModel.from_pretrained`` reads it.

    PEFT has a subfolder for each adapter that is not named ``default``; if none is, the active one has no subfolder.

    Args:
        model: model with the adapters.
        folder: path of the folder.
        state_dict: full weights by name where they are sharded; None takes the model's.
    """
    model.save_pretrained(str(folder), state_dict=state_dict)
    if "default" not in model.peft_config:
        own = folder / model.active_adapter
        for path in list(own.iterdir()):
            path.replace(folder / path.name)
        own.rmdir()


def save_merged(
    model: "PeftModel | PreTrainedModel",
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dtype: torch.dtype | None = None,
    quantized_base: Literal["dequantize", "keep"] | None = None,
    texts: Mapping[str, str] | None = None,
    text_only: bool = False,
) -> None:
    """Write a model with its adapter merged, for ``from_pretrained`` of its class in transformers.

    The model itself does not change: a copy on the CPU is merged. Before the folder gets its final name, the files are
    read back, and the logits of the read model are compared with those of the base model and adapter on some prompts.
    Then what the model does not use of the files that it was read from is added (``BaseFiles``), with their config.

    Args:
        model: a ``PeftModel`` or ``PreTrainedModel``.
        folder: path of the merged model; an earlier model there is replaced.
        tokenizer: tokenizer to save in the folder, chat template included; None saves none.
        dtype: dtype of the saved weights; None keeps the model's.
        quantized_base: treatment of a 4-bit or 8-bit base model: ``dequantize`` it and merge into the result, or
            ``keep`` it quantized and quantize the merged weights again. The loss of accuracy is measured and printed.
        texts: text files to add to the folder, by name.
        text_only: whether to leave out what the model does not use, and to write the config of the model alone.

    Raises:
        ValueError: the tuning method cannot be merged, or ``quantized_base`` does not fit the base model.
        MergeFailed: the merged model differs from the trained one; ``folder`` is not written.
    """
    check_mergeable(model, dtype, quantized_base)
    base = model.get_base_model() if is_peft(model) else model
    files = BaseFiles.of(base)
    if files is not None:
        text_only = text_only or _has_new_head(base, files) or _must_stay_alone(base, files, quantized_base)

    def write(temporary: Path) -> None:
        save = partial(_save, files=files, text_only=text_only, folder=temporary)
        if is_peft(model):
            _write_merged(model, save, temporary, tokenizer, dtype, quantized_base)
        else:
            layout = Layout.of(model)
            saved = model if dtype in (None, model.dtype) else _cast(copy_on_cpu(model), dtype)
            save(saved)
            check_same(read_back(temporary, layout.saved_as(saved)), saved)
        add_files(temporary, files, base, tokenizer, text_only)

    write_atomically(folder, write, None, texts)


def _has_new_head(base: "PreTrainedModel", files: BaseFiles) -> bool:
    """Whether a model scores texts, and its files are those of a causal language model, whose head it does not have."""
    return isinstance(base, HasScore) and "score.weight" not in files.tensors


def _must_stay_alone(base: "PreTrainedModel", files: BaseFiles, quantized_base: str | None) -> bool:
    """Whether the quantization of a merged model, or its end, leaves no place for what it does not use of its base."""
    unused = files.unused_parts(base)
    if not unused or (quantized_base != "keep" and files.are_for_dense_models(unused)):
        return False
    rank_zero_warn(
        f"the merged model holds the text part alone: the config of a model whose weights are "
        f"{'quantized again' if quantized_base == 'keep' else 'dequantized'} cannot describe the rest of this base"
    )
    return True


def _save(model: "PreTrainedModel", files: BaseFiles | None, text_only: bool, folder: Path) -> None:
    """Write a model under the names, and in files of the size, that its base is published in."""
    save_under_names_read(model)
    if text_only:
        save_under_own_names(model)
    elif files is not None and not is_quantized(model):
        files.publish_names_of(model)
    largest = files.largest_file() if files is not None else None
    model.save_pretrained(folder, **({} if largest is None else {"max_shard_size": largest}))


def _write_merged(
    model: "PeftModel",
    save: "Callable[[PreTrainedModel], None]",
    folder: Path,
    tokenizer: "PreTrainedTokenizerBase | None",
    dtype: torch.dtype | None,
    quantized_base: str | None,
) -> None:
    trained = copy_on_cpu(model).eval()
    without_faults(trained)
    base = trained.get_base_model()
    if attention_implementation(base.config) not in ("eager", "sdpa"):
        # Others may need an accelerator, or arguments of the training loop.
        base.set_attn_implementation(portable_attention(base))
    if dtype is not None and not is_quantized(base):
        # Merge in the wider of both dtypes and round once, so that the comparison measures that rounding only.
        _cast(trained, torch.promote_types(base.dtype, dtype), narrow=False)
    layout, ids = Layout.of(base), sample_ids(base, tokenizer)
    buffers = _buffers_of_base(base)
    expected = logits_of(trained, ids)
    trained_mib = base.get_memory_footprint() / 2**20
    with trained.disable_adapter():
        untrained = logits_of(trained, ids)
    if quantized_base == "dequantize":
        trained = _dequantized(trained, dtype or base.dtype)
    merged = _merge(trained)
    merged = merged if dtype is None else _cast(merged, dtype)
    with quantized_again() if quantized_base == "keep" else nullcontext():
        save(merged)
    layout, merged_dtype = layout.saved_as(merged), merged.dtype
    mib, in_memory = merged.get_memory_footprint() / 2**20, logits_of(merged, ids) if quantized_base == "keep" else None
    del base, trained, merged  # free their memory for the model that is read back

    with quantized_again() if quantized_base == "keep" else nullcontext():
        again = read_back(folder, layout)
    check_buffers(again, buffers)
    experts = check_changes(model, again) if quantized_base != "keep" else 0
    got = logits_of(again, ids)
    if quantized_base is None:
        report = _compare_dense(expected, got, untrained, merged_dtype)
        kept = f"; beyond the bound, and of what training did {share_lost(expected, got, untrained):.1%} is lost"
        rank_zero_info(
            f"merge verified: {report}{f', {experts} experts one by one' if experts else ''}"
            f"{kept if report.bound == float('inf') else ''}"
        )
        return
    result = _check_quantized(expected, got, untrained, in_memory, merged_dtype)
    rank_zero_info(f"{result}; {mib:,.1f} MiB of weights, {trained_mib:,.1f} MiB in training")


def _compare_dense(expected: Tensor, got: Tensor, untrained: Tensor, dtype: torch.dtype) -> MergeReport:
    tolerance = BOUNDS.get(dtype, BOUNDS[torch.float32])
    if dtype in (torch.float16, torch.bfloat16):
        return compare_rounded(expected, got, untrained, tolerance)
    return compare_in_fp32(expected, got, tolerance)


def copy_on_cpu(model: _Model) -> _Model:
    """Copy a model without a second one in a GPU's memory: only quantized weights are copied there first."""
    memo: dict[int, Any] = {id(buffer): buffer.to("cpu", copy=True) for buffer in model.buffers()}
    for module in model.modules():  # RecurrentGemma keeps the states of its last pass, which no copy can be made of
        kept = (value for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf)
        memo |= {id(value): value.detach().to("cpu", copy=True) for value in kept}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            on_cpu = parameter.detach().to("cpu", copy=True)
            memo[id(parameter)] = nn.Parameter(on_cpu, parameter.requires_grad)
    return copy.deepcopy(model, memo).cpu()


def _check_quantized(
    expected: Tensor, got: Tensor, untrained: Tensor, in_memory: Tensor | None, dtype: torch.dtype
) -> str:
    """Compare the files of a merge into a quantized base with the trained model; returns the result as a sentence.

    Args:
        expected: logits of the model that was trained.
        got: logits of the files.
        untrained: logits of the base.
        in_memory: logits of the merged model before it was written, whose base stays quantized; None where it does not.
        dtype: dtype of the merged weights.
    """
    lost = share_lost(expected, got, untrained)
    if in_memory is not None:
        compare(in_memory, got, BOUNDS[torch.float32])  # the files hold what was merged
        what, report = "merged, and rounded to the base's bits again", compare(expected, got, float("inf"))
        check_kept(lost, report)
    else:
        what = f"dequantized to {str(dtype).removeprefix('torch.')} and merged"
        report = compare_rounded(expected, got, untrained, DEQUANTIZED_BOUND)
    return (
        f"{what}: against the quantized model that was trained, {report}; of what training did to the logits, "
        f"{lost:.1%} is lost"
    )


def _merge(trained: "PeftModel") -> "PreTrainedModel":
    _untie_embeddings(trained.get_base_model())
    with warnings.catch_warnings():
        # PEFT warns of rounding and of untied embeddings; both are measured and printed after the merge.
        warnings.filterwarnings("ignore", message=".*rounding errors.*|.*no longer tied.*")
        return trained.merge_and_unload(safe_merge=True)


def _cast(
    model: "PeftModel | PreTrainedModel", dtype: torch.dtype, narrow: bool = True
) -> "PeftModel | PreTrainedModel":
    """Cast a model's floating-point parameters to a dtype, those that transformers keeps in fp32 beside it to fp32.

    Buffers keep their dtype: a router bias in bf16 would select other experts. Scales of embeddings are those that the
    files will be read with.

    Args:
        model: model to cast in place.
        dtype: target dtype.
        narrow: whether parameters of a wider dtype are rounded too, e.g. fp32 adapters on a bf16 base model.
    """
    kept = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        own = torch.float32 if kept.search(_name_in_base(name)) else dtype
        if parameter.is_floating_point() and (narrow or torch.promote_types(parameter.dtype, own) == own):
            parameter.data = parameter.data.to(own)
    scale_embeddings_as(model, dtype)
    return model


def _dequantized(model: "PeftModel", dtype: torch.dtype) -> "PeftModel":
    """Move the adapter to the dequantized base model: PEFT cannot merge its layers for quantized weights into it."""
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    name, config = model.active_adapter, model.active_peft_config
    adapter = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    try:
        base = dequantize(model.unload(), dtype).to(dtype)
    except NotImplementedError as error:
        raise ValueError(
            f"transformers cannot dequantize {model.config.quantization_config.quant_method} weights ({error}); merge "
            "into the model that they were quantized from, or use the adapter as it is"
        ) from error
    plain = get_peft_model(base, config, name)
    set_peft_model_state_dict(plain, adapter, name)
    return plain.eval()


def _untie_embeddings(base: "PreTrainedModel") -> None:
    """Untie the output head from the embedding where an adapter changes only one of them: a merge would change both.

    Trainable tokens change both, so they stay tied.
    """
    sides = base.get_input_embeddings(), base.get_output_embeddings()
    if sides[1] is None or not any(
        hasattr(side, "base_layer") and not hasattr(side, "trainable_tokens_delta") for side in sides
    ):
        return
    embedding, head = (getattr(side, "base_layer", side) for side in sides)
    if embedding.weight is head.weight:
        head.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)


def check_mergeable(
    model: "PeftModel | PreTrainedModel", dtype: torch.dtype | None = None, quantized_base: str | None = None
) -> None:
    """Check that ``save_merged`` can merge a model.

    Raises:
        ValueError: there is no model of peft or transformers, the tuning method cannot be merged, or ``quantized_base``
            or ``dtype`` does not fit the base model.
    """
    if not is_peft(model) and not is_pretrained(model):
        raise ValueError(
            f"{type(model).__name__} holds no model of peft or transformers that could be merged; leave merged_dir out"
        )
    if not is_peft(model) and _has_adapters(model):
        raise ValueError(
            f"{type(model).__name__} has adapters that no peft.PeftModel holds (inject_adapter_in_model, add_adapter), "
            "which cannot be merged; make them by peft.get_peft_model, or leave merged_dir out and save them yourself"
        )
    if is_peft(model) and not isinstance(model.base_model, Merges):
        method = model.active_peft_config.peft_type.value
        raise ValueError(f"{method} adds no weights that could be merged into the base; use the adapter as it is")
    if is_peft(model) and not _is_comparable(base := model.get_base_model()):
        raise ValueError(
            "a merge is verified by the logits of a causal language model of transformers, or by the scores of one "
            f"that scores texts, and {type(base).__name__} is neither; leave merged_dir out, and merge by the "
            "adapter's own merge_and_unload()"
        )
    check_quantized_base(is_quantized(model.get_base_model() if is_peft(model) else model), dtype, quantized_base)


def _has_adapters(model: nn.Module) -> bool:
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ModuleNotFoundError:
        return False
    return any(isinstance(part, BaseTunerLayer) for part in model.modules())


def _is_comparable(base: nn.Module) -> bool:
    """Whether a model computes logits of the vocabulary, or scores of the text, from ``input_ids`` alone."""
    if not is_pretrained(base) or is_encoder_decoder(base.config):
        return False
    return isinstance(base, HasScore) or base.get_output_embeddings() is not None


def check_quantized_base(is_quantized: bool, dtype: torch.dtype | str | None, quantized_base: str | None) -> None:
    """Check that the options of a merge fit a base model that is quantized, or one that is not.

    Raises:
        ValueError: they do not.
    """
    if is_quantized and quantized_base is None:
        raise ValueError(
            "the base is quantized, and an adapter that is merged into it is rounded with it; choose quantized_base: "
            "dequantize (exact to the merged dtype, 2 to 4 times the size) or keep (small, and further from what was "
            "trained)"
        )
    if not is_quantized and quantized_base is not None:
        raise ValueError(f"quantized_base={quantized_base}, but the base is not quantized; leave it out")
    if quantized_base == "keep" and dtype is not None:
        raise ValueError(f"quantized_base=keep leaves weights in their bits; leave dtype={dtype} out")

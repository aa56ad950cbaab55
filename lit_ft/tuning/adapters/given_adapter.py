"""LoRA adapter in a folder, of PEFT or of any trainer that writes its files, whose weights training begins with."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import AddedToken

from lit_ft.errors import RecipeError, explained, option_called
from lit_ft.internals.hub import download_first
from lit_ft.model.files.fingerprint import Fingerprint, check_same_base, read_fingerprint
from lit_ft.model.files.size_check import shapes_of
from lit_ft.model.loading import load_tokenizer
from lit_ft.model.spec import ModelSpec
from lit_ft.tuning import lora_init

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENS_SHOWN = 20
"""Added tokens that a message lists."""


def config_of(folder: Path) -> PeftConfig:
    """Config of an adapter that is trained further.

    Raises:
        RecipeError: the folder holds no adapter in safetensors, one of another method, or one that fits a changed base.
    """
    for name in (_CONFIG, _WEIGHTS):
        if not (folder / name).is_file():
            raise RecipeError(
                f"model.adapter={str(folder)!r} holds no {name}; name the folder of an adapter of PEFT"
                f"{download_first(str(folder))}"
            )
    with explained(f"model.adapter: {folder / _CONFIG}", "put back the file"):
        config = PeftConfig.from_pretrained(str(folder))
    kind = getattr(config.peft_type, "value", config.peft_type)
    if not isinstance(config, LoraConfig) or kind != "LORA":
        raise RecipeError(f"model.adapter={str(folder)!r} is of the method {kind}; only LoRA is trained further")
    if lora_init.changes_base(config):
        raise RecipeError(
            f"model.adapter={str(folder)!r} was trained on a base that its method changes (init_lora_weights="
            f"{config.init_lora_weights!r}, bias={config.bias!r}); convert it to plain LoRA, as PEFT's save_pretrained "
            "does with path_initial_model_for_weight_conversion"
        )
    config.inference_mode = False
    config.init_lora_weights = True  # its weights are replaced
    return config


def check(folder: Path, skeleton: PeftModel, base: Fingerprint | None) -> None:
    """Refuse an adapter that was trained on another base, by what it records of it and by names and shapes.

    Args:
        folder: folder of the adapter.
        skeleton: model with an adapter of its config, without weights.
        base: the base of the run; None compares names and shapes alone.

    Raises:
        RecipeError: the base, the name of a weight or a shape differs.
    """
    name = f"model.adapter={str(folder)!r}"
    check_same_base(read_fingerprint(folder), base, name)
    held = dict(shapes_of(folder / _WEIGHTS, name))
    needed, embeddings = (
        {key: tuple(tensor.shape) for key, tensor in part.items()} for part in _parts_of_a_file(skeleton)
    )
    needed |= {key: shape for key, shape in embeddings.items() if key in held}
    if wrong := sorted(key for key in needed.keys() | held.keys() if needed.get(key) != held.get(key)):
        key = wrong[0]
        fix = "name the base that it was trained on with model.pretrained"
        if "trainable_tokens" in key:
            fix = "leave out those of model.added_tokens that it did not train"
        raise RecipeError(
            f"{name} does not fit {type(skeleton.get_base_model()).__name__}: {key} is {held.get(key, 'missing')} in "
            f"it and {needed.get(key, 'missing')} here; {fix}"
        )


def check_tokens(folder: Path, config: PeftConfig, base: ModelSpec) -> None:
    """Compare the tokens that were added for an adapter, by the tokenizer in its folder, with those of the run.

    Those whose rows the adapter trained are needed; of others, whose rows are the base's, a line says that they differ.

    Raises:
        RecipeError: the run's tokenizer lacks a token whose row the adapter trained, or has it under another id.
    """
    if not (folder / "tokenizer_config.json").is_file():
        return
    with option_called("model.pretrained", "model.adapter"):
        tokenizer = load_tokenizer(str(folder))
    ours, theirs = base.tokenizer.get_vocab(), dict(sorted(tokenizer.added_tokens_decoder.items()))
    differing = {number for number, token in theirs.items() if ours.get(token.content) != number}
    if not differing:
        return
    trained = config.to_dict().get("trainable_token_indices") or []
    rows = [row for side in trained.values() for row in side] if isinstance(trained, dict) else trained
    number = min(differing.intersection(rows) or differing)
    token = theirs[number].content
    message = (
        f"model.adapter={str(folder)!r} has the token {token!r} (id {number}), which the tokenizer of the run "
        f"{'has under another id' if token in ours else 'lacks'}"
    )
    if number not in rows:
        rank_zero_warn(f"{message}; if the data has it, set model.tokenizer to that folder")
        return
    given = {*base.added_tokens, *base.added_special_tokens}
    wanted = [token for number, token in theirs.items() if number in differing or token.content in given]
    raise RecipeError(f"{message}; set {_as_options(wanted)}")


def _as_options(tokens: Sequence[AddedToken]) -> str:
    """Options that add tokens, with their values."""
    options = []
    for option, special in (("added_tokens", False), ("added_special_tokens", True)):
        named = [json.dumps(token.content, ensure_ascii=False) for token in tokens if token.special == special]
        listed = ", ".join([*named[:_TOKENS_SHOWN], *["..."] * (len(named) > _TOKENS_SHOWN)])
        options += [f"model.{option} to [{listed}]"] if named else []
    return " and ".join(options)


@torch.no_grad()
def load(folder: Path, model: PeftModel) -> None:
    """Give a model the weights of an adapter whose config it has.

    Raises:
        RecipeError: the folder has embeddings of another base.
    """
    weights = load_file(folder / _WEIGHTS)
    for name, own in _parts_of_a_file(model)[1].items():
        saved = weights.pop(name, None)
        if saved is not None and not (torch.equal(saved.to(own), own) or torch.equal(own.to(saved), saved)):  # rounded
            raise RecipeError(
                f"model.adapter={str(folder)!r} has a frozen {name}, with other values than the base here; name the "
                "base that it was trained on with model.pretrained"
            )
    set_peft_model_state_dict(model, weights)


def _parts_of_a_file(model: PeftModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of an adapter, and those of frozen embeddings and heads that it adapts, which PEFT saves beside them."""
    own = get_peft_model_state_dict(model, save_embedding_layers=False)
    every = get_peft_model_state_dict(model, save_embedding_layers=True)
    return own, {key: tensor for key, tensor in every.items() if key not in own}

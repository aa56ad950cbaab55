"""Comparison of logits: a checkpoint in Megatron's arithmetic against the model in transformers'."""

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.megatron.checks import core_model, reconstruction
from lit_ft.megatron.checks.reconstruction import Weights
from lit_ft.megatron.families import EMBEDDING, FINAL_NORM, HEAD, Key
from lit_ft.megatron.formats.hugging_face import HuggingFaceWeights, TensorInfo, write_file
from lit_ft.megatron.formats.source import MegatronSource
from lit_ft.megatron.shape import ModelShape

Check = Literal["reduced", "megatron"]
"""How logits are compared: of a model of the first and the last layer, or of the whole model by Megatron-Core."""
_IDS, _TOKENS, _WINDOW = 512, 24, 16
"""Rows of the vocabulary of the reduced model; length of the sequence, and of the longest window that it sees."""
TOLERANCE = 1e-3
"""Largest difference of a logit in fp32; an error in a mapping shows as one above 0.01."""


def check_logits(
    weights: HuggingFaceWeights, source: MegatronSource, folder: Path, shape: ModelShape, check: Check | None
) -> str:
    """Compare a Megatron checkpoint with a Hugging Face folder.

    Args:
        weights: Hugging Face folder.
        source: checkpoint.
        folder: folder of the checkpoint's files.
        shape: sizes of the model.
        check: how; None takes Megatron-Core where it is installed and memory suffices.

    Returns:
        The result in words.

    Raises:
        RecipeError: the logits differ, or Megatron-Core is asked for and cannot run.
    """
    size = sum(torch.Size(shape.shape_of(part)).numel() for key in shape.all_keys() for part in key.weight.parts)
    obstacle = _obstacle(size * torch.float32.itemsize)
    if check == "megatron" and obstacle:
        raise RecipeError(f"verify=megatron: {obstacle}; use --verify reduced")
    if shape.window is not None:
        shape = replace(shape, window=min(shape.window, _WINDOW))
    if check == "reduced" or obstacle:
        if obstacle and check is None:
            rank_zero_info(f"compared without Megatron-Core: {obstacle}")
        what = "a model of its first and last layer in Megatron's arithmetic"
        difference = _reduced(weights, source, shape)
    else:
        what = "Megatron-Core's model"
        difference = _megatron(weights, source, folder, shape)
    if not difference <= TOLERANCE:
        raise RecipeError(
            f"logits of {what} differ from transformers' by {difference:.2g}, more than {TOLERANCE}: "
            "nothing is written; please report the config.json"
        )
    return f"logits of {what} differ from transformers' by {difference:.1e} at most"


def _obstacle(size: int) -> str | None:
    """Reason why Megatron-Core does not run the whole model here; None if it does."""
    if not core_model.is_installed():
        return "megatron-core is not installed (pip install -e '.[megatron]')"
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if 2 * size > there:
        return f"two models in fp32 are {2 * size / 2**30:,.1f} GiB, and {there / 2**30:,.1f} GiB of memory are free"
    return None


def _tokens(shape: ModelShape) -> Tensor:
    count = min(shape.vocabulary, _IDS)
    return torch.arange(1, _TOKENS + 1) * 7919 % count


def _config_of(folder: Path) -> PretrainedConfig:
    """Config of a model whose window, if it has one, is shorter than the sequence: the logits depend on it."""
    config = AutoConfig.from_pretrained(folder)
    if window := config.to_dict().get("sliding_window"):
        config.sliding_window = min(window, _WINDOW)
    return config


def _megatron(weights: HuggingFaceWeights, source: MegatronSource, folder: Path, shape: ModelShape) -> float:
    ids = _tokens(shape)[None]
    config = _config_of(weights.folder)
    model = AutoModelForCausalLM.from_pretrained(weights.folder, config=config, dtype=torch.float32)
    with torch.no_grad():
        expected = model.eval()(ids).logits
    del model
    layout = core_model.layout_of(source.arguments, source.layout, shape)
    got = core_model.logits(core_model.CoreCheckpoint(folder, shape, layout, source.rows), ids)
    return float((got - expected).abs().max())


def _reduced(weights: HuggingFaceWeights, source: MegatronSource, shape: ModelShape) -> float:
    numbers = sorted({0, shape.layers - 1})
    count, ids = min(shape.vocabulary, _IDS), _tokens(shape)
    model = _reduced_model(weights, shape, numbers, count)
    with torch.no_grad():
        expected = model.eval()(ids[None]).logits[0]
        cos, sin = model.model.rotary_emb(torch.empty(1), torch.arange(len(ids))[None])
    del model
    rows = {EMBEDDING.megatron: Key(EMBEDDING), FINAL_NORM.megatron: Key(FINAL_NORM), HEAD.megatron: Key(HEAD)}

    def model_weight(name: str, _: int | None) -> list[Tensor]:
        parts = source.parts(rows[name])
        return [torch.cat(parts)[:count].float()] if rows[name].weight.is_padded else [parts[0].float()]

    layers = [_layer_weights(source, shape, number) for number in numbers]
    with torch.no_grad():
        got = reconstruction.logits(ids, shape, cos[0], sin[0], layers, model_weight)
    return float((got - expected).abs().max())


def _layer_weights(source: MegatronSource, shape: ModelShape, layer: int) -> Weights:
    by_name = {weight.megatron: weight for weight in shape.family.layer}
    return lambda name, expert: [part.float() for part in source.parts(Key(by_name[name], layer, expert))]


def _reduced_model(weights: HuggingFaceWeights, shape: ModelShape, layers: list[int], rows: int) -> PreTrainedModel:
    """Model in transformers of some layers and of the first rows of the vocabulary, in fp32."""
    names: dict[str, str] = {}
    for key in shape.all_keys():
        if key.layer is None or key.layer in layers:
            new = key if key.layer is None else key._replace(layer=layers.index(key.layer))
            names |= {new.hugging_face(part): key.hugging_face(part) for part in key.weight.parts}
    padded = {part.name for weight in (EMBEDDING, HEAD) for part in weight.parts}

    def read(name: str) -> Tensor:
        tensor = weights.read(names[name], 0, 0, rows) if name in padded else weights.read(names[name])
        return tensor.float()

    infos = []
    for name, source in names.items():
        own = weights.shapes[source]
        infos.append(TensorInfo(name, (rows, *own[1:]) if name in padded else own, torch.float32))
    config = json.loads((weights.folder / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": len(layers), "vocab_size": rows, "dtype": "float32"}
    config |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    if "layer_types" in config:
        config["layer_types"] = [config["layer_types"][layer] for layer in layers]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_file(folder / "model.safetensors", infos, read)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        short = _config_of(folder)
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=short, dtype=torch.float32)
        return model

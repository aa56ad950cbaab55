"""GGUF files of a model, from its Hugging Face folder, and of a LoRA adapter; one tensor is in memory at a time."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from lit_callbacks.export.weight_files import opened
from peft import LoraConfig, PeftConfig
from peft.utils.other import get_pattern_key
from transformers import PretrainedConfig

from lit_ft.errors import RecipeError
from lit_ft.gguf.architectures import Family
from lit_ft.gguf.hyperparameters import write_hyperparameters
from lit_ft.gguf.layouts import names_of, order_of
from lit_ft.gguf.vocabulary import SpecialTokens, Vocabulary
from lit_ft.gguf.weights import FILE_TYPES, ModelWeights, Weight

LORA_WEIGHTS = "adapter_model.safetensors"
_FACTORS = {".lora_A.weight": ".lora_a", ".lora_B.weight": ".lora_b"}
_FACTOR_OF_DIM = (".lora_B.weight", ".lora_A.weight")
"""Factor that has the rows of the weight, and that which has its columns."""


@dataclass(frozen=True)
class TokenizerEntries:
    """Entries of a file that say how texts become tokens."""

    vocabulary: Vocabulary
    special: SpecialTokens
    chat_template: str | None


def write_model(path: Path, name: str, weights: ModelWeights, tokenizer: TokenizerEntries) -> None:
    """Write a model's GGUF file.

    Args:
        path: path of the file.
        name: name of the model, for programs that show it.
        weights: its weights, which are read twice: first for their shapes.
        tokenizer: its tokenizer.

    Raises:
        RecipeError: a tensor has no name in GGUF.
    """
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[weights.family.arch])
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    write_hyperparameters(writer, weights.config, weights.family.has_windows)
    writer.add_file_type(FILE_TYPES[weights.type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    tokenizer.vocabulary.write(writer)
    tokenizer.special.write(writer)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
    _write_tensors(writer, weights)


def write_adapter(path: Path, name: str, adapter: "AdapterWeights") -> None:
    """Write a LoRA adapter's GGUF file, in float32.

    Args:
        path: path of the file.
        name: name of the adapter.
        adapter: its weights.

    Raises:
        RecipeError: a tensor of the adapter has no form in GGUF.
    """
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[adapter.family.arch])
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(adapter.lora.lora_alpha))
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _write_tensors(writer, adapter)


def check_lora(lora: PeftConfig) -> None:
    """Refuse an adapter that has no form in GGUF.

    Raises:
        RecipeError: it is not LoRA, or has more than the two factors of linear layers.
    """
    if not isinstance(lora, LoraConfig):
        raise RecipeError(f"GGUF has a form for LoRA adapters, not for {lora.peft_type.value}; add --merge --gguf TYPE")
    extras = ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "alora_invocation_tokens")
    unsupported = [one for one in (*extras, "lora_bias", "layer_replication") if getattr(lora, one, None)]
    if lora.bias != "none":
        unsupported.append(f"bias={lora.bias}")
    if unsupported:
        raise RecipeError(
            f"{', '.join(unsupported)} of this adapter is not in GGUF's LoRA files; add --merge --gguf TYPE"
        )


@dataclass(frozen=True)
class AdapterWeights:
    """Factors of a LoRA adapter that PEFT has written, converted as they are read."""

    folder: Path
    config: PretrainedConfig
    """Config of the base model."""
    family: Family

    @property
    def lora(self) -> LoraConfig:
        """Config of the adapter.

        Raises:
            RecipeError: the adapter has no form in GGUF.
        """
        lora = PeftConfig.from_pretrained(str(self.folder))
        check_lora(lora)
        assert isinstance(lora, LoraConfig)
        return lora

    def __iter__(self) -> Iterator[Weight]:
        """All factors; each pass reads them anew.

        Raises:
            RecipeError: a tensor has no name in GGUF.
        """
        name_in_gguf, lora = names_of(self.family, self.config), self.lora
        with opened(self.folder / LORA_WEIGHTS) as file:
            for name in file.names:
                factor = next((ending for ending in _FACTORS if name.endswith(ending)), None)
                weight = name.removeprefix("base_model.model.").removesuffix(factor or "") + ".weight"
                if factor is None or (weight == "lm_head.weight" and self.config.tie_word_embeddings):
                    raise RecipeError(f"{name} of this adapter is not in GGUF's LoRA files; add --merge --gguf TYPE")
                values = file.tensor(name).to(torch.float32)
                if factor == ".lora_B.weight":
                    # llama.cpp multiplies with lora_alpha / rank of the file; what PEFT has beyond that goes into B.
                    rank = values.shape[1]
                    values = values * (_scaling(lora, weight, rank) * rank / lora.lora_alpha)
                order = order_of(weight, self.config, self.family)
                if order is not None and factor == _FACTOR_OF_DIM[order.dim]:
                    values = order.applied(values)
                yield Weight(name_in_gguf(weight) + _FACTORS[factor], GGMLQuantizationType.F32, values)


def _scaling(lora: LoraConfig, weight: str, rank: int) -> float:
    """Factor of PEFT for the product of two factors."""
    pattern = lora.alpha_pattern or {}
    alpha = pattern.get(get_pattern_key(list(pattern), weight.removesuffix(".weight")), lora.lora_alpha)
    return float(alpha) / (math.sqrt(rank) if lora.use_rslora else rank)


def _write_tensors(writer: GGUFWriter, weights: Iterable[Weight]) -> None:
    """Write all that was added to a writer, and then the tensors, each read and converted when its turn comes."""
    for one in weights:
        # The dtype tells the writer that the shape is of values, not of bytes.
        writer.add_tensor_info(one.name, tuple(one.values.shape), np.dtype(np.float32), one.n_bytes, one.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for one in weights:
        writer.write_tensor_data(one.quantized())
    writer.close()

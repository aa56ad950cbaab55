"""Description of a base model and its tokenizer, from which its skeleton, weights and fingerprint are made."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.base_files import BaseFiles
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft import process
from lit_ft.errors import RecipeError, option_called
from lit_ft.internals import torch as torch_internals
from lit_ft.model import embeddings, loading, quantization
from lit_ft.model.config.head import Head
from lit_ft.model.config.overrides import Overrides
from lit_ft.model.files import fingerprint, size_check, text_part
from lit_ft.model.files.fingerprint import BaseForm
from lit_ft.model.files.weight_files import check_weight_files


@dataclass(frozen=True)
class ModelSpec:
    """Base model and tokenizer of a recipe, and the form in which the weights are read."""

    pretrained: str
    """Folder or hub id."""
    tokenizer_name: str
    """Folder or hub id of the tokenizer."""
    added_tokens: Sequence[str] = ()
    added_special_tokens: Sequence[str] = ()
    init: loading.Init = "pretrained"
    dtype: loading.Dtype = "auto"
    attn_implementation: str = "auto"
    quantization: QuantizationConfigMixin | None = None
    config_overrides: Overrides | None = None
    """Values in place of those of config.json."""
    head: Head = "logits"
    """What is computed from the final hidden states: logits of tokens, or the score of a text."""
    loaded: PreTrainedModel | None = field(default=None, compare=False, repr=False)
    """The model with its weights, if they are in memory: ``build`` then returns a model that shares their tensors."""

    @property
    def config(self) -> PretrainedConfig:
        """Config of the model, read anew."""
        return loading.load_config(self.pretrained, self.config_overrides)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Tokenizer with the added tokens."""
        option = "model.pretrained" if self.tokenizer_name == self.pretrained else "model.tokenizer"
        with option_called("model.pretrained", option):
            tokenizer = loading.load_tokenizer(self.tokenizer_name)
        embeddings.add_tokens(tokenizer, self.added_tokens, special=False)
        embeddings.add_tokens(tokenizer, self.added_special_tokens, special=True)
        return tokenizer

    @property
    def tokenizer_in_use(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer, where something has read it; None for data in token ids and a folder that holds none."""
        return vars(self).get("tokenizer")

    @property
    def added_ids(self) -> list[int]:
        """Ids of the added tokens."""
        vocabulary = self.tokenizer.get_vocab() if self.added_tokens or self.added_special_tokens else {}
        return [vocabulary[token] for token in (*self.added_tokens, *self.added_special_tokens)]

    @property
    def is_quantized(self) -> bool:
        """Whether the weights are quantized: by the recipe, or already in the files."""
        return self.quantization is not None or (self.init == "pretrained" and quantization.is_packed(self.config))

    def check_shards(self, value: str) -> None:
        """Refuse a quantized base whose weights cannot be sharded.

        Args:
            value: value of the recipe that shards them, e.g. ``data_parallel_size=2``.

        Raises:
            RecipeError: the base is one in bitsandbytes' INT8, or its weights are stored as integers and torch is 2.11.
        """
        form = self.quantization or self.config
        if self.is_quantized and quantization.stores_integers(form) and not torch_internals.SHARDS_INTEGERS:
            raise RecipeError(
                f"{value}: the 4-bit weights are stored as integers, which torch {torch.__version__} cannot shard; set "
                "bnb_4bit_quant_storage: bfloat16 in model.quantization, or install torch 2.12 or newer"
            )
        if self.is_quantized and quantization.is_bitsandbytes_int8(form):
            raise RecipeError(
                f"{value}: bitsandbytes keeps the scales of INT8 weights in attributes that shards do not have; take "
                "NF4 (load_in_4bit: true), trainer.strategy=ddp, or lit_ft.strategies.DeepSpeedStrategy"
            )

    def fingerprint(self) -> fingerprint.Fingerprint:
        """Fingerprint that tells this base model from another one."""
        return fingerprint.fingerprint(self.pretrained, self.init, process.seed())

    def form(self) -> BaseForm:
        """Form in which the weights are read, as an adapter's folder records it."""
        method = None if self.quantization is None else quantization.method_of(self.quantization)
        return BaseForm(self.dtype, self.config_overrides or {}, method)

    def skeleton(self) -> PreTrainedModel:
        """Model on the meta device, without weights, after checks of config, weight files and tokenizer.

        Raises:
            RecipeError: one of them does not fit.
        """
        loading.check_attention(self.attn_implementation, self.config)
        skeleton = loading.skeleton(self.pretrained, self.dtype, self.config_overrides, self.head)
        self._check_weights(skeleton)
        embeddings.resize_embeddings(skeleton, self.tokenizer, len(self.added_ids))
        return skeleton

    def _check_weights(self, skeleton: PreTrainedModel) -> None:
        """Refuse weight files that do not fit the config, which memory would be allocated by."""
        if self.init == "random":
            return
        check_weight_files(self.pretrained)
        folder = Path(self.pretrained).expanduser()
        if folder.is_dir() and not self.is_quantized:
            size_check.check_weights(folder, skeleton, f"model.pretrained={self.pretrained!r}")
        if unused := self.unused_tensors(skeleton):
            rank_zero_info(f"model.pretrained={self.pretrained!r}: {unused}")

    def weights_dtype(self) -> torch.dtype:
        """Dtype of most of the base's weights; some may stay in fp32."""
        return loading.dtype_of_weights(self.config, self.dtype)

    def unused_tensors(self, model: PreTrainedModel) -> str:
        """Sentence on what the weight files hold that the model does not use; empty if that is nothing.

        Args:
            model: model without weights, with which a hub model's files are not known yet, or with them.
        """
        folder = Path(self.pretrained).expanduser()
        return text_part.describe_unused(BaseFiles.in_folder(folder) if folder.is_dir() else BaseFiles.of(model), model)

    def build(self, attn_implementation: str | None = None) -> PreTrainedModel:
        """Model with its weights, in training mode; ``attn_implementation`` takes the place of the spec's own."""
        attention = attn_implementation or self.attn_implementation
        if self.loaded is None:
            base = self._load(attention)
        else:
            base = copy_sharing_weights(self.loaded)
            base.set_attn_implementation(loading.pick_attention(base.config, attention))
        if self.added_ids:
            embeddings.resize_embeddings(base, self.tokenizer, len(self.added_ids))
        return base

    def build_unquantized(self) -> PreTrainedModel:
        """Model with the weights as they were before the recipe's quantization."""
        return loading.load_base(
            self.pretrained, self.init, self.dtype, overrides=self.config_overrides, head=self.head
        )

    def _load(self, attention: str) -> PreTrainedModel:
        form = self.dtype, attention, self.quantization
        base = loading.load_base(self.pretrained, self.init, *form, overrides=self.config_overrides, head=self.head)
        is_on_hub = not Path(self.pretrained).expanduser().is_dir()
        if is_on_hub and self.init == "pretrained" and (unused := self.unused_tensors(base)):
            rank_zero_info(f"model.pretrained={self.pretrained!r}: {unused}")
        return base


def copy_sharing_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Copy of a model's modules over the same parameters and buffers, so that adapters of each are its own."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})

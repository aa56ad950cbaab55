"""Prompt tuning, P-tuning and prefix tuning on packed batches: each sample gets its own virtual tokens.

PEFT prepends them to a padded batch in ``PeftModel.forward``, which is not called for a packed batch. Here virtual
embeddings are prepended to every sample of the packed batch; a prefix of keys and values, which is a cache of one
length, is used for one sample at a time.
"""

import torch
from lit_callbacks.distributed.host_copy import queued_copy
from peft import PeftConfig, PeftModel, PromptLearningConfig
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import has_prompt
from lit_ft.internals.transformers import cache_option
from lit_ft.model.architecture import Decoder
from lit_ft.model.isolation.lengths import samples_of
from lit_ft.packed_batch import PackedBatch

EMBEDDINGS = ("PROMPT_TUNING", "P_TUNING")
"""PEFT methods whose virtual tokens are input embeddings."""
PREFIX = "PREFIX_TUNING"
"""PEFT method whose virtual tokens are keys and values of each layer."""


_SIZES = ("token_dim", "num_layers", "num_attention_heads", "num_transformer_submodules")
"""Fields of PEFT's configs that PEFT takes from the model where they are not set."""


_HEADS = frozenset({"num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "text_config"})
"""Names of the number of heads in configs that PEFT knows (peft 0.21)."""
_READS_IDS = frozenset("deepseek_v4 gemma4 gemma4_text qwen4_exp qwen4_exp_text".split())
"""Architectures whose layers take embeddings or experts of their own by the tokens' ids (transformers 5.24)."""
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that keep keys and values, and nothing else, and attend to those of a prefix."""
_OTHER_KEYS = frozenset("dory falcon mimo_v2_flash whisper xlstm".split())
"""Further architectures in which a prefix of PEFT's shape does not fit each layer (transformers 5.24)."""


def check_sizes(peft: PeftConfig) -> None:
    """Refuse sizes of the model in a recipe: PEFT would build virtual tokens of that size, whatever the model's is.

    Raises:
        RecipeError: a size is set.
    """
    if isinstance(peft, PromptLearningConfig):
        given = {name: value for name, value in peft.to_dict().items() if name in _SIZES and value is not None}
        if given:
            raise RecipeError(f"model.peft: {given} are sizes of the model, which are read from it; leave them out")


def fit_to(model: PreTrainedModel, peft: PeftConfig) -> None:
    """Refuse virtual tokens that do not fit a model; ``peft`` is changed in place.

    Embeddings do not where the model reads token ids beside them, keys and values where layers keep something else.
    PEFT asks for the number of heads, which it finds under some names only, also where the method has no use for it.

    Raises:
        RecipeError: they do not fit.
    """
    if (method := str(peft.peft_type.value)) == PREFIX and (reason := _no_prefix(model.config.get_text_config())):
        raise RecipeError(
            f"model.peft: virtual tokens of {method} are keys and values of one size before those of each layer, and "
            f"{model.config.model_type} {reason}; take another method, e.g. peft.LoraConfig"
        )
    if method not in EMBEDDINGS:
        return
    if model.config.model_type in _READS_IDS:
        raise RecipeError(
            f"model.peft: virtual tokens of {method} are embeddings, and {model.config.model_type} reads the ids of "
            "all tokens again after it has embedded them; take another method, e.g. peft.LoraConfig"
        )
    if not _HEADS & model.config.to_dict().keys():
        peft.num_attention_heads = 1


def _no_prefix(config: PretrainedConfig) -> str | None:
    """Reason why keys and values of a prefix do not fit a model; None if they do."""
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION):
        return f"has layers of other kinds ({', '.join(others)})"
    if getattr(config, "kv_lora_rank", None) is not None:
        return f"has keys and values of two sizes (kv_lora_rank={config.kv_lora_rank})"
    if config.model_type in _OTHER_KEYS:
        return "keeps them in another form"
    return None if _HEADS & config.to_dict().keys() else "names its number of heads in a way that PEFT does not know"


def check_embeddings(model: PeftModel) -> None:
    """Refuse virtual embeddings for a model in which PEFT finds no embeddings.

    Raises:
        RecipeError: it finds none.
    """
    if method_of(model) in EMBEDDINGS and model.word_embeddings is None:
        name, method = type(model.get_base_model()).__name__, method_of(model)
        raise RecipeError(
            f"model.peft: PEFT finds no embeddings of vocab_size rows in {name}, beside which {method} would put its "
            "own; take another method, e.g. peft.LoraConfig"
        )


def method_of(model: nn.Module | None) -> str | None:
    """Name of a ``PeftModel``'s prompt-learning method; None for other methods and models, and while it is disabled."""
    return str(model.active_peft_config.peft_type.value) if has_prompt(model) else None


def virtual_lengths(model: PreTrainedModel | PeftModel, lengths: list[int]) -> list[int]:
    """Number of tokens of each sample, including its virtual tokens."""
    if method_of(model) not in EMBEDDINGS:
        return lengths
    return [length + model.active_peft_config.num_virtual_tokens for length in lengths]


def hidden_states(model: PeftModel, decoder: Decoder, batch: PackedBatch, **options: object) -> Tensor:
    """Final hidden states of a packed batch without its virtual tokens, ``(1, T, H)``."""
    if method_of(model) == PREFIX:
        return _with_prefix(model, decoder, batch)
    lengths, virtual = batch["segment_lengths"], model.active_peft_config.num_virtual_tokens
    embeddings = model.word_embeddings(batch["input_ids"])[0]
    prompts = model.get_prompt(batch_size=len(lengths)).to(embeddings.dtype)
    parts = [part for pair in zip(prompts, embeddings.split(lengths), strict=True) for part in pair]
    positions = torch.cat([torch.arange(length + virtual) for length in lengths])
    of_samples = (positions >= virtual).nonzero()[:, 0]  # on the host, which would wait for a GPU to find them
    hidden = decoder(
        inputs_embeds=torch.cat(parts)[None],
        position_ids=queued_copy(positions, embeddings.device)[None],
        use_cache=False,
        **options,
    ).last_hidden_state
    return hidden.index_select(1, queued_copy(of_samples, hidden.device))


def _with_prefix(model: PeftModel, decoder: Decoder, batch: PackedBatch) -> Tensor:
    parts = []
    for ids in batch["input_ids"].split(batch["segment_lengths"], dim=1):
        with samples_of([ids.shape[1]]):
            options = {cache_option(model.get_base_model()): model.get_prompt(batch_size=1)}
            parts.append(decoder(input_ids=ids, use_cache=False, **options).last_hidden_state)
    return torch.cat(parts, dim=1)

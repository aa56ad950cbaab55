"""Architectures whose packed batches were compared with single samples, and those that are refused, with the reasons.

``python -m benchmarks.model_table`` compares all causal LMs that transformers has, and prints docs/models.md.
"""

from collections.abc import Mapping

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig
from transformers import __version__ as transformers_version

from lit_ft.errors import RecipeError
from lit_ft.model.architecture import Architecture

_ROW_POSITIONS = (
    "counts positions from the start of a packed batch, not of each sample: its decoder takes no position_ids"
)
_PAD_POSITIONS = "counts positions from pad_token_id + 1, in its own embedding alone"
_SEVERAL_BOOKS = "predicts codes of audio in several codebooks, not text"
_DRAFT = "drafts tokens from the hidden states of another model, without which it cannot be trained"


def _each(names: str, reason: str) -> Mapping[str, str]:
    return dict.fromkeys(names.split(), reason)


REFUSED: Mapping[str, str] = {
    **_each("bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart trocr", _ROW_POSITIONS),
    **_each("camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod", _PAD_POSITIONS),
    **_each("musicgen musicgen_melody", _SEVERAL_BOOKS),
    **_each("gemma4_assistant gemma4_unified_assistant", _DRAFT),
    "blt": "groups bytes to patches over all samples of a packed batch",
    "cpmant": "puts prompt tokens of its own before each packed batch, not before each sample",
    "mllama": "runs some of its layers on images alone, so that text trains nothing in them",
    "openai-gpt": "attends to all tokens before in a packed batch, in a module that has no cache to find it by",
    "prophetnet": "predicts several tokens at once, by streams of attention of its own",
    "reformer": "attends within chunks of a packed batch, whatever the samples",
    "roformer": "makes rotary embeddings for the length of a packed batch, whatever the samples",
    "xlm": "reads samples' lengths from a mask of padded batches",
    "xlnet": "takes tokens before batches, and no position_ids",
}
"""Why an architecture is refused, by its name in transformers; the reason is a sentence without its subject."""

_ENCODERS = frozenset("bert bert-generation big_bird electra ernie megatron-bert rembert roc_bert".split())

COMPARED = frozenset(
    """
    afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam bert bert-generation big_bird
    biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v3
    deepseek_v32 deepseek_v4 diffllama doge dory dots1 dots3_note dots3_note_text electra emu3 ernie ernie4_5
    ernie4_5_moe exaone exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3
    gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2
    jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash
    mamba mamba2 megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral modernbert-decoder moshi moss_transcribe_diarize mpt nanochat nemotron
    nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2 qwen2_moe
    qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text
    recurrent_gemma rembert roc_bert rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma whisper xglm xlstm youtu zamba zamba2 zaya
    """.split()
)
"""Architectures of which packed batches were found to equal single samples (transformers 5.24), to 1e-5."""

_NOT_MIXED: Mapping[str, str] = {
    "dbrx": "adds results in half precision to a sum in fp32 in place, which torch refuses",
}
"""Why an architecture fails where operators cast for themselves (transformers 5.24)."""

_NOT_ROUNDED: Mapping[str, str] = _each(
    "inkling2_loop_text inkling2_text", "multiplies values in fp32 by the weights of its routers"
)
"""Why an architecture fails where all weights are in half precision (transformers 5.24)."""

COUNTS_TOKENS = frozenset({("llama4_text", "full_attention")})
"""Architectures and kinds of layers whose attention counts positions from the first token that it is called with."""

_READS_PADDING = frozenset("axk2 deepseek_v4 git hy_v4 recurrent_gemma rwkv whisper xlstm".split())
"""Architectures whose answers change with padding before a prompt, whatever the attention mask says of it."""


def reads_padding(config: PretrainedConfig) -> bool:
    """Whether padding before a prompt may change a model's answer: it does, or the model was not compared."""
    return config.model_type in _READS_PADDING or config.model_type not in COMPARED


def check(config: PretrainedConfig) -> None:
    """Refuse models whose results on packed batches would differ from those on single samples.

    Raises:
        RecipeError: the model is one of them, or no causal language model; the message gives the reason.
    """
    name = config.model_type
    if (reason := REFUSED.get(name)) is not None:
        raise RecipeError(
            f"model.pretrained: {name} {reason}; take another model (docs/models.md lists those that work)"
        )
    if name in _ENCODERS and not Architecture.of(config).is_decoder:
        raise RecipeError(
            f"model.pretrained: config.json of this {name} says is_decoder: false, so that tokens attend to later "
            "ones, which they are to predict; set it to true, or take a causal language model"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise RecipeError(
            f"model.pretrained: transformers has no causal language model of {name}, as config.json calls it; take "
            "another model (docs/models.md lists those that work)"
        )
    if name not in COMPARED:
        rank_zero_warn(
            f"{name} was not compared: whether its packed batches equal single samples is not known (transformers "
            f"{transformers_version}); look at the leak probe of `python -m lit_ft check`, or set "
            "data.micro_batch_size to 1, data.join_micro_batches to false and data.packing to null"
        )


def check_precision(config: PretrainedConfig, precision: str) -> None:
    """Refuse a precision in which a model's first step would fail.

    Args:
        config: config of the model.
        precision: value of ``trainer.precision``.

    Raises:
        RecipeError: it would; the message gives the reason.
    """
    reasons = _NOT_MIXED if precision.endswith("-mixed") else {}
    if (reason := reasons.get(config.model_type)) is not None:
        raise RecipeError(
            f"trainer.precision={precision}: {config.model_type} {reason}; set it to 32-true, with which "
            "model.dtype=bfloat16 computes in bfloat16 and keeps in fp32 what has to be"
        )


def check_rounded(config: PretrainedConfig, holds: str) -> None:
    """Refuse a model whose first step would fail because all of its weights are in half precision.

    Args:
        config: config of the model.
        holds: which weights are in half precision, and what keeps them from it.

    Raises:
        RecipeError: it would; the message gives the reason.
    """
    if (reason := _NOT_ROUNDED.get(config.model_type)) is not None:
        raise RecipeError(f"{holds}: {config.model_type} {reason}")

"""Architectures that vLLM serves, by their names in transformers.

From ``vllm/model_executor/models/registry.py`` of vLLM 0.33.0 (2026-11-02), matched by the names of transformers'
classes for causal LMs (transformers 5.23); nothing of vLLM was run.
"""

VERSION = "0.33"

BY_VLLM = frozenset(
    """
    afmoe apertus axk1 beam bloom cohere cohere2 cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
    dots3_note dots3_note_text ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flint gemma
    gemma2 gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified glm4 glm4_moe glm4_moe_lite
    glm_moe_dsa gpt-sw3 gpt2 gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared hrm_text hy_v3 hy_v4 hyperclovax inkling_text internlm3 iquestcoder jamba kimi_linear laguna lfm2
    lfm2_moe llama llama4 llama4_text longcat_flash mamba mamba2 mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral
    mixtral moss_transcribe_diarize nemotron nemotron_h olmo_hybrid olmoe opt phi3 qwen2 qwen2_moe qwen3 qwen3_5
    qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text stablelm zamba2
    """.split()
)
"""Architectures with code of their own in vLLM: ``_TEXT_GENERATION_MODELS`` and ``_MULTIMODAL_MODELS``."""

BY_TRANSFORMERS = frozenset(
    """
    arcee cwm flex_olmo glm gpt_bigcode gpt_neox hunyuan_v1_dense hunyuan_v1_moe jais2 kolibri1 mellum olmo olmo2 olmo3
    phi seed_oss smollm3 starcoder2 vaultgemma
    """.split()
)
"""Architectures that vLLM computes by transformers' code: ``_TRANSFORMERS_SUPPORTED_MODELS``."""


def served(model_type: str) -> str:
    """How vLLM serves an architecture: by its own code, by that of transformers, or as far as is listed not at all."""
    if model_type in BY_VLLM:
        return "yes"
    return "yes, by transformers" if model_type in BY_TRANSFORMERS else "not listed"

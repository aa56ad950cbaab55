"""GGUF files of small models of each family are what llama.cpp computes like transformers; what is not is refused."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import peft
import pytest
import torch
from lit_callbacks.export.merge_check import MergeFailed
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lit_ft.data.text.chat_template import BUILT_IN
from lit_ft.errors import RecipeError
from lit_ft.gguf import WeightType, weights
from lit_ft.gguf.folders import check_convertible, write_adapter_folder, write_merged_folder
from lit_ft.gguf.hyperparameters import context_length
from lit_ft.gguf.ollama import ollama_name
from lit_ft.gguf.pre_tokenizers import EXPRESSIONS
from lit_ft.gguf.verification import check_tensors
from lit_ft.model.config.positions import positions_in

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "dtype": "float32",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
TEXTS = ["the red cup is under the green lamp 123 红 杯子 'll", "def f(x):\n  return x"] * 3


def by_layer(full: dict[str, Any], sliding: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rotary position embeddings of a model with sliding windows."""
    default = {"rope_type": "default", "rope_theta": full["rope_theta"]}
    return {"full_attention": full, "sliding_attention": sliding or default}


def byte_level(name: str, ends: list[str], bos: str | None = None) -> PreTrainedTokenizerFast:
    """Tokenizer of byte-level BPE with one of llama.cpp's pre-tokenizers."""
    (expression, ignore), *_ = [key for key, value in EXPRESSIONS.items() if value == name]
    backend = Tokenizer(models.BPE(ignore_merges=ignore))
    split = pre_tokenizers.Split(Regex(expression), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    special = [*ends, *([bos] if bos else [])]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=310, special_tokens=special, initial_alphabet=alphabet)
    )
    if bos:
        backend.post_processor = processors.TemplateProcessing(f"{bos} $A", None, [(bos, backend.token_to_id(bos))])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=ends[0], bos_token=bos)


def sentencepiece(texts: Sequence[str] = TEXTS) -> PreTrainedTokenizerFast:
    """Tokenizer of Llama 2's kind: BPE over characters, bytes as tokens, a space before each text."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=310, special_tokens=["<unk>", "<s>", "</s>", *of_bytes], limit_alphabet=20, max_token_length=4
    )
    backend.train_from_iterator(texts, trainer)
    content = backend.to_str()
    backend = Tokenizer.from_str(content)
    backend.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def gemma_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer of Gemma's kind: Llama 2's without a space before a text; no token has a line break and other text."""
    lines = [line for text in TEXTS for line in text.splitlines()]
    content = json.loads(sentencepiece(lines).backend_tokenizer.to_str())
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    content |= {"normalizer": content["normalizer"]["normalizers"][1], "pre_tokenizer": split}
    backend = Tokenizer.from_str(json.dumps(content))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def llama3_tokenizer() -> PreTrainedTokenizerFast:
    ends = ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = byte_level("llama-bpe", ends, "<|begin_of_text|>")
    tokenizer.chat_template = BUILT_IN["llama3"]
    return tokenizer


def chatml_tokenizer(pre_tokenizer: str = "qwen2") -> PreTrainedTokenizerFast:
    tokenizer = byte_level(pre_tokenizer, ["<|im_end|>", "<|im_start|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = BUILT_IN["chatml"]
    return tokenizer


def random(model: Callable[..., PreTrainedModel], config: Callable[..., Any], **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    built = model(config(**SIZES | options)).eval()
    for name, parameter in built.named_parameters():
        if name.endswith(("bias", "norm.weight")):
            torch.nn.init.normal_(parameter, std=0.3)
    return built


def written(
    to: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    weight_type: WeightType,
    ends: Sequence[int] = (0,),
) -> Path:
    """Write a folder with the GGUF file of a model."""
    model.generation_config.eos_token_id = list(ends) if tokenizer.eos_token_id == 0 else tokenizer.eos_token_id

    def save(folder: Path, dtype: torch.dtype | None) -> None:
        # Qwen3.5's published files have the experts of a layer in one tensor.
        per_expert = model.config.model_type != "qwen3_5_moe_text"
        (model if dtype is None else model.to(dtype)).save_pretrained(folder, save_original_format=per_expert)

    check_convertible(model, tokenizer)
    write_merged_folder(to, "tiny", save, tokenizer, weight_type)
    return to


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 64}
DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8}
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "final_logit_softcapping": 4.0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
}
GEMMA4_EXPERTS = {
    "rope_parameters": by_layer(
        {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.25, "factor": 2.0}, ROPE
    ),
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
OTHERS: list[tuple[str, dict[str, Any], Callable[[], PreTrainedTokenizerFast], WeightType]] = [
    ("mixtral", {"num_local_experts": 4}, sentencepiece, "bf16"),
    ("qwen2_moe", SHARED, chatml_tokenizer, "f32"),
    ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "head_dim": 32}, chatml_tokenizer, "q8_0"),
    ("qwen3_5_text", DELTA_NET, partial(chatml_tokenizer, "qwen35"), "f32"),
    ("qwen3_5_moe_text", DELTA_NET | SHARED, partial(chatml_tokenizer, "qwen35"), "f32"),
    ("gemma2", GEMMA | {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 3.0}, gemma_tokenizer, "f32"),
    (
        "gemma3_text",
        GEMMA | {"num_hidden_layers": 6, "rope_parameters": by_layer(LINEAR, ROPE)},
        gemma_tokenizer,
        "f32",
    ),
    ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}, gemma_tokenizer, "f32"),
    ("gemma4_text", GEMMA4 | GEMMA4_EXPERTS, gemma_tokenizer, "f32"),
    ("phi3", {"pad_token_id": 0}, sentencepiece, "f32"),
    ("olmo2", {}, llama3_tokenizer, "f32"),
    (
        "olmo3",
        {"num_hidden_layers": 4, "sliding_window": 8, "rope_parameters": by_layer(YARN)},
        llama3_tokenizer,
        "f32",
    ),
    ("granite", GRANITE, partial(chatml_tokenizer, "gpt-4o"), "f32"),
    ("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}, llama3_tokenizer, "f32"),
    ("glm4", {"head_dim": 32, "pad_token_id": 0}, llama3_tokenizer, "f32"),
    ("ernie4_5", {"head_dim": 32}, sentencepiece, "f32"),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}, llama3_tokenizer, "f32"),
    ("seed_oss", {"head_dim": 32, "attention_bias": True}, partial(chatml_tokenizer, "seed-coder"), "f32"),
]
"""Architectures by their ``model_type``."""


@pytest.mark.parametrize(
    ("model", "config", "options", "tokenizer", "weight_type"),
    [
        (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3, "head_dim": 32}, llama3_tokenizer, "f32"),
        (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}, llama3_tokenizer, "bf16"),
        (MistralForCausalLM, MistralConfig, {"sliding_window": 200}, sentencepiece, "f16"),
        (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": YARN}, chatml_tokenizer, "f32"),
        (
            Qwen2ForCausalLM,
            Qwen2Config,
            {"rope_parameters": LINEAR, "tie_word_embeddings": True},
            chatml_tokenizer,
            "q8_0",
        ),
        (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}, chatml_tokenizer, "f32"),
        *((AutoModelForCausalLM.from_config, CONFIG_MAPPING[kind], *rest) for kind, *rest in OTHERS),
    ],
    ids=[
        *("llama3", "llama-bias", "mistral-sentencepiece", "qwen2-yarn", "qwen2-linear-q8_0", "qwen3"),
        *(f"{kind}-{len(options)}-{weight_type}" for kind, options, _, weight_type in OTHERS),
    ],
)
def test_llama_cpp_computes_what_transformers_does(
    model: Any,
    config: Any,
    options: Any,
    tokenizer: Any,
    weight_type: WeightType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    built = random(model, config, **options)
    folder = written(tmp_path / "gguf", built, tokenizer(), weight_type, ends=range(3))
    assert "GGUF verified: llama.cpp's log-probabilities differ by" in caplog.text
    warned = [str(one.message) for one in recwarn if "sliding window of 200 tokens" in str(one.message)]
    assert len(warned) == (model is MistralForCausalLM)
    file = f"model-{weight_type}.gguf"
    assert sorted(path.name for path in folder.iterdir()) == ["Modelfile", "README.md", "manifest.json", file]
    assert f"llama-server -m {file} --jinja" in (folder / "README.md").read_text()


def test_positions_of_a_file_are_those_of_training() -> None:
    for rope, positions in ((by_layer(LINEAR, ROPE), 256), (by_layer(ROPE), 256)):
        config = CONFIG_MAPPING["gemma3_text"](**SIZES | GEMMA | {"rope_parameters": rope})
        assert context_length(config, has_windows=True) == positions_in(config) == positions
        assert context_length(config, has_windows=False) == config.sliding_window
    assert context_length(LlamaConfig(**SIZES | {"rope_parameters": LINEAR}), has_windows=True) == 512


@pytest.mark.parametrize("kind", ["qwen3_5_text", "llama", "phi3", "gemma3_text", "qwen2_moe"])
def test_an_adapter_of_all_linear_layers(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    options, tokenizer = next(
        ((options, tokenizer) for other, options, tokenizer, _ in OTHERS if other == kind), ({}, llama3_tokenizer)
    )
    base = random(AutoModelForCausalLM.from_config, CONFIG_MAPPING[kind], **options)
    base.generation_config.eos_token_id = 0

    def save(folder: Path) -> None:
        lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
        peft.get_peft_model(deepcopy(base), lora).save_pretrained(folder)

    write_adapter_folder(tmp_path / "gguf", "tiny", save, lambda: base.to(torch.bfloat16), tokenizer(), "f32")
    assert "GGUF verified: llama.cpp's log-probabilities differ by" in caplog.text


def test_an_adapter_alone_needs_no_file_of_its_base_without_llama_cpp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    monkeypatch.setattr("lit_ft.gguf.folders.has_llama", lambda: False)
    base = random(LlamaForCausalLM, LlamaConfig)
    adapted = peft.get_peft_model(deepcopy(base), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    arguments = (adapted.save_pretrained, lambda: deepcopy(base), llama3_tokenizer())
    for weight_type, files in ((None, set()), ("f32", {"base-f32.gguf"})):
        caplog.clear()
        with pytest.warns(UserWarning, match="llama.cpp was not run"):
            write_adapter_folder(tmp_path / "gguf", "tiny", *arguments, weight_type)
        written_files = {path.name for path in (tmp_path / "gguf").glob("*.gguf")}
        assert written_files == {"adapter.gguf", *files}
        assert ("base-f32.gguf: " in caplog.text) is bool(files)


def test_the_tokens_of_the_file_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = llama3_tokenizer()
    tokenizer.add_tokens(["<think>"])
    folder = written(tmp_path / "gguf", random(LlamaForCausalLM, LlamaConfig), tokenizer, "f32", ends=range(3))
    fields = gguf.GGUFReader(folder / "model-f32.gguf").fields
    found = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    names = [f"{kind}_token_id" for kind in ("eos", "eot", "eom", "bos")]
    assert [found[name] for name in names] == [0, 1, 2, tokenizer.bos_token_id]
    assert found["add_bos_token"] is True
    assert found["pre"] == "llama-bpe"
    assert found["tokenizer.chat_template".removeprefix("tokenizer.ggml.")] == tokenizer.chat_template
    tokens, types = found["tokens"], found["token_type"]
    assert tokens[:5] == tokenizer.convert_ids_to_tokens(range(5))
    think = tokens.index("<think>")
    assert think == tokenizer.convert_tokens_to_ids("<think>")
    kinds = gguf.TokenType
    assert [types[number] for number in (0, 6, think, think + 1)] == [
        *(kinds.CONTROL, kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED)
    ]
    assert tokens[think + 1] == f"[PAD{think + 1}]"
    modelfile = (folder / "Modelfile").read_text()
    assert [line for line in modelfile.splitlines() if line.startswith(("FROM", "PARAMETER", "TEMPLATE"))] == [
        "FROM ./model-f32.gguf",
        *(f'PARAMETER stop "{end}"' for end in ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")),
        'TEMPLATE """{{ range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>',
    ]


def lose_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "order_of", lambda *_: None)


def lose_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "rope_divisors", lambda config: None)


def name_another_pre_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    (key, _) = next(one for one in EXPRESSIONS.items() if one[1] == "llama-bpe")
    monkeypatch.setitem(EXPRESSIONS, key, "qwen2")


def lose_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf.GGUFWriter, "add_eom_token_id", lambda *_: None)


def damage_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gguf.quantize
    monkeypatch.setattr(gguf, "quantize", lambda values, kind: whole(values * (1 + 2**-9 * (values > 0)), kind))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lose_layout, "is not the model that was trained: llama.cpp's log-probabilities differ by"),
        (lose_frequencies, "is not the model that was trained: llama.cpp's log-probabilities differ by"),
        (name_another_pre_tokenizer, "llama.cpp tokenizes .* as"),
        (lose_an_end, r"does not end an answer at \['a'\]"),
        (damage_the_file, r"has other values than rounding to F32 explains"),
    ],
)
def test_a_fault_leaves_nothing_behind(
    fault: Callable[[pytest.MonkeyPatch], None], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = llama3_tokenizer()
    ordinary = tokenizer.convert_tokens_to_ids("a")
    model = random(LlamaForCausalLM, LlamaConfig, rope_parameters=LLAMA3)
    fault(monkeypatch)
    with pytest.raises(MergeFailed, match=f"{message}.*nothing was written"):
        written(tmp_path / "gguf", model, tokenizer, "f32", ends=[0, 1, ordinary])
    assert list(tmp_path.iterdir()) == []


def test_without_llama_cpp_the_tensors_are_compared_and_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    monkeypatch.setattr("lit_ft.gguf.folders.has_llama", lambda: False)
    with pytest.warns(UserWarning, match="tensors were compared, and llama.cpp was not run"):
        folder = written(tmp_path / "gguf", random(Qwen2ForCausalLM, Qwen2Config), chatml_tokenizer(), "q8_0")
    assert "model-q8_0.gguf: 27 tensors read back" in caplog.text
    extra = weights.Weight("rope_freqs.weight", gguf.GGMLQuantizationType.F32, torch.ones(8))
    with pytest.raises(MergeFailed, match=r"lacks the tensor rope_freqs.weight"):
        check_tensors(folder / "model-q8_0.gguf", [extra])


def test_what_has_no_form_in_gguf_is_refused_by_name() -> None:
    tokenizer = chatml_tokenizer()
    sizes = {**SIZES, "head_dim": 16}
    with pytest.raises(RecipeError, match="GemmaForCausalLM cannot be written.*LlamaForCausalLM, MistralForCausalLM, "):
        check_convertible(GemmaForCausalLM(GemmaConfig(**sizes)), tokenizer)
    with pytest.raises(RecipeError, match="^LlamaForSequenceClassification is a reward model, .* lit_ft.RewardModel"):
        check_convertible(LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)), tokenizer)
    for options, message in (
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor in its yarn"),
    ):
        with pytest.raises(RecipeError, match=f"LlamaForCausalLM with {message}"):
            check_convertible(LlamaForCausalLM(LlamaConfig(**{**SIZES, **options})), tokenizer)
    for kind, options, message in (
        ("qwen3", {"attention_bias": True}, "Qwen3ForCausalLM with attention_bias=True"),
        ("qwen3", {"rope_parameters": LLAMA3}, "Qwen3ForCausalLM with rope_type='llama3'"),
        ("qwen3_moe", EXPERTS | {"norm_topk_prob": False}, "Qwen3MoeForCausalLM with norm_topk_prob=False"),
        ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [0]}, r"with mlp_only_layers=\[0\]"),
        ("qwen3_5_text", DELTA_NET | {"linear_key_head_dim": 8}, "with linear_key_head_dim=8 and another linear_val"),
        (
            "qwen3_5_text",
            DELTA_NET | {"layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"]},
            "with full attention in layers that are not equally far apart",
        ),
        ("gemma3_text", GEMMA | {"rope_parameters": by_layer(LINEAR, LINEAR)}, "rope_type='linear' in sliding windows"),
        ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 8}, "with query_pre_attn_scalar=8 and 2 layers"),
        ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 1}, "with num_kv_shared_layers=1 after layers of full_att"),
        ("olmo3", {"rope_parameters": by_layer(YARN, ROPE)}, "with rope_theta=100.0 in sliding windows, and 500.0 wit"),
        ("smollm3", {"no_rope_layers": [0, 1], "pad_token_id": 0}, r"with no_rope_layers=\[0, 1\]"),
        ("olmoe", {}, "with num_key_value_heads=2 and 4 heads"),
        ("exaone4", {}, "Exaone4ForCausalLM cannot be written as GGUF by lit_ft, which has tables for"),
    ):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | options))
        with pytest.raises(RecipeError, match=message):
            check_convertible(model, tokenizer)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    unknown = byte_level("qwen2", ["<|im_end|>"])
    unknown.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+"), "isolated")
    with pytest.raises(RecipeError, match=r"the pre-tokenizer \[a-z\]\+ is none that is known of llama.cpp"):
        check_convertible(model, unknown)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")))
    with pytest.raises(RecipeError, match="the tokenizer is WordLevel, and only BPE"):
        check_convertible(model, words)


@pytest.mark.parametrize(
    ("name", "given"),
    [("My Run 2", "my-run-2"), ("数据", "model"), ("qwen_2.5-数据", "qwen_2.5"), ("2026-11-27", "2026-11-27")],
)
def test_a_name_that_ollama_takes(name: str, given: str) -> None:
    assert ollama_name(name) == given

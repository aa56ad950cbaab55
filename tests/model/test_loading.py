"""Damaged model folders: refused with the file's name before anything is allocated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lit_callbacks.output import heartbeat
from peft import PrefixTuningConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, Qwen2MoeConfig, T5Config
from transformers.utils import is_flash_attn_2_available

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError
from lit_ft.model.attention.packed_attention import PACKED
from lit_ft.model.loading import (
    DENSE,
    check_attention,
    decoder_layers,
    load_base,
    load_config,
    load_tokenizer,
    pick_attention,
)
from lit_ft.tuning.spec import TuningSpec


def edited(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return edit


def written(name: str, content: str | bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def in_shards(folder: Path) -> None:
    """An index that names a file which is not there."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file(weights, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
    names = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(weights)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "config is no JSON": (written("config.json", "{"), "config.json"),
    "config is a list": (written("config.json", "[1]"), "config.json"),
    "config is a number": (written("config.json", "3"), "config.json"),
    "too many layers": (edited(num_hidden_layers=10**9, layer_types=None), "=1000000000 must be 1 to 10,000"),
    "no layer": (edited(num_hidden_layers=0), "num_hidden_layers=0 must be 1"),
    "negative vocabulary": (edited(vocab_size=-1), "vocab_size=-1 must be 1"),
    "larger vocabulary": (edited(vocab_size=10**7), "is (384, 48) in model.safetensors, and (10000000, 48) by config"),
    "heads that do not divide": (edited(num_attention_heads=7), "config.json"),
    "a size that is a text": (edited(hidden_size="x"), "config.json"),
    "unknown activation": (edited(hidden_act="no"), "config.json"),
    "weights cut off": (cut, "model.safetensors"),
    "weights of noise": (written("model.safetensors", b"\x07" * 500), "model.safetensors"),
    "weights with a giant header": (written("model.safetensors", b"\xff" * 7 + b"\x3f{}"), "model.safetensors"),
    "a shard is missing": (in_shards, "names 1 missing file (model-00002-of-00002.safetensors)"),
    "weights that Git has elsewhere": (
        written("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 5\n"),
        "model.safetensors is Git's pointer to the file, not the file; run `git lfs pull` in the folder, or download",
    ),
    "no vocabulary": (
        lambda folder: (folder / "tokenizer.json").unlink(),
        "holds no tokenizer that loads (without the file of its vocabulary, e.g. tokenizer.json, it would ",
    ),
    "tokenizer of noise": (written("tokenizer.json", b"\x93\x00{"), "holds no tokenizer that loads"),
    "tokenizer of another type": (written("tokenizer.json", '{"model": [], "version": 1}'), "holds no tokenizer"),
    "half of a surrogate pair": (
        written("tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast", "note": "\\ud83d"}'),
        "surrogates not allowed",
    ),
    "tokenizer config is a list": (written("tokenizer_config.json", "[]"), "holds no tokenizer that loads"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_before_weights_load(name: str, model_folder: str, tmp_path: Path) -> None:
    damage, message = DAMAGE[name]
    folder = shutil.copytree(model_folder, tmp_path / "model")
    damage(Path(folder))
    with pytest.raises(RecipeError) as refusal:
        CausalLM(str(folder)).check()
    assert message in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_good_folder_and_one_in_shards_pass(model_folder: str, tmp_path: Path) -> None:
    CausalLM(model_folder).check()
    folder = shutil.copytree(model_folder, tmp_path / "model")
    in_shards(Path(folder))
    shutil.copy(Path(model_folder) / "model.safetensors", Path(folder) / "model-00002-of-00002.safetensors")
    CausalLM(str(folder)).check()


def test_drawn_weights_larger_than_memory_are_refused(model_folder: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    edited(hidden_size=400_000, intermediate_size=4_000_000)(Path(folder))
    with pytest.raises(RecipeError, match=r"the weights by config.json are [\d,.]+ GiB, and this machine has"):
        load_base(str(folder), init="random")


def test_a_damaged_generation_config(model_folder: str, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (Path(folder) / "generation_config.json").write_text("[1")
    with pytest.raises(RecipeError, match="generation_config.json"):
        load_base(str(folder), init="random")
    assert torch.get_default_dtype() == torch.float32


def test_folders_and_files_beside_models(model_folder: str, tmp_path: Path) -> None:
    model = tmp_path / "qwen2"
    model.symlink_to(model_folder)
    for name, file in (("adapter", "adapter_config.json"), ("run", "config.yaml"), ("run/checkpoints", "last.ckpt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    for path, message in {
        tmp_path / "adapter": f"is an adapter, no model; .*export --adapter {tmp_path}/adapter --merge --out DIR",
        tmp_path / "run": f"is a run, no model; .*export --run {tmp_path}/run --merge",
        model / "config.json": f"is a file; name a folder with config.json, weights and tokenizer: {model}$",
        tmp_path / "run" / "config.yaml": "is a file; name a folder with config.json, weights and tokenizer$",
        tmp_path / "qwen": f"does not exist; did you mean '{model}'?",
    }.items():
        with pytest.raises(RecipeError, match=message):
            load_config(str(path))


def test_attention_that_is_not_there() -> None:
    llama = LlamaConfig()
    check_attention("sdpa", llama)
    check_attention("kernels-community/flash-attn", llama)
    with pytest.raises(RecipeError, match="sdpa does not compute the attention of gpt_oss; leave it out"):
        check_attention("sdpa", GptOssConfig())
    with pytest.raises(RecipeError, match=r"model.attn_implementation='spda' is none of .*; did you mean sdpa\?"):
        check_attention("spda", llama)
    with pytest.raises(RecipeError, match=r"model.attn_implementation='dense' is none of"):
        check_attention(DENSE, llama)
    assert pick_attention(llama, DENSE) == "sdpa"
    prefix = TuningSpec(PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"), "auto", None)
    assert pick_attention(GptOssConfig(), prefix.attention("auto")) == "eager"
    if not is_flash_attn_2_available():
        with pytest.raises(RecipeError, match="flash_attention_2 needs the package flash-attn and a GPU"):
            check_attention("flash_attention_2", llama)


@pytest.mark.parametrize(("use_sliding_window", "attention"), [(False, PACKED), (True, "sdpa")])
def test_a_window_that_is_in_the_mask_alone(use_sliding_window: bool, attention: str) -> None:
    """Qwen2-MoE tells its attention function of no window, and most of its models have none."""
    assert pick_attention(Qwen2MoeConfig(use_sliding_window=use_sliding_window), "auto") == attention


def test_what_is_no_causal_language_model(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    for init in ("random", "pretrained"):
        with pytest.raises(
            RecipeError, match="transformers has no causal language model of t5, as config.json calls it"
        ):
            load_base(str(tmp_path), init)


@pytest.mark.parametrize("name", ["{}", "a\x00b", "-", "x" * 300])
def test_what_is_no_name(name: str) -> None:
    with pytest.raises(RecipeError, match="model.pretrained="):
        load_tokenizer(name)


def test_the_reading_of_weights_is_said_at_intervals(
    model_folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "SECONDS_BETWEEN_LINES", 1e-4)
    caplog.set_level("INFO")
    load_base(model_folder)
    assert f"reading the weights of {model_folder}: 0 s so far" in caplog.messages


@pytest.mark.parametrize("name", ["biogpt", "ctrl", "qwen2"])
def test_layers_are_found_where_a_class_of_models_names_none(name: str) -> None:
    """Otherwise FSDP would gather a whole model at once, and context parallelism would leave attention as it is."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(name))
    assert len(decoder_layers(model)) == model.config.num_hidden_layers == 4

"""Another base, or one that has changed since, is told from the one that was trained on."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_folders import change, untied
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.model.files.fingerprint import (
    BaseForm,
    check_same_base,
    check_same_form,
    fingerprint,
    read_fingerprint,
    warn_of_other_form,
)


@pytest.fixture
def base(model_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "base"))


def test_a_copy_is_the_same_base(model_folder: str, base: Path) -> None:
    check_same_base(fingerprint(model_folder), fingerprint(str(base)), "the adapter")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    check_same_base(fingerprint(model_folder), fingerprint(str(base)), "the adapter")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.v_proj.bias"])
def test_a_change_of_any_tensor_is_seen(base: Path, name: str) -> None:
    before = fingerprint(str(base))
    change(base, name)
    with pytest.raises(
        RecipeError, match="the adapter was trained on '.*base', whose weights changed since; bring back"
    ):
        check_same_base(before, fingerprint(str(base)), "the adapter")


def test_files_of_any_names_are_looked_at(base: Path) -> None:
    file = "model.safetensors-00001-of-00001.safetensors"
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, file)}))
    save_file(weights, base / file)
    before = fingerprint(str(base))
    save_file({name: weight + 1 for name, weight in weights.items()}, base / file)
    assert fingerprint(str(base))["weights"] != before["weights"]


def test_files_that_are_not_read_are_not_looked_at(base: Path) -> None:
    before = fingerprint(str(base))
    shutil.copy(base / "model.safetensors", base / "model-00001-of-00002.safetensors")
    assert fingerprint(str(base)) == before


def test_a_config_that_computes_otherwise_is_seen(base: Path) -> None:
    before, config = fingerprint(str(base)), json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    with pytest.raises(RecipeError, match=r"whose config.json changed since"):
        check_same_base(before, fingerprint(str(base)), "the adapter")


def test_another_base(model_folder: str, tmp_path: Path) -> None:
    other = fingerprint(untied(model_folder, tmp_path / "other"))
    with pytest.raises(RecipeError, match=r"was trained on '.*nano-qwen2', and '.*other' has other weights"):
        check_same_base(fingerprint(model_folder), other, "the adapter")


def test_shards_and_old_files_are_looked_at(model_folder: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 1
    (tmp_path / "old").mkdir()
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    found = [
        fingerprint(str(folder))["weights"] for folder in (tmp_path / "shards", tmp_path / "old", Path(model_folder))
    ]
    assert len(set(found)) == 3


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")


def test_a_checkpoint_does_not_resume_on_a_changed_base(
    make_trainer: Any, base: Path, write_rows: Any, tmp_path: Path
) -> None:
    module = CausalLM(str(base), peft=lora())
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, TextDataModule(write_rows()))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    module.save_adapter(tmp_path / "adapter")
    assert read_fingerprint(tmp_path / "adapter") == fingerprint(str(base))
    change(base)
    again = CausalLM(str(base), peft=lora())
    with pytest.raises(RecipeError, match="the checkpoint was trained on .* whose weights changed since"):
        make_trainer(max_steps=2).fit(again, TextDataModule(write_rows()), ckpt_path=tmp_path / "one.ckpt")


def test_full_fine_tuning_resumes_without_its_base(
    make_trainer: Any, base: Path, write_rows: Any, tmp_path: Path
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.fit(CausalLM(str(base)), TextDataModule(write_rows()))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    change(base)
    make_trainer(max_steps=2).fit(CausalLM(str(base)), TextDataModule(write_rows()), ckpt_path=tmp_path / "one.ckpt")


def test_random_weights_are_told_by_their_seed(model_folder: str) -> None:
    (seven, eight) = (fingerprint(model_folder, "random", seed) for seed in (7, 8))
    check_same_base(seven, fingerprint(model_folder, "random", 7), "the checkpoint")
    with pytest.raises(RecipeError, match="trained on random weights of seed 7, not 8; set seed_everything to 7"):
        check_same_base(seven, eight, "the checkpoint")


def test_a_hub_model_is_recorded_with_its_revision(model_folder: str, tmp_path: Path, monkeypatch: Any) -> None:
    snapshot = Path(shutil.copytree(model_folder, tmp_path / "snapshots" / "0123abc"))
    monkeypatch.setattr(
        "lit_ft.model.files.fingerprint.try_to_load_from_cache",
        lambda _, file: str(snapshot / file),
    )
    recorded = fingerprint("someone/nano-qwen2")
    assert recorded["commit"] == "0123abc"
    check_same_base(recorded, fingerprint(model_folder), "the adapter")  # downloaded to a folder
    change(snapshot)
    with pytest.raises(RecipeError, match=r"whose weights changed since; bring back what it was \(revision 0123abc on"):
        check_same_base(recorded, fingerprint("someone/nano-qwen2"), "the adapter")


def test_what_records_no_base_is_said(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    check_same_base(None, fingerprint(model_folder), "the checkpoint")
    assert "the checkpoint does not record its base: not compared with" in caplog.text


@pytest.mark.parametrize("method", [lora(), None], ids=["LoRA", "full"])
def test_a_run_is_not_resumed_with_other_values_of_the_config(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, method: LoraConfig | None
) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.fit(CausalLM(model_folder, peft=method), TextDataModule(write_rows()))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    rope = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    again = CausalLM(model_folder, peft=method, config_overrides=rope)
    with pytest.raises(RecipeError, match="was trained with model.config_overrides={}, and the recipe has"):
        make_trainer(max_steps=2).fit(again, TextDataModule(write_rows()), ckpt_path=tmp_path / "one.ckpt")


def test_the_form_of_a_base_in_a_checkpoint() -> None:
    now = BaseForm("float32", {"rope_theta": 5}, None)
    check_same_form(None, now)  # an earlier version wrote none
    check_same_form(now.plain(), now)
    with pytest.raises(RecipeError, match="trained with model.config_overrides={}, and the recipe has"):
        check_same_form(BaseForm("float32", {}).plain(), now)
    with pytest.warns(UserWarning, match=r"model\.dtype: the base is float32, and was bfloat16 up to the checkpoint"):
        warn_of_other_form(BaseForm("bfloat16", {}).plain(), now)
    with pytest.warns(UserWarning, match="the base is not quantized, and was quantized by bitsandbytes"):
        warn_of_other_form(BaseForm("float32", {}, "bitsandbytes").plain(), now)

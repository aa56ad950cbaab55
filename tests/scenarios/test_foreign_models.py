"""Model folders and adapters that bring code."""

import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from command_line import recipe, run
from hostile import Evil
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lit_ft.export.adapter_folders import Adapter, load_adapters
from lit_ft.model.loading import load_base, load_config, load_tokenizer, skeleton


@pytest.fixture
def theirs(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the model with code beside it that leaves a mark, and somebody who says yes to each question."""
    folder = tmp_path / "theirs"
    shutil.copytree(model_folder, folder)
    for name in ("configuration_x", "modeling_x", "tokenization_x"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return folder


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


AUTO_MAP = {"AutoConfig": "configuration_x.C", "AutoModelForCausalLM": "modeling_x.M"}


def test_an_unknown_architecture_with_code(
    capsys: Any, theirs: Path, tmp_path: Path, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    edit(theirs / "config.json", auto_map=AUTO_MAP, model_type="x")
    said = run(capsys, "check", *recipe(tmp_path, str(theirs), write_rows())[1:], code=2)
    assert "config.json: it wants Python code of its own (auto_map) to be run, which is never done" in said
    assert sys.stdin.read().count("y") == 100, "somebody was asked"
    assert not (tmp_path / "ran").exists()


def test_a_known_architecture_with_code_is_read_without_it(theirs: Path, tmp_path: Path) -> None:
    edit(theirs / "config.json", auto_map=AUTO_MAP)
    edit(theirs / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_x.T"]}, tokenizer_class="X")
    load_config(str(theirs))
    load_tokenizer(str(theirs))
    load_base(str(theirs))
    load_base(str(theirs), init="random")
    skeleton(str(theirs))
    assert sys.stdin.read().count("y") == 100
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_run_no_code(theirs: Path, tmp_path: Path) -> None:
    (theirs / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil(tmp_path / "ran")}, theirs / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights"):
        load_base(str(theirs))
    assert not (tmp_path / "ran").exists()


def test_pickled_adapters_run_no_code(model_folder: str, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    weights: dict[str, Any] = load_file(folder / "adapter_model.safetensors")
    os.remove(folder / "adapter_model.safetensors")
    torch.save(weights | {"evil": Evil(tmp_path / "ran")}, folder / "adapter_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), [Adapter(folder)])
    assert not (tmp_path / "ran").exists()


def test_an_adapter_imports_no_module(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    folder = tmp_path / "adapter"
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    edit(folder / "adapter_config.json", megatron_config={"x": 1}, megatron_core="planted")
    with pytest.raises(ValueError, match="megatron_core"):
        load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), [Adapter(folder)])
    edit(folder / "adapter_config.json", megatron_config=None, auto_mapping={"parent_library": "planted"})
    load_adapters(AutoModelForCausalLM.from_pretrained(model_folder), [Adapter(folder)])
    assert not (tmp_path / "ran").exists()

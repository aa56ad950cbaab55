"""Model folders that name files elsewhere."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from lit_ft import RecipeError
from lit_ft.model.loading import load_base


@pytest.fixture
def sharded(model_folder: str, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


@pytest.mark.parametrize("how", ["{}/../elsewhere/{}", "/{}/elsewhere/{}"])
def test_an_index_names_no_file_outside(sharded: Path, tmp_path: Path, how: str) -> None:
    assert load_base(str(sharded)).num_parameters() > 0
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = sorted(content["weight_map"].values())[0]
    (tmp_path / "elsewhere").mkdir()
    shutil.move(sharded / name, tmp_path / "elsewhere" / name)
    there = how.format("." if how.startswith("{") else str(tmp_path).strip("/"), name)
    content["weight_map"] = {key: there if file == name else file for key, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(RecipeError, match=r"index\.json names a file outside of the folder .*elsewhere"):
        load_base(str(sharded))


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "[" * 100_000])
def test_a_damaged_index(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(RecipeError, match="is no index of weights"):
        load_base(str(sharded))


def test_an_adapter_beside_the_model_is_not_put_on_it(sharded: Path) -> None:
    (sharded / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "x"}))
    with pytest.raises(RecipeError, match="holds an adapter"):
        load_base(str(sharded))

"""A config.json of an architecture that transformers does not have."""

import json
from pathlib import Path

import pytest
import transformers

from lit_ft import RecipeError
from lit_ft.model.loading import load_config

HERE = transformers.__version__
REFUSED = {
    "a later version has it": (
        {"model_type": "x9", "transformers_version": "99.1.0"},
        f"transformers {HERE} has no model_type 'x9', and 99.1.0, which the model was saved with, has it: pip install "
        "-U 'transformers>=99.1.0'",
    ),
    "no version is named": ({"model_type": "x9"}, "has no model_type 'x9', and the file names no newer version that"),
    "an older version is named": ({"model_type": "x9", "transformers_version": "4.1.0"}, "names no newer version"),
    "a version that is none": ({"model_type": "x9", "transformers_version": "new"}, "names no newer version"),
    "its own code": (
        {"model_type": "x9", "auto_map": {"AutoConfig": "configuration_x.C"}, "transformers_version": "99.1.0"},
        "it wants Python code of its own (auto_map) to be run, which is never done: it could do all that you can do",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    values, message = REFUSED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(RecipeError, match="^model.pretrained=.*: config.json: ") as error:
        load_config(str(tmp_path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)

"""Form, YAML and command line of a recipe stand for the same training."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nicegui", reason="the extra `board` is not installed")

from lit_ft.board.board import Board
from lit_ft.board.command_line import fit_arguments
from lit_ft.board.recipe_text import RecipeText, as_text, from_text
from lit_ft.board.schema import GROUPS, PRESETS, Schema, matching_preset
from lit_ft.commands.train import fit_parser
from lit_ft.errors import RecipeError

QUICKSTART = Path("recipes/quickstart.yaml")


@pytest.fixture(scope="module")
def parser() -> Any:
    return fit_parser()


@pytest.fixture(scope="module")
def schema(parser: Any) -> Schema:
    return Schema(parser)


@pytest.fixture
def recipe() -> RecipeText:
    return RecipeText(QUICKSTART.read_text(encoding="utf-8"))


def parsed(parser: Any, arguments: list[str]) -> Any:
    found = parser.parse_args(arguments)
    found["config"] = None
    return found


# --- the schema ------------------------------------------------------------------------------------


def test_every_field_of_the_form_is_an_option(schema: Schema, recipe: RecipeText) -> None:
    fields = schema.fields(recipe)
    assert {name for names in GROUPS.values() for name in names} <= set(fields)
    assert set(PRESETS) <= set(fields)


def test_all_options_of_help_are_reached(schema: Schema, parser: Any) -> None:
    help_text = parser.format_help()
    for name in ("trainer.max_steps", "data.supervise", "model.lr_factors", "trainer.enable_checkpointing"):
        assert f"--{name}" in help_text
        assert name in schema.own
    assert schema.own["data.supervise"].choices == ("assistant", "last", "all")
    assert schema.own["data.max_length"].default == "2048"
    assert schema.own["data.system"].is_text
    assert not schema.own["data.max_length"].is_text
    assert schema.own["merge"].choices == ("true", "false")
    assert "longer samples" in schema.own["data.overlong"].help


def test_options_of_a_class_are_those_of_the_recipe(schema: Schema) -> None:
    lora = RecipeText("model: {peft: {class_path: peft.LoraConfig}}")
    ia3 = RecipeText("model: {peft: {class_path: peft.IA3Config}}")
    assert "model.peft.lora_alpha" in schema.fields(lora)
    assert "model.peft.lora_alpha" not in schema.fields(ia3)
    assert "Low-Rank Adaptation" in schema.fields(lora)["model.peft.use_dora"].help
    assert "model.peft.feedforward_modules" in schema.fields(ia3)


def test_code_that_is_not_allowed_is_not_imported(schema: Schema, tmp_path: Path) -> None:
    assert schema.of_class("model.peft", "antigravity.Config") == {}
    assert schema.of_class("model.peft", "peft.NoSuchConfig") == {}


@pytest.mark.slow
@pytest.mark.parametrize(("key", "name"), [(key, name) for key, found in PRESETS.items() for name in found])
def test_a_preset_is_accepted_and_recognized(parser: Any, recipe: RecipeText, key: str, name: str) -> None:
    recipe.set(key, PRESETS[key][name])
    assert matching_preset(key, recipe.get(key)) == name
    arguments = fit_arguments(recipe, RecipeText(QUICKSTART.read_text(encoding="utf-8")), [str(QUICKSTART)])
    parser.parse_args(arguments)


# --- form and YAML ---------------------------------------------------------------------------------


def test_a_change_keeps_comments_and_order(recipe: RecipeText) -> None:
    before = recipe.text
    recipe.set("model.peft.r", 8)
    recipe.set("data.system", "Be brief: {x}")
    recipe.set("trainer.max_steps", 20)
    changed = before.replace("r: 16", "r: 8").replace(
        "  micro_batch_size: 16\n", "  micro_batch_size: 16\n  system: 'Be brief: {x}'\n"
    )
    assert recipe.text == f"{changed}  max_steps: 20\n"
    for name in ("data.system", "trainer.max_steps"):
        recipe.set(name, None)
    assert recipe.text.split() == before.replace("r: 16", "r: 8").split()


def test_options_are_found_in_either_form_of_a_section() -> None:
    for text in ("model: {pretrained: a}", "model: {class_path: lit_ft.CausalLM, init_args: {pretrained: a}}"):
        recipe = RecipeText(text)
        assert recipe.get("model.pretrained") == "a"
        recipe.set("model.pretrained", "b")
        recipe.set("model.dtype", "float32")
        assert RecipeText(recipe.text).get("model.dtype") == "float32"
        assert recipe.options()["model.pretrained"] == "b"


def test_a_recipe_from_nothing() -> None:
    recipe = RecipeText()
    recipe.set("model.pretrained", "a")
    recipe.set("optimizer", PRESETS["optimizer"]["AdamW"])
    recipe.set("optimizer.lr", 0.1)
    assert recipe.content() == {
        "model": {"pretrained": "a"},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}},
    }
    recipe.set("model.pretrained", None)
    recipe.set("optimizer", None)
    assert recipe.text == ""


def test_callbacks_are_added_and_removed_beside_those_of_the_recipe(recipe: RecipeText) -> None:
    before = recipe.text
    recipe.set_callback("lit_callbacks.LossLedger", {})
    recipe.set_callback("lit_callbacks.SampleGenerations", {"prompts": ["Hello: you"]})
    assert recipe.callback("lit_ft.ExactMatch") == {"max_new_tokens": 24, "samples": 6}
    assert recipe.callback("lit_callbacks.SampleGenerations") == {"prompts": ["Hello: you"]}
    for name in ("lit_callbacks.LossLedger", "lit_callbacks.SampleGenerations"):
        recipe.set_callback(name, None)
    assert recipe.content() == RecipeText(before).content()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "line 2: is no YAML"),
        ("- a", "holds no mapping"),
        ("a: *b", "is no YAML"),
        ("a: &a [x]\n" + "\n".join(f"b{i}: [*a, *a]" for i in range(3)), ""),
    ],
)
def test_a_text_that_is_no_recipe_is_an_error_with_its_line(text: str, message: str) -> None:
    if not message:
        assert RecipeText(text).get("b0") == [["x"], ["x"]]
        return
    with pytest.raises(RecipeError, match=message):
        RecipeText(text)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gbk.yaml").write_bytes("# 中文\n".encode("gbk"))
    with pytest.raises(RecipeError, match=r"gbk\.yaml: is not UTF-8 \(byte 2\); save the recipe as UTF-8 text"):
        RecipeText.of_file(tmp_path / "gbk.yaml")
    with pytest.raises(RecipeError, match=r"gone\.yaml: cannot be read \(No such file or directory\)"):
        RecipeText.of_file(tmp_path / "gone.yaml")


@pytest.mark.parametrize("value", ["a", "a: b", "1", 1, 0.5, True, "true", None, ["a", 1], {"a": {"b": 2}}, "[x"])
def test_the_text_of_a_field_reads_as_its_value(value: object) -> None:
    assert from_text(as_text(value)) == value


def test_a_number_with_an_exponent_is_a_number() -> None:
    assert from_text("1e-4") == 1e-4
    assert as_text("1e-4") == "1e-4"  # YAML 1.1 has it as a text in a recipe
    with pytest.raises(RecipeError, match="is no YAML value"):
        from_text("[1")


# --- the command -----------------------------------------------------------------------------------

CHANGES: dict[str, dict[str, object]] = {
    "nothing": {},
    "numbers": {"model.peft.r": 8, "optimizer.lr": 1e-4, "trainer.max_steps": 20, "data.max_length": 128},
    "a list": {"model.peft.target_modules": ["q_proj"], "data.template_options": {"thinking": False}},
    "another class": {"model.peft": PRESETS["model.peft"]["IA3Config"]},
    "removed": {"data.val_path": None, "model.peft.lora_alpha": None},
    "no method": {"model.peft": None},
    "texts": {"data.system": "Answer with care - 是的", "data.path": "a b.json"},
    "callbacks": {"trainer.callbacks": [{"class_path": "lit_callbacks.LossLedger"}]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_the_command_stands_for_the_recipe(parser: Any, recipe: RecipeText, tmp_path: Path, name: str) -> None:
    base = RecipeText(recipe.text)
    for key, value in CHANGES[name].items():
        recipe.set(key, value)
    arguments = fit_arguments(recipe, base, [str(QUICKSTART)])
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe.text, encoding="utf-8")
    assert arguments is not None
    assert parsed(parser, arguments) == parsed(parser, ["--config", str(file)])
    if name in ("nothing", "numbers"):
        assert arguments[:2] == ["--config", str(QUICKSTART)]
        assert len(arguments) == 2 + 2 * len(CHANGES[name])


@pytest.mark.parametrize("text", ["You are: {x}", "null", "-x", "[a]"])
def test_a_text_that_a_command_line_would_read_otherwise_needs_a_file(recipe: RecipeText, text: str) -> None:
    base = RecipeText(recipe.text)
    recipe.set("data.system", text)
    assert recipe.get("data.system") == text
    assert fit_arguments(recipe, base, [str(QUICKSTART)]) is None


FRAGMENTS = Board([Path("runs")], Path("recipes"), fit_parser).fragments()


def test_recipes_without_a_model_are_fragments() -> None:
    assert {"tuning/dora.yaml", "precision/bf16_true.yaml", "strategies/ddp.yaml"} <= set(FRAGMENTS)
    assert not {"quickstart.yaml", "examples/qlora_24gb.yaml", "data/tasks/quickstart.yaml"} & set(FRAGMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_on_top_is_a_second_config(
    parser: Any, schema: Schema, recipe: RecipeText, tmp_path: Path, name: str
) -> None:
    if name == "loggers/swanlab.yaml":  # its class is the package's own
        pytest.importorskip("swanlab")
    both = recipe.with_fragment(RecipeText(FRAGMENTS[name].read_text(encoding="utf-8")), schema.kept)
    files = [str(QUICKSTART), str(FRAGMENTS[name])]
    arguments = fit_arguments(both, RecipeText(both.text), files)
    assert arguments == ["--config", files[0], "--config", files[1]]
    file = tmp_path / "recipe.yaml"
    file.write_text(both.text, encoding="utf-8")
    assert parsed(parser, ["--config", str(file)]) == parsed(parser, arguments)

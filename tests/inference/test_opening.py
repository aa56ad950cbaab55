"""Each way to open a model for answers gives the answers of the model that was trained."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
from architectures import ATTENTION, save_model
from command_line import recipe
from forked_commands import run_forked
from transformers import AutoModelForCausalLM

from lit_ft.commands.export import export
from lit_ft.errors import RecipeError
from lit_ft.export.restore_run import module_of, restore
from lit_ft.inference.opening import OpenedModel, base_opener, open_model, open_together, open_tokenizer
from lit_ft.inference.text_stream import Decoding, stream_answer
from lit_ft.run.folder import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """Run of one step that keeps checkpoint and adapter, with thinking switched off in its template."""
    folder = tmp_path_factory.mktemp("run")
    rows = folder / "rows.jsonl"
    rows.write_text('{"instruction": "red book", "output": "blue cup"}\n' * 8)
    arguments = recipe(folder, model_folder, str(rows), max_steps=2)
    done = run_forked(*arguments, "--run_dir", str(folder / "run"), "--optimizer.lr", "3", "--model.dtype", "float32")
    assert done.returncode == 0, done.stderr
    return folder / "run"


def answer(opened: OpenedModel) -> str:
    prompt = opened.template.render([{"role": "user", "content": "the green lamp"}], generation=True)
    return stream_answer(opened, prompt, Decoding(max_new_tokens=12), lambda _: None).text


def test_a_run_its_adapter_and_its_merged_model_answer_alike(run: Path, tmp_path: Path, model_folder: str) -> None:
    module = module_of(RunFolder(run))
    restore(module, RunFolder(run).last_checkpoint())
    prompt = module.render_prompt([{"role": "user", "content": "the green lamp"}])
    wanted = module.answer([prompt], 12)[0]
    export(run=str(run), out=str(tmp_path / "merged"), merge=True)
    bare = shutil.copytree(run / "adapter", tmp_path / "bare")  # as PEFT alone writes it
    for name in ("manifest.json", "tokenizer_config.json", "tokenizer.json"):
        (bare / name).unlink()
    for path, base in ((run, None), (run / "adapter", None), (tmp_path / "merged", None), (bare, model_folder)):
        opened = open_model(str(path), base=base)
        assert answer(opened) == wanted
        assert opened.model(torch.tensor([[5, 9]])).logits.shape[1] == 2  # not only `generate`: serve scores with it
    untrained = answer(open_model(model_folder))
    assert untrained != wanted
    both = open_model(str(run))
    with both.without_adapter():
        assert answer(both) == untrained
    assert answer(both) == wanted


def test_an_adapter_s_base_is_read_in_the_dtype_of_training(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    (adapter / "manifest.json").unlink()
    recorded = json.loads((adapter / "base.json").read_text())
    assert recorded["dtype"] == "float32"
    for dtype in ("bfloat16", "float32"):
        (adapter / "base.json").write_text(json.dumps(recorded | {"dtype": dtype}))
        assert open_model(str(adapter)).base.dtype == getattr(torch, dtype)
    assert list(open_together([str(run), str(adapter)])) == ["base", "run", adapter.parent.name]
    (adapter / "base.json").write_text(json.dumps(recorded | {"dtype": "int8"}))
    with pytest.raises(RecipeError, match="dtype='int8' must be one of auto, float32"):
        open_model(str(adapter))
    (adapter / "base.json").unlink()
    caplog.clear()
    assert open_model(str(adapter)).base.dtype == torch.float32
    assert "does not record the dtype of its training" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda run, base: {"path": base, "base": "other"}, "is for an adapter's folder"),
        (lambda run, base: {"path": base, "ckpt_path": "best"}, "is no run"),
        (lambda run, base: {"path": str(run), "ckpt_path": "step=9.ckpt"}, "does not exist"),
        (lambda run, base: {"path": str(run.parent / "nothing")}, "nothing"),
        (
            lambda run, base: {"path": f"{run}/checkpoints/last.ckpt"},
            "is a checkpoint; give its run, '.*/run', and",
        ),
        (lambda run, base: {"path": str(run / "merged")}, r"has not written it yet; .*run/checkpoints/last\.ckpt"),
        (lambda run, base: {"path": base, "chat_template": "vicuna"}, "is no file"),
    ],
)
def test_what_cannot_be_opened(
    run: Path, model_folder: str, options: Callable[[Path, str], dict[str, Any]], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        open_model(**options(run, model_folder))


def test_a_base_that_moved_is_told_with_where_to_write_its_place(run: Path, tmp_path: Path, model_folder: str) -> None:
    moved = shutil.copytree(run, tmp_path / "run")
    config, recorded = moved / "config.yaml", moved / "adapter" / "base.json"
    for file in (config, recorded):
        file.write_text(file.read_text().replace(model_folder, "/earlier/base"))
    (moved / "adapter" / "manifest.json").unlink()
    with pytest.raises(RecipeError, match=rf"pretrained='/earlier/base' does not exist; run this in .* into {config}$"):
        open_model(str(moved))
    message = r"the base that .*/adapter records='/earlier/base' does not exist; name its place with --base$"
    with pytest.raises(RecipeError, match=message):
        open_model(str(moved / "adapter"))
    with pytest.raises(RecipeError, match=message):
        export(adapter=[str(moved)], out=str(tmp_path / "out"))


def test_a_tokenizer_alone_is_named_by_its_path(run: Path) -> None:
    for name, message in (("merged", "has not written it yet"), ("checkpoints/x", r"path='.*checkpoints/x' does not")):
        with pytest.raises(RecipeError, match=message):
            open_tokenizer(str(run / name), None)


def test_models_that_are_opened_together_share_the_base_s_weights(run: Path, tmp_path: Path, model_folder: str) -> None:
    copied = shutil.copytree(run / "adapter", tmp_path / "other")
    together = open_together([str(run), str(copied)])
    assert list(together) == ["base", "run", "other"]
    for name, path in (("base", model_folder), ("run", str(run)), ("other", str(copied))):
        assert answer(together[name]) == answer(open_model(path))
    own = dict(together["base"].base.named_parameters())
    for name in ("run", "other"):
        frozen = {
            key.replace(".base_layer", ""): weight
            for key, weight in together[name].base.named_parameters()
            if ".lora_" not in key
        }
        assert {key: weight.data_ptr() for key, weight in frozen.items()} == {
            key: weight.data_ptr() for key, weight in own.items()
        }


CHANGE_THE_BASE = {
    "KaSA": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], kasa_config=peft.KasaConfig()),
    "biases": peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="all"),
}


@pytest.mark.parametrize("method", CHANGE_THE_BASE)
def test_an_adapter_that_changes_its_base_leaves_that_of_others_alone(
    run: Path, tmp_path: Path, model_folder: str, method: str
) -> None:
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), CHANGE_THE_BASE[method])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or name.endswith("bias"):
                weight.normal_(generator=torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "changes")
    shutil.copytree(run / "adapter", tmp_path / "plain")
    paths = {"base": model_folder, "changes": str(tmp_path / "changes"), "plain": str(tmp_path / "plain")}
    for order in (["changes", "plain"], ["plain", "changes"]):
        together = open_together([paths[name] for name in order])
        assert set(together) == set(paths)
        assert {name: answer(together[name]) for name in paths} == {
            name: answer(open_model(path)) for name, path in paths.items()
        }
    with pytest.raises(RecipeError, match="the adapter changes the base's weights in memory"):
        together["changes"].check_adapter()


def test_models_of_two_bases_are_not_opened_together(run: Path, tmp_path: Path, model_folder: str) -> None:
    other = shutil.copytree(model_folder, tmp_path / "base")
    with pytest.raises(RecipeError, match="'base', which is taken"):
        open_together([str(run), str(other)])
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "adapter" / "adapter_model.safetensors", bare)
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    (bare / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    weights = safetensors.torch.load_file(other / "model.safetensors")
    safetensors.torch.save_file({name: 2 * weight for name, weight in weights.items()}, other / "model.safetensors")
    with pytest.raises(RecipeError, match="are not the same base in the same form"):
        open_together([str(run), str(bare)])


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_models_with_capped_logits_or_sinks_are_opened(architecture: str, tmp_path: Path) -> None:
    base = save_model(architecture, tmp_path / "model", layers=2)
    config = peft.LoraConfig(target_modules=ATTENTION, init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(1)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "run")
    export(adapter=[str(tmp_path / "run")], out=str(tmp_path / "merged"), merge=True)
    together = open_together([str(tmp_path / "run")])
    assert answer(together["base"]) == answer(open_model(base))
    assert answer(together["run"]) == answer(open_model(str(tmp_path / "merged"))) != answer(together["base"])


def test_only_an_adapter_can_be_switched_off(model_folder: str) -> None:
    with pytest.raises(RecipeError, match="has no adapter to switch off"):
        open_model(model_folder).check_adapter()


def test_the_base_of_a_run_is_read_anew(run: Path, model_folder: str) -> None:
    opened = open_model(str(run))
    open_base = base_opener(opened)
    assert open_base is not None
    with opened.without_adapter():
        switched_off = answer(opened)
    assert answer(open_base()) == switched_off != answer(opened)
    assert base_opener(open_model(model_folder)) is None


def test_a_model_without_a_template_is_opened_where_none_is_needed(model_folder: str, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").unlink()
    with pytest.raises(RecipeError, match="has no chat template"):
        open_model(str(tmp_path / "model"))
    opened = open_model(str(tmp_path / "model"), needs_template=False)
    assert not opened.has_template
    assert opened.template.render([{"role": "user", "content": "red"}], generation=True) == "User: red\nAssistant:"
    assert open_model(model_folder, needs_template=False).has_template


ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """Run with another scaling of rotary positions than its base's config.json."""
    folder = tmp_path_factory.mktemp("scaled")
    rows = folder / "rows.jsonl"
    rows.write_text('{"instruction": "red book", "output": "blue cup"}\n' * 8)
    options = ["--run_dir", str(folder / "run"), "--model.dtype", "float32"]
    options += ["--model.config_overrides", json.dumps(ROPE)]
    done = run_forked(*recipe(folder, model_folder, str(rows), max_steps=2), *options)
    assert done.returncode == 0, done.stderr
    return folder / "run"


IDS = torch.arange(3, 60)[None]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits[0]


def test_an_adapter_of_a_quantized_base_says_that_it_is_opened_on_the_unquantized_one(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    adapter = shutil.copytree(run / "adapter", tmp_path / "adapter")
    (adapter / "manifest.json").unlink()
    recorded = json.loads((adapter / "base.json").read_text())
    assert "quantization" not in recorded
    open_model(str(adapter))
    assert "unquantized" not in caplog.text
    (adapter / "base.json").write_text(json.dumps(recorded | {"quantization": "bitsandbytes"}))
    open_model(str(adapter))
    assert f"{adapter} was trained on a base quantized by bitsandbytes, and is used with the unquantized" in caplog.text
    (adapter / "base.json").write_text(json.dumps(recorded | {"quantization": 4}))
    with pytest.raises(RecipeError, match="quantization=4 must be the name of a method"):
        open_model(str(adapter))


def test_an_adapter_s_base_has_the_config_of_training(
    scaled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, model_folder: str
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    wanted = logits_of(open_model(str(scaled)).model)
    assert "model.config_overrides" not in caplog.text
    for base in (None, model_folder):
        opened = open_model(str(scaled / "adapter"), base=base)
        torch.testing.assert_close(logits_of(opened.model), wanted, atol=1e-6, rtol=0)
    assert f"the base of {scaled / 'adapter'} is read with model.config_overrides={json.dumps(ROPE)}" in caplog.text
    together = open_together([str(scaled), str(shutil.copytree(scaled / "adapter", tmp_path / "copy"))])
    for name in ("run", "copy"):
        torch.testing.assert_close(logits_of(together[name].model), wanted, atol=1e-6, rtol=0)
    export(adapter=[str(scaled / "adapter")], out=str(tmp_path / "merged"), merge=True)
    torch.testing.assert_close(logits_of(open_model(str(tmp_path / "merged")).model), wanted, atol=1e-4, rtol=0)
    # As it was written before: without the entry, the base is that of its files.
    old = shutil.copytree(scaled / "adapter", tmp_path / "old")
    (old / "manifest.json").unlink()
    recorded = json.loads((old / "base.json").read_text())
    assert recorded.pop("config_overrides") == ROPE
    (old / "base.json").write_text(json.dumps(recorded))
    assert (logits_of(open_model(str(old)).model) - wanted).abs().max() > 0.01


def test_adapters_of_other_configs_are_not_taken_together(
    run: Path, scaled: Path, tmp_path: Path, model_folder: str
) -> None:
    for one, two in ((run, scaled), (scaled, run)):
        with pytest.raises(
            RecipeError, match=r"not the same base in the same form .* model\.config_overrides .*linear"
        ):
            open_together([str(one / "adapter"), str(shutil.copytree(two / "adapter", tmp_path / one.parent.name))])
        pair = [f"{one}=0.5", f"{two}=0.5"]
        with pytest.raises(RecipeError, match=r"was trained with model\.config_overrides=.* use it with a"):
            export(adapter=pair, out=str(tmp_path / "sum"))
        with pytest.raises(RecipeError, match=r"was trained with model\.config_overrides="):
            export(run=str(two), adapter=[str(one)], out=str(tmp_path / "sum"))
    export(run=str(scaled), adapter=[f"{scaled}=0.5", f"{scaled}=0.5"], out=str(tmp_path / "sum"))
    wanted = logits_of(open_model(str(scaled)).model)
    torch.testing.assert_close(logits_of(open_model(str(tmp_path / "sum")).model), wanted, atol=1e-5, rtol=0)
    assert "Load the base with these values of its config" in (tmp_path / "sum" / "README.md").read_text()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [([1], r"base\.json: config_overrides=\[1\] must be a mapping"), ({"ropes": 1}, r"has no 'ropes'; it has")],
)
def test_damaged_values_of_a_config_are_one_line(scaled: Path, tmp_path: Path, overrides: object, message: str) -> None:
    adapter = shutil.copytree(scaled / "adapter", tmp_path / "adapter")
    (adapter / "manifest.json").unlink()
    recorded = json.loads((adapter / "base.json").read_text())
    (adapter / "base.json").write_text(json.dumps(recorded | {"config_overrides": overrides}))
    with pytest.raises(RecipeError, match=message) as error:
        open_model(str(adapter))
    assert str(adapter / "base.json") in str(error.value)

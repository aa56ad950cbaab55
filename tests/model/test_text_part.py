"""Models for images and text in published form are trained, merged and resumed as what they are for text."""

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from command_line import losses, recipe
from lightning.pytorch import Trainer
from lit_callbacks import AdapterMerger
from lit_callbacks.export.merging import save_merged
from published_folders import all_tensors, publish
from ranks import on_ranks
from shared_fixtures import make_rows, make_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from lit_ft import CausalLM, TextDataModule
from lit_ft.cli import main
from lit_ft.errors import RecipeError
from lit_ft.model import loading
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import pack_samples
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy

pytestmark = pytest.mark.slow

LORA = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish("gemma3", tmp_path_factory.mktemp("published") / "gemma3", make_tokenizer())


def lit_ft(*arguments: object) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(argument) for argument in arguments])
    assert stop.value.code == 0


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 40)[None]).logits


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_the_text_part_is_the_same_function(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    base = publish(name, tmp_path / name, make_tokenizer())
    whole = AutoModelForImageTextToText.from_pretrained(base)
    capfd.readouterr()
    spec = ModelSpec(str(base), str(base), attn_implementation="sdpa")
    skeleton, text = spec.skeleton(), spec.build()
    assert not any("vision" in part or "visual" in part for part, _ in text.named_modules())
    assert {name: p.shape for name, p in skeleton.named_parameters()} == {
        name: p.shape for name, p in text.named_parameters()
    }
    torch.testing.assert_close(logits(text), logits(whole), atol=1e-5, rtol=1e-5)
    count = {"qwen3_5": "24 of 51", "gemma3": "37 of 65"}[name]
    assert caplog.text.count(f"{count} tensors not used in training (") == 1
    assert "LOAD REPORT" not in capfd.readouterr().err

    config = json.loads((base / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 64
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"mlp\.\w+_proj.weight is .* by config.json; put back the file"):
        spec.skeleton()
    config["text_config"] |= {"intermediate_size": 48, "num_hidden_layers": 3, "layer_types": None}
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(RecipeError, match=r"lacks weights of the model, which would be random \(\d+: model.layers."):
        loading.load_base(str(base))


def test_llama_4_is_the_same_function_within_chunks(tmp_path: Path) -> None:
    """Its class declares its decoder under the name that it has in the model for images."""
    base, ids = publish("llama4", tmp_path / "llama4", make_tokenizer()), torch.arange(3, 40)
    module = CausalLM(str(base))
    module.configure_model()
    with torch.no_grad():
        hidden = module.hidden_states(pack_samples([(ids.numpy(), ids.numpy())] * 2))[0]
        whole = AutoModelForImageTextToText.from_pretrained(base).eval()  # with an image alone
        wanted = whole.language_model(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(module.base_model.lm_head(hidden), torch.cat([wanted] * 2), atol=1e-5, rtol=1e-5)


def test_lora_from_fit_to_a_merged_model_and_plain_peft(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    (tmp_path / "rows.json").write_text(json.dumps(make_rows(8)))
    start = recipe(tmp_path, str(gemma3), str(tmp_path / "rows.json"), max_steps=2)
    lit_ft(*start, "--run_dir", tmp_path / "run", "--merge", "--data.packing", "96", "--trainer.max_steps", "1")
    lit_ft(*start, "--run_dir", tmp_path / "run", "--merge", "--data.packing", "96", "--ckpt_path", "last")
    lit_ft(*start, "--run_dir", tmp_path / "at_once", "--merge", "--data.packing", "96")
    assert losses(tmp_path / "run") == losses(tmp_path / "at_once")
    before, after, at_once = (
        all_tensors(folder) for folder in (gemma3, tmp_path / "run" / "merged", tmp_path / "at_once" / "merged")
    )
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], at_once[name]) for name in after if not name.startswith("mtp."))
    assert sum(not torch.equal(before[name], after[name]) for name in before if not name.startswith("mtp.")) == 4

    merged = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "merged"))
    lines = (tmp_path / "run" / "adapter" / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(lines.replace("THIS FOLDER", str(tmp_path / "run" / "adapter")), names)
    torch.testing.assert_close(logits(names["model"]), merged, atol=1e-5, rtol=1e-5)

    lit_ft("export", "--run", tmp_path / "run", "--merge", "--out", tmp_path / "again")
    assert all_tensors(tmp_path / "again").keys() == before.keys()
    lit_ft("export", "--run", tmp_path / "run", "--merge", "--text-only", "--out", tmp_path / "text")
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "text")), merged)
    lit_ft("verify", tmp_path / "again")

    capsys.readouterr()
    lit_ft("check", *start[1:])
    assert "base model: 37 of 65 tensors not used in training" in capsys.readouterr().out


def test_a_hub_model_is_completed_from_its_snapshot(
    gemma3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    repository, commit = tmp_path / "hub" / "models--someone--gemma3", "0123abcd" * 5
    shutil.copytree(gemma3, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    spec = ModelSpec("someone/gemma3", "someone/gemma3", attn_implementation="sdpa")
    save_merged(spec.build(), tmp_path / "merged", spec.tokenizer)
    assert "model.pretrained='someone/gemma3': 37 of 65 tensors not used" in caplog.text
    assert all_tensors(tmp_path / "merged").keys() == all_tensors(gemma3).keys()
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "FSDP": FSDPStrategy,
    "ZeRO-3": partial(DeepSpeedStrategy, stage=3),
}


def fit_and_write(base: Path, data: Path, out: Path, world: int) -> None:
    os.environ["PL_GLOBAL_SEED"] = "3"
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for way, options in {"LoRA": {"peft": LORA}, "full": {}}.items():
        trainer = Trainer(
            max_steps=1,
            accelerator="cpu",
            devices=world,
            strategy=STRATEGIES[out.name](),
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[AdapterMerger(out / way / "adapter", out / way / "merged")],
        )
        module = CausalLM(str(base), **options, optimizer=partial(torch.optim.SGD, lr=0.0))
        trainer.fit(module, TextDataModule(str(data), micro_batch_size=2))


def test_ranks_that_read_shards_write_all_of_it(gemma3: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(make_rows(8)))
    base = Path(shutil.copytree(gemma3, tmp_path / "base"))
    for name in STRATEGIES:
        world = 1 if name == "one" else 2
        on_ranks(world, fit_and_write, base, tmp_path / "rows.json", tmp_path / name, world, timeout=200)
    published = all_tensors(base)
    for way, strategy in itertools.product(("LoRA", "full"), ("FSDP", "ZeRO-3")):
        one, split = (all_tensors(tmp_path / name / way / "merged") for name in ("one", strategy))
        assert one.keys() == split.keys() == published.keys()
        for name in published:
            torch.testing.assert_close(one[name], split[name], atol=0, rtol=0, equal_nan=True, msg=name)
            if way == "full":  # a step of size zero
                torch.testing.assert_close(published[name], split[name], atol=0, rtol=0, equal_nan=True, msg=name)
        config = tmp_path / strategy / way / "merged" / "config.json"
        assert config.read_bytes() == (base / "config.json").read_bytes()
        AutoModelForImageTextToText.from_pretrained(config.parent)

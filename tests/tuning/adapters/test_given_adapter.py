"""An adapter that PEFT or a run has written is trained further."""

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from model_folders import untied
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.packed_batch import pack_samples

pytestmark = pytest.mark.slow

METHODS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "DoRA": {"use_dora": True},
    "rsLoRA, by EVA": {"use_rslora": True, "init_lora_weights": "eva", "rank_pattern": {"q_proj": 2}},
    "a module in full": {"modules_to_save": ["norm"]},
}


def written_by_peft(base: str, folder: Path, **options: Any) -> str:
    """Folder of an adapter that plain PEFT has written, with weights that differ from those of a new one."""
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | options
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{**settings, "init_lora_weights": True}))
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 10)
    adapted.save_pretrained(str(folder))
    config = json.loads((folder / "adapter_config.json").read_text())
    config |= {"init_lora_weights": settings.get("init_lora_weights", True)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("method", METHODS)
def test_training_begins_with_its_weights(model_folder: str, tmp_path: Path, method: str) -> None:
    folder = written_by_peft(model_folder, tmp_path / "theirs", **METHODS[method])
    module = CausalLM(model_folder, adapter=folder)
    module.check()
    module.configure_model()
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    plain = peft.PeftModel.from_pretrained(base, folder).eval()
    ids = torch.arange(3, 40)
    with torch.no_grad():
        logits = plain(input_ids=ids[None]).logits[0, :-1]
        result = module.eval()(pack_samples([(ids.tolist(), ids.tolist())]))
    expected = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum")
    assert result.loss_sum.item() == pytest.approx(expected.item(), rel=1e-5)
    assert isinstance(module.model, peft.PeftModel)
    held, own = load_file(Path(folder) / "adapter_model.safetensors"), peft.get_peft_model_state_dict(module.model)
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], own[name]) for name in held)
    names = {name.replace(".default", "").replace(".modules_to_save", "") for name in module.trainable_parameters()}
    assert {name.removeprefix("model.").removesuffix(".weight") for name in names} == {
        name.removesuffix(".weight") for name in held
    }


def test_frozen_embeddings_beside_their_adapter_are_those_of_the_base(model_folder: str, tmp_path: Path) -> None:
    folder = written_by_peft(model_folder, tmp_path / "theirs", target_modules=["q_proj", "embed_tokens"])
    file = Path(folder) / "adapter_model.safetensors"
    held = load_file(file)
    (frozen,) = [name for name in held if "base_layer" in name]
    module = CausalLM(model_folder, adapter=folder)
    module.check()
    module.configure_model()
    own = peft.get_peft_model_state_dict(module.model)
    assert held.keys() == own.keys()
    assert all(torch.equal(held[name], own[name]) for name in held)
    save_file(held | {frozen: held[frozen] + 1}, file, {"format": "pt"})
    with pytest.raises(RecipeError, match=r"has a frozen .*embed_tokens\S+, with other values than the base here"):
        CausalLM(model_folder, adapter=folder).configure_model()


def test_it_is_trained_further_and_saved_for_the_same_base(
    model_folder: str, tmp_path: Path, make_trainer: Any, write_rows: Any
) -> None:
    rows = write_rows([{"instruction": "the cup is", "output": "red"}] * 6)
    first = CausalLM(model_folder, peft=peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    make_trainer(max_steps=2).fit(first, TextDataModule(rows, max_length=96))
    (tmp_path / "first").mkdir()
    first.save_adapter(tmp_path / "first")
    second = CausalLM(model_folder, adapter=str(tmp_path / "first"), adapter_dtype="auto")
    make_trainer(max_steps=2).fit(second, TextDataModule(rows, max_length=96))
    (tmp_path / "second").mkdir()
    second.save_adapter(tmp_path / "second")
    before, after = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("first", "second"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "lora_B" in name)
    other = untied(model_folder, tmp_path / "other")
    with pytest.raises(RecipeError, match="was trained on .* name the base that it was trained on"):
        CausalLM(other, adapter=str(tmp_path / "first")).check()


def added(base: str, folder: Path, **options: Any) -> str:
    """Folder of a new adapter, with the tokenizer of its run."""
    module = CausalLM(base, peft=peft.LoraConfig(r=2, target_modules=["q_proj"]), **options)
    module.configure_model()
    folder.mkdir()
    module.save_adapter(folder)
    module.tokenizer.save_pretrained(folder)
    return str(folder)


def test_the_tokens_that_it_added_are_those_of_the_run(model_folder: str, tmp_path: Path) -> None:
    two = added(model_folder, tmp_path / "two", added_tokens=["<red>"], added_special_tokens=["<cup>"])
    plain = added(model_folder, tmp_path / "plain")
    size = len(CausalLM(model_folder).tokenizer)
    CausalLM(model_folder, adapter=two, added_tokens=["<red>"], added_special_tokens=["<cup>"]).check()
    CausalLM(model_folder, adapter=two, added_tokens=["<red>", "<cup>"]).check()  # the same rows
    fix = r'; set model\.added_tokens to \["<red>"\] and model\.added_special_tokens to \["<cup>"\]$'
    for options, lacking in (
        ({}, rf"'<red>' \(id {size}\), which the tokenizer of the run lacks"),
        ({"added_tokens": ["<red>"]}, rf"'<cup>' \(id {size + 1}\), which the tokenizer of the run lacks"),
        ({"added_tokens": ["<cup>", "<red>"]}, rf"'<red>' \(id {size}\), which the .* has under another id"),
    ):
        with pytest.raises(RecipeError, match=f"'{two}' has the token {lacking}{fix}"):
            CausalLM(model_folder, adapter=two, **options).check()
    with pytest.raises(RecipeError, match=r"leave out those of model\.added_tokens that it did not train"):
        CausalLM(model_folder, adapter=plain, added_tokens=["<red>"]).check()


def test_a_token_beside_it_that_it_did_not_train_is_said(model_folder: str, tmp_path: Path) -> None:
    theirs = written_by_peft(model_folder, tmp_path / "theirs")
    tokenizer = CausalLM(model_folder).tokenizer
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    tokenizer.save_pretrained(theirs)
    for options, lacks in (({}, True), ({"tokenizer": theirs}, False)):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            CausalLM(model_folder, adapter=theirs, **options).check()
        message = (
            f"'<padding>' (id {len(tokenizer) - 1}), which the tokenizer of the run lacks; if the data has it, set"
        )
        assert any(message in str(one.message) for one in said) is lacks


def test_what_cannot_be_trained_further(model_folder: str, tmp_path: Path) -> None:
    def refused(folder: object, match: str, **options: Any) -> None:
        with pytest.raises(RecipeError, match=match):
            CausalLM(model_folder, adapter=str(folder), **options).check()

    theirs = Path(written_by_peft(model_folder, tmp_path / "theirs"))
    refused(theirs, "has a config of its own; set model.peft to null", peft=peft.LoraConfig())
    refused(tmp_path / "none", "holds no adapter_config.json; name the folder of an adapter of PEFT")
    refused(Path("some/one"), "; one of the hub is downloaded first: hf download some/one --local-dir one")
    pissa = written_by_peft(model_folder, tmp_path / "pissa", init_lora_weights="pissa")
    refused(pissa, "on a base that its method changes")
    config = json.loads((theirs / "adapter_config.json").read_text())
    (theirs / "adapter_config.json").write_text(json.dumps({**config, "r": 3}))
    refused(theirs, r"does not fit Qwen2ForCausalLM: .*lora_A.weight is \(4, \d+\) in it and \(3, \d+\) here; name the")
    (theirs / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    refused(theirs, "v_proj.lora_A.weight is .* in it and missing here")
    (theirs / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3", "target_modules": ["q_proj"]}))
    refused(theirs, "is of the method IA3; only LoRA is trained further")

"""What a merged model takes over from its base's folder, on tiny folders in the form that models are published in."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lit_callbacks.export.base_files import BaseFiles
from lit_callbacks.export.manifest import verify_manifest
from lit_callbacks.export.merge_check import MergeFailed
from lit_callbacks.export.merging import save_merged
from lit_callbacks.internals.transformers_internals import read_the_text_part
from published_folders import BUILDERS, all_tensors, publish
from safetensors.torch import load_file, save_file
from shared_fixtures import make_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")

TOKENIZER = make_tokenizer()
_VISION = ("vision", "multi_modal", "mtp.")
NOT_USED = {"qwen3_5": ("model.visual.", "mtp."), "gemma3": _VISION, "llama4": _VISION, "qwen3_next": ("mtp.",)}
PUBLISHED = (
    *("config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Function from the name of an architecture to a folder that is not to be changed."""
    folders: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in folders:
            folders[name] = publish(name, tmp_path_factory.mktemp("published") / name, TOKENIZER)
        return folders[name]

    return folder_of


def read(folder: Path) -> Any:
    """The text model of a folder."""
    config = AutoConfig.from_pretrained(folder)
    if (text := config.get_text_config()) is not config:
        read_the_text_part(text.model_type)
        text.tie_word_embeddings = config.tie_word_embeddings
    return AutoModelForCausalLM.from_pretrained(folder, config=text).eval()


def adapted(folder: Path, *targets: str) -> Any:
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=list(targets or ("q_proj",)), init_lora_weights=False)
    return peft.get_peft_model(read(folder), config)


def logits(folder: Path, kind: Any) -> torch.Tensor:
    with torch.no_grad():
        return kind.from_pretrained(folder).eval()(input_ids=torch.arange(3, 40)[None]).logits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


def changed_tensors(base: Path, out: Path) -> set[str]:
    before, after = all_tensors(base), all_tensors(out)
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(bits(before[name]), bits(after[name]))}


def changed_keys(base: Path, out: Path) -> dict[str, Any]:
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (base, out))
    return {name: value for name, value in after.items() if name not in before or before[name] != value}


@pytest.mark.parametrize("name", BUILDERS)
def test_nothing_of_a_published_model_is_lost(
    published: Any, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    base, out = published(name), tmp_path / "merged"
    save_merged(adapted(base), out, AutoTokenizer.from_pretrained(base))
    changed = changed_tensors(base, out)
    assert changed
    assert all(tensor.endswith("self_attn.q_proj.weight") for tensor in changed)
    assert {file for file in PUBLISHED if (base / file).read_bytes() != (out / file).read_bytes()} == set()
    tensors = all_tensors(base)
    carried = [tensor for tensor in tensors if tensor.startswith(NOT_USED[name])]
    counts = f"training changed {len(changed)}, {len(tensors) - len(changed) - len(carried)} are unchanged, "
    assert f"of the base's {len(tensors)} tensors, {counts}{len(carried)} that it does not use" in caplog.text
    assert "mtp 3" in caplog.text

    index, old = (json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (out, base))
    assert index["metadata"] == old["metadata"]
    assert all(tensor in load_file(out / file) for tensor, file in index["weight_map"].items())
    assert index["weight_map"].keys() == tensors.keys()
    assert len(set(index["weight_map"].values())) >= 3
    assert not verify_manifest(out)
    if name not in ("qwen3_next", "llama4"):  # transformers 5.24's Llama 4 with images does not compute text alone
        together = logits(out, AutoModelForImageTextToText)
        torch.testing.assert_close(logits(out, AutoModelForCausalLM), together, atol=1e-5, rtol=1e-5)
        assert not torch.equal(together, logits(base, AutoModelForImageTextToText))


@pytest.mark.parametrize("name", BUILDERS)
def test_the_text_alone(published: Any, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    model, out = adapted(published(name)), tmp_path / "merged"
    save_merged(model, out, TOKENIZER, text_only=True)
    assert all(tensor.startswith(("model.", "lm_head.")) for tensor in all_tensors(out))
    assert not any(part in tensor for tensor in all_tensors(out) for part in ("language_model", "visual", "mtp"))
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model.get_base_model()).__name__]
    assert not (out / "preprocessor_config.json").exists()
    assert (out / "LICENSE").read_bytes() == (published(name) / "LICENSE").read_bytes()
    assert "tensors of the base are left out (" in caplog.text
    read_back = AutoModelForCausalLM.from_pretrained(out)
    merged = model.merge_and_unload().state_dict()
    for tensor, value in read_back.state_dict().items():
        torch.testing.assert_close(value, merged[tensor], atol=1e-6, rtol=1e-6, msg=tensor)


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_all_weights_in_another_dtype(tmp_path: Path, name: str) -> None:
    base = publish(name, tmp_path / "base", TOKENIZER, torch.bfloat16)
    model = read(base)
    with torch.no_grad():
        model.model.norm.weight += 1
    save_merged(model, tmp_path / "merged", TOKENIZER, dtype=torch.float32)
    before, after = all_tensors(base), all_tensors(tmp_path / "merged")
    assert before.keys() == after.keys()
    for tensor, value in before.items():
        is_carried = tensor.startswith(NOT_USED[name])
        assert after[tensor].dtype == (value.dtype if is_carried else torch.float32), tensor
        if not tensor.endswith(".norm.weight"):
            assert torch.equal(bits(value.to(after[tensor].dtype)), bits(after[tensor])), tensor
    assert changed_keys(base, tmp_path / "merged").keys() <= {"torch_dtype", "text_config"}
    assert AutoConfig.from_pretrained(tmp_path / "merged").dtype == torch.float32
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["a_key_of_its_own"] == [1, 2]


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
@pytest.mark.parametrize("is_scaled_by", [1, 4])
def test_other_positions_in_a_config_of_transformers_4(
    published: Any, tmp_path: Path, name: str, is_scaled_by: int
) -> None:
    base = Path(shutil.copytree(published(name), tmp_path / "base"))
    written = json.loads((base / "config.json").read_text())
    part = written.get("text_config", written)
    rope = part.pop("rope_parameters")
    if name == "gemma3":
        part |= {"rope_local_base_freq": rope["sliding_attention"]["rope_theta"], "rope_scaling": None}
        part["rope_theta"] = rope["full_attention"]["rope_theta"]
    else:
        part |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
        part["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    (base / "config.json").write_text(json.dumps(written))
    config = read(base).config
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    rope.pop("factor", None)
    rope |= {"rope_theta": 3e5, **(scaling if is_scaled_by == 4 else {"rope_type": "default"})}
    config.max_position_embeddings = 512 * is_scaled_by
    model = AutoModelForCausalLM.from_pretrained(base, config=config).eval()
    save_merged(model, tmp_path / "merged", TOKENIZER)
    changed = changed_keys(base, tmp_path / "merged")
    changed = changed.get("text_config", changed)
    assert {key: changed.get(key) for key in ("rope_theta", "rope_scaling", "rope_parameters")} == {
        "rope_theta": 3e5,
        "rope_parameters": None,
        "rope_scaling": scaling if is_scaled_by == 4 else None,
    }
    again = read(tmp_path / "merged")
    assert again.config.rope_parameters == config.rope_parameters
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_lost", [False, True])
def test_rounding_that_delta_nets_amplify_is_no_difference(
    tmp_path: Path, is_lost: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 a few logits differ from the adapter's by more than the bound; after a lost merge nearly all do."""
    caplog.set_level("INFO", "lightning.pytorch")
    base = publish("qwen3_5", tmp_path / "base", TOKENIZER, torch.bfloat16)
    model = adapted(base, "q_proj", "in_proj_qkv", "in_proj_z", "out_proj", "gate_proj", "up_proj", "down_proj")
    torch.manual_seed(3)
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        torch.nn.init.normal_(parameter, std=0.3 if is_lost else 1e-2)
    if is_lost:
        monkeypatch.setattr(peft.tuners.lora.Linear, "get_delta_weight", lambda self, _: torch.zeros_like(self.weight))
        with pytest.raises(MergeFailed, match="the merged model is not what was trained: .* at 50% of the positions"):
            save_merged(model, tmp_path / "merged", TOKENIZER)
        return
    save_merged(model, tmp_path / "merged", TOKENIZER)
    assert "at 50% of the positions" in caplog.text


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3"])
def test_a_head_that_training_parts_from_the_embedding(published: Any, tmp_path: Path, name: str) -> None:
    base, out = published(name), tmp_path / "merged"
    save_merged(adapted(base, "lm_head"), out, TOKENIZER)
    head = all_tensors(out).keys() - all_tensors(base).keys()
    assert [tensor.rpartition("lm_head")[2] for tensor in head] == [".weight"]
    assert AutoConfig.from_pretrained(out).tie_word_embeddings is False
    together = logits(out, AutoModelForImageTextToText)
    torch.testing.assert_close(logits(out, AutoModelForCausalLM), together, atol=1e-5, rtol=1e-5)


def test_a_tied_head_in_the_files_is_not_written_twice(published: Any, tmp_path: Path) -> None:
    base = Path(shutil.copytree(published("qwen3_5"), tmp_path / "base"))
    index = json.loads((base / "model.safetensors.index.json").read_text())
    file = base / index["weight_map"]["model.language_model.embed_tokens.weight"]
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.language_model.embed_tokens.weight"].clone()}, file)
    model = read(base)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_merged(model, tmp_path / "merged", TOKENIZER)
    assert all_tensors(base).keys() - all_tensors(tmp_path / "merged").keys() == {"lm_head.weight"}


def test_names_without_the_prefix_of_the_base_model_and_torch_files(tmp_path: Path) -> None:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=384, n_embd=16, n_layer=1, n_head=2, n_positions=64)).save_pretrained(
        tmp_path
    )
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    torch.save({**bare, "h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    save_merged(copy.deepcopy(model), tmp_path / "merged")
    assert all_tensors(tmp_path / "merged").keys() == {*bare, "h.0.attn.masked_bias"}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("change", ["token", "template"])
def test_a_changed_tokenizer_replaces_the_published_one(published: Any, tmp_path: Path, change: str) -> None:
    base, tokenizer = published("gemma3"), copy.deepcopy(TOKENIZER)
    if change == "token":
        tokenizer.add_tokens(["<new>"])
    else:
        tokenizer.chat_template = "{{ messages[0].content }}"
    save_merged(adapted(base), tmp_path / "merged", tokenizer)
    file = {"token": "tokenizer.json", "template": "chat_template.jinja"}[change]
    assert (tmp_path / "merged" / file).read_bytes() != (base / file).read_bytes()
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()


def test_a_tensor_that_is_missing_from_the_files_is_found(published: Any, tmp_path: Path) -> None:
    model = read(published("qwen3_next"))
    files = BaseFiles.of(model)
    assert files is not None
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.0.mlp.experts.3.down_proj.weight")
    save_file({**tensors, "model.layers.0.mlp.experts.9.down_proj.weight": lost}, tmp_path / "model.safetensors")
    with pytest.raises(MergeFailed, match=r"lack model.layers.0.mlp.experts.3.down_proj.weight of the base"):
        files.complete(tmp_path, type(model), files.unused_parts(model))


@pytest.mark.parametrize("rest", [torch.bfloat16, torch.int8])
def test_of_a_quantized_base_scales_are_left_out(
    published: Any, tmp_path: Path, rest: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """A base in fp8 is dense once it is read; what is quantized and not used has no place in a dense model."""
    caplog.set_level("INFO", "lightning.pytorch")
    base = Path(shutil.copytree(published("gemma3"), tmp_path / "base"))
    model = read(base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for file in base.glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(file).items() if name != "mtp.counts"}
        scales = {f"{name}_scale_inv": torch.ones(1) for name in tensors if "language" in name and "q_proj" in name}
        save_file({**tensors, **scales, f"mtp.{file.stem}": torch.ones(3).to(rest)}, file)
    save_merged(model, tmp_path / "merged", TOKENIZER)
    saved = all_tensors(tmp_path / "merged")
    assert not any("scale_inv" in tensor for tensor in saved)
    assert any("vision" in tensor for tensor in saved) == (rest is torch.bfloat16)
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in written
    assert ("text_config" in written) == (rest is torch.bfloat16)
    said = "2 of its quantization are left out" if rest is torch.bfloat16 else "tensors of the base are left out ("
    assert said in caplog.text
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")

"""``export --gguf`` and ``--gguf_adapter``: llama.cpp computes what was trained; the rest is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import peft
import pytest
import torch
from command_line import recipe
from forked_commands import run_forked
from lit_callbacks.export.merge_check import MergeFailed
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from lit_ft.commands.export import run as export
from lit_ft.errors import RecipeError
from lit_ft.gguf import writing
from lit_ft.model.files.fingerprint import BaseForm, fingerprint, write_fingerprint

pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of two steps on the quickstart's model and data."""
    folder = tmp_path_factory.mktemp("run")
    arguments = recipe(folder, "checkpoints/tiny-qwen2", "recipes/data/quickstart_val.json", max_steps=2)
    done = run_forked(*arguments, "--run_dir", str(folder / "run"))
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Export in this process; returns what it said."""
    caplog.set_level("INFO", "lightning.pytorch")

    def run(*arguments: object) -> str:
        caplog.clear()
        export(["export", *map(str, arguments)])
        return caplog.text

    return run


def test_a_merged_model(trained: Path, said: Callable[..., str]) -> None:
    text = said(trained, "--merge", "--gguf", "f32")
    assert "merge verified" in text
    assert "GGUF verified: llama.cpp's log-probabilities differ by" in text
    assert "prompts of 3 of 3 conversations have the tokens of training" in text
    files = {path.name for path in (trained / "gguf-f32").iterdir()}
    assert files == {"model-f32.gguf", "Modelfile", "README.md", "manifest.json"}
    assert set(json.loads((trained / "gguf-f32" / "manifest.json").read_text())["files"]) == files - {"manifest.json"}


def test_an_adapter_with_its_base(trained: Path, said: Callable[..., str], tmp_path: Path) -> None:
    text = said(trained, "--gguf_adapter", "--gguf", "q8_0", "--out", tmp_path / "both")
    assert "adapter.gguf: 16 tensors read back" in text
    assert "GGUF verified: llama.cpp's log-probabilities differ by" in text
    names = {path.name for path in (tmp_path / "both").iterdir()}
    assert names == {"adapter.gguf", "base-q8_0.gguf", "Modelfile", "README.md", "manifest.json"}
    lines = (tmp_path / "both" / "Modelfile").read_text().splitlines()
    assert {"FROM ./base-q8_0.gguf", "ADAPTER ./adapter.gguf", 'PARAMETER stop "<|im_end|>"'} <= set(lines)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "both" / "adapter.gguf").tensors}
    factors = ("lora_A", "lora_B")
    saved = peft.load_peft_weights(str(trained / "adapter"), device="cpu")
    for factor in factors:
        expected = saved[f"base_model.model.model.layers.1.self_attn.v_proj.{factor}.weight"]
        assert torch.equal(torch.tensor(tensors[f"blk.1.attn_v.weight.{factor.lower()}"].data), expected)


def test_scales_of_peft_go_into_an_adapter(trained: Path, said: Callable[..., str], tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained("checkpoints/tiny-qwen2", dtype="float32")
    patterns = {"rank_pattern": {"v_proj": 8}, "alpha_pattern": {"v_proj": 3}}
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "v_proj"], init_lora_weights=False, **patterns
    )
    torch.manual_seed(7)  # some draws are near the bound of bf16
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    form = BaseForm("float32", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}})
    write_fingerprint(fingerprint("checkpoints/tiny-qwen2"), tmp_path / "adapter", form)
    text = said("--adapter", tmp_path / "adapter", "--gguf_adapter", "--out", tmp_path / "gguf")
    assert "GGUF verified" in text
    assert '"factor": 2.0}}: a GGUF file of the base holds them only if' in text
    assert {path.name for path in (tmp_path / "gguf").glob("*.gguf")} == {"adapter.gguf"}


def test_a_wrong_scale_leaves_nothing_behind(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = writing._scaling
    monkeypatch.setattr(writing, "_scaling", lambda *given: 2 * scaling(*given))
    with pytest.raises(MergeFailed, match="is not the model that was trained.*nothing was written"):
        export(["export", str(trained), "--gguf_adapter", "--out", str(tmp_path / "gguf")])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gguf", "q8_0"], "gguf=q8_0: add --merge for the merged model as GGUF, or --gguf_adapter"),
        (["--merge", "--gguf_adapter"], "merge and gguf_adapter exclude each other"),
        (["--merge", "--gguf", "f16", "--dtype", "bf16"], "dtype=bf16 is for Hugging Face folders"),
        (["--merge", "--gguf", "f16", "--quantized_base", "keep"], "use dequantize"),
        (
            ["--merge", "--gguf", "q4_k_m"],
            "q4_k_m' is none of .*; llama.cpp's llama-quantize makes smaller types",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(trained: Path, options: list[str], message: str) -> None:
    with pytest.raises((RecipeError, SystemExit), match=message):
        export(["export", str(trained), *options])


def test_other_adapters_and_architectures_are_refused_before_weights_are_read(
    trained: Path, tmp_path: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained("checkpoints/tiny-qwen2")
    peft.get_peft_model(base, peft.IA3Config(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "ia3")
    with pytest.raises(RecipeError, match="GGUF has a form for LoRA adapters, not for IA3; add --merge --gguf TYPE"):
        export(["export", "--adapter", str(tmp_path / "ia3"), "--gguf_adapter", "--out", str(tmp_path / "gguf")])
    assert not (tmp_path / "gguf").exists()

    config = GPT2Config(vocab_size=768, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    lora = peft.LoraConfig(target_modules=["c_attn"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2"), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "gpt2" / name).write_bytes(Path("checkpoints/tiny-qwen2", name).read_bytes())
    monkeypatch.setattr("lit_ft.model.loading.load_base", None)  # no weights are read
    with pytest.raises(
        RecipeError, match="GPT2LMHeadModel cannot be written as GGUF by lit_ft, which has tables for Ll"
    ):
        export(
            ["export", "--adapter", str(tmp_path / "adapter"), "--merge", "--gguf", "f16", "--out", str(tmp_path / "o")]
        )

"""``export``: what it writes is what was trained, and what is wrong leaves nothing behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import yaml
from command_line import recipe
from model_folders import change, untied
from safetensors.torch import load_file, save_file
from shared_fixtures import make_rows
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from tuning_methods import METHODS

from lit_ft.cli import main

pytestmark = pytest.mark.slow

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "float32"}
INT8 = {"load_in_8bit": True}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")


@pytest.fixture
def lit_ft(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Run a command in this process; returns what it said."""
    caplog.set_level("INFO", "lightning.pytorch")

    def run(*arguments: Any, code: int = 0) -> str:
        capsys.readouterr()
        caplog.clear()
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        said = caplog.text + capsys.readouterr().err
        assert stop.value.code == code, said
        return said

    return run


@pytest.fixture
def base(model_folder: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder, tmp_path / "base"))


@pytest.fixture
def fit(lit_ft: Any, base: Path, tmp_path: Path, write_rows: Any) -> Callable[..., Path]:
    """Train for two steps; returns the run's folder."""

    def train(*options: Any, name: str = "run") -> Path:
        folder = tmp_path / name
        arguments = recipe(tmp_path, str(base), write_rows(), max_steps=2)
        lit_ft(*arguments, "--data.val_fraction", "0.2", "--run_dir", folder, *options)
        return folder

    return train


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, ...], Path]:
    """Folders of the runs of ``finished``, by their options."""
    return {}


@pytest.fixture
def finished(
    lit_ft: Any, model_folder: str, runs: dict[tuple[str, ...], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Folder of a run of two steps on ``model_folder`` that several tests read, so none may change it."""

    def find(*options: str) -> Path:
        if options not in runs:
            folder = tmp_path_factory.mktemp("finished")
            data = folder / "rows.json"
            data.write_text(json.dumps(make_rows(22), ensure_ascii=False), encoding="utf-8")
            arguments = recipe(folder, model_folder, str(data), max_steps=2)
            lit_ft(*arguments, "--data.val_fraction", "0.2", "--run_dir", folder / "run", *options)
            runs[options] = folder / "run"
        return runs[options]

    return find


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(3, 60)[None]).logits[0]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()


# --- several adapters ------------------------------------------------------------------------------


def write_adapter(folder: Path, base: Path, config: peft.PeftConfig, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
    """An adapter of random weights, and what it adds to each weight of the base."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for weight in filter(lambda weight: not weight.any(), model.parameters()):
            weight.normal_(std=0.1 * weight.requires_grad)
    model.save_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = model.merge_and_unload().state_dict()
    return folder, {name: after[name] - before[name] for name in before}


def lora(**options: Any) -> peft.LoraConfig:
    defaults = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**defaults, **options})


PAIRS = {
    "same shape": (lora(), lora()),
    "other ranks and layers": (lora(), lora(r=7, lora_alpha=3, target_modules=["q_proj", "down_proj"])),
    "rsLoRA": (lora(use_rslora=True), lora(r=8, use_rslora=True)),
    "ranks by layer": (lora(rank_pattern={"layers.0.self_attn.q_proj": 2}), lora()),
    "layers that the first one leaves out": (
        lora(exclude_modules=["v_proj"], layers_to_transform=[0], alpha_pattern={"q_proj": 3}),
        lora(target_modules=r".*\.(v_proj|down_proj)"),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_adapters_are_summed_by_weight(lit_ft: Any, base: Path, tmp_path: Path, pair: str) -> None:
    one, two = (write_adapter(tmp_path / str(i), base, config, i) for i, config in enumerate(PAIRS[pair]))
    said = lit_ft(
        *("export", "--adapter", f"{one[0]}=0.7", "--adapter", f"{two[0]}=-0.3"),
        *("--out", tmp_path / "merged", "--merge"),
    )
    assert "(cat: the weighted sum exactly)" in said
    assert "merge verified: logits differ by" in said
    before, merged = weights(base), weights(tmp_path / "merged")
    for name, weight in before.items():
        wanted = weight + 0.7 * one[1][name] - 0.3 * two[1][name]
        torch.testing.assert_close(merged[name], wanted, atol=1e-6, rtol=0, msg=name)

    lit_ft("export", "--adapter", f"{one[0]}=0.7", "--adapter", f"{two[0]}=-0.3", "--out", tmp_path / "sum")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "sum")
    torch.testing.assert_close(
        logits(plain), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), atol=2e-5, rtol=1e-5
    )
    assert not list(tmp_path.rglob("*.bin"))


def test_one_adapter_is_picked_or_scaled(lit_ft: Any, base: Path, tmp_path: Path) -> None:
    folder, delta = write_adapter(tmp_path / "r=8", base, lora(), 0)  # a path may hold the sign
    for text, weight in ((f"{folder}", 1.0), (f"{folder}=0.5", 0.5)):
        lit_ft("export", "--adapter", text, "--out", tmp_path / "merged", "--merge")
        merged, before = weights(tmp_path / "merged"), weights(base)
        for name in before:
            torch.testing.assert_close(merged[name], before[name] + weight * delta[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("method", ["AdaMSS", "SHiRA", "VeLoRA"])
def test_an_adapter_whose_method_reads_weights_as_it_is_created(
    lit_ft: Any, base: Path, tmp_path: Path, method: str
) -> None:
    folder, delta = write_adapter(tmp_path / "one", base, METHODS[method], 0)
    lit_ft("export", "--adapter", folder, "--out", tmp_path / "merged", "--merge")
    merged, before = weights(tmp_path / "merged"), weights(base)
    assert any(change.any() for change in delta.values())
    for name in before:
        torch.testing.assert_close(merged[name], before[name] + delta[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
        {"use_rslora": True, "target_modules": ["embed_tokens"]},
    ],
    ids=["ranks by layer", "embedding"],
)
def test_a_scaled_adapter_is_one_that_peft_loads(lit_ft: Any, base: Path, tmp_path: Path, options: Any) -> None:
    folder, _ = write_adapter(tmp_path / "one", base, lora(**options), 0)
    lit_ft("export", "--adapter", f"{folder}=-0.5", "--out", tmp_path / "scaled")
    lit_ft("export", "--adapter", f"{folder}=-0.5", "--out", tmp_path / "merged", "--merge")
    assert f"Made of -0.5 x `{folder}`." in (tmp_path / "scaled" / "README.md").read_text()
    plain = AutoModelForCausalLM.from_pretrained(base)
    scaled = peft.PeftModel.from_pretrained(plain, tmp_path / "scaled")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(scaled), logits(merged), atol=2e-5, rtol=1e-5)
    with scaled.disable_adapter():
        assert not torch.allclose(logits(scaled), logits(merged), atol=1e-2)


def test_a_bias_that_has_no_place_in_a_merged_model_is_refused(lit_ft: Any, base: Path, tmp_path: Path) -> None:
    folder, out = tmp_path / "one", tmp_path / "merged"
    config = lora(lora_bias=True, target_modules=["q_proj", "o_proj"])
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    said = lit_ft("export", "--adapter", folder, "--out", out, "--merge", code=2)
    assert "lora_bias=true trains biases, and model.layers.0.self_attn.o_proj has none to add them to" in said
    assert not out.exists()


def test_adapters_that_peft_would_combine_in_part_are_refused(lit_ft: Any, base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "bias", base, lora(lora_bias=True), 0)
    write_adapter(tmp_path / "ranks", base, lora(rank_pattern={"q_proj": 2}), 0)
    said = lit_ft("export", "--adapter", f"{tmp_path / 'bias'}=0.5", "--out", tmp_path / "no", code=2)
    assert "lora_bias=True trains biases of factors, which PEFT leaves out of a sum" in said
    two = ["--adapter", f"{tmp_path / 'ranks'}", "--adapter", f"{tmp_path / 'ranks'}=0.5"]
    said = lit_ft("export", *two, "--combination", "linear", "--out", tmp_path / "no", code=2)
    assert "combination=linear takes one rank for all layers" in said
    assert "take cat or svd" in said
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("combination", "other"),
    [("linear", "svd")] + [(one, f"{one}_svd") for one in ("ties", "dare_linear", "dare_ties", "magnitude_prune")],
)
def test_unequal_ranks_are_refused_with_the_methods_that_take_them(
    lit_ft: Any, base: Path, tmp_path: Path, monkeypatch: Any, combination: str, other: str
) -> None:
    one, two = (write_adapter(tmp_path / str(rank), base, lora(r=rank), 0)[0] for rank in (4, 2))
    adapters = ["--adapter", one, "--adapter", two, "--out", tmp_path / "out"]
    density = [] if combination == "linear" else ["--density", "0.5"]
    with monkeypatch.context() as patch:
        patch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights were loaded"))
        said = lit_ft("export", *adapters, "--combination", combination, *density, code=2)
    assert f"combination={combination} takes adapters of one rank, and these have 4 ({one}), 2 ({two})" in said
    assert f"take cat, the weighted sum, or {other}" in said
    assert not (tmp_path / "out").exists()
    lit_ft("export", *adapters, "--combination", other, *density)
    assert peft.PeftConfig.from_pretrained(tmp_path / "out").r == 4


@pytest.mark.parametrize("combination", ["linear", "svd", "ties", "dare_linear", "magnitude_prune", "dare_ties_svd"])
def test_other_combinations(lit_ft: Any, base: Path, tmp_path: Path, combination: str) -> None:
    for number in range(2):
        write_adapter(tmp_path / str(number), base, lora(), number)
    options = [] if combination in ("linear", "svd") else ["--density", "0.5"]
    adapters = ["--adapter", tmp_path / "0", "--adapter", tmp_path / "1"]
    lit_ft("export", *adapters, "--combination", combination, *options, "--out", tmp_path / "out", "--merge")
    wrong = ["--density", "0.5"] if not options else []
    said = lit_ft("export", *adapters, "--combination", combination, *wrong, "--out", tmp_path / "no", code=2)
    assert "ties, dare and magnitude_prune keep a share" in said
    if options:
        said = lit_ft("export", *adapters, "--combination", combination, "--density", "1.5", "--out", "no", code=2)
        assert "density=1.5 must be over 0 and at most 1" in said
    assert not (tmp_path / "no").exists()


def test_a_combination_of_one_adapter_and_weights_that_are_no_numbers(
    lit_ft: Any, finished: Any, tmp_path: Path
) -> None:
    run, out = finished(), tmp_path / "out"
    for adapters in (["--run", run], ["--adapter", run]):  # PEFT would take it for linear
        prune = ["--combination", "magnitude_prune", "--density", "0.5"]
        assert "is for several adapters" in lit_ft("export", *adapters, *prune, "--out", out, code=2)
    for weight in ("nan", "inf"):
        said = lit_ft("export", "--adapter", f"{run}={weight}", "--out", out, code=2)
        assert f"the weight {weight} must be a finite number" in said
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_refused_before_a_model_is_read(lit_ft: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = lit_ft("export", "--adapter", tmp_path / "none", "--out", tmp_path / "file" / "out", code=2)
    assert "file' is a file); name another place with --out" in said
    said = lit_ft("export", "--adapter", tmp_path / "none", "--out", "/proc/out", code=2)
    assert "out='/proc/out' cannot be written (No such file or directory); name another place" in said
    (tmp_path / "loop").symlink_to("loop")
    said = lit_ft("export", "--adapter", tmp_path / "none", "--out", tmp_path / "loop", code=2)
    assert "loop' cannot be written (Too many levels of symbolic links); name another place" in said
    (tmp_path / "loop").unlink()
    said = lit_ft("export", "--adapter", tmp_path / "none", "--out", "/", code=2)
    assert "out='/' is the root of all folders; name one below it with --out" in said
    said = lit_ft("export", "--adapter", tmp_path / "none", "--out", tmp_path, code=2)
    assert "holds other things than a model (file), which would be lost; name a new folder" in said


def test_runs_are_adapters_and_a_run_gives_the_base(lit_ft: Any, finished: Any, tmp_path: Path) -> None:
    one, two = finished(), finished("--seed_everything", "5")
    named = ("--adapter", f"{one}=0.5", "--adapter", f"{two}=0.5")
    said = lit_ft("export", "--run", one, *named, "--out", tmp_path / "mean")
    written = f"0.5 x {one}/adapter, 0.5 x {two}/adapter -> {tmp_path / 'mean'}"
    assert said.splitlines()[-1].endswith(written)
    again = lit_ft("export", "--run", one, *named, "--out", tmp_path / "mean")
    assert again.splitlines()[-1].endswith(f"{written}, in place of the model that was there")
    card = (tmp_path / "mean" / "README.md").read_text()
    assert f"Made of 0.5 x `{one}/adapter`, 0.5 x `{two}/adapter` (cat)." in card
    assert json.loads((tmp_path / "mean" / "base.json").read_text()) == json.loads(
        (one / "adapter/base.json").read_text()
    )
    assert AutoTokenizer.from_pretrained(tmp_path / "mean").chat_template


UNSUMMABLE = {
    "IA3": (peft.IA3Config(task_type="CAUSAL_LM"), "IA3 adds no products of matrices, which alone are combined"),
    "DoRA": (lora(use_dora=True), "use_dora=True trains magnitudes, which do not add up"),
    "modules_to_save": (lora(modules_to_save=["norm"]), "modules_to_save=['norm'] is not combined by PEFT"),
    "tokens": (lora(trainable_token_indices=[3]), "trainable_token_indices=[3] trains rows of the embeddings"),
    "biases": (lora(bias="lora_only"), "bias='lora_only' is not combined by PEFT"),
}


@pytest.mark.parametrize("case", UNSUMMABLE)
def test_what_is_no_sum_is_refused(lit_ft: Any, base: Path, tmp_path: Path, case: str) -> None:
    config, reason = UNSUMMABLE[case]
    write_adapter(tmp_path / "a", base, config, 0)
    write_adapter(tmp_path / "b", base, lora(), 1)
    for adapters in (["--adapter", tmp_path / "b", "--adapter", tmp_path / "a"], ["--adapter", f"{tmp_path / 'a'}=2"]):
        assert reason in lit_ft("export", *adapters, "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()
    lit_ft("export", "--adapter", tmp_path / "a", "--out", tmp_path / "out", "--merge")


def test_adapters_are_merged_in_the_dtype_that_the_first_one_was_trained_in(
    lit_ft: Any, finished: Any, base: Path, tmp_path: Path
) -> None:
    """The files of the base are float32, as config.json says."""
    whole, half, out = finished(), finished("--model.dtype", "bfloat16"), tmp_path / "out"
    for first, second, dtype, other in ((whole, half, "float32", "bfloat16"), (half, whole, "bfloat16", "float32")):
        adapters = ["--adapter", f"{first}=0.5", "--adapter", f"{second}=0.5"]
        said = lit_ft("export", *adapters, "--merge", "--out", out)
        assert f"{second}/adapter was trained on a base in {other}, and is used with it in {dtype} here" in said
        assert said.count("was trained on a base in") == 1
        assert {str(one.dtype) for one in load_file(out / "model.safetensors").values()} == {f"torch.{dtype}"}
    said = lit_ft("export", "--adapter", half, "--merge", "--out", out)
    assert "on a base in" not in said
    lit_ft("export", "--run", half, "--merge", "--out", tmp_path / "of_run")
    of_run = load_file(tmp_path / "of_run" / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, of_run[name]), name

    foreign, _ = write_adapter(tmp_path / "foreign", base, lora(), 0)
    said = lit_ft("export", "--adapter", foreign, "--merge", "--out", tmp_path / "of_foreign")
    assert f"{foreign} does not record the dtype of its training: the base is read in that of its files" in said


# --- another base ----------------------------------------------------------------------------------


def test_an_adapter_of_another_base(lit_ft: Any, finished: Any, base: Path, tmp_path: Path) -> None:
    other = untied(str(base), tmp_path / "other")
    run, foreign = finished(), write_adapter(tmp_path / "foreign", base, lora(), 0)[0]
    out = ["--base", other, "--out", tmp_path / "out", "--merge"]
    assert "was trained on '" in (said := lit_ft("export", "--adapter", run, *out, code=2))
    assert "has other weights" in said
    said = lit_ft("export", "--adapter", foreign, *out, code=2)  # PEFT records a name alone
    assert f"was trained on '{base}', and the base is '{other}'" in said

    wider = tmp_path / "wider" / "base"  # the same name, other shapes
    shutil.copytree(base, wider)
    config = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps({**config, "num_attention_heads": 8, "head_dim": 12}))
    said = lit_ft("export", "--adapter", foreign, "--base", wider, "--out", tmp_path / "out", code=2)
    assert "q_proj.lora_B.weight is (48, 4) there, and (96, 4) on this one" in said
    assert not (tmp_path / "out").exists()


def test_a_base_that_changed_since(lit_ft: Any, fit: Any, base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    run = fit()
    change(base)
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights were loaded"))
    for options in (["--run", run, "--merge"], ["--run", run], ["--adapter", run]):
        said = lit_ft("export", *options, "--out", tmp_path / "out", code=2)
        assert "whose weights changed since; bring back what it was, or train anew" in said
    said = lit_ft("validate", "--config", run / "config.yaml", "--ckpt_path", "last", code=2)
    assert "the checkpoint was trained on" in said
    assert not (tmp_path / "out").exists()


def test_random_bases_are_drawn_again(lit_ft: Any, fit: Any, tmp_path: Path) -> None:
    run = fit("--model.init", "random", "--merge")
    lit_ft("export", "--run", run, "--merge", "--out", tmp_path / "again")
    for name, weight in weights(run / "merged").items():
        assert torch.equal(weights(tmp_path / "again")[name], weight), name


# --- quantized bases -------------------------------------------------------------------------------


def quantized(config: dict[str, Any]) -> list[str]:
    return ["--model.quantization", json.dumps({"class_path": "transformers.BitsAndBytesConfig", "init_args": config})]


def test_a_quantized_base_asks_for_a_choice(
    lit_ft: Any, finished: Any, tmp_path: Path, write_rows: Any, base: Path
) -> None:
    run, out = finished(*quantized(NF4)), tmp_path / "out"
    said = lit_ft("export", "--run", run, "--merge", "--out", out, code=2)
    assert "choose quantized_base: dequantize" in said
    assert "is step" not in said  # that is said once the checkpoint has been read
    assert "or keep" in said
    assert json.loads((run / "adapter/base.json").read_text())["quantization"] == "bitsandbytes"
    assert "In training the base was quantized by bitsandbytes" in (run / "adapter/README.md").read_text()
    said = lit_ft(*recipe(tmp_path, str(base), write_rows()), *quantized(NF4), "--merge", "true", code=2)
    assert "export --run RUN --merge --quantized-base dequantize (or keep)" in said
    keep = ["--run", run, "--merge", "--quantized-base", "keep", "--out", out]
    assert "leave dtype" in lit_ft("export", *keep, "--dtype", "bf16", code=2)
    assert not out.exists()


def test_a_sum_records_that_one_base_was_quantized_whatever_the_order(
    lit_ft: Any, finished: Any, tmp_path: Path
) -> None:
    plain, packed, out = finished(), finished(*quantized(NF4)), tmp_path / "sum"
    line = f"{packed}/adapter was trained on a base quantized by bitsandbytes, and is used with the unquantized one"
    for order in ((plain, packed), (packed, plain)):
        adapters = [option for run in order for option in ("--adapter", run)]
        said = lit_ft("export", *adapters, "--out", out)
        assert said.count(line) == said.count("was trained on a base quantized") == 1
        assert json.loads((out / "base.json").read_text())["quantization"] == "bitsandbytes"
        assert "In training the base was quantized by bitsandbytes" in (out / "README.md").read_text()
    said = lit_ft("export", "--run", packed, *adapters, "--out", out)
    assert "used with the unquantized one" not in said  # the base of the run is quantized
    assert json.loads((out / "base.json").read_text())["quantization"] == "bitsandbytes"


@pytest.mark.parametrize("config", [NF4, INT8], ids=["nf4", "int8"])
def test_a_quantized_base_is_dequantized(
    lit_ft: Any, finished: Any, model_folder: str, tmp_path: Path, config: dict[str, Any]
) -> None:
    run = finished(*quantized(config))
    options = ["--merge", "--quantized-base", "dequantize", "--dtype", "fp32", "--out", tmp_path / "out"]
    said = lit_ft("export", "--run", run, *options)
    assert "dequantized to float32 and merged: against the quantized model that was trained, logits differ by" in said
    assert "of what training did to the logits," in said
    assert "MiB of weights" in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not getattr(merged, "is_quantized", False)
    if config is INT8:
        return  # its kernels round activations: only measured
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(**{**NF4, "bnb_4bit_compute_dtype": torch.float32})
    trained = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=nf4, device_map={"": "cpu"})
    trained = peft.PeftModel.from_pretrained(trained.dequantize(torch.float32), run / "adapter")
    torch.testing.assert_close(logits(merged), logits(trained), atol=1e-4, rtol=1e-4)


def test_int8_may_be_kept_and_reads_back(lit_ft: Any, finished: Any, tmp_path: Path) -> None:
    run = finished(*quantized(INT8))
    said = lit_ft("export", "--run", run, "--merge", "--quantized-base", "keep", "--out", tmp_path / "out")
    assert "merged, and rounded to the base's bits again" in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map={"": "cpu"})
    assert merged.model.layers[0].self_attn.q_proj.weight.dtype == torch.int8
    assert not list((tmp_path / "out").glob("*.bin"))


def test_four_bits_that_forget_what_was_learned_are_refused(lit_ft: Any, fit: Any, tmp_path: Path) -> None:
    run = fit(*quantized(NF4), "--model.peft.init_lora_weights", "true")
    said = lit_ft("export", "--run", run, "--merge", "--quantized-base", "keep", "--out", tmp_path / "out", code=1)
    assert "of what training did to the logits" in said
    assert "nothing was written. Dequantize the base, or use the adapter on it" in said
    assert not (tmp_path / "out").exists()


# --- a merge that went wrong -----------------------------------------------------------------------


def _edit(change_tensors: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def _resize(folder: Path) -> None:
    """Embeddings and config agree with each other, and not with the base."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:380].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 380}))


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_edit(lambda tensors: tensors.__delitem__(NORM)), f"{NORM} is missing"),
    "NaN": (_edit(lambda tensors: tensors[NORM].fill_(float("nan"))), f"{NORM} holds values that are not finite"),
    "empty": (_edit(lambda tensors: tensors.update({NORM: tensors[NORM][:0]})), f"{NORM} is empty, (0,)"),
    "dtype": (_edit(lambda tensors: tensors.update({NORM: tensors[NORM].half()})), f"{NORM} is torch.float16, not"),
    "extra": (_edit(lambda tensors: tensors.update({"other": torch.zeros(3)})), "other is not in Qwen2ForCausalLM"),
    "values": (_edit(lambda tensors: tensors[NORM].mul_(1.1)), "the merged model is not what was trained"),
    "head": (_edit(lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1})), "ties them to one"),
    "resized": (_resize, f"{EMBEDDING} is (380, 48), in the base (384, 48)"),
}


@pytest.mark.parametrize("case", DAMAGES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_damaged_files_leave_nothing(
    lit_ft: Any, finished: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, method: str
) -> None:
    damage, message = DAMAGES[case]
    run = finished(*(["--model.peft", "null"] if method == "full" else []))
    save = PreTrainedModel.save_pretrained

    def save_and_damage(self: Any, folder: Path, **options: Any) -> None:
        save(self, folder, **options)
        damage(folder)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_and_damage)
    said = lit_ft("export", "--run", run, "--merge", "--out", tmp_path / "out" / "merged", code=1)
    message = f"{NORM} has other values" if (case, method) == ("values", "full") else message
    assert message in said
    assert "nothing was written" in said
    assert list((tmp_path / "out").iterdir()) == []


# --- the folder ------------------------------------------------------------------------------------


def test_dtypes_and_spellings(lit_ft: Any, finished: Any, tmp_path: Path) -> None:
    run = finished()
    for short, dtype in (("bf16", torch.bfloat16), ("float16", torch.float16), ("fp32", torch.float32)):
        assert "merge verified" in lit_ft(
            "export", "--run", run, "--merge", "--dtype", short, "--out", tmp_path / "out"
        )
        assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_merge_into_a_wider_dtype_is_rounded_once(lit_ft: Any, fit: Any, tmp_path: Path, method: str) -> None:
    """A bf16 base, merged in fp32: base plus adapter to the last bits, no sum that was rounded to bf16 before."""
    run = fit("--model.dtype", "bfloat16", *(["--model.peft", "null"] if method == "full" else []))
    lit_ft("export", "--run", run, "--merge", "--dtype", "float32", "--out", tmp_path / "wide")
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    is_rounded = all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in wide.values())
    assert is_rounded == (method == "full")
    lit_ft("export", "--run", run, "--merge", "--dtype", "fp16", "--out", tmp_path / "half")
    for name, tensor in load_file(tmp_path / "half" / "model.safetensors").items():
        assert torch.equal(tensor, wide[name].half()), name


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_flipped_bit_in_an_adapter_or_its_base_is_found(lit_ft: Any, fit: Any, tmp_path: Path) -> None:
    run = fit("--merge")
    (run / "adapter" / "README.md").write_text("# My adapter")  # texts may be changed
    export = ("export", "--adapter", run / "adapter", "--merge", "--out", tmp_path / "out")
    lit_ft(*export)
    flip(run / "adapter" / "adapter_model.safetensors")
    said = lit_ft(*export, code=2)
    assert "adapter' is not what was exported (with other bytes: adapter_model.safetensors); export it again" in said
    lit_ft("export", "--run", run)
    lit_ft(*export)
    flip(run / "merged" / "model.safetensors")
    assert "merged' is not what was exported" in lit_ft(*export, "--base", run / "merged", code=2)
    (run / "merged" / "manifest.json").write_text("[]")
    assert "manifest.json is no readable manifest" in lit_ft(*export, "--base", run / "merged", code=2)


def test_fit_and_validate_compare_a_merged_base_with_its_manifest(
    lit_ft: Any, fit: Any, tmp_path: Path, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    merged = fit("--merge") / "merged"
    flip(merged / "model.safetensors")
    more = ["--model.pretrained", merged, "--data.val_path", write_rows(count=4, name="val.json")]
    arguments = [*recipe(tmp_path, str(merged), write_rows(), max_steps=1)[1:], *more]
    refused = "merged' is not what was exported (with other bytes: model.safetensors); export it again, or remove its"
    for command in ("fit", "validate"):
        assert refused in lit_ft(command, *arguments, "--run_dir", tmp_path / "of-merged", code=2)
    monkeypatch.setattr("lit_ft.commands.first_checks.HASHED_BASE_BYTES", 0)
    said = lit_ft("validate", *arguments, "--run_dir", tmp_path / "of-merged")
    assert f"GiB are compared with manifest.json by size alone; python -m lit_ft verify {merged} compares" in said
    with (merged / "model.safetensors").open("ab") as file:
        file.write(b"1")
    assert "of another size: model.safetensors" in lit_ft("validate", *arguments, code=2)


def test_an_export_says_which_step_it_is(lit_ft: Any, fit: Any) -> None:
    run = fit("--trainer.log_every_n_steps", "1")
    last = run / "checkpoints" / "last.ckpt"
    assert "last.ckpt is step 2 of 2\n" in (said := lit_ft("export", "--run", run))
    assert "newer" not in said
    assert "was logged up to" not in said
    state = torch.load(last, weights_only=False)
    torch.save({**state, "global_step": 1}, run / "checkpoints" / "first.ckpt")
    said = lit_ft("export", "--run", run, "--checkpoint", run / "checkpoints" / "first.ckpt")
    assert "first.ckpt is step 1 of 2\n" in said
    by_epochs = (run / "config.yaml").read_text().replace("max_steps: 2", "max_steps: -1")
    (run / "config.yaml").write_text(by_epochs)
    assert "last.ckpt is step 2 of 2\n" in lit_ft("export", "--run", run)
    (run / "finished.json").unlink()
    assert "last.ckpt is step 2; the run has not finished\n" in lit_ft("export", "--run", run)
    assert f"a newer checkpoint is {last}, of step 2; take it with --ckpt_path" in said
    last.unlink()
    for other in (run / "checkpoints").glob("epoch*.ckpt"):
        other.unlink()
    said = lit_ft("export", "--run", run, "--checkpoint", run / "checkpoints" / "first.ckpt")
    assert "the run was logged up to step 2 (metrics.csv), of which no checkpoint is left" in said


@pytest.mark.parametrize("command", ["validate", "fit"])
def test_a_copied_run_goes_on_from_its_own_checkpoints(lit_ft: Any, fit: Any, tmp_path: Path, command: str) -> None:
    run, copy = fit(), tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(run)
    options = ["--trainer.max_steps", "3"] if command == "fit" else []
    said = lit_ft(command, "--config", copy / "config.yaml", "--ckpt_path", "last", *options)
    assert f"config.yaml names the run folder {run}; the folder that it lies in is used: {copy}" in said
    assert not run.exists()
    steps = [torch.load(path)["global_step"] for path in (copy / "checkpoints").glob("last*.ckpt")]
    assert max(steps) == (3 if command == "fit" else 2)


def test_generation_stops_at_the_end_of_a_turn(lit_ft: Any, fit: Any, base: Path, tmp_path: Path) -> None:
    path = base / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 7, "do_sample": True, "temperature": 0.7}))
    tokenizer = AutoTokenizer.from_pretrained(base)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    run = fit("--merge")
    said = lit_ft("export", "--run", run, "--merge", "--out", tmp_path / "out")
    assert f"generation_config.json: eos_token_id 7 -> [7, {end}], so that <|im_end|> ends an answer" in said
    for folder in (run / "merged", tmp_path / "out"):
        config = AutoModelForCausalLM.from_pretrained(folder).generation_config
        assert config.eos_token_id == [7, end]
        assert config.temperature == 0.7
    path.write_text(json.dumps({"eos_token_id": [7, end]}))
    said = lit_ft("export", "--run", run, "--merge", "--out", tmp_path / "out")
    assert "generation_config.json" not in said


def test_the_card_says_what_it_is(lit_ft: Any, fit: Any, base: Path, tmp_path: Path) -> None:
    run = fit("--merge", "--trainer.val_check_interval", "1")
    shutil.copytree(run / "adapter", tmp_path / "first")
    lit_ft("export", "--run", run)
    for folder, library in ((tmp_path / "first", "peft"), (run / "adapter", "peft"), (run / "merged", "transformers")):
        text = (folder / "README.md").read_text(encoding="utf-8")
        front = yaml.safe_load(text.split("---\n")[1])
        assert front == {"library_name": library, "pipeline_tag": "text-generation", "tags": ["lit_ft", "lora"]}
        assert str(base) in text
        assert "| metric, at the end | value |" in text
        assert "| val/loss |" in text
        cooked = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
        assert cooked["model"]["init_args"]["peft"]["init_args"]["r"] == 4
        assert "logger" not in cooked["trainer"]
        assert f"torch {torch.__version__}" in text
        assert "[More Information Needed]" not in text  # PEFT's template
    assert "- `rows`: 18 samples" in (run / "merged" / "README.md").read_text()


def test_a_card_keeps_secrets() -> None:
    from lit_ft.export.model_card import Card

    recipe = {
        "model": {"init_args": {"pretrained": "Qwen/Qwen2.5-0.5B", "hf_token": "hf_abc", "added_tokens": ["<a>"]}},
        "data": {"init_args": {"path": "https://me:secret@host/rows.json", "sources": [{"path": "tatsu-lab/alpaca"}]}},
        "trainer": {"logger": {"init_args": {"key": "wandb-key"}}, "max_steps": 3},
        "run_dir": "/home/me/runs",
    }
    text = str(Card(kind="adapter", title="t", base="Qwen/Qwen2.5-0.5B", commit="abc", method="LORA", recipe=recipe))
    for secret in ("hf_abc", "secret", "wandb-key", "/home/me"):
        assert secret not in text
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["base_model"], front["datasets"]) == ("Qwen/Qwen2.5-0.5B", ["tatsu-lab/alpaca"])
    assert "<a>" in text
    assert "(revision abc)" in text


@pytest.mark.parametrize(
    ("url", "published"),
    [
        ("https://me:se@cret@host:8443/rows.json", "https://host:8443/rows.json"),
        (
            "https://a.blob.core.windows.net/c/rows.json?sv=2024&sig=secret",
            "https://a.blob.core.windows.net/c/rows.json",
        ),
        ("s3://bucket/rows.json?X-Amz-Signature=secret#secret", "s3://bucket/rows.json"),
        ("zip://rows.json::https://me:secret@host/a.zip?k=secret", "zip://rows.json::https://host/a.zip"),
        ("http://[secret", "(left out)"),
    ],
)
def test_a_card_keeps_secrets_of_urls(url: str, published: str) -> None:
    from lit_ft.export.model_card import Card

    options = {"path": url, "val_path": f"two: {url} and", "cache_dir": "~/a?b#c"}
    card = str(Card(kind="adapter", title="t", base="b", recipe={"data": {"init_args": options}}))
    assert "cret" not in card
    cooked = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    shown = {"path": published, "val_path": f"two: {published} and", "cache_dir": "~/a?b#c"}
    assert cooked == {"data": {"init_args": shown}}
    assert f"- `{published}`" in card


@pytest.mark.parametrize("count", [2, 80], ids=["spare rows", "resized"])
def test_the_lines_of_an_adapters_card_read_what_was_trained(
    lit_ft: Any, fit: Any, base: Path, tmp_path: Path, count: int
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="bfloat16")
    plain.save_pretrained(base)
    tokens = json.dumps([f"<new_{number}>" for number in range(count)])
    run = fit("--model.added_tokens", tokens, "--model.dtype", "float32", "--merge")
    lit_ft("export", "--adapter", run, "--out", tmp_path / "picked")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    for folder in (run / "adapter", tmp_path / "picked"):
        lines = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
        names: dict[str, Any] = {}
        exec(lines.replace("THIS FOLDER", str(folder)), names)
        torch.testing.assert_close(logits(names["model"]), logits(merged), atol=1e-4, rtol=1e-4)


def test_added_tokens_by_a_recipe(lit_ft: Any, fit: Any, tmp_path: Path) -> None:
    tokens = json.dumps([f"<new_{number}>" for number in range(80)])
    run = fit("--model.added_tokens", tokens, "--merge")
    merged = AutoModelForCausalLM.from_pretrained(run / "merged")
    tokenizer = AutoTokenizer.from_pretrained(run / "merged")
    assert merged.config.vocab_size == len(tokenizer) == 400
    assert "model.resize_token_embeddings(len(tokenizer))" in (run / "adapter" / "README.md").read_text()
    for options in (["--run", run], ["--adapter", run]):
        lit_ft("export", *options, "--merge", "--out", tmp_path / "out")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(logits(again), logits(merged), atol=1e-6, rtol=1e-6)


MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "there is nothing to export; name a run with --run, or adapters with --adapter"),
    "two runs": (["RUN", "--run", "RUN"], "both name a run; leave one out"),
    "run and base": (["RUN", "--base", "b"], "run and base both name a base model"),
    "no adapter there": (["--adapter", "nowhere=0.5", "--out", "o"], "neither 'nowhere' nor 'nowhere/adapter' holds"),
    "an adapter of the hub": (
        ["--adapter", "some/one=0.5", "--out", "o"],
        "first: hf download some/one",
    ),
    "no checkpoint of an adapter": (
        ["--run", "RUN", "--adapter", "RUN", "--ckpt_path", "best", "--out", "o"],
        "ckpt_path='best' chooses a checkpoint of a run, and --adapter names what is exported in place of one",
    ),
    "no out": (["--adapter", "RUN"], "out is not set; say where to write with --out DIR"),
    "dtype of an adapter": (["--run", "RUN", "--dtype", "bf16"], "dtype=bf16 is for merged weights; add --merge"),
    "not merged": (["--run", "RUN", "--quantized-base", "keep"], "quantized_base=keep is for merged weights"),
    "not quantized": (
        ["--run", "RUN", "--merge", "--quantized-base", "keep"],
        "the base is not quantized; leave it out",
    ),
    "a checkpoint": (["CKPT"], "last.ckpt' is a checkpoint; give its run, '"),
    "an adapter": (["ADAPTER"], "is an adapter's folder; name it with --adapter"),
    "onto the base": (["--run", "RUN", "--merge", "--out", "BASE"], "is the base model itself; name another folder"),
    "onto other things": (["--run", "RUN", "--merge", "--out", "RUN"], "config.yaml"),
    "misspelt": (["--run", "RUN", "--adaptor", "x"], "did you mean 'adapter'?"),
}


def test_mistakes(lit_ft: Any, finished: Any, model_folder: str) -> None:
    run = finished()
    held = sorted(path for path in run.rglob("*") if path.is_file())
    for name, (options, message) in MISTAKES.items():
        paths = {"RUN": str(run), "BASE": model_folder, "ADAPTER": str(run / "adapter")}
        paths["CKPT"] = str(run / "checkpoints" / "last.ckpt")
        named = [paths.get(option, option) for option in options]
        assert message in lit_ft("export", *named, code=2), name
    assert sorted(path for path in run.rglob("*") if path.is_file()) == held


GARBAGE = {
    "adapter/adapter_config.json": (b"[1", b"[]", b'{"peft_type": "NO"}', b"\xff"),
    "adapter/adapter_model.safetensors": (b"", b"\x07" * 500),
    "adapter/base.json": (b"{", b"[]"),
    "config.yaml": (b"a: [", b"3", b"\xff", b"model: 3"),
}


def test_garbage_in_files_of_a_run_is_one_line_that_names_them(lit_ft: Any, fit: Any, tmp_path: Path) -> None:
    run = fit()
    (run / "adapter" / "manifest.json").unlink()
    for name, contents in GARBAGE.items():
        whole = (run / name).read_bytes()
        for content in contents:
            (run / name).write_bytes(content)
            what = ("--adapter", run / "adapter") if name.startswith("adapter") else ("--run", run)
            last = lit_ft("export", *what, "--out", tmp_path / "out", code=2).strip().splitlines()[-1]
            assert last.startswith("lit_ft: error: "), (name, content, last)
            assert Path(name).name in last, (name, content, last)
        (run / name).write_bytes(whole)


@pytest.mark.parametrize("method", ["prompt", "full"])
def test_what_a_method_cannot_do(lit_ft: Any, finished: Any, tmp_path: Path, method: str) -> None:
    prompt = {"class_path": "peft.PromptTuningConfig", "init_args": {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}}
    run = finished("--model.peft", "null" if method == "full" else json.dumps(prompt))
    options, message = {
        "prompt": (["--merge"], "PROMPT_TUNING adds no weights that could be merged"),
        "full": ([], "the run trained all weights, so there is no adapter; add --merge"),
    }[method]
    said = lit_ft("export", "--run", run, *options, "--out", tmp_path / "out", code=2)
    assert message in said
    assert "is step" not in said  # that is said once the checkpoint has been read
    assert not (tmp_path / "out").exists()

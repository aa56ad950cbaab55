"""Options that are for speed or memory alone leave every number as it is."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from one_process import numbers
from peft import LoraConfig
from transformers import AutoConfig

from benchmarks.speed import equal_samples
from benchmarks.speed.scaling import measure_curve
from benchmarks.speed.scaling_pictures import draw
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.internals import liger_kernel
from lit_ft.model import liger_kernels

pytestmark = pytest.mark.slow

LORA = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")


def test_liger_is_refused_before_weights_are_read(
    make_trainer: Any, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ft.model.loading.load_base", lambda *_: pytest.fail("weights are read"))
    module = CausalLM(model_folder, liger=True)
    with pytest.raises(RecipeError, match="needs a CUDA device, this run is on cpu; set it to false"):
        make_trainer(max_steps=1).fit(module, TextDataModule(write_rows()))
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match="needs a CUDA device"):
            CausalLM(model_folder, liger=True).check()
    with pytest.raises(RecipeError, match="both fuse norms and MLPs; set one of them to false"):
        CausalLM(model_folder, liger=True, compile=True)


def test_liger_takes_the_place_of_norms_and_mlps(model_folder: str) -> None:
    """Where the package is installed; its kernels need a GPU."""
    pytest.importorskip("liger_kernel")
    from transformers.models.qwen2 import modeling_qwen2

    config = AutoConfig.from_pretrained(model_folder)
    liger_kernels.check(config, torch.device("cuda"))
    with pytest.raises(RecipeError, match="no kernels for 'gpt2', but for .*, llama, .*; set it to false"):
        liger_kernels.check(AutoConfig.for_model("gpt2"), torch.device("cuda"))
    rotate = modeling_qwen2.apply_rotary_pos_emb
    classes = {name: getattr(modeling_qwen2, name) for name in ("Qwen2RMSNorm", "Qwen2MLP")}
    module = CausalLM(model_folder, peft=LORA)
    module.configure_model()
    base = module.base_model
    forward = base.forward
    try:
        liger_kernel.apply_to_instance(base)
        assert modeling_qwen2.apply_rotary_pos_emb.__module__.startswith("liger_kernel")
    finally:  # it replaces them for the whole process
        modeling_qwen2.apply_rotary_pos_emb = rotate
        for name, kind in classes.items():
            setattr(modeling_qwen2, name, kind)
    names = [layer.mlp._get_name() for layer in base.model.layers] + [base.model.norm._get_name()]
    names += [layer.input_layernorm._get_name() for layer in base.model.layers]
    assert names == ["LigerSwiGLUMLP"] * 2 + ["LigerRMSNorm"] * 3
    assert base.forward == forward  # the loss stays lit_ft's


class NothingMoreToCompile(Callback):
    """After the first step, what would have to be compiled is an error."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch.compiler.set_stance("fail_on_recompile")


def test_compiled_layers_give_the_same_numbers_and_rows_of_any_length_need_one_compilation(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    plain = numbers(make_trainer, model_folder, write_rows(), peft=LORA)
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    try:
        compiled = numbers(
            make_trainer, model_folder, write_rows(), [NothingMoreToCompile()], peft=LORA, compile="aot_eager"
        )
    finally:
        torch.compiler.set_stance("default")
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)
    for ours, wanted in zip(compiled.gradients, plain.gradients, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6)
    assert not breaks


def test_curves_are_drawn_and_tabled(tmp_path: Path) -> None:
    measured = {"DDP": {1: (100.0, 0.5), 2: (190.0, 0.51)}, "FSDP": {2: (150.25, 0.3)}}
    points = [
        {"line": line, "x": x, "tokens_per_second": rate, "gib": gib}
        for line, of in measured.items()
        for x, (rate, gib) in of.items()
    ]
    table = draw("ranks", points, tmp_path / "first.svg")
    assert table.splitlines() == [
        "| ranks | tokens/s, DDP | memory, GiB, DDP | tokens/s, FSDP | memory, GiB, FSDP |",
        "|---|---|---|---|---|",
        "| 1 | 100 | 0.50 |  |  |",
        "| 2 | 190 | 0.51 | 150 | 0.30 |",
    ]
    draw("ranks", points, tmp_path / "again.svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_points_that_are_there_are_not_measured_again(tmp_path: Path) -> None:
    there = [{"line": line, "x": "2 M"} for line in ("measured", "planned")]
    (tmp_path / "size.json").write_text(json.dumps({"points": there}))
    measure_curve("size", ["2 M", "1.5 B"], tmp_path, tmp_path)
    *kept, new = json.loads((tmp_path / "size.json").read_text())["points"]
    assert kept == there
    assert (new["line"], new["x"]) == ("planned", "1.5 B")
    # Weights in bf16 are most of it: 1.54 billion of them, the head tied.
    assert new["parameters"] == pytest.approx(1.544e9, rel=1e-3)
    assert new["gib"] == pytest.approx(2 * 1.544e9 / 2**30, rel=0.05)


def test_attention_to_samples_of_one_length_has_a_row_for_each_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(equal_samples, "BATCHES", {"cpu": [(1, 12), (3, 8)]})
    equal_samples.main(["--repeats", "3"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if " ms" in line]
    assert [row[0] for row in rows] == ["| 1 x 12", "| 3 x 8"]
    assert all(float(cell.split()[0]) > 0 for row in rows for cell in row[1:])

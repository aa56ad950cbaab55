"""Quantized bases compute what the dense weights that they stand for do, and train, or are refused."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantized_checkpoints
import torch
from architectures import save_model
from lit_callbacks.export.merge_check import logits_of
from lit_callbacks.internals.transformers_internals import dequantize
from one_process import Losses
from peft import LoraConfig
from quantized_checkpoints import dense_of, give_adapter
from safetensors.torch import load_file, save_file
from shared_fixtures import make_tokenizer, tiny_qwen2
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPTQConfig,
    Llama4TextConfig,
    QuantoConfig,
)

from benchmarks.model_comparison import ARCHITECTURES
from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import trainable_shapes
from lit_ft.cli import main
from lit_ft.model.isolation.architectures import COMPARED
from lit_ft.model.quantization import check_gradient, reading_options
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch, pack_samples

pytestmark = pytest.mark.slow

PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "quanto": "optimum",
}


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def need(scheme: str) -> None:
    """Skip where the package of a scheme is not installed."""
    if (package := PACKAGES.get(scheme.split()[0])) is not None and not is_installed(package):
        pytest.skip(f"{package} is not installed")


def four_bit(kind: str = "nf4", dtype: torch.dtype = torch.float32, double: bool = False) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )


def torchao(name: str) -> Any:
    from torchao import quantization
    from transformers import TorchAoConfig

    return TorchAoConfig(getattr(quantization, name)())


REQUESTED: dict[str, Any] = {
    "nf4": four_bit,
    "nf4 double": lambda: four_bit(double=True),
    "fp4": lambda: four_bit("fp4"),
    "fp4 double": lambda: four_bit("fp4", double=True),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True),
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "quanto int8": lambda: QuantoConfig(weights="int8"),
    "quanto int4": lambda: QuantoConfig(weights="int4"),
}


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 as in ``model_folder``, with layers as wide as quantized groups want."""
    folder = tmp_path_factory.mktemp("models") / "wide-qwen2"
    model, tokenizer = tiny_qwen2(hidden_size=64, intermediate_size=128, initializer_range=0.1)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)


def built(folder: str, **options: Any) -> CausalLM:
    module = CausalLM(folder, peft=lora(), optimizer=lambda p: torch.optim.AdamW(p, lr=5e-3), **options)
    module.configure_model()
    return module


def a_row() -> PackedBatch:
    texts = ("the cup is red", "a book under the lamp was blue and green")
    samples = [make_tokenizer()(text, return_tensors="np")["input_ids"][0] for text in texts]
    return pack_samples([(ids, ids) for ids in samples])


def compare(quantized: CausalLM, dense: CausalLM, *, training: bool) -> tuple[torch.Tensor, float]:
    """With one adapter on both: differences of token losses, and the gradients' relative distance."""
    give_adapter(quantized, dense)
    losses, gradients = [], []
    for module in (quantized, dense):
        module.train(training).zero_grad()
        result = module(a_row())
        result.loss_sum.backward()
        losses.append(result.per_token)
        grads = {name: p.grad for name, p in module.trainable_parameters().items()}
        gradients.append(torch.cat([grads[name].flatten() for name in sorted(grads)]))
    got, wanted = gradients
    return (losses[0] - losses[1]).abs(), float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("scheme", REQUESTED)
def test_a_requested_base_equals_its_dense_weights(
    wide_folder: str, tmp_path: Path, scheme: str, training: bool
) -> None:
    need(scheme)
    quantized = built(wide_folder, quantization=REQUESTED[scheme]())
    dense = built(dense_of(wide_folder, REQUESTED[scheme](), tmp_path / "dense"))
    losses, gradients = compare(quantized, dense, training=training)
    if (scheme, training) == ("int8", False):
        # LLM.int8 rounds activations as well; bitsandbytes leaves that out on CPUs while training.
        assert losses.mean() < 0.02
        assert losses.max() < 0.1
    else:
        assert losses.max() < 1e-5
        assert gradients < 1e-5


def runs(make_trainer: Any, quantized: CausalLM, dense: CausalLM, data: str, steps: int) -> list[list[float]]:
    """Losses of training both from one adapter."""
    give_adapter(quantized, dense)
    both = []
    for module in (quantized, dense):
        record = Losses()
        make_trainer(max_steps=steps, callbacks=[record]).fit(module, TextDataModule(data, micro_batch_size=4))
        both.append(record.losses)
    assert len(both[0]) == len(both[1]) == steps
    assert min(both[1]) < both[1][0] - 0.05  # it has learned something
    return both


@pytest.mark.parametrize(
    ("scheme", "dtype", "tolerance"),
    [(scheme, "float32", 1e-3) for scheme in REQUESTED] + [("nf4", "bfloat16", 5e-2), ("int8", "bfloat16", 5e-2)],
)
def test_qlora_tracks_lora_on_the_dequantized_base(
    make_trainer: Any, wide_folder: str, write_rows: Any, tmp_path: Path, scheme: str, dtype: str, tolerance: float
) -> None:
    need(scheme)
    quantization = REQUESTED[scheme]()
    if dtype == "bfloat16":
        quantization.bnb_4bit_compute_dtype = torch.bfloat16
    dense = dense_of(wide_folder, quantization, tmp_path / "dense", dtype)
    modules = built(wide_folder, quantization=quantization, dtype=dtype), built(dense, dtype=dtype)
    got, wanted = runs(make_trainer, *modules, write_rows(count=40), steps=10)
    assert got == pytest.approx(wanted, abs=tolerance)


@pytest.mark.parametrize("format", quantized_checkpoints.FORMATS)
def test_a_stored_base_equals_its_dense_weights(
    make_trainer: Any, wide_folder: str, write_rows: Any, tmp_path: Path, format: str
) -> None:
    need(format)
    stored, dense = quantized_checkpoints.write(wide_folder, format, tmp_path)
    for training in (True, False):
        losses, gradients = compare(built(stored), built(dense), training=training)
        assert losses.max() < 1e-5
        assert gradients < 1e-5
    got, wanted = runs(make_trainer, built(stored), built(dense), write_rows(), steps=3)
    assert got == pytest.approx(wanted, abs=1e-4)
    # The check before a run knows the adapter's weights without the base's.
    skeleton = trainable_shapes(CausalLM(stored, peft=lora()).check())
    assert {f"model.{name}": shape for name, shape in skeleton.items()} == trainable_shapes(built(stored))


@pytest.mark.parametrize("scheme", [scheme for scheme in REQUESTED if "quanto" not in scheme])
def test_a_saved_base_is_read_again(wide_folder: str, tmp_path: Path, scheme: str) -> None:
    need(scheme)
    quantization = REQUESTED[scheme]()
    base = AutoModelForCausalLM.from_pretrained(wide_folder, quantization_config=quantization, device_map={"": "cpu"})
    base.save_pretrained(tmp_path / "saved")
    make_tokenizer().save_pretrained(tmp_path / "saved")
    stored = str(tmp_path / "saved")
    losses, gradients = compare(built(stored), built(wide_folder, quantization=REQUESTED[scheme]()), training=True)
    assert losses.max() < 1e-5
    assert gradients < 1e-5
    CausalLM(stored, peft=lora()).check()
    with pytest.raises(RecipeError, match="is quantized .*; set model.peft"):
        CausalLM(stored).check()
    with pytest.raises(RecipeError, match="is quantized already .*; leave model.quantization out"):
        CausalLM(stored, peft=lora(), quantization=quantization).check()


def test_a_dequantized_base_trains_in_full(
    make_trainer: Any, wide_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    stored, dense = quantized_checkpoints.write(wide_folder, "fp8", tmp_path)
    losses = []
    for folder in (stored, dense):
        module = CausalLM(folder, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        module.check()
        record = Losses()
        make_trainer(max_steps=3, callbacks=[record]).fit(module, TextDataModule(write_rows()))
        losses.append(record.losses)
    assert losses[0] == losses[1]


# --- refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq needs a package .*pip install --no-deps gptqmodel"),
        ({"quant_method": "awq", "bits": 4}, "awq needs a package .*pip install --no-deps gptqmodel"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "pip install compressed-tensors"),
        ({"quant_method": "torchao", "quant_type": {"default": {}}}, r"torchao needs a package .*'.\[torchao\]'"),
        ({"quant_method": "eetq"}, "eetq needs a package|eetq does not run here"),
        ({"quant_method": "unheard-of"}, "unheard-of does not run here"),
    ],
)
def test_a_stored_base_without_its_package(
    wide_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], match: str
) -> None:
    if is_installed(PACKAGES.get(config["quant_method"], "nothing")):
        pytest.skip("its package is installed")
    monkeypatch.setitem(quantized_checkpoints.FORMATS, "other", (lambda w: ({"weight": w}, w), config))
    stored, _ = quantized_checkpoints.write(wide_folder, "other", tmp_path)
    with pytest.raises(RecipeError, match=match):
        CausalLM(stored, peft=lora()).check()


def test_a_requested_quantization_without_its_package(wide_folder: str) -> None:
    if is_installed("optimum"):
        pytest.skip("optimum is installed")
    with pytest.raises(RecipeError, match="quanto needs a package .*pip install optimum-quanto"):
        CausalLM(wide_folder, peft=lora(), quantization=QuantoConfig(weights="int8"))


def test_an_unknown_4_bit_type_is_refused(model_folder: str) -> None:
    with pytest.raises(RecipeError, match="bnb_4bit_quant_type='nf5' must be nf4 or fp4"):
        CausalLM(model_folder, peft=LoraConfig(), quantization=four_bit("nf5"))


def test_calibrated_quantizations_are_read_only(wide_folder: str) -> None:
    with pytest.raises(RecipeError, match="gptq looks at data while it quantizes; name a checkpoint"):
        CausalLM(wide_folder, peft=lora(), quantization=GPTQConfig(bits=4))


def test_missing_weights_are_not_drawn_at_random(wide_folder: str, tmp_path: Path) -> None:
    shutil.copytree(wide_folder, tmp_path / "gaps")
    weights = load_file(tmp_path / "gaps" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "gaps" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match=r"lacks weights .*\(1: model.layers.1.mlp.up_proj.weight"):
        built(str(tmp_path / "gaps"))


@pytest.mark.skipif(not is_installed("torchao"), reason="torchao is not installed")
def test_activations_in_int8_pass_no_gradient(wide_folder: str) -> None:
    with pytest.raises(RecipeError, match="do not pass the gradient back .*; take a quantization of weights alone"):
        built(wide_folder, quantization=torchao("Int8DynamicActivationInt8WeightConfig"))


def test_layers_without_a_true_gradient_are_found() -> None:
    class Half(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            output = super().forward(input)
            return output / 2 + (output / 2).detach()

    class Detached(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).detach()

    check_gradient(nn.Linear(8, 4), torch.float32)
    with torch.device("meta"):  # as Lightning builds models: under the device of the run
        check_gradient(nn.Linear(8, 4, device="cpu"), torch.float32)
    with pytest.raises(RecipeError, match="it is 50% of what it should be"):
        check_gradient(Half(8, 4), torch.float32)
    with pytest.raises(RecipeError, match="does not require grad"):
        check_gradient(Detached(8, 4), torch.float32)


def test_too_little_memory_is_not_taken_for_a_wrong_gradient() -> None:
    class TooLarge(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        check_gradient(TooLarge(8, 4), torch.float32)


def test_the_command_line_says_it_in_one_line(
    wide_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIT_FT_RUN_DIR", "")
    asked = {
        "model.pretrained": wide_folder,
        "model.quantization": "transformers.BitsAndBytesConfig",
        "model.quantization.load_in_8bit": "true",
        "data.path": "none.json",
        "run_dir": str(tmp_path / "run"),
    }
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(word for name, value in asked.items() for word in (f"--{name}", value))])
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("lit_ft: error: model.quantization is set without model.peft;")


def quantized(name: str, folder: Path) -> CausalLM:
    """Model of an architecture in 4 bits, ready to train."""
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    module = CausalLM(str(folder), peft=LoraConfig(r=4, target_modules="all-linear"), quantization=four_bit())
    module.configure_model()
    return module


def test_a_quantization_that_changes_no_layer_is_refused(tmp_path: Path) -> None:
    """Falcon's layers are a class derived from ``nn.Linear``, which transformers passes over."""
    with pytest.raises(RecipeError, match="changes no layer of FalconForCausalLM: .* the model has FalconLinear"):
        quantized("falcon", tmp_path)


def test_an_architecture_that_fails_in_4_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"model.quantization: rwkv scales its weights for evaluation, and fails"):
        quantized("rwkv", tmp_path)


@pytest.mark.parametrize(("name", "layer"), [("mamba", "dt_proj"), ("gemma3n_text", "prediction_coefs")])
def test_weights_that_a_model_reads_are_not_packed(
    name: str, layer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lightning.pytorch"):
        module = quantized(name, tmp_path)
    assert "model.quantization leaves out " in caplog.text
    batch = pack_samples([(np.arange(5, 30), np.arange(5, 30))])
    module.train()
    module.token_loss(module.hidden_states(batch), batch).loss_sum.backward()
    weights = {type(p).__name__ for n, p in module.base_model.named_parameters() if f"{layer}." in n}
    assert weights == {"Parameter"}
    assert any(type(p).__name__ == "Params4bit" for p in module.parameters())
    assert module.base_model.lm_head.weight.dtype == torch.float32
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)


NOT_ALONE = {"emu3", "falcon", "gemma3n", "llama4", "llama4_text", "rwkv"}
"""Architectures whose tiny config is a part's, whose layers are not packed, that need a package, have no eager
attention here, or are refused."""


@pytest.mark.parametrize("name", sorted((COMPARED & set(ARCHITECTURES)) - NOT_ALONE))
def test_an_architecture_in_4_bits_computes_what_its_dense_weights_do(name: str, tmp_path: Path) -> None:
    """Some cast the inputs of a linear layer to the dtype of its weights (dots3_note, hy_v4)."""
    AutoModelForCausalLM.from_config(tiny_config(name)).save_pretrained(tmp_path)
    base = ModelSpec(str(tmp_path), "", attn_implementation="eager", quantization=four_bit()).build().eval()
    assert any(type(layer).__name__ == "Linear4bit" for layer in base.modules())
    ids = [torch.arange(5, 45)[None]]
    got = logits_of(base, ids)
    torch.testing.assert_close(got, logits_of(dequantize(base, torch.float32).eval(), ids), atol=1e-5, rtol=1e-5)


def test_latent_attention_in_8_bits_computes_in_evaluation(tmp_path: Path) -> None:
    """Its inputs have four dimensions."""
    AutoModelForCausalLM.from_config(tiny_config("deepseek_v2")).save_pretrained(tmp_path)
    base = ModelSpec(str(tmp_path), "", attn_implementation="eager", quantization=REQUESTED["int8"]()).build()
    ids = [torch.arange(5, 26)[None]]
    trained, got = logits_of(base.train(), ids), logits_of(base.eval(), ids)
    assert (got - trained).norm() < 0.05 * trained.norm()  # activations are rounded to 8 bits in evaluation


@pytest.mark.parametrize("name", ["zamba2", "qwen2"])
def test_an_architecture_in_8_bits_computes_what_its_dense_weights_do(name: str, tmp_path: Path) -> None:
    """Some layers of Zamba2 share a weight, and bitsandbytes gives the first of them its scales alone."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(tiny_config(name)).eval()
    dense.save_pretrained(tmp_path)
    base = ModelSpec(str(tmp_path), "", attn_implementation="eager", quantization=REQUESTED["int8"]()).build().train()
    ids = [torch.arange(5, 45)[None]]
    wanted, got = logits_of(dense, ids), logits_of(base, ids)
    assert 0 < (got - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("scheme", ["nf4", "int8", "torchao float8", "quanto int8"])
def test_a_router_that_is_a_linear_layer_stays_dense(scheme: str, tmp_path: Path) -> None:
    """Llama 4's returns two results."""
    need(scheme)
    module = CausalLM(
        save_model("llama4_text", tmp_path),
        quantization=REQUESTED[scheme](),
        peft=LoraConfig(target_modules="all-linear"),
    )
    module.configure_model()
    layer = module.base_model.model.layers[0]
    assert type(layer.feed_forward.router.weight) is nn.Parameter
    assert type(layer.feed_forward.router).__name__ == "Llama4Router"
    assert type(module.base_model.lm_head.weight) is nn.Parameter
    projection = layer.self_attn.q_proj.base_layer
    assert type(projection) is not nn.Linear or type(projection.weight) is not nn.Parameter
    ids = np.arange(3, 40)
    module(pack_samples([(ids, ids)] * 2)).loss_sum.backward()


def test_quanto_leaves_a_router_to_the_model() -> None:
    """It would take the place of Llama 4's, and of what it computes."""
    quantization = QuantoConfig(weights="int8")
    read = reading_options(Llama4TextConfig(), quantization)["quantization_config"]
    assert read.modules_to_not_convert == [r".*\.router", "lm_head", "score"]
    assert quantization.modules_to_not_convert is None

"""Float8 products: by hand, against torchao, and over a run."""

import importlib.util
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from one_process import Losses
from peft import LoraConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BitsAndBytesConfig

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.internals.torch import FLOAT8_ON_CPU
from lit_ft.packed_batch import pack_samples
from lit_ft.training.precision import Float8Linear, Float8Precision, float8_product, to_float8

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not FLOAT8_ON_CPU, reason="torch 2.11 has CUDA's products alone")]

SCALINGS = ["tensorwise", "rowwise"]
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def test_rounding_by_hand() -> None:
    # One scale: 448 is the largest of e4m3, so that 1.0625 of 3 bits of mantissa becomes 1.
    rounded, scale = to_float8(torch.tensor([[448.0, 1.0625], [-2.0, 1.125]]), torch.float8_e4m3fn, by_row=False)
    assert rounded.float().tolist() == [[448.0, 1.0], [-2.0, 1.125]]
    assert scale == 1
    # A scale for each row.
    rounded, scale = to_float8(torch.tensor([[896.0, 2.0], [0.0, 0.0]]), torch.float8_e4m3fn, by_row=True)
    assert rounded.float().tolist() == [[448.0, 1.0], [0.0, 0.0]]
    assert scale[0].tolist() == [2.0]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_product_by_hand(scaling: Any) -> None:
    # Values that float8 and bfloat16 hold exactly; 5 is padded to 16.
    left = torch.tensor([[448.0, 1.0, 2.0, 0.0, -4.0]]).repeat(3, 1)
    right = torch.eye(16, 5) * 448
    wanted = left @ right.T
    assert torch.equal(float8_product(left, right, scaling, is_forward=True), wanted)


def test_what_is_no_number_stays_so() -> None:
    left = torch.ones(2, 16)
    left[0, 0] = torch.inf
    assert not float8_product(left, torch.ones(16, 16), "tensorwise", is_forward=True).isfinite().all()


def gradients(layer: nn.Module, weight: torch.Tensor, inputs: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    output = layer(inputs)
    return [output, *torch.autograd.grad(output, (inputs, weight), grad)]


def case(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(64, 48, dtype=dtype)
    return layer, torch.randn(2, 16, 64, dtype=dtype, requires_grad=True), torch.randn(2, 16, 48, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_is_near_the_dense_one(scaling: Any, dtype: torch.dtype) -> None:
    layer, inputs, grad = case(dtype)
    got = gradients(Float8Linear(layer, scaling), layer.weight, inputs, grad)
    for found, wanted in zip(got, gradients(layer, layer.weight, inputs, grad), strict=True):
        assert found.dtype == dtype
        assert (found - wanted).norm() < 0.07 * wanted.norm()


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_layer_equals_torchaos(scaling: Any) -> None:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear as Peer

    layer, inputs, grad = case(torch.bfloat16)
    # torchao rounds the scales of rows down to powers of two.
    config = replace(Float8LinearConfig.from_recipe_name(scaling), emulate=True, round_scales_to_power_of_2=False)
    wanted = gradients(Peer.from_float(layer, config), layer.weight, inputs, grad)
    for found, peer in zip(gradients(Float8Linear(layer, scaling), layer.weight, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(found, peer, atol=2e-2, rtol=2e-2)


def test_a_frozen_weight_keeps_no_inputs() -> None:
    layer, inputs, _ = case()
    layer.requires_grad_(False)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        Float8Linear(layer, "tensorwise")(inputs)
    assert [tensor.shape for tensor in kept] == [layer.weight.shape]


class Products(TorchDispatchMode):
    """Context manager that counts products in float8, and the matrices that are rounded for them."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0
        self.rounded: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "scaled_mm" in func._schema.name
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and output.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            self.rounded.append(output.shape)
        return output


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_frozen_weight_is_rounded_once_with_the_same_result(scaling: Any) -> None:
    layer, inputs, grad = case(torch.bfloat16)
    layer.requires_grad_(False)
    each_time, once = Float8Linear(layer, scaling), Float8Linear(layer, scaling)
    with Products() as before:
        wanted = each_time(inputs)
        wanted_grad = torch.autograd.grad(wanted, inputs, grad)[0]
    assert before.rounded == [(32, 64), (48, 64), (32, 48), (64, 48)]
    assert once.round_frozen() == 2 * 48 * 64 + 4 * {"tensorwise": 2, "rowwise": 48 + 64}[scaling]
    with Products() as seen:
        for _ in range(2):
            got = once(inputs)
            (got_grad,) = torch.autograd.grad(got, inputs, grad)
            assert torch.equal(got, wanted)
            assert torch.equal(got_grad, wanted_grad)
    assert seen.rounded == [(32, 64), (32, 48)] * 2
    assert once.state_dict().keys() == layer.state_dict().keys()
    layer.requires_grad_(True)  # what is kept is not that of a weight that trains
    assert sum(shape in ((48, 64), (64, 48)) for shape in rounded_by(once, inputs, grad)) == 2
    layer.requires_grad_(False)
    once.to(torch.float32)
    assert (48, 64) in rounded_by(once, inputs.float(), grad.float())


def rounded_by(layer: nn.Module, inputs: torch.Tensor, grad: torch.Tensor) -> list[torch.Size]:
    with Products() as seen:
        torch.autograd.grad(layer(inputs), inputs, grad)
    return seen.rounded


def test_compiled_it_is_one_graph() -> None:
    layer, inputs, grad = case()
    layer.requires_grad_(False)
    eager = Float8Linear(layer, "tensorwise")
    eager.round_frozen()
    compiled = torch.compile(eager, backend="aot_eager", fullgraph=True)
    got = compiled(inputs)
    assert torch.equal(got, eager(inputs))
    assert torch.equal(torch.autograd.grad(got, inputs, grad)[0], torch.autograd.grad(eager(inputs), inputs, grad)[0])


@pytest.mark.parametrize("keep", [True, False])
def test_a_run_rounds_one_factor_of_each_product(
    make_trainer: Any, model_folder: str, write_rows: Any, keep: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    module = CausalLM(model_folder, peft=LORA, activation_offload=True)
    plugin = Float8Precision(keep_rounded=keep)
    with Products() as seen:
        make_trainer(max_steps=3, plugins=[plugin]).fit(module, TextDataModule(write_rows(), micro_batch_size=2))
    layers = [part for part in module.modules() if isinstance(part, Float8Linear)]
    assert seen.products > 3 * len(layers)
    assert len(seen.rounded) == (seen.products + 2 * len(layers) if keep else 2 * seen.products)
    assert ("float8: frozen weights are rounded once; 0 MiB beside the weights" in caplog.text) == keep
    assert not any(part._rounded for part in layers)  # memory is given back with the end of the run


def losses_of(
    make_trainer: Any, folder: str, data: str, plugin: Float8Precision | None, **options: Any
) -> tuple[list[float], CausalLM]:
    record = Losses()
    module = CausalLM(folder, optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3), **options)
    trainer = make_trainer(max_steps=10, callbacks=[record], plugins=[plugin] if plugin else None)
    trainer.fit(module, TextDataModule(data, micro_batch_size=4))
    return record.losses, module


@pytest.mark.parametrize("peft", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_run_tracks_float32(make_trainer: Any, model_folder: str, write_rows: Any, scaling: Any, peft: Any) -> None:
    data = write_rows(count=40)
    wanted, _ = losses_of(make_trainer, model_folder, data, None, peft=peft)
    got, module = losses_of(make_trainer, model_folder, data, Float8Precision(scaling), peft=peft)
    assert got == pytest.approx(wanted, rel=0.02)  # 0.012 was the largest
    assert wanted[-1] < wanted[0] - 0.5  # it has learned something
    assert any(isinstance(part, Float8Linear) for part in module.modules())


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradients_point_where_those_of_float32_do(make_trainer: Any, model_folder: str, scaling: Any) -> None:
    found = []
    for plugin in (None, Float8Precision(scaling)):
        module = CausalLM(model_folder, peft=LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False))
        module.configure_model()
        if plugin is not None:
            convert(module, plugin)
        ids = torch.arange(3, 40).numpy()
        module(pack_samples([(ids, ids)])).loss_sum.backward()
        found.append(torch.cat([p.grad.flatten() for p in module.trainable_parameters().values()]))
    assert torch.cosine_similarity(*found, 0) > 0.92  # 0.948 and 0.961 through two layers of large random weights


def convert(module: CausalLM, plugin: Float8Precision, device: str = "cpu") -> None:
    strategy = SimpleNamespace(root_device=torch.device(device), distributed_sampler_kwargs=None)
    module._trainer = SimpleNamespace(strategy=strategy)
    plugin.convert_module(module)


def test_which_layers(model_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    module = CausalLM(model_folder, peft=LORA)
    module.configure_model()
    convert(module, Float8Precision())
    names = {name for name, part in module.named_modules() if isinstance(part, Float8Linear)}
    of_layer = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert names == {f"model.base_model.model.model.layers.{i}.{name}.base_layer" for i in (0, 1) for name in of_layer}
    assert "float8 (tensorwise) in 10 linear layers; 4 others have sizes that are no multiples of 16" in caplog.text


def test_evaluation_is_that_of_the_weights(make_trainer: Any, model_folder: str) -> None:
    module, dense = (CausalLM(model_folder, peft=LORA) for _ in range(2))
    for each in (module, dense):
        each.configure_model()
    convert(module, Float8Precision())
    ids = torch.arange(3, 40).numpy()
    row = pack_samples([(ids, ids)])
    assert not torch.equal(module(row).per_token, dense(row).per_token)
    assert torch.equal(module.eval()(row).per_token, dense.eval()(row).per_token)


def test_a_fit_after_a_validation_trains_in_float8(
    make_trainer: Any, model_folder: str, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    module, rows = CausalLM(model_folder, peft=LORA), write_rows(count=8)
    data = TextDataModule(rows, val_path=rows, micro_batch_size=4)
    trainer = make_trainer(max_steps=2, plugins=[Float8Precision("tensorwise")])
    trainer.validate(module, data)
    layers = [part for part in module.modules() if isinstance(part, Float8Linear)]
    trainer.fit(module, data)
    assert [part for part in module.modules() if isinstance(part, Float8Linear)] == layers
    make_trainer(max_steps=1, plugins=[Float8Precision("rowwise")]).fit(module, data)
    assert {part.scaling for part in layers} == {"rowwise"}
    said = [f"float8 ({scaling}) in {len(layers)} linear layers" for scaling in ("tensorwise", "tensorwise", "rowwise")]
    assert [line.split(";")[0] for line in caplog.messages if line.startswith("float8 (")] == said


def test_mixed_computes_all_else_in_bfloat16(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    dtypes = set()
    module = CausalLM(model_folder, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    module.configure_model()
    module.model.model.norm.register_forward_hook(lambda *_: dtypes.add(torch.is_autocast_enabled("cpu")))
    module.model.model.layers[0].mlp.register_forward_hook(lambda *found: dtypes.add(found[-1].dtype))
    make_trainer(max_steps=1, plugins=[Float8Precision(mixed=True)]).fit(module, TextDataModule(write_rows()))
    assert dtypes == {True, torch.bfloat16}
    assert {p.dtype for p in module.parameters()} == {torch.float32}


def test_refused(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = CausalLM(model_folder, peft=LORA, quantization=BitsAndBytesConfig(load_in_8bit=True))
    packed.configure_model()
    with pytest.raises(RecipeError, match="finds no linear layer .* they are quantized"):
        convert(packed, Float8Precision())
    with pytest.raises(RecipeError, match="needs an NVIDIA GPU .*, not mps"):
        convert(packed, Float8Precision(), "mps")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(RecipeError, match=r"needs compute capability 8.9 .* A100 has 8.0"):
        convert(packed, Float8Precision(), "cuda")
    monkeypatch.setattr("lit_ft.internals.torch.FLOAT8_ON_CPU", False)
    with pytest.raises(RecipeError, match="has no float8 products on a CPU; install a newer one"):
        convert(packed, Float8Precision(), "cpu")

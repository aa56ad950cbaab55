"""LoRA's fused function computes what PEFT computes, and leaves everything else to PEFT."""

import copy
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from ranks import LiveRanks
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig

from lit_ft import CausalLM, TextDataModule
from lit_ft.model.activations import checkpointing
from lit_ft.packed_batch import pack_samples
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lit_ft.tuning.lora.fused_lora import Fused, FusedLinear, fuse

without_cpp = torch._inductor.config.patch(fallback_by_default=True)
"""Inductor's graphs without its C++ code, which takes 25 s to compile."""

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"lora_dropout": 0.3},
    "rsLoRA": {"use_rslora": True},
    "bias of B": {"lora_bias": True},
    "bias of the base": {"bias": "all"},
    "weights as parameters": {"target_parameters": ["up.weight", "down.weight"]},
}


class Net(nn.Module):
    """A layer with a bias and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 80), nn.Linear(80, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def lora_net(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    targets = ["up"] if options.get("lora_bias") else [] if "target_parameters" in options else ["up", "down"]
    return get_peft_model(Net().to(dtype), LoraConfig(r=6, target_modules=targets, init_lora_weights=False, **options))


def fused(model: Any, **options: Any) -> Any:
    model = copy.deepcopy(model)
    fuse(model, **options)
    assert all(isinstance(layer, Fused) for layer in model.modules() if isinstance(layer, LoraLayer))
    return model


def numbers(model: Any, x: Tensor, trains_x: bool = True) -> dict[str, Tensor]:
    """Output of a model, and gradients of a function of it."""
    torch.manual_seed(1)  # for dropout
    x = x.detach().clone().requires_grad_(trains_x)
    out = model(x)
    out.double().square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"output": out.detach(), **({"x": x.grad} if trains_x else {}), **gradients}


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_outputs_and_gradients_are_those_of_peft(options: str, trains_x: bool) -> None:
    model = lora_net(**OPTIONS[options])
    wanted, found = (numbers(m, inputs(), trains_x) for m in (model, fused(model)))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert distance(found[name], tensor) < 1e-6, name


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_are_those_of_finite_differences(options: str) -> None:
    model = fused(lora_net(torch.float64, **OPTIONS[options])).double()
    weights = [p for p in model.parameters() if p.requires_grad]

    def output(x: Tensor, *_: Tensor) -> Tensor:
        torch.manual_seed(1)
        return model(x)

    x = inputs(torch.float64)[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(output, (x, *weights), fast_mode=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "size_of_b", "factor"),
    [("bf16 base", 0.1, 1.3), ("bf16 base", 1.0, 2.0), ("bf16-mixed", 0.1, 1.0), ("bf16-mixed", 1.0, 1.05)],
)
def test_bf16_is_about_as_close_to_exact_numbers_as_peft(precision: str, size_of_b: float, factor: float) -> None:
    """With ``size_of_b`` 1, the adapter adds as much as the base does; PEFT multiplies it in float32 on a bf16 base."""
    is_mixed = precision == "bf16-mixed"
    errors: dict[str, Counter[str]] = {"fused": Counter(), "PEFT": Counter()}
    for alpha in range(2, 18):
        model = lora_net(torch.bfloat16, lora_alpha=alpha)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weight.data = torch.randn_like(weight) * weight.std() * (size_of_b if "lora_B" in name else 1)
        exact = numbers(copy.deepcopy(model).double(), inputs(torch.bfloat16).double())
        model = model.float() if is_mixed else model
        for way, computed in (("fused", fused(model)), ("PEFT", model)):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
                found = numbers(computed, inputs(torch.bfloat16).to(torch.float32 if is_mixed else torch.bfloat16))
            for name, tensor in found.items():
                errors[way][name] += distance(tensor, exact[name])
    for name, error in errors["PEFT"].items():
        assert 0.01 < errors["fused"][name] < factor * error, name


def test_inputs_are_kept_once_and_in_their_dtype() -> None:
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    model, x = fused(lora_net(torch.bfloat16)), inputs(torch.bfloat16).requires_grad_()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model.model.up(x)
    assert {dtype for dtype, _ in kept} == {torch.bfloat16}
    # x, x A^T, and the weights A, W and B
    assert [shape for _, shape in kept] == [(2, 50, 32), (100, 6), (6, 32), (80, 32), (80, 6)]


class Products(TorchDispatchMode):
    """Number of matrix products that are computed, not taken from a cache, by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_recomputes_no_large_product() -> None:
    model, x = lora_net(torch.bfloat16), inputs(torch.bfloat16)
    wanted = numbers(fused(model), x)
    x = x.requires_grad_()
    out = checkpoint(fused(model, checkpointing="selective"), x, **checkpointing.options("selective"))
    with Products() as backward:
        out.double().square().sum().backward()
    assert backward.calls["aten.addmm.default"] == 0  # sums with the base's products are in the cache
    assert backward.calls["aten.addmm.out"] == backward.calls["aten.mm.out"] == 1  # those of the rank's columns
    assert torch.equal(out, wanted["output"])
    assert x.grad is not None
    assert torch.equal(x.grad, wanted["x"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ("plain", "aot_eager"),
        ("bias of B", "aot_eager"),
        ("bias of the base", "aot_eager"),
        ("plain", "inductor"),
    ],
)
@without_cpp
def test_compiles_as_one_graph(options: str, backend: str) -> None:
    model = fused(lora_net(**OPTIONS[options]))
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True, dynamic=True)
    wanted = numbers(model, inputs())
    found, graphs = run_and_get_code(numbers, compiled, inputs())
    for tensor, other in zip(wanted.values(), found.values(), strict=True):
        assert distance(other, tensor) < 1e-6
    assert all(graph.count("ops.lit_ft.add_product.default(") == 2 for graph in graphs)  # in place, not from a copy


def test_merging_switching_off_and_parameters_are_those_of_peft() -> None:
    model, x = lora_net(), inputs()
    other = fused(model)
    assert list(other.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        adapted = model(x)
        with model.disable_adapter(), other.disable_adapter():
            assert torch.equal(other(x), model(x))
            assert distance(other(x), adapted) > 0.1
        for change in (other.merge_adapter, other.unmerge_adapter):
            change()
            assert distance(other(x), adapted) < 1e-6
        assert distance(other.merge_and_unload()(x), adapted) < 1e-6


# --- layers with the same input -------------------------------------------------------------------------


class Block(nn.Module):
    """Layers with the names that transformers gives them; ``v_proj`` is called before ``k_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 48), nn.Linear(32, 16, bias=False), nn.Linear(32, 16)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(48, 64), nn.Linear(48, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, v, k = self.q_proj(x), self.v_proj(x), self.k_proj(x)
        x = q * torch.cat([k, v.sigmoid(), k + v], dim=-1)
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def lora_block(dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"r": 6, "target_modules": ".*_proj", "init_lora_weights": False, **options}
    return get_peft_model(Block().to(dtype), LoraConfig(**options))


TOGETHER: dict[str, dict[str, Any]] = {
    "plain": {},
    "rsLoRA": {"use_rslora": True},
    "bias of B": {"lora_bias": True},
    "bias of the base": {"bias": "all"},
    "other ranks": {"rank_pattern": {"k_proj": 2, "up_proj": 9}, "alpha_pattern": {"v_proj": 3}},
    "two of three": {"target_modules": ["q_proj", "v_proj"]},
}


@pytest.mark.parametrize("trains_x", [True, False])
@pytest.mark.parametrize("options", TOGETHER)
def test_layers_with_the_same_input_compute_what_peft_does(options: str, trains_x: bool) -> None:
    model = lora_block(**TOGETHER[options])
    other = fused(model)
    wanted, found = (numbers(m, inputs(), trains_x) for m in (model, other))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert distance(found[name], tensor) < 1e-6, name
    aheads = {layer.ahead for layer in other.modules() if isinstance(layer, Fused) and layer.others}
    assert len(aheads) == (1 if options == "two of three" else 2)
    assert not any(ahead.is_off or ahead.outputs or ahead.x is not None for ahead in aheads)


def test_the_first_layer_that_is_called_computes_the_others() -> None:
    """Falcon-H1 calls up_proj before gate_proj."""

    def up_first(block: Any, x: Tensor) -> Tensor:
        y = block.up_proj(x)
        assert list(block.gate_proj.ahead.outputs) == [0]
        return block.down_proj(y * nn.functional.silu(block.gate_proj(x)))

    block = fused(lora_block()).base_model.model
    x = torch.randn(3, 48)
    expected = block.down_proj(nn.functional.silu(block.gate_proj(x)) * block.up_proj(x))
    for _ in range(2):
        assert distance(up_first(block, x), expected) < 1e-6
    block.up_proj(x)
    copied = copy.deepcopy(block)  # as for a merge: what waits for gate_proj is not copied
    assert not copied.gate_proj.ahead.outputs
    assert distance(up_first(copied, x), expected) < 1e-6
    assert distance(block.gate_proj(x), copied.gate_proj(x)) < 1e-6


def test_gradients_of_layers_with_the_same_input_are_those_of_finite_differences() -> None:
    model = fused(lora_block(torch.float64, lora_bias=True, rank_pattern={"k_proj": 2})).double()
    weights = [p for p in model.parameters() if p.requires_grad]
    x = inputs(torch.float64)[:1, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, *_: model(x), (x, *weights), fast_mode=True)


class SizesOfProducts(TorchDispatchMode):
    """Shapes of the second matrix of each product."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            self.sizes[(*args[1].shape,)] += 1
        return func(*args, **(kwargs or {}))


def test_an_input_is_read_once_for_all_layers() -> None:
    model, x = fused(lora_block()), inputs().requires_grad_()
    with SizesOfProducts() as forward:
        out = model(x)
    with SizesOfProducts() as backward:
        out.sum().backward()
    assert {size: count for size, count in forward.sizes.items() if size[0] != 6} == {
        (32, 18): 1,
        (48, 12): 1,
        (64, 6): 1,
    }
    of_inputs = {size: count for size, count in backward.sizes.items() if size[0] != 100 and size[1] != 6}
    assert of_inputs == {(18, 32): 1, (12, 48): 1, (6, 64): 1}
    assert backward.sizes[100, 32] == backward.sizes[100, 48] == 1  # gradients of all matrices A


def other_input(block: Any) -> None:
    proj = block.k_proj
    block.__dict__["k_proj"] = lambda x: proj(x + 0)


def left_out(block: Any) -> None:
    proj = block.k_proj.base_layer
    block.__dict__["k_proj"] = lambda x: proj(x)


def hooked(block: Any) -> None:
    block.v_proj.register_forward_pre_hook(lambda _, args: (2 * args[0],))


@pytest.mark.parametrize(("change", "is_off"), [(other_input, True), (left_out, True), (hooked, False)])
def test_layers_whose_inputs_differ_compute_their_own_outputs(change: Any, is_off: bool) -> None:
    class Looked(Block):
        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

    model = lora_block()
    other = fused(model)
    for one in (model, other):
        one.base_model.model.__class__ = Looked
        change(one.base_model.model)
    for _ in range(2):
        wanted, found = numbers(model, inputs()), numbers(other, inputs())
        for name, tensor in wanted.items():
            assert (tensor is None) == (found[name] is None), name  # of a layer that is not called
            assert tensor is None or distance(found[name], tensor) < 1e-6, name
    ahead = other.base_model.model.q_proj.ahead
    assert ahead.is_off == is_off
    assert not ahead.outputs


@pytest.mark.parametrize("options", [{"lora_dropout": 0.3}, {"target_modules": ["q_proj", "up_proj"]}])
def test_layers_with_dropout_or_without_others_are_computed_alone(options: dict[str, Any]) -> None:
    model = lora_block(**options)
    wanted, found = numbers(model, inputs()), numbers(fused(model), inputs())
    for name, tensor in wanted.items():
        assert distance(found[name], tensor) < 1e-6, name


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@without_cpp
def test_layers_with_the_same_input_are_in_one_graph(backend: str) -> None:
    model = fused(lora_block())
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=backend, fullgraph=True, dynamic=True)
    for rows in (inputs(), inputs()[:, :31]):
        compiled.zero_grad(), model.zero_grad()
        found, wanted = numbers(compiled, rows), numbers(model, rows)
        for tensor, other in zip(wanted.values(), found.values(), strict=True):
            assert distance(other, tensor) < 1e-6


# --- where PEFT computes the layer ----------------------------------------------------------------------


def with_two_adapters(model: PeftModel) -> None:
    model.add_adapter("second", LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])


def with_a_hook(model: PeftModel) -> None:
    model.base_model.model.up.base_layer.register_forward_hook(lambda *_: None)


def with_a_trained_base(model: PeftModel) -> None:
    model.base_model.model.up.base_layer.requires_grad_(True)


def with_an_own_forward(model: PeftModel) -> None:
    layer = model.base_model.model.up.lora_A["default"]
    layer.forward = layer.forward


def with_another_kind_of_layer(model: PeftModel) -> None:
    class Other(nn.Linear):
        pass

    model.base_model.model.up.base_layer.__class__ = Other


@pytest.mark.parametrize(
    ("change", "notice"),
    [
        (with_two_adapters, "2 adapters are active"),
        (with_a_hook, "their parts have hooks"),
        (with_an_own_forward, "or a forward pass of their own"),
        (with_a_trained_base, "their base weights train"),
        (with_another_kind_of_layer, "a part of them is a Other"),
    ],
)
def test_peft_computes_other_calls_and_one_notice_gives_the_reason(
    change: Any, notice: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = lora_net()
    other = fused(model)
    for changed in (model, other):
        torch.manual_seed(3)
        change(changed)
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        wanted, found, _ = numbers(model, inputs()), numbers(other, inputs()), other(inputs())
    assert [notice in message for message in caplog.messages] == [True]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert distance(found[name], tensor) < 1e-6, name


def nf4(compute: torch.dtype = torch.float32, nested: bool = False) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=nested,
    )


INT8 = BitsAndBytesConfig(load_in_8bit=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "notice"),
    [
        ({"peft": LoraConfig(target_modules="all-linear")}, None),
        ({"peft": LoraConfig(target_modules="all-linear"), "fused_lora": False}, None),
        ({"peft": LoraConfig(target_modules=["q_proj"], use_dora=True)}, "2 LoRA layers itself (DoraLinearVariant)"),
        ({"peft": LoraConfig(target_modules=["q_proj"]), "quantization": INT8}, "2 LoRA layers itself (Linear8bitLt)"),
        ({"peft": LoraConfig(target_modules=["q_proj", "embed_tokens"])}, "1 LoRA layers itself (Embedding)"),
        ({"peft": None}, None),
    ],
    ids=["plain", "off", "DoRA", "quantized base", "embedding", "no adapter"],
)
def test_a_notice_names_the_layers_that_peft_computes(
    model_folder: str, options: dict[str, Any], notice: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        module = CausalLM(model_folder, **options)
        module.configure_model()
    said = [message for message in caplog.messages if "fused_lora" in message]
    assert [notice in message for message in said] == ([] if notice is None else [True])
    count = sum(isinstance(layer, FusedLinear) for layer in module.modules())
    is_plain = notice is None and options["peft"] is not None and options.get("fused_lora", True)
    assert count == (14 if is_plain else 2 if "embed" in str(options) else 0)


# --- in training ----------------------------------------------------------------------------------------


class Numbers(Callback):
    """Loss of each micro-batch, and gradients of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.gradients += [p.grad.clone() for p in pl_module.trainable_parameters().values()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


RUNS: dict[str, dict[str, Any]] = {
    "dropout": {"peft": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)},
    "checkpointing": {"gradient_checkpointing": True},
    "selective checkpointing": {"gradient_checkpointing": "selective"},
    "NEFTune, LoRA+": {"neftune_alpha": 5, "lr_factors": {"lora_B": 16}},
    "added tokens": {"added_tokens": ["<a>", "<b>"]},
    "NF4": {"quantization": nf4(), "gradient_checkpointing": True},
    "NF4, selective checkpointing": {"quantization": nf4(), "gradient_checkpointing": "selective"},
    "NF4, nested, dropout": {
        "quantization": nf4(nested=True),
        "peft": LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2),
    },
    "modules_to_save": {"peft": LoraConfig(r=4, target_modules="all-linear", modules_to_save=["lm_head"])},
}


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_runs_are_those_with_peft(make_trainer: Any, model_folder: str, write_rows: Any, run: str) -> None:
    found = {True: Numbers(), False: Numbers()}
    for is_fused, record in found.items():
        torch.manual_seed(0)
        options = {"peft": LoraConfig(r=4, target_modules="all-linear"), **RUNS[run]}
        trainer = make_trainer(max_steps=3, accumulate_grad_batches=2, callbacks=[record])
        module = CausalLM(model_folder, fused_lora=is_fused, **options)
        trainer.fit(module, TextDataModule(write_rows(), micro_batch_size=4, shuffle=False))
    assert found[True].losses == pytest.approx(found[False].losses, rel=1e-6)
    assert len(found[True].losses) == 6
    for tensor, wanted in zip(found[True].gradients, found[False].gradients, strict=True):
        torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-6)


def test_four_bit_weights_are_computed_in_their_dtype_and_in_training(
    model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = pack_samples([(np.arange(3, 20), np.arange(3, 20))])
    for compute, notice in ((torch.float32, []), (torch.bfloat16, ["float32 and bnb_4bit_compute_dtype is torch.bf"])):
        peft = LoraConfig(r=4, target_modules=["q_proj"])
        module = CausalLM(model_folder, peft=peft, quantization=nf4(compute), dtype="float32")
        module.configure_model()
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning.pytorch"):
            for trains in (True, False):
                module.train(trains)
                with Products() as computed:
                    module(row)
                dense = computed.calls["bitsandbytes.dequantize_4bit.default"]
                assert dense == (2 if trains and not notice else 0)  # layers with an adapter
        said = [message for message in caplog.messages if "fused_lora" in message]
        assert [notice[0] in message for message in said] == [True] * len(notice)


HOOKS = "their parts have hooks, or a forward pass of their own"
STRATEGIES: dict[str, tuple[Any, set[str]]] = {
    "ddp": (lambda: "ddp", set()),
    "fsdp": (FSDPStrategy, set()),
    "tp2": (lambda: ModelParallelStrategy(tensor_parallel_size=2), set()),
    "pp2": (lambda: ModelParallelStrategy(pipeline_parallel_size=2), set()),
    "zero3": (lambda: DeepSpeedStrategy(stage=3), {HOOKS}),
}
"""What makes a strategy, and the notices that a run with it prints."""


def notices(make_trainer: Any, model_folder: str, data: str, strategy: str) -> set[str]:
    module = CausalLM(model_folder, peft=LoraConfig(r=4, target_modules="all-linear"))
    trainer = make_trainer(max_steps=1, devices=2, strategy=STRATEGIES[strategy][0](), use_distributed_sampler=False)
    trainer.fit(module, TextDataModule(data, micro_batch_size=2))
    return set.union(*(layer.reported for layer in module.modules() if isinstance(layer, FusedLinear)))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_compute_the_function(
    make_trainer: Any, model_folder: str, write_rows: Any, live_ranks: LiveRanks, strategy: str
) -> None:
    found = live_ranks(2, notices, make_trainer, model_folder, write_rows(), strategy)
    assert found == [STRATEGIES[strategy][1]] * 2

"""The formula for FLOPs against torch's counter, and peaks by device."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lit_callbacks.throughput.batch_counts import BatchCounts, count_batch
from lit_callbacks.throughput.flops import TransformerFlops
from lit_callbacks.throughput.peak_flops import DATASHEETS, datasheet_peak, measured_peak
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION_INPUTS = {"gpt2": ["c_attn"]}


def tiny(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    configs = {
        "qwen2": lambda: transformers.Qwen2Config(**SIZES, **HEADS),
        "llama": lambda: transformers.LlamaConfig(**SIZES, **HEADS),
        "gpt2": lambda: transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=3, n_head=4, n_positions=64),
        "mixtral": lambda: transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    }
    # Products one by one: the counter knows no fused attention on a CPU, and no grouped products.
    options = {"experts_implementation": "eager"} if name == "mixtral" else {}
    return transformers.AutoModelForCausalLM.from_config(configs[name](), attn_implementation="eager", **options)


def with_lora(model: Any, name: str, modules: list[str] | str | None = None) -> Any:
    peft = pytest.importorskip("peft")
    modules = modules or ATTENTION_INPUTS.get(name, ["q_proj", "v_proj"])
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules, fan_in_fan_out=name == "gpt2"))


def counted(model: nn.Module, batch: dict[str, Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    return counter.get_total_flops()


def padded_batch(length: int = 40) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (3, length))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("tuning", ["full", "lora"])
@pytest.mark.parametrize("name", ["qwen2", "llama", "gpt2", "mixtral"])
def test_the_formula_equals_the_counter(name: str, tuning: str) -> None:
    model = tiny(name) if tuning == "full" else with_lora(tiny(name), name)
    batch = padded_batch()
    formula = TransformerFlops.of(model)
    assert formula is not None
    assert formula(count_batch(batch)) == pytest.approx(counted(model, batch), rel=0.01)


@pytest.mark.parametrize("modules", ["all-linear", ["k_proj"], ["down_proj"], ["o_proj", "up_proj"]])
def test_which_gradients_are_computed_depends_on_where_the_adapter_is(modules: Any) -> None:
    """Below the first weight that trains nothing flows back: exact, not within a tolerance."""
    model, batch = with_lora(tiny("llama"), "llama", modules), padded_batch()
    formula = TransformerFlops.of(model)
    assert formula is not None
    # The counter sees the rotary frequencies times positions as a product too: 1 FLOP a pair of channels and token.
    assert formula(count_batch(batch)) == pytest.approx(counted(model, batch), rel=1e-3)


@pytest.mark.parametrize("shape", [(1, 40, 64), (40, 64)])
def test_learned_positions_are_added_and_not_multiplied(shape: tuple[int, ...]) -> None:
    class Own(nn.Module):
        """A model of someone's own, with the names of a Hugging Face style config."""

        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(num_hidden_layers=1, num_attention_heads=4, hidden_size=64)
            self.pos_embed = nn.Parameter(torch.zeros(shape))
            self.wte, self.qkv, self.head = nn.Embedding(96, 64), nn.Linear(64, 192), nn.Linear(64, 96, bias=False)
            self.head.weight = self.wte.weight

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(self.wte(input_ids) + self.pos_embed).chunk(3, -1)
            return self.head(torch.softmax(query @ key.transpose(1, 2), -1) @ value)

    ids = torch.randint(0, 96, (3, 40))
    with FlopCounterMode(display=False) as counter:
        (model := Own())(ids).sum().backward()
    formula = TransformerFlops.of(model)
    assert formula is not None
    assert formula(count_batch({"input_ids": ids})) == counter.get_total_flops()


def test_layers_above_the_last_that_is_frozen() -> None:
    model, batch = tiny("qwen2"), padded_batch()
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.2." in parameter_name or "norm" in parameter_name.rpartition("layers")[0]
    formula = TransformerFlops.of(model)
    assert formula is not None
    assert formula(count_batch(batch)) == pytest.approx(counted(model, batch), rel=1e-3)


def test_weights_cost_six_four_or_two_flops_a_token() -> None:
    full = TransformerFlops.of(tiny("llama"))
    frozen = TransformerFlops.of(with_lora(tiny("llama"), "llama", ["q_proj"]))
    nothing = TransformerFlops.of(tiny("llama").requires_grad_(False))
    assert full is not None and frozen is not None and nothing is not None  # noqa: PT018
    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 112)
    adapter = 3 * 2 * 4 * 64
    below = 64 * 64 + 2 * 64 * 32  # the first layer's q, k and v have no gradients of their input
    first_a = 4 * 64
    assert full.per_token == 6 * weights
    assert full.per_head_position == 6 * 96 * 64
    assert frozen.per_token == 4 * weights - 2 * below + 6 * adapter - 2 * first_a
    assert frozen.per_head_position == 4 * 96 * 64
    assert nothing.per_token == 2 * weights


def test_the_head_is_counted_where_it_is_computed() -> None:
    formula = TransformerFlops.of(tiny("llama"))
    assert formula is not None
    counts = {"non_padding_tokens": 9, "lengths": [4, 5]}
    difference = formula(BatchCounts(head_positions=9, **counts)) - formula(BatchCounts(head_positions=3, **counts))  # type: ignore[operator, arg-type]
    assert difference == 6 * 6 * 96 * 64


def test_a_sliding_window_limits_the_pairs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(**SIZES, **HEADS, sliding_window=8)
    formula = TransformerFlops.of(transformers.MistralForCausalLM(config))
    assert formula is not None
    assert formula.per_pair == {8: 3 * 12 * 64}


@pytest.mark.slow
def test_layers_may_have_heads_of_other_widths() -> None:
    transformers = pytest.importorskip("transformers", "5.24")
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.Gemma4TextConfig(**SIZES, **HEADS, head_dim=8, global_head_dim=16, layer_types=kinds)
    formula = TransformerFlops.of(transformers.Gemma4ForCausalLM(config))
    assert formula is not None
    assert formula.per_pair == {config.sliding_window: 2 * 12 * 4 * 8, None: 12 * 4 * 16}


def test_a_model_on_the_meta_device_has_the_same_formula() -> None:
    with torch.device("meta"):
        skeleton = tiny("mixtral")
    assert TransformerFlops.of(skeleton) == TransformerFlops.of(tiny("mixtral"))


def test_no_config_no_formula() -> None:
    assert TransformerFlops.of(nn.Linear(2, 2)) is None


def test_where_tokens_do_not_tell_the_flops_there_is_no_formula() -> None:
    transformers = pytest.importorskip("transformers")
    seq2seq = transformers.T5Config(vocab_size=96, d_model=64, d_ff=112, d_kv=16, num_layers=2, num_heads=4)
    assert TransformerFlops.of(transformers.T5ForConditionalGeneration(seq2seq)) is None
    assert TransformerFlops.of(nn.ModuleDict({"teacher": tiny("llama"), "student": tiny("llama")})) is None
    picture = transformers.CLIPVisionConfig(**SIZES, **HEADS, image_size=8, patch_size=4)
    two_kinds = nn.ModuleList([tiny("llama"), transformers.CLIPVisionModel(picture)])
    assert TransformerFlops.of(two_kinds) is None


@pytest.mark.parametrize(
    ("device", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA H100 NVL", torch.float16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16, None),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("Tesla V100-SXM2-16GB", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65),
        ("NVIDIA A10G", torch.bfloat16, None),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("Some other chip", torch.bfloat16, None),
    ],
)
def test_peaks_by_name(device: str, dtype: torch.dtype, teraflops: float | None) -> None:
    peak = datasheet_peak(device, dtype)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_fp32_on_tensor_cores() -> None:
    assert datasheet_peak("NVIDIA A100-SXM4-80GB", torch.float32, tf32=True) == 156e12
    assert datasheet_peak("Tesla T4", torch.float32, tf32=True) == 8.1e12


def test_no_peak_is_slower_than_a_wider_dtypes() -> None:
    for words, peaks in DATASHEETS:
        assert peaks[torch.float16] >= peaks.get("tf32", 0) >= 0, words
        assert peaks.get("tf32", peaks[torch.float32]) >= peaks[torch.float32], words


def test_a_measured_peak_is_what_a_product_reaches() -> None:
    peak = measured_peak(torch.device("cpu"), torch.float32, size=512, seconds=0.2)
    left = torch.randn(512, 512)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        left @ left
        seconds.append(time.perf_counter() - started)
    assert 0.3 < peak / (2 * 512**3 / min(seconds)) < 3

"""Where and when the weights of a quantized base are quantized: on the device of the run, one at a time."""

import gc
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lit_callbacks.memory.storage_ledger import local_bytes
from peft import LoraConfig
from shared_fixtures import tiny_qwen2
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel

from lit_ft import CausalLM, TextDataModule
from lit_ft.model.loading import load_base
from lit_ft.model.quantization import linear_modules, reading_options

pytestmark = pytest.mark.slow

SCHEMES = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}
QUANTIZES = ("bitsandbytes::quantize_4bit", "bitsandbytes::int8_vectorwise_quant")
GPU = torch.device("cuda", 0)
LAYERS, WIDTH = 2, 128


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Qwen2 whose linear layers are far larger than its embeddings."""
    folder = tmp_path_factory.mktemp("models") / "deep-qwen2"
    sizes = {"hidden_size": WIDTH, "intermediate_size": 512, "num_hidden_layers": LAYERS, "num_key_value_heads": 4}
    model, tokenizer = tiny_qwen2(**sizes, tie_word_embeddings=False, initializer_range=0.02)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class OnThisMachine(TorchFunctionMode):
    """Context manager that runs on the CPU what asks for a GPU, and notes the sizes of the matrices asked for there."""

    def __init__(self, events: list[tuple[str, torch.Size]]) -> None:
        super().__init__()
        self.events = events

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.to and GPU in (*args, kwargs.get("device")) and args[0].dim() == 2:
            self.events.append(("moved", args[0].shape))
        here = [torch.device("cpu") if one == GPU else one for one in args] if func is torch.Tensor.to else args
        if kwargs.get("device") == GPU:
            kwargs["device"] = torch.device("cpu")
        return func(*here, **kwargs)


class Quantizations(TorchDispatchMode):
    """Context manager that notes each weight that is quantized, and, if asked, the dense matrices in memory then."""

    def __init__(self, events: list[tuple[str, torch.Size]], looks_at_memory: bool = False) -> None:
        super().__init__()
        self.events, self.looks_at_memory = events, looks_at_memory
        self.dense_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in QUANTIZES:
            self.events.append(("quantized", args[0].shape))
            if self.looks_at_memory:
                self.dense_bytes.append(dense_bytes())
        return func(*args, **(kwargs or {}))


def dense_bytes() -> int:
    """Bytes of all new matrices of at least the size of a layer's that have values and are not quantized."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.device.type == "cpu"]
    return local_bytes(t for t in tensors if t.dim() == 2 and t.is_floating_point() and min(t.shape) >= WIDTH)


def read_as_for_a_gpu(
    folder: str, quantization: BitsAndBytesConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[PreTrainedModel, list[tuple[str, torch.Size]], list[int]]:
    """Read a base as Lightning builds it for a GPU; a CPU computes what the GPU would."""
    memory = {"mem_get_info": (2**40, 2**40), "memory_reserved": 0, "memory_allocated": 0}
    for name, value in memory.items():  # what transformers asks of the GPU before it reads
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    events: list[tuple[str, torch.Size]] = []
    with Quantizations(events, looks_at_memory=True) as seen, OnThisMachine(events), GPU:
        base = load_base(folder, quantization=quantization)
    return base, events, seen.dense_bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_quantized_one_by_one_where_the_run_is(
    scheme: str, deep_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    gc.freeze()  # what follows looks at newer objects alone
    base, events, dense = read_as_for_a_gpu(deep_folder, SCHEMES[scheme], monkeypatch)
    quantized = [place for place, (what, _) in enumerate(events) if what == "quantized"]
    assert len(quantized) == len(linear_modules(base)) == 7 * LAYERS
    for place in quantized:  # moved dense, and quantized there before the next one is moved
        assert events[place - 1] == ("moved", events[place][1])
    embeddings = sum(4 * one.weight.numel() for one in (base.get_input_embeddings(), base.get_output_embeddings()))
    # Besides the embeddings, which stay dense, there is one weight in fp32; LLM.int8 reads it in fp16.
    per_value = {"nf4": 4, "int8": 4 + 2}[scheme]
    assert dense == [embeddings + per_value * events[p][1].numel() for p in quantized]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_quantizes_no_weight(scheme: str, deep_folder: str, make_trainer: Any, write_rows: Any) -> None:
    peft = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    module = CausalLM(deep_folder, peft=peft, quantization=SCHEMES[scheme])
    events: list[tuple[str, torch.Size]] = []
    with Quantizations(events):
        make_trainer(max_steps=2).fit(module, TextDataModule(write_rows(), micro_batch_size=2))
    weights = [shape for _, shape in events if min(shape) >= WIDTH]
    assert len(weights) == 7 * LAYERS


def test_without_a_gpu_and_for_stored_layers_it_is_the_cpu(deep_folder: str) -> None:
    config, stored = AutoConfig.from_pretrained(deep_folder), AutoConfig.from_pretrained(deep_folder)
    stored.quantization_config = {"quant_method": "gptq", "bits": 4}
    assert reading_options(config, SCHEMES["nf4"])["device_map"] == {"": "cpu"}
    with GPU:
        assert reading_options(config, SCHEMES["nf4"])["device_map"] == {"": GPU}
        assert reading_options(stored, None)["device_map"] == {"": "cpu"}
    with torch.device("meta"):
        assert reading_options(config, SCHEMES["int8"])["device_map"] == {"": "cpu"}

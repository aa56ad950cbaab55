"""Quantized checkpoints made from a dense one, each with its dequantized checkpoint.

Legend: w a weight ``(out, in)``; q its integers; s scales; z zero points; groups lie along the inputs.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from shared_fixtures import make_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM

GROUP = 32
Stored = tuple[dict[str, Tensor], Tensor]
"""Tensors that a checkpoint has in place of a weight, and the dequantized weight."""


def pack(integers: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Pack eight 4-bit integers of a row into each int32; the first of ``order`` is in the lowest bits."""
    eights = integers.reshape(len(integers), -1, 8)[..., list(order)].to(torch.int64)
    packed = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def four_bits(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Quantize to 4 bits: q ``(out, in)``, z and s ``(out, groups)``, and the dequantized weight in fp16."""
    groups = w.reshape(len(w), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    s = ((high - low) / 15).half().float()
    z = (-low / s).round()
    q = (groups / s[..., None] + z[..., None]).round().clamp(0, 15)
    dense = ((q - z[..., None]) * s[..., None]).reshape(w.shape)
    return q.reshape(w.shape), z, s, dense.half().float()


def gptq(w: Tensor) -> Stored:
    q, z, s, dense = four_bits(w)
    group_of = (torch.arange(w.shape[1]) // GROUP).int()
    # Zero points are stored minus one, modulo 16: 0 as 15.
    parts = {"qweight": pack(q).t(), "qzeros": pack((z.t() - 1) % 16), "scales": s.t().half(), "g_idx": group_of}
    return parts, dense


def awq(w: Tensor) -> Stored:
    q, z, s, dense = four_bits(w)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(q.t(), order), "qzeros": pack(z.t(), order), "scales": s.t().half()}, dense


def packed_int4(w: Tensor) -> Stored:
    groups = w.reshape(len(w), -1, GROUP)
    s = groups.abs().amax(-1, keepdim=True) / 7
    q = (groups / s).round()
    parts = {"weight_packed": pack((q + 8).reshape(w.shape)), "weight_shape": torch.tensor(w.shape)}
    return {**parts, "weight_scale": s[..., 0]}, (q * s).reshape(w.shape)


def int8(w: Tensor) -> Stored:
    s = w.abs().amax(1, keepdim=True) / 127
    q = (w / s).round()
    return {"weight": q.to(torch.int8), "weight_scale": s}, q * s


def float8(w: Tensor, scale: str = "weight_scale") -> Stored:
    s = (w.abs().amax() / 448).reshape(1)
    q = (w / s).to(torch.float8_e4m3fn)
    return {"weight": q, scale: s.reshape(1, 1) if scale.endswith("inv") else s}, q.float() * s


def _compressed_tensors(format: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_PER_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}
FORMATS: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "fp8": (
        lambda w: float8(w, "weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "compressed-tensors int4": (
        packed_int4,
        _compressed_tensors(
            "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}, None
        ),
    ),
    "compressed-tensors int8": (
        int8,
        _compressed_tensors(
            "int-quantized",
            {"num_bits": 8, "type": "int", "strategy": "channel"},
            {"num_bits": 8, "type": "int", **_PER_TOKEN},
        ),
    ),
    "compressed-tensors float8": (
        float8,
        _compressed_tensors(
            "float-quantized",
            {"num_bits": 8, "type": "float", "strategy": "tensor"},
            {"num_bits": 8, "type": "float", **_PER_TOKEN},
        ),
    ),
}


def write(dense: str, format: str, folder: Path) -> tuple[str, str]:
    """Write a checkpoint in ``format`` and its dequantized checkpoint; returns their folders."""
    quantize, config = FORMATS[format]
    weights = load_file(f"{dense}/model.safetensors")
    stored, stands_for = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith("proj.weight")]:
        parts, stands_for[name] = quantize(stored.pop(name))
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    if format in ("gptq", "awq"):  # their layers have fp16 biases
        stands_for = {n: t.half().float() if n.endswith("proj.bias") else t for n, t in stands_for.items()}
    for name, tensors, extra in (("quantized", stored, {"quantization_config": config}), ("dense", stands_for, {})):
        shutil.copytree(dense, folder / name)
        save_file(
            {n: t.contiguous() for n, t in tensors.items()}, folder / name / "model.safetensors", {"format": "pt"}
        )
        settings = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**settings, **extra}))
    return str(folder / "quantized"), str(folder / "dense")


def dense_of(folder: str, quantization: Any, out: Path, dtype: str = "float32", tokenizer: Any = None) -> str:
    """The requested base's weights, rounded as it has them, as a dense checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=quantization, device_map={"": "cpu"}, dtype=dtype
    )
    if quantization.quant_method == "bitsandbytes":
        model = model.dequantize()
    else:
        packed, model = model, AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in model.named_parameters():
            stands_for = packed.get_parameter(name)
            parameter.data = stands_for.dequantize() if hasattr(stands_for, "dequantize") else stands_for
    model.save_pretrained(out)
    (tokenizer or make_tokenizer()).save_pretrained(out)
    return str(out)


def give_adapter(to: CausalLM, source: CausalLM) -> None:
    """GPTQ's layers come in another order than the dense ones, and new weights are drawn in that order."""
    with torch.no_grad():
        for name, parameter in to.trainable_parameters().items():
            parameter.copy_(source.trainable_parameters()[name])

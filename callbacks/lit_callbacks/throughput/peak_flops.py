"""Peak FLOP/s of a device, from vendors' datasheets or by measurement."""

import time
from collections import Counter

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn

TERA = 1e12
TF32 = "tf32"
Peaks = dict[torch.dtype | str, float]


def _tensor_cores(half: float, tf32: float, fp32: float, fp64: float | None = None) -> Peaks:
    peaks: Peaks = {torch.bfloat16: half, torch.float16: half, TF32: tf32, torch.float32: fp32}
    return peaks if fp64 is None else {**peaks, torch.float64: fp64}


# TFLOP/s of dense matrix products with fp32 accumulation: datasheet figures "with sparsity" are halved. The first entry
# whose words are all in the device's name is used, so variants come before the general name. fp64 is the figure of
# tensor cores, which matrix products use.
DATASHEETS: list[tuple[tuple[str, ...], Peaks]] = [
    # NVIDIA DGX B200 datasheet (8 GPUs: 72 PFLOP/s FP8 with sparsity), NVIDIA Blackwell architecture technical brief.
    (("gb200",), _tensor_cores(2500, 1250, 80)),
    (("b200",), _tensor_cores(2250, 1125, 75)),
    # NVIDIA H200 Tensor Core GPU datasheet (hpc-datasheet-sc23-h200), columns SXM and NVL, halved.
    (("h200", "nvl"), _tensor_cores(835.5, 417.5, 60, 60)),
    (("h200",), _tensor_cores(989.4, 494.7, 66.9, 66.9)),
    (("gh200",), _tensor_cores(989.4, 494.7, 66.9, 66.9)),
    # NVIDIA H100 Tensor Core GPU datasheet (resources.nvidia.com/en-us-tensor-core) and H100 whitepaper, table 2.
    (("h100", "nvl"), _tensor_cores(835.5, 417.5, 60, 60)),
    (("h100", "pcie"), _tensor_cores(756, 378, 51.2, 51.2)),
    (("h100",), _tensor_cores(989.4, 494.7, 66.9, 66.9)),
    (("h800",), _tensor_cores(989.4, 494.7, 66.9)),
    # NVIDIA A100 Tensor Core GPU datasheet (nvidia-a100-datasheet-us-nvidia-1758950-r4); A800 has the same cores.
    (("a100",), _tensor_cores(312, 156, 19.5, 19.5)),
    (("a800",), _tensor_cores(312, 156, 19.5)),
    # NVIDIA datasheets A30, A40, A10; NVIDIA RTX A6000 datasheet (309.7 with sparsity).
    (("a30",), _tensor_cores(165, 82, 10.3, 10.3)),
    (("a40",), _tensor_cores(149.7, 74.8, 37.4)),
    (("a10",), _tensor_cores(125, 62.5, 31.2)),
    (("rtx", "a6000"), _tensor_cores(154.8, 77.4, 38.7)),
    # NVIDIA datasheets L40S (733 with sparsity), L40, L4 (242 with sparsity).
    (("l40s",), _tensor_cores(362, 183, 91.6)),
    (("l40",), _tensor_cores(181, 90.5, 90.5)),
    (("l4",), _tensor_cores(121, 60, 30.3)),
    # NVIDIA Ada GPU architecture whitepaper v2.1, appendix A, and Ampere GA102 whitepaper v2, table 9: "with FP32
    # accumulate", which is half of the FP16 figure on GeForce.
    (("rtx", "4090"), _tensor_cores(165.2, 82.6, 82.6)),
    (("rtx", "3090"), _tensor_cores(71, 35.6, 35.6)),
    # NVIDIA V100 datasheet (volta-v100-datasheet-update) and T4 datasheet: no bf16, no TF32.
    (("v100", "sxm"), {torch.float16: 125, torch.float32: 15.7, torch.float64: 7.8}),
    (("v100",), {torch.float16: 112, torch.float32: 14, torch.float64: 7}),
    (("t4",), {torch.float16: 65, torch.float32: 8.1}),
    # AMD Instinct MI300X and MI325X data sheets (matrix, dense); MI250X: one of its two dies, which is what torch sees.
    (("mi325x",), _tensor_cores(1307.4, 653.7, 163.4, 163.4)),
    (("mi300x",), _tensor_cores(1307.4, 653.7, 163.4, 163.4)),
    (("mi250x",), _tensor_cores(191.5, 47.9, 47.9, 47.9)),
]


def datasheet_peak(device_name: str, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a device by its name; None if its datasheet is not in ``DATASHEETS``.

    Args:
        device_name: name from ``torch.cuda.get_device_name``, e.g. "NVIDIA H100 80GB HBM3".
        dtype: dtype of the matrix products.
        tf32: whether fp32 products may run in TF32 (``torch.set_float32_matmul_precision``).
    """
    words = device_name.lower().replace("-", " ").split()
    if {"mig", "laptop"} & set(words):
        return None  # a partition of a device (MIG), or a slower laptop chip of the same name
    for terms, peaks in DATASHEETS:
        if all(any(_matches(word, term) for word in words) for term in terms):
            key: torch.dtype | str = TF32 if dtype is torch.float32 and tf32 and TF32 in peaks else dtype
            return peaks[key] * TERA if key in peaks else None
    return None


def _matches(word: str, term: str) -> bool:
    # "Tesla V100-SXM2-16GB", but not "A10G" (a smaller chip than A10): a form factor may have a suffix, a model may
    # not.
    return word.startswith(term) if term in ("sxm", "pcie") else word == term


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, seconds: float = 0.3) -> float:
    """FLOP/s of the fastest of repeated square matrix products; synchronizes with the device.

    Args:
        device: device to measure.
        dtype: dtype of the factors.
        size: number of rows and columns of the factors; None is 8192 on accelerators and 1024 on a CPU.
        seconds: seconds after which no further product starts.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, deadline = float("inf"), time.perf_counter() + seconds
    while best == float("inf") or time.perf_counter() < deadline:
        _wait(device)
        started = time.perf_counter()
        left @ right
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def compute_dtype(trainer: Trainer, module: LightningModule) -> torch.dtype:
    """The dtype of a run's matrix products: autocast's, else that of most weights."""
    precision = str(trainer.precision)
    if "mixed" in precision:
        return torch.bfloat16 if precision.startswith("bf16") else torch.float16
    return weights_dtype(module)


def weights_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of most weights, by number of elements, without quantized weights."""
    elements: Counter[torch.dtype] = Counter()
    for weight in module.parameters():
        if weight.is_floating_point():
            elements[weight.dtype] += weight.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device of this process by its datasheet; None for a CPU and for MPS, which have none."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return datasheet_peak(torch.cuda.get_device_name(device), dtype, tf32)

import pytest
import torch
from lit_callbacks.widest_float import widest_float


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.float64), ("cuda:1", torch.float64), ("mps", torch.float32)]
)
def test_mps_has_no_fp64(device: str, dtype: torch.dtype) -> None:
    assert widest_float(torch.device(device)) == dtype

"""Parts of Megatron-Core 0.16.1 that ask for CUDA or Transformer Engine, replaced so that its model runs on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    """Context in which Megatron-Core builds and runs its ``GPTModel`` on the CPU, for verification alone."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    def cuda(tensor: Tensor, *_: object, **__: object) -> Tensor:
        return tensor

    def sliding_window_mask(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
        attended = torch.ones(queries, keys, dtype=torch.bool)
        return ~attended.triu(keys - queries - window[0]).tril(keys - queries + window[1])

    with (
        # The device of rotary frequencies, masks and received activations.
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(torch.cuda, "synchronize", lambda *_: None),
        # The last pipeline stage moves its copy of tied embeddings.
        patch.object(Tensor, "cuda", cuda),
        # There is no dropout, so no state of a generator is kept apart.
        patch.object(CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        # Its own function has "cuda" as the device.
        patch.object(fused_softmax, "get_sliding_window_causal_mask", sliding_window_mask),
        # The name is not defined without Transformer Engine, and the router asks whether it is None.
        patch.object(moe_utils, "te_general_gemm", None, create=True),
    ):
        yield

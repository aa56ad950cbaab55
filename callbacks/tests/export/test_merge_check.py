"""Logits of a model, by which a merge is checked."""

import pytest
import torch
from lit_callbacks.export.merge_check import logits_of

transformers = pytest.importorskip("transformers")


def test_a_model_whose_cache_fails_has_logits() -> None:
    sizes = {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": 1, "vocab_size": 96}
    model = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**sizes)).eval()
    ids = [torch.arange(1, 6)[None], torch.arange(1, 3)[None]]
    with pytest.raises(ValueError, match="matC_old has wrong shape"):
        model(input_ids=ids[0])
    assert logits_of(model, ids).shape == (7, 96)

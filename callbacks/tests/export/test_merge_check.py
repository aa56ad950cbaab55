"""Logits of a model, by which a merge is checked, and what they may differ by."""

import pytest
import torch
from lit_callbacks.export.merge_check import MergeFailed, compare_in_fp32, logits_of

transformers = pytest.importorskip("transformers")


def test_a_model_whose_cache_fails_has_logits() -> None:
    sizes = {"hidden_size": 64, "embedding_dim": 64, "num_heads": 4, "num_blocks": 1, "vocab_size": 96}
    model = transformers.xLSTMForCausalLM(transformers.xLSTMConfig(**sizes)).eval()
    ids = [torch.arange(1, 6)[None], torch.arange(1, 3)[None]]
    with pytest.raises(ValueError, match="matC_old has wrong shape"):
        model(input_ids=ids[0])
    assert logits_of(model, ids).shape == (7, 96)


@pytest.mark.parametrize(("others", "said"), [(0, "1.1e-04)"), (1, "at 90% of the positions"), (5, "at 50% of the")])
def test_an_undecided_router_may_choose_another_expert_for_some_tokens(others: int, said: str) -> None:
    expected = torch.linspace(-1, 1, 80).view(10, 8)
    got = expected + 1e-5
    got[:others] += 0.1
    report = compare_in_fp32(expected, got, 1.1e-4)
    assert report.largest_difference == pytest.approx(1e-5, rel=0.1)
    assert said in str(report)


@pytest.mark.parametrize("wrong", ["most", "one is not a number"])
def test_a_merge_that_is_lost_is_refused(wrong: str) -> None:
    expected = torch.linspace(-1, 1, 80).view(10, 8)
    got = expected.clone()
    if wrong == "most":
        got[:6] += 0.1
    else:
        got[3, 2] = float("nan")
    with pytest.raises(MergeFailed, match="not what was trained"):
        compare_in_fp32(expected, got, 1e-4)

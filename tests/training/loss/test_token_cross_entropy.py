import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lit_ft.training.loss import token_cross_entropy as losses
from lit_ft.training.loss.token_cross_entropy import token_cross_entropy, tokens_per_chunk
from lit_ft.training.loss.token_window import loss_weight


def test_a_sum_worked_out_by_hand() -> None:
    # Two tokens over two words: logits (0, ln 3) put 1/4 and 3/4 on them.
    hidden = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    result = token_cross_entropy(hidden, nn.Identity(), torch.tensor([0, 1]), chunk_tokens=1)
    assert float(result.loss_sum) == pytest.approx(math.log(4) + math.log(4 / 3))
    assert int(result.correct) == 1


@pytest.mark.parametrize("chunk_tokens", [1, 4, 5, 100])
def test_gradients_equal_plain_cross_entropy(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 13, bias=True, dtype=torch.float64)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 13, (11,))
    plain = cross_entropy(head(hidden), targets, reduction="sum") * 0.3
    wanted = torch.autograd.grad(plain, [hidden, *head.parameters()])
    result = token_cross_entropy(hidden, head, targets, chunk_tokens, list(head.parameters()))
    got = torch.autograd.grad(result.loss_sum * 0.3, [hidden, *head.parameters()])
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)  # the loss itself is taken in fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_cache", [1, 26, 30, 10_000])
def test_rows_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, in_cache: int) -> None:
    monkeypatch.setattr(losses, "_LOGITS_IN_CACHE", in_cache)
    torch.manual_seed(0)
    logits = torch.randn(11, 13).to(dtype).requires_grad_()
    targets = torch.randint(0, 13, (11,))
    with torch.no_grad():
        logits[3] = 1.0  # all the same: the first counts as the model's choice
    result = token_cross_entropy(logits, torch.clone, targets, 5)
    plain = cross_entropy(logits.float(), targets, reduction="none")
    torch.testing.assert_close(result.per_token, plain.detach())
    assert int(result.correct) == int((logits.argmax(-1) == targets).sum())
    (got,) = torch.autograd.grad(result.loss_sum, logits)
    torch.testing.assert_close(got, torch.autograd.grad(plain.sum(), logits)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_expression_for_compilers_is_the_same(dtype: torch.dtype) -> None:
    """One graph for any number of tokens; tests/cuda compiles it to kernels."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(losses._in_one_expression, dynamic=True, fullgraph=True, backend=backend)
    for tokens in (11, 7, 2):
        logits, targets = torch.randn(tokens, 13).to(dtype), torch.randint(0, 13, (tokens,))
        logits[1] = 1.0  # all the same: the first counts as the model's choice
        for has_gradient in (False, True):
            found = compiled(logits, targets, has_gradient)
            wanted = losses._from_logits(logits.clone(), targets, has_gradient)
            assert (found[2] is None) == (not has_gradient)
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other)
    assert len(graphs) == 2


def test_a_frozen_head_gets_no_gradient() -> None:
    head = nn.Linear(8, 13).requires_grad_(False)
    hidden = torch.randn(3, 8, requires_grad=True)
    token_cross_entropy(hidden, head, torch.tensor([0, 1, 2]), 2, list(head.parameters())).loss_sum.backward()
    assert head.weight.grad is None
    assert hidden.grad is not None


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        result = token_cross_entropy(torch.randn(3, 8), nn.Linear(8, 13), torch.tensor([0, 1, 2]), 2)
    assert not result.loss_sum.requires_grad


def test_no_supervised_token_is_a_zero_that_reaches_the_parameters() -> None:
    hidden = torch.randn(4, 8, requires_grad=True)
    nothing = token_cross_entropy(hidden[[]], nn.Identity(), torch.zeros(0, dtype=torch.long), 2)
    nothing.loss_sum.backward()
    assert float(nothing.loss_sum.detach()) == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()


def test_a_second_backward_is_refused_not_wrong() -> None:
    hidden = torch.randn(3, 8, requires_grad=True)
    loss = token_cross_entropy(hidden, nn.Linear(8, 13), torch.tensor([0, 1, 2]), 2).loss_sum
    (loss * 2).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (loss * 2).backward()


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="3 hidden states for 2 targets"):
        token_cross_entropy(torch.randn(3, 8), nn.Identity(), torch.tensor([0, 1]), 2)


def test_chunks_hold_a_fixed_number_of_logits() -> None:
    assert (tokens_per_chunk(151_936, "cpu"), tokens_per_chunk(151_936, "cuda")) == (441, 1_766)
    assert tokens_per_chunk(2**30, "cpu") == 1


def test_weight_undoes_lightnings_and_the_strategys_division() -> None:
    # Two ranks of two micro-batches with 1, 2, 3 and 4 tokens, each of loss 1: the mean is 1.
    losses = [1.0, 2.0, 3.0, 4.0]
    weight = loss_weight(window_tokens=10, accumulate=2, replicas=2)
    per_rank = [sum(loss * weight / 2 for loss in losses[rank::2]) for rank in range(2)]
    assert sum(per_rank) / 2 == pytest.approx(1.0)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("trains", ["hidden and head", "hidden", "head"])
def test_gradients_of_another_loss_of_the_tokens(chunk_tokens: int, trains: str) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 13, bias=True, dtype=torch.float64).requires_grad_("head" in trains)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad="hidden" in trains)
    targets = torch.randint(0, 13, (11,))

    def loss_of(per_token: torch.Tensor) -> torch.Tensor:
        return -(per_token[:6].sum() - per_token[6:].sum()).sigmoid().log()

    def with_weights(per_token: torch.Tensor, has_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        assert has_gradient
        with torch.enable_grad():
            leaf = per_token.detach().requires_grad_()
            loss = loss_of(leaf)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    inputs = [one for one in (hidden, *head.parameters()) if one.requires_grad]
    plain = loss_of(cross_entropy(head(hidden), targets, reduction="none"))
    wanted = torch.autograd.grad(plain * 0.3, inputs)
    result = token_cross_entropy(hidden, head, targets, chunk_tokens, list(head.parameters()), loss_of=with_weights)
    torch.testing.assert_close(result.loss_sum.double(), plain, atol=1e-6, rtol=1e-6)
    got = torch.autograd.grad(result.loss_sum * 0.3, inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)

"""One loss and one gradient, however a step is split: the invariants of docs/numerics.md."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_process import STEPS, sgd, train
from peft import LoraConfig
from shared_fixtures import record_difference
from transformers import AutoTokenizer

from lit_ft import CausalLM, TextDataModule

pytestmark = pytest.mark.slow

ROWS, STEP = 22, 8  # the third step of an epoch is ragged


def lora() -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def assert_same(got: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    assert len(got[0]) == len(wanted[0]) == STEPS
    record_difference(
        list(zip(got[0], wanted[0], strict=True)), [(got[1][name], wanted[1][name]) for name in wanted[1]]
    )
    assert got[0] == pytest.approx(wanted[0], rel=tolerance, abs=tolerance)
    assert got[1].keys() == wanted[1].keys()
    for name in wanted[1]:
        torch.testing.assert_close(got[1][name], wanted[1][name], atol=tolerance, rtol=tolerance, msg=name)


@pytest.fixture
def whole_steps(make_trainer: Any, model_folder: str, write_rows: Any, kept: dict[str, Any]) -> Callable[..., Any]:
    """Fit with one micro-batch a step, which others are compared with; run once with an adapter and once without."""

    def fit_once(peft: LoraConfig | None = None) -> Any:
        if (key := "full" if peft is None else "LoRA") not in kept:
            kept[key] = train(make_trainer, model_folder, write_rows(count=ROWS), peft=peft, micro_batch_size=STEP)
        return kept[key]

    return fit_once


@pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])
@pytest.mark.parametrize("join", [False, True], ids=["apart", "joined"])
@pytest.mark.parametrize(("size", "accumulate"), [(4, 2), (2, 4), (1, 8)])
def test_batch_splits(
    make_trainer: Any,
    model_folder: str,
    write_rows: Any,
    whole_steps: Any,
    peft: Any,
    join: bool,
    size: int,
    accumulate: int,
) -> None:
    data = {"micro_batch_size": size, "join_micro_batches": join, "max_length": 96}
    got = train(make_trainer, model_folder, write_rows(count=ROWS), peft=peft, accumulate=accumulate, **data)
    assert_same(got, whole_steps(peft))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(
    make_trainer: Any, model_folder: str, write_rows: Any, whole_steps: Any, attention: str
) -> None:
    path, model = write_rows(count=ROWS), {"attn_implementation": attention}
    assert_same(train(make_trainer, model_folder, path, micro_batch_size=STEP, model=model), whole_steps())


@pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])
def test_gradient_checkpointing(
    make_trainer: Any, model_folder: str, write_rows: Any, whole_steps: Any, peft: Any
) -> None:
    path, model = write_rows(count=ROWS), {"gradient_checkpointing": True}
    assert_same(
        train(make_trainer, model_folder, path, peft=peft, micro_batch_size=STEP, model=model), whole_steps(peft)
    )


@pytest.mark.parametrize("peft", [None, lora()], ids=["full", "lora"])
def test_packed_rows_equal_a_padded_hugging_face_forward(
    make_trainer: Any, model_folder: str, write_rows: Any, peft: Any
) -> None:
    """The reference is written by hand: padded batches, labels handed to the model, plain SGD."""
    path = write_rows(count=STEP)
    got = train(make_trainer, model_folder, path, peft=copy.deepcopy(peft), micro_batch_size=STEP, shuffle=False)
    in_bins = train(make_trainer, model_folder, path, peft=copy.deepcopy(peft), micro_batch_size=STEP, packing=96)

    data = TextDataModule(path)
    data.load(AutoTokenizer.from_pretrained(model_folder))
    samples = [data.splits["train"][i] for i in range(STEP)]
    length = max(len(ids) for ids, _ in samples)
    input_ids = torch.zeros(STEP, length, dtype=torch.long)
    labels, mask = torch.full_like(input_ids, -100), torch.zeros_like(input_ids)
    for i, (ids, label) in enumerate(samples):
        input_ids[i, : len(ids)] = torch.from_numpy(ids)
        labels[i, : len(ids)] = torch.from_numpy(label)
        mask[i, : len(ids)] = 1
    module = CausalLM(model_folder, peft=peft)
    torch.manual_seed(7)
    module.configure_model()
    assert module.model is not None
    module.base_model.set_attn_implementation("sdpa")
    optimizer = sgd(module.trainable_parameters().values())
    losses = []
    for _ in range(STEPS):
        loss = module.model(input_ids=input_ids, labels=labels, attention_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    wanted = losses, {name: p.detach() for name, p in module.trainable_parameters().items()}
    assert_same(got, wanted)
    assert_same(in_bins, wanted)


def test_one_sample_does_not_move_another_samples_loss(model_folder: str) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    from lit_ft.packed_batch import pack_samples

    first, second, other = (torch.randint(3, 300, (n,)).numpy() for n in (17, 23, 23))
    both = module.forward(pack_samples([(first, first), (second, second)])).loss_sum
    alone = module.forward(pack_samples([(second, second)])).loss_sum
    changed = module.forward(pack_samples([(first, first), (other, other)])).loss_sum
    changed_alone = module.forward(pack_samples([(other, other)])).loss_sum
    assert float(both - alone) == pytest.approx(float(changed - changed_alone), abs=1e-4)
    assert float(both) != pytest.approx(float(changed), abs=1e-1)


def test_chunks_of_the_head_do_not_change_anything(
    make_trainer: Any, model_folder: str, write_rows: Any, whole_steps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, wanted = write_rows(count=ROWS), whole_steps()
    monkeypatch.setattr("lit_ft.training.loss.token_cross_entropy.LOGITS_PER_CHUNK", 384 * 7)
    assert_same(train(make_trainer, model_folder, path, micro_batch_size=STEP), wanted)


def test_a_cut_epoch_counts_only_what_it_runs(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    """limit_train_batches ends an epoch inside a window of micro-batches."""
    path = write_rows(count=ROWS)
    cut = {"trainer": {"limit_train_batches": 3}, "micro_batch_size": 4, "shuffle": False}
    got = train(make_trainer, model_folder, path, accumulate=2, **cut)
    whole = train(
        make_trainer,
        model_folder,
        write_rows(count=12, name="twelve.json"),
        micro_batch_size=8,
        shuffle=False,
    )
    assert_same(got, whole)

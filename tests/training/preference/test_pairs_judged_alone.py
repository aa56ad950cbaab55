"""KTO in one process: against plain transformers, for any split, after a resume, and data that does not fit."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_strategies import RecordMeans, assert_same, fit_in_steps_of_4, sgd
from lightning.pytorch.loggers import CSVLogger
from preference_pairs import LORA, data_of, fit, write_judged, write_pairs
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_ft import DPO, KTO, CausalLM, PreferenceLM, RecipeError
from lit_ft.export.folder_texts import run_texts, samples_of
from lit_ft.packed_batch import Conversation
from lit_ft.run.folder import RunFolder

UNPAIRED = {"format": "unpaired_preference"}
OBJECTIVE = KTO(beta=0.5, desirable_weight=0.75, undesirable_weight=1.5)
MEANS = ("kl", "reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected", "log_prob_rejected")
HOW: dict[str, Any] = {"model": {"objective": OBJECTIVE}, "data": UNPAIRED}


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_judged(tmp_path_factory.mktemp("judged"))


def _log_prob(model: PreTrainedModel, conversation: Conversation) -> Tensor:
    ids, labels = (torch.from_numpy(np.array(part, dtype=np.int64)) for part in conversation)
    return -cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum")


def _with_next_answer(conversations: list[Conversation], index: int) -> Conversation:
    (ids, labels), (others, their_labels) = conversations[index], conversations[(index + 1) % len(conversations)]
    prompt, theirs = int((labels < 0).sum()), int((their_labels < 0).sum())
    joined = np.concatenate([ids[:prompt], others[theirs:]]), np.concatenate([labels[:prompt], their_labels[theirs:]])
    longest = max(len(ids), len(others))
    return joined[0][:longest], joined[1][:longest]


class Plain:
    """KTO in full as its paper has it, conversation by conversation, with a second model as reference."""

    def __init__(self, folder: str, path: str, split: str) -> None:
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
        data = data_of(path, shuffle=False, **UNPAIRED)
        data.load(PreferenceLM(folder).tokenizer)
        samples = data.splits[split]
        self.answers = [samples[i] for i in range(len(samples))]
        self.is_good = [json.loads(line)["label"] for line in Path(path).read_text("utf-8").splitlines()]

    def loss(self, chosen: range) -> tuple[Tensor, float]:
        """Mean loss of some answers, and the divergence that it has."""
        with torch.no_grad():
            others = [_with_next_answer(self.answers, i) for i in chosen]
            differences = [_log_prob(self.policy, one) - _log_prob(self.reference, one) for one in others]
            divergence = torch.stack(differences).mean().clamp(min=0)
            before = [_log_prob(self.reference, self.answers[i]) for i in chosen]
        losses = []
        for i, reference in zip(chosen, before, strict=True):
            margin = OBJECTIVE.beta * (_log_prob(self.policy, self.answers[i]) - reference - divergence)
            good, bad = OBJECTIVE.desirable_weight, OBJECTIVE.undesirable_weight
            losses.append(good * (1 - margin.sigmoid()) if self.is_good[i] else bad * (1 - (-margin).sigmoid()))
        return torch.stack(losses).mean(), float(divergence)


def test_steps_and_validation_are_those_of_plain_transformers(
    make_trainer: Any, model_folder: str, judged: str
) -> None:
    plain, losses, divergences = Plain(model_folder, judged, "train"), [], []
    for start in range(0, 13, 4):
        loss, divergence = plain.loss(range(start, min(start + 4, 13)))
        plain.policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in plain.policy.parameters():
                parameter -= 0.1 * parameter.grad
        losses.append(float(loss.detach()))
        divergences.append(divergence)
    held_out = Plain(model_folder, str(Path(judged).with_name("val.jsonl")), "train")
    held_out.policy = plain.policy

    module = PreferenceLM(model_folder, objective=OBJECTIVE, optimizer=sgd)
    record, data = RecordMeans(["train/kl"], None, None), data_of(judged, shuffle=False, **UNPAIRED)
    make = lambda **options: make_trainer(**options | {"max_epochs": 1})  # noqa: E731
    means, weights = fit_in_steps_of_4(make, module, data, record, {})
    assert [loss for loss, _ in record.steps] == pytest.approx(losses, rel=1e-4)
    assert [step["train/kl"] for step in record.means] == pytest.approx(divergences, abs=1e-4)
    assert divergences[0] == 0
    assert max(divergences) > 0.05
    for name, parameter in plain.policy.named_parameters():
        torch.testing.assert_close(weights[f"model.{name}"], parameter.detach(), atol=2e-5, rtol=1e-4)
    loss, divergence = held_out.loss(range(5))
    assert (means["val/loss"], means["val/kl"]) == pytest.approx((float(loss), divergence), rel=1e-3)


@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(make_trainer: Any, model_folder: str, judged: str, trains: str) -> None:
    model = {"objective": OBJECTIVE, "peft": LORA if trains == "adapter" else None}
    how = {"model": model, "data": {**UNPAIRED, "micro_batch_size": 4}}
    one, means, weights = fit(make_trainer, model_folder, judged, how)
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"micro_batch_size": 2, "num_workers": 1}):
        steps, same, found = fit(make_trainer, model_folder, judged, {"model": model, "data": {**UNPAIRED, **data}})
        assert_same(steps, found, one, weights, 5e-5)  # without AVX-512 the last steps differ by 2.6e-5
        assert same == pytest.approx(means, rel=1e-4, abs=1e-6)
    assert means.keys() == {"val/loss", "val/log_prob_chosen", *(f"val/{name}" for name in MEANS)}
    assert means["val/reward_margin"] == pytest.approx(means["val/reward_chosen"] - means["val/reward_rejected"], 1e-4)


def test_the_divergence_is_that_without_dropout_and_leaves_the_draws_of_training(
    make_trainer: Any, model_folder: str, judged: str
) -> None:
    lora = type(LORA)(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5)
    record = RecordMeans(["train/kl"], None, None)
    module = PreferenceLM(model_folder, peft=lora, objective=OBJECTIVE, optimizer=sgd)
    fit_in_steps_of_4(make_trainer, module, data_of(judged, **UNPAIRED), record, {})
    assert record.means[0]["train/kl"] == 0


def test_a_resumed_run_goes_on_to_the_bit(make_trainer: Any, model_folder: str, judged: str, tmp_path: Path) -> None:
    save = {"save_after": 3, "save": str(tmp_path / "three.ckpt")}
    one, means, weights = fit(make_trainer, model_folder, judged, {**HOW, **save})
    steps, same, found = fit(make_trainer, model_folder, judged, {**HOW, "resume": save["save"]})
    assert steps == one[3:]
    assert same == means
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    trained = PreferenceLM(model_folder, peft=LORA, objective=OBJECTIVE)
    fit(make_trainer, model_folder, judged, {**HOW, "save_after": 8, "save": str(tmp_path / "end.ckpt")})
    path = str(tmp_path / "end.ckpt")
    (found,) = make_trainer().validate(trained, data_of(judged, **UNPAIRED), ckpt_path=path, verbose=False)
    assert found == pytest.approx(means, rel=1e-5, abs=1e-6)


def test_complete_pairs_count_as_their_answers(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    """Those of both in the same steps."""
    path = write_pairs(tmp_path)
    rows = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]
    answers = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in rows
        for name in ("chosen", "rejected")
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers), "utf-8")
    found = []
    for file, form, size in ((path, "preference", 13), (str(tmp_path / "answers.jsonl"), UNPAIRED["format"], 26)):
        data = data_of(file, format=form, val_path=None, micro_batch_size=size, shuffle=False)
        trainer = make_trainer(max_steps=1, log_every_n_steps=1)
        trainer.fit(PreferenceLM(model_folder, peft=LORA, objective=KTO(), optimizer=sgd), data)
        found.append({name: float(value) for name, value in trainer.callback_metrics.items() if "grad_norm" in name})
        assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(0.5)
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_means_over_answers_that_a_step_does_not_have_are_left_out(
    make_trainer: Any, model_folder: str, judged: str, tmp_path: Path
) -> None:
    data = data_of(judged, micro_batch_size=1, val_path=None, shuffle=False, join_micro_batches=False, **UNPAIRED)
    trainer = make_trainer(max_steps=3, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(PreferenceLM(model_folder, peft=LORA, objective=KTO(), optimizer=sgd), data)
    (file,) = tmp_path.rglob("metrics.csv")
    with file.open() as lines:
        steps = [{name.removeprefix("train/"): value for name, value in row.items()} for row in csv.DictReader(lines)]
    found = [{name for name in MEANS if step.get(name)} for step in steps]
    assert found == [  # a bad answer, and two good ones
        {"kl", "reward_accuracy", "reward_rejected", "log_prob_rejected"},
        *[{"kl", "reward_accuracy", "reward_chosen"}] * 2,
    ]
    assert "nan" not in file.read_text()


def test_a_card_names_the_objective_and_counts_answers(
    make_trainer: Any, model_folder: str, judged: str, tmp_path: Path
) -> None:
    module, data = PreferenceLM(model_folder, peft=LORA, objective=KTO()), data_of(judged, val_path=None, **UNPAIRED)
    make_trainer(max_steps=1).fit(module, data)
    (tmp_path / "config.yaml").write_text(f"data: {{init_args: {{path: {judged}}}}}")
    card = run_texts("adapter", RunFolder(tmp_path), module, {}, samples_of(data))["README.md"]
    assert "better and worse answers by `KTO(beta=0.1, desirable_weight=1, undesirable_weight=1)`." in card
    assert "- `pairs`: 13 samples\n" in card


def test_data_and_objectives_that_do_not_fit(
    make_trainer: Any, model_folder: str, judged: str, write_rows: Any, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=r"format=unpaired_preference is for lit_ft\.PreferenceLM, and the model is"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder), data_of(judged, **UNPAIRED))
    with pytest.raises(
        RecipeError, match=r"DPO\(.*\) compares two answers to a prompt, and the data has .* lit_ft\.KTO"
    ):
        make_trainer(max_steps=1).fit(PreferenceLM(model_folder, objective=DPO()), data_of(judged, **UNPAIRED))
    rows = [{"prompt": "a", "completion": word, "label": True} for word in ("cup", "lamp", "cup lamp")]
    alike = data_of(write_rows(rows), val_path=None, **UNPAIRED)
    with pytest.raises(RecipeError, match=r"all answers of train \(3 judged answers\) are to one prompt, and"):
        make_trainer(max_steps=1).fit(PreferenceLM(model_folder, objective=KTO()), alike)
    of_dpo, pairs = str(tmp_path / "dpo.ckpt"), write_pairs(tmp_path)
    fit(make_trainer, model_folder, pairs, {"save_after": 3, "save": of_dpo})
    with pytest.raises(RecipeError, match=r"13 of 13 pairs \(train\) .* not known"):  # it has none to other prompts
        fit(make_trainer, model_folder, pairs, {"resume": of_dpo, "model": {"objective": KTO()}})

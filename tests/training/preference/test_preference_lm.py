"""Preference tuning in one process: against plain transformers, for any split of a step, and after a resume."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_strategies import Record, assert_same, sgd
from lit_callbacks import ForgettingProbe
from peft import LoraConfig, LoraGAConfig
from peft.tuners.lora.loraga import preprocess_loraga
from preference_pairs import LORA, data_of, fit, write_pairs
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid
from transformers import AutoModelForCausalLM, PreTrainedModel

from lit_ft import DPO, ORPO, CausalLM, PreferenceLM, RecipeError, SimPO, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.export.folder_texts import run_texts, samples_of
from lit_ft.run.folder import RunFolder
from lit_ft.training.preference.metrics import NAMES
from lit_ft.training.preference.objectives import AnswerLogProbs, Objective
from lit_ft.tuning import lora_init


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def _log_prob(model: PreTrainedModel, conversation: tuple[np.ndarray, np.ndarray]) -> Tensor:
    ids, labels = (torch.from_numpy(np.array(part, dtype=np.int64)) for part in conversation)
    return -cross_entropy(model(ids[None]).logits[0, :-1], labels[1:], ignore_index=-100, reduction="sum")


def _plain_dpo(folder: str, path: str, beta: float, lr: float) -> tuple[list[float], dict[str, Tensor]]:
    """One epoch of DPO in full as its paper has it, conversation by conversation, with a second model as reference."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(folder) for _ in range(2))
    data = data_of(path, shuffle=False)
    data.load(PreferenceLM(folder).tokenizer)
    samples, losses = data.splits["train"], []
    for start in range(0, len(samples), 4):
        of_pairs = []
        for i in range(start, min(start + 4, len(samples))):
            with torch.no_grad():
                before = [_log_prob(reference, half) for half in samples.pair(i)]
            now = [_log_prob(policy, half) for half in samples.pair(i)]
            of_pairs.append(-logsigmoid(beta * ((now[0] - before[0]) - (now[1] - before[1]))))
        loss = torch.stack(of_pairs).mean()
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter -= lr * parameter.grad
        losses.append(float(loss.detach()))
    return losses, {f"model.{name}": parameter.detach() for name, parameter in policy.named_parameters()}


def test_steps_are_those_of_plain_transformers(make_trainer: Any, model_folder: str, pairs: str) -> None:
    losses, weights = _plain_dpo(model_folder, pairs, beta=0.5, lr=0.1)
    how = {"data": {"shuffle": False}, "model": {"peft": None}}
    make = lambda **options: make_trainer(**options | {"max_epochs": 1})  # noqa: E731
    steps, _, found = fit(make, model_folder, pairs, how)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(2))
    assert min(losses) < 0.6
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("objective", [DPO(beta=0.5, label_smoothing=0.1, nll_weight=0.2), SimPO(), ORPO()])
@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(
    make_trainer: Any, model_folder: str, pairs: str, objective: Objective, trains: str
) -> None:
    model = {"objective": objective, "peft": LORA if trains == "adapter" else None}
    one, means, weights = fit(make_trainer, model_folder, pairs, {"model": model, "data": {"micro_batch_size": 4}})
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"micro_batch_size": 2, "num_workers": 1}):
        steps, same, found = fit(make_trainer, model_folder, pairs, {"model": model, "data": data})
        assert_same(steps, found, one, weights, 1e-5)
        assert same == pytest.approx(means, rel=1e-4)
    assert means.keys() == {"val/loss", *(f"val/{name}" for name in NAMES)}
    assert means["val/reward_margin"] == pytest.approx(means["val/reward_chosen"] - means["val/reward_rejected"], 1e-4)


class Recorded(Objective):
    """DPO that keeps what it is given."""

    needs_reference = True

    def __init__(self) -> None:
        self.given: list[AnswerLogProbs] = []

    def losses(self, chosen: AnswerLogProbs, rejected: AnswerLogProbs) -> Tensor:
        self.given.append(chosen)
        return DPO().losses(chosen, rejected)

    def reward(self, answer: AnswerLogProbs) -> Tensor:
        return DPO().reward(answer)


def test_the_reference_is_the_model_that_begins_without_dropout(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    """Also with an adapter that was trained before, and for the validation data without a sanity check."""
    lora = {"peft": type(LORA)(r=4, target_modules=["q_proj"], lora_dropout=0.5)}
    first = PreferenceLM(model_folder, optimizer=sgd, **lora)
    make_trainer(max_steps=3).fit(first, data_of(pairs, val_path=None))
    first.save_adapter(tmp_path)
    objective = Recorded()
    module = PreferenceLM(model_folder, adapter=str(tmp_path), objective=objective, optimizer=sgd)
    trainer = make_trainer(max_steps=2, val_check_interval=2)
    trainer.fit(module, data_of(pairs, join_micro_batches=False))
    begins = next(one for one in objective.given if one.reference.any())
    assert not torch.equal(begins.policy, begins.reference)  # dropout
    fresh = PreferenceLM(model_folder, adapter=str(tmp_path), objective=Recorded())
    make_trainer().validate(fresh, data_of(pairs), verbose=False)
    known = {name: value for name, value in module._reference.known.items() if name.startswith("5 ")}
    assert fresh._reference.known.keys() == known.keys()
    for name, value in known.items():
        torch.testing.assert_close(fresh._reference.known[name], value)


def test_a_resumed_run_goes_on_with_the_same_reference(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    how = {"save_after": 3, "save": str(tmp_path / "three.ckpt")}
    one, means, weights = fit(make_trainer, model_folder, pairs, how)
    steps, same, found = fit(make_trainer, model_folder, pairs, {"resume": how["save"]})
    assert steps == one[3:]
    assert same == means
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_an_objective_that_changes_is_named(make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path) -> None:
    path, of_simpo = str(tmp_path / "dpo.ckpt"), str(tmp_path / "simpo.ckpt")
    fit(make_trainer, model_folder, pairs, {"save_after": 3, "save": path})
    with pytest.warns(UserWarning, match=r"trained on pairs .*DPO\(beta=0\.5, .*, and goes on with .*DPO\(beta=0\.1, "):
        fit(make_trainer, model_folder, pairs, {"resume": path, "model": {"objective": DPO()}})
    fit(make_trainer, model_folder, pairs, {"save_after": 3, "save": of_simpo, "model": {"objective": SimPO()}})
    with pytest.raises(
        RecipeError, match=r"it was trained on pairs .* by `SimPO\(beta=2, gamma=1\)`\. Go on with that"
    ):
        fit(make_trainer, model_folder, pairs, {"resume": of_simpo})


def test_validate_and_test_with_a_checkpoint(make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path) -> None:
    path = str(tmp_path / "end.ckpt")
    _, means, _ = fit(make_trainer, model_folder, pairs, {"save_after": 8, "save": path})
    trained = lambda: PreferenceLM(model_folder, peft=LORA, objective=DPO(beta=0.5))  # noqa: E731
    (found,) = make_trainer().validate(trained(), data_of(pairs), ckpt_path=path, verbose=False)
    assert found == pytest.approx(means, rel=1e-5)
    (found,) = make_trainer().test(trained(), data_of(pairs), ckpt_path=path, verbose=False)  # on val_path
    assert found == pytest.approx({name.replace("val/", "test/"): value for name, value in means.items()}, rel=1e-5)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(Path(pairs).read_text("utf-8").splitlines(keepends=True)[3:]), "utf-8")
    with pytest.raises(RecipeError, match=r"10 of 10 pairs \(test\) .* not known, .* give it these pairs too"):
        make_trainer().test(trained(), data_of(pairs, test_path=str(other)), ckpt_path=path, verbose=False)


def test_a_short_run_computes_the_reference_of_its_own_pairs(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    module = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, data_of(pairs, val_path=None))
    (known,) = module._reference.known.values()
    assert int(known.isfinite().all(1).sum()) == 4  # two steps of two pairs
    trainer.save_checkpoint(tmp_path / "short.ckpt")
    longer = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
    with pytest.raises(RecipeError, match=r"9 of 13 pairs \(train\) .* begin a new run with as many steps"):
        make_trainer(max_steps=9).fit(longer, data_of(pairs, val_path=None), ckpt_path=tmp_path / "short.ckpt")
    with pytest.raises(RecipeError, match=r"5 of 5 pairs \(val\) by the model as it was before training"):
        make_trainer().validate(module, data_of(pairs), verbose=False)


def test_a_run_resumed_with_other_micro_batches_has_the_reference_of_what_is_left(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    for steps in (2, 4):
        module = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
        record = Record(2, str(tmp_path / f"{steps}.ckpt"))
        trainer = make_trainer(max_steps=steps, callbacks=[record], plugins=[AnyCheckpointIO()])
        trainer.fit(module, data_of(pairs, val_path=None))

    def go_on(begun: str) -> PreferenceLM:
        module, data = PreferenceLM(model_folder, peft=LORA, optimizer=sgd), data_of(pairs, val_path=None)
        data.micro_batch_size = 1
        trainer = make_trainer(max_steps=4, plugins=[AnyCheckpointIO()])
        trainer.fit(module, data, ckpt_path=str(tmp_path / begun))
        return module

    go_on("4.ckpt")  # two steps of one pair, behind four pairs of eight
    with pytest.raises(RecipeError, match=r"2 of 6 pairs \(train\) .* begin a new run with as many steps"):
        go_on("2.ckpt")


def test_a_card_names_the_objective_and_counts_pairs(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    module, data = PreferenceLM(model_folder, peft=LORA, objective=SimPO()), data_of(pairs, val_path=None)
    make_trainer(max_steps=1).fit(module, data)
    (tmp_path / "config.yaml").write_text(f"data: {{init_args: {{path: {pairs}}}}}")
    card = run_texts("adapter", RunFolder(tmp_path), module, {}, samples_of(data))["README.md"]
    assert "Trained on pairs of a better and a worse answer by `SimPO(beta=2, gamma=1)`." in card
    assert "- `pairs`: 13 pairs\n" in card


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"max_epochs": 2, "check_val_every_n_epoch": 2}, [5, 13]),  # whose first epoch opens no validation data
        ({"max_epochs": 3, "limit_train_batches": 2}, [5, 13]),  # each epoch has others
        ({"max_epochs": 3, "overfit_batches": 2}, [4, 5]),
        ({"max_epochs": 3, "overfit_batches": 0.5}, [5, 6]),
        ({"max_epochs": 1, "limit_train_batches": 2, "accumulate_grad_batches": 4}, [4, 5]),
        ({"fast_dev_run": 1, "accumulate_grad_batches": 4}, [1, 2]),
    ],
)
def test_the_reference_is_computed_of_what_a_run_needs(
    make_trainer: Any, model_folder: str, pairs: str, options: dict[str, Any], needed: list[int]
) -> None:
    module = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
    trainer = make_trainer(**options)
    trainer.fit(module, data_of(pairs, micro_batch_tokens=130))
    assert math.isfinite(trainer.callback_metrics["val/loss"])
    assert sorted(int(known.isfinite().all(1).sum()) for known in module._reference.known.values()) == needed


def test_losses_of_sources_and_of_samples_are_those_of_pairs(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path
) -> None:
    from lit_ft import Source

    sources = [Source(pairs, name="a", format="preference"), Source(pairs, name="b", format="preference", max_rows=3)]
    module = PreferenceLM(model_folder, peft=LORA, optimizer=sgd)
    recorded: list[Any] = []
    module.record_losses = lambda ids, losses, counts, names: recorded.append((ids, losses.clone(), counts, names))
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=8, log_every_n_steps=1)
    trainer.fit(module, TextDataModule(sources=sources, micro_batch_size=2, shuffle=False))
    names = [name for _, _, _, of_pairs in recorded for name in of_pairs]
    losses = torch.cat([of_pairs for _, of_pairs, _, _ in recorded])
    assert (names.count("a"), names.count("b")) == (13, 3)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(float(losses.mean()))
    assert float(trainer.callback_metrics["train/loss/b"]) == pytest.approx(math.log(2))
    assert all(counts == [1] * len(ids) for ids, _, counts, _ in recorded)


def test_the_loss_of_plain_texts_is_their_cross_entropy(make_trainer: Any, model_folder: str, pairs: str) -> None:
    texts = ["red cup on the table", "a blue lamp"]
    probe = ForgettingProbe(texts, every_n_steps=1)
    trainer = make_trainer(max_steps=1, callbacks=[probe])
    trainer.fit(PreferenceLM(model_folder, peft=LORA, optimizer=sgd), data_of(pairs, val_path=None))
    module = CausalLM(model_folder)
    module.configure_model()
    total, tokens = module.eval().text_loss(texts)
    lines = Path(trainer.default_root_dir, "forgetting.jsonl").read_text("utf-8").splitlines()
    first = json.loads(lines[0])
    assert (first["step"], first["tokens"]) == (0, tokens)
    assert first["loss"] == pytest.approx(float(total) / tokens, rel=1e-5)


def test_an_init_from_gradients_takes_those_of_the_objective(
    make_trainer: Any, model_folder: str, pairs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the sum of both answers' cross-entropy, which would learn the rejected ones too."""
    found: list[Tensor] = []

    def recorded(base: PreTrainedModel, config: Any, train_step: Any) -> None:
        train_step()
        found.append(base.model.layers[0].self_attn.q_proj.weight.grad.clone())
        base.zero_grad()
        preprocess_loraga(base, config, train_step=train_step)

    monkeypatch.setattr(lora_init, "preprocess_loraga", recorded)
    lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig())
    data = data_of(pairs, micro_batch_size=13, shuffle=False, val_path=None)
    make_trainer(max_steps=1).fit(PreferenceLM(model_folder, peft=lora, objective=DPO(beta=0.5), optimizer=sgd), data)
    base, samples = AutoModelForCausalLM.from_pretrained(model_folder), data.splits["train"]
    for i in range(len(samples)):
        chosen, rejected = (_log_prob(base, half) for half in samples.pair(i))
        (-0.5 * (chosen - rejected) / 2 / len(samples)).backward()  # the derivative of -log sigmoid(0) is -1/2
    torch.testing.assert_close(found[0], base.model.layers[0].self_attn.q_proj.weight.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("objective", ["dpo", DPO])
def test_an_objective_that_is_none(model_folder: str, objective: Any) -> None:
    with pytest.raises(RecipeError, match=r"model\.objective.* Objective or None is needed"):
        PreferenceLM(model_folder, objective=objective)


def test_data_and_module_that_do_not_fit(make_trainer: Any, model_folder: str, pairs: str, write_rows: Any) -> None:
    trainer = make_trainer(max_steps=1)
    with pytest.raises(RecipeError, match=r"is for lit_ft\.PreferenceLM, and the model is a CausalLM"):
        trainer.fit(CausalLM(model_folder), data_of(pairs))
    with pytest.raises(RecipeError, match=r"PreferenceLM trains on pairs .* data\.format=preference"):
        make_trainer(max_steps=1).fit(PreferenceLM(model_folder), TextDataModule(write_rows()))
    with pytest.raises(RecipeError, match=r"the data holds none"):
        make_trainer(max_steps=1).fit(PreferenceLM(model_folder), torch.utils.data.DataLoader([json.loads("{}")]))

"""Distillation in one process: against plain transformers, for any split of a step, and after a resume."""

import hashlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compared_strategies import adamw
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lit_callbacks import LossLedger
from peft import LoraConfig
from sampled_answers import LORA, SEED, assert_same_runs, data_of, write_questions
from taught_models import fit, steady, write_teacher
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from lit_ft import (
    DFT,
    CausalLM,
    DistillationLM,
    ExactAnswer,
    ForwardKL,
    JensenShannon,
    OnPolicyDistillationLM,
    PolicyLM,
    RecipeError,
    ReverseKL,
    Source,
    TextDataModule,
)
from lit_ft.model.generation import Sampling, generate_answers
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import pack_samples
from lit_ft.training.distillation.divergences import Divergence
from lit_ft.training.metrics import metric_names


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def folders(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return model_folder, write_teacher(tmp_path_factory.mktemp("teacher"))


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _own_answer(student: Any, tokenizer: Any, prompt: list[int], expected: list[int], step: int) -> list[int]:
    seeds = [_seed(f"{step} 0 {prompt} {expected}")]
    drawn = Sampling(temperature=1.0, seed=SEED)
    (answer,) = generate_answers(student, student, tokenizer, [prompt], 3, drawn, seeds)
    return list(answer.ids)


def _plain(folders: tuple[str, str], path: str, steps: int, ratio: float, is_own: bool) -> tuple[list[float], Any]:
    """Steps of distillation sample by sample, with all weights: losses, and the final weights."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    tokens = max(tokenizer.get_vocab().values()) + 1
    data = data_of(path, shuffle=False)
    data.load(tokenizer)
    samples, losses = data.splits["train"], []
    for step in range(steps):
        terms = []
        for index in range(4 * step, min(4 * step + 4, len(samples))):
            ids, labels = samples[index]
            row, at = torch.tensor(ids)[None].long(), torch.tensor(labels != -100).nonzero()[:, 0]
            if is_own:
                prompt = row[0, : at[0]].tolist()
                answer = _own_answer(student, tokenizer, prompt, row[0, at].tolist(), step)
                row = torch.tensor([*prompt, *answer])[None]
                at = torch.arange(len(prompt), row.shape[1])
            logits = student(row).logits[0, at - 1]
            with torch.no_grad():
                of_teacher = teacher(row).logits[0, at - 1, :tokens].log_softmax(-1)
            far = kl_div(logits[:, :tokens].log_softmax(-1), of_teacher, log_target=True, reduction="none").sum(-1)
            known = cross_entropy(logits, row[0, at], reduction="none")
            terms.append(far if is_own else ratio * far + (1 - ratio) * known)
        loss = torch.cat(terms).mean()
        student.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in student.parameters():
                parameter -= 0.05 * parameter.grad
        losses.append(float(loss.detach()))
    return losses, {f"model.{name}": p.detach() for name, p in student.named_parameters()}


@pytest.mark.parametrize(
    ("options", "is_own"),
    [({}, False), ({"kd_ratio": 0.75}, False), ({"on_policy": 1.0, "divergence": ForwardKL()}, True)],
)
def test_steps_are_those_of_plain_transformers(
    make_trainer: Any, folders: tuple[str, str], questions: str, options: dict[str, Any], is_own: bool
) -> None:
    losses, weights = _plain(folders, questions, 3, options.get("kd_ratio", 1.0), is_own)
    how = {"data": {"shuffle": False}, "model": {"peft": None, **options}, "trainer": {"max_steps": 3}}
    steps, _, found = fit(make_trainer, folders, questions, how)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-5)
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("options", [{"kd_ratio": 0.75}, {"on_policy": 1.0, "answers_per_prompt": 2}])
@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(
    make_trainer: Any, folders: tuple[str, str], questions: str, options: dict[str, Any], trains: str
) -> None:
    model = {"peft": LORA if trains == "adapter" else None, **options}
    one = fit(make_trainer, folders, questions, {"model": model, "data": {"micro_batch_size": 4}})
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"micro_batch_size": 2, "num_workers": 1}):
        assert_same_runs(fit(make_trainer, folders, questions, {"model": model, "data": data}), one, 1e-5)


def test_a_resumed_run_takes_the_same_steps(
    make_trainer: Any, folders: tuple[str, str], questions: str, tmp_path: Path
) -> None:
    how = {"model": {"on_policy": 0.5, "kd_ratio": 0.5}, "save_after": 2, "save": str(tmp_path / "two.ckpt")}
    one, means, weights = fit(make_trainer, folders, questions, how)
    steps, same, found = fit(make_trainer, folders, questions, {"model": how["model"], "resume": how["save"]})
    assert steps == one[2:]
    for got, wanted in zip(same, means[2:], strict=True):  # which has what earlier steps have logged, too
        assert got == {name: wanted[name] for name in got}
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    saved = torch.load(how["save"], weights_only=False)
    assert len(saved["state_dict"]) == len(weights)  # nothing of the teacher


@pytest.mark.parametrize(
    "options",
    [
        *({"divergence": divergence} for divergence in (ForwardKL(2.0), ReverseKL(), JensenShannon(0.9))),
        {"on_policy": 1.0},
        {"on_policy": 1.0, "divergence": JensenShannon()},
    ],
)
def test_a_model_comes_nearer_to_its_teacher(
    make_trainer: Any, folders: tuple[str, str], questions: str, options: dict[str, Any]
) -> None:
    trainer = {"accumulate_grad_batches": 1, "max_epochs": 12}
    make = lambda **given: make_trainer(**{**given, **trainer})  # noqa: E731
    how = {"model": {"peft": None, **options}, "data": {"micro_batch_size": 5}, "optimizer": adamw}
    steps, means, _ = fit(make, folders, questions, how)
    assert steps[-1][0] < 0.7 * steps[0][0]
    assert means[-2]["train/divergence"] == pytest.approx(steps[-1][0])


def test_a_teacher_that_is_the_model_itself_teaches_nothing(
    make_trainer: Any, model_folder: str, questions: str
) -> None:
    how = {"model": {"peft": None}, "data": {"val_path": None}}
    steps, _, weights = fit(make_trainer, (model_folder, model_folder), questions, how)
    assert [loss for loss, _ in steps] == pytest.approx([0.0] * len(steps), abs=1e-6)
    before = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, before[name.removeprefix("model.")], atol=1e-5, rtol=1e-5)


def test_validation_has_the_known_answers_loss_and_the_divergence(
    make_trainer: Any, folders: tuple[str, str], questions: str
) -> None:
    val = str(Path(questions).with_name("val.json"))
    module = DistillationLM(folders[0], teacher=folders[1], kd_ratio=0.5)
    found = make_trainer().validate(module, data_of(questions), verbose=False)[0]
    plain = make_trainer().validate(CausalLM(folders[0]), data_of(questions), verbose=False)[0]
    assert {name: found[name] for name in plain} == pytest.approx(plain)
    trained = DistillationLM(folders[0], teacher=folders[1], optimizer=steady)
    trainer = make_trainer(max_steps=1, log_every_n_steps=1)
    trainer.fit(trained, data_of(val, micro_batch_size=3, val_path=None))
    assert found["val/divergence"] == pytest.approx(float(trainer.callback_metrics["train/loss"]))
    tested = make_trainer().test(module, data_of(questions), verbose=False)[0]
    assert tested["test/divergence"] == pytest.approx(found["val/divergence"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (DistillationLM, {}),
        (DistillationLM, {"kd_ratio": 0.5}),
        (OnPolicyDistillationLM, {"max_new_tokens": 2}),
    ],
)
def test_metrics_to_monitor_are_those_that_are_logged(
    make_trainer: Any, folders: tuple[str, str], questions: str, kind: type[DistillationLM], options: dict[str, Any]
) -> None:
    module = kind(folders[0], teacher=folders[1], optimizer=steady, **options)
    trainer = make_trainer(max_steps=1, log_every_n_steps=1, limit_train_batches=1)
    trainer.fit(module, data_of(questions))
    of_some = ("router_aux_loss", "regularization", "expert_load_max_over_mean", "padding_share", "grad_norm")
    for split in ("train", "val"):
        known = set(metric_names(split, module.measured)) - {f"{split}/{name}" for name in of_some}
        logged = {name for name in trainer.callback_metrics if name.startswith(f"{split}/")} - {"train/grad_norm"}
        assert logged == known
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if module.kd_ratio < 1:
        mixed = (measured["train/divergence"] + measured["train/cross_entropy"]) / 2
        assert measured["train/loss"] == pytest.approx(mixed)


def test_a_share_of_steps_is_on_own_answers(make_trainer: Any, folders: tuple[str, str], questions: str) -> None:
    module = OnPolicyDistillationLM(folders[0], teacher=folders[1], on_policy=0.5, max_new_tokens=3, optimizer=steady)
    root = make_trainer.keywords["default_root_dir"]
    trainer = make_trainer(max_steps=5, log_every_n_steps=1, logger=CSVLogger(root))
    trainer.fit(module, data_of(questions, val_path=None))
    lines = [json.loads(line) for line in (Path(root) / "sampled_answers.jsonl").read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert {"prompt", "answer", "expected", "tokens", "finish_reason"} < lines[0].keys()
    assert not {"reward", "rewards"} & lines[0].keys()


def test_prompts_without_answers(
    make_trainer: Any, folders: tuple[str, str], questions: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All that is measured is of answers of the student: of greedy ones in a validation."""
    caplog.set_level(logging.INFO)
    asked = str(Path(questions).with_name("asked.json"))
    module = OnPolicyDistillationLM(folders[0], teacher=folders[1], max_new_tokens=3, optimizer=steady)
    found = make_trainer().validate(module, data_of(asked, "asked.json"), verbose=False)[0]
    assert found == {"val/divergence": pytest.approx(_divergence_of_greedy(folders, asked), rel=1e-5)}
    trainer = make_trainer(max_epochs=1, log_every_n_steps=1)
    trainer.fit(module, data_of(asked, "asked.json"))
    assert "3 of 3 rows: without a known answer, and none is needed" in caplog.text
    assert trainer.callback_metrics["train/answer_tokens"] > 0
    assert not {"val/loss", "val/perplexity", "val/token_accuracy"} & trainer.callback_metrics.keys()


def _divergence_of_greedy(folders: tuple[str, str], path: str) -> float:
    """Mean reverse divergence of the student's greedy answers of 3 tokens, by plain transformers."""
    student, teacher = (AutoModelForCausalLM.from_pretrained(folder) for folder in folders)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    tokens, terms = max(tokenizer.get_vocab().values()) + 1, []
    for row in json.loads(Path(path).read_text("utf-8")):
        turn = {"role": "user", "content": f"{row['instruction']}\n{row['input']}".strip()}
        prompt = tokenizer.apply_chat_template([turn], add_generation_prompt=True, return_tensors="pt")["input_ids"]
        answered = student.generate(prompt, do_sample=False, max_new_tokens=3)
        at = torch.arange(prompt.shape[1] - 1, answered.shape[1] - 1)
        with torch.no_grad():
            of_student, of_teacher = (
                model(answered).logits[0, at, :tokens].log_softmax(-1) for model in (student, teacher)
            )
        terms.append(kl_div(of_teacher, of_student, log_target=True, reduction="none").sum(-1))
    return float(torch.cat(terms).mean())


@pytest.mark.parametrize("options", [{"on_policy": 0.5}, {}])
def test_what_cannot_be_without_answers(
    make_trainer: Any, folders: tuple[str, str], questions: str, options: dict[str, Any]
) -> None:
    asked = str(Path(questions).with_name("asked.json"))
    module = OnPolicyDistillationLM(folders[0], teacher=folders[1], max_new_tokens=3, **options)
    monitors = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(monitor="val/loss")]}
    said = r"'output' is empty" if options else r"monitors val/loss, .*; monitor val/divergence with mode: min, or give"
    with pytest.raises(RecipeError, match=said):
        make_trainer(max_epochs=1, **({} if options else monitors)).fit(module, data_of(asked, "asked.json"))
    assert module.model is None, "before weights are read"


def test_losses_of_sources(make_trainer: Any, folders: tuple[str, str], questions: str) -> None:
    sources = [Source(questions, name="one"), Source(str(Path(questions).with_name("val.json")), name="two")]
    for kind in (DistillationLM, OnPolicyDistillationLM):
        module = kind(folders[0], teacher=folders[1], max_new_tokens=3, optimizer=steady)
        trainer = make_trainer(max_steps=1, log_every_n_steps=1)
        trainer.fit(module, TextDataModule(sources=sources, micro_batch_size=13, shuffle=False))
        means = {name: float(value) for name, value in trainer.callback_metrics.items()}
        low, high = sorted((means["train/loss/one"], means["train/loss/two"]))
        assert low < means["train/loss"] < high


def test_another_teacher_is_named(
    make_trainer: Any, folders: tuple[str, str], questions: str, model_folder: str, tmp_path: Path
) -> None:
    saved = str(tmp_path / "two.ckpt")
    fit(make_trainer, folders, questions, {"save_after": 2, "save": saved})
    with pytest.warns(
        UserWarning,
        match=r"was trained on the answers of the data by ForwardKL\(temperature=1\) from .*, and goes on with",
    ):
        fit(make_trainer, (folders[0], model_folder), questions, {"resume": saved})


@pytest.mark.parametrize("kind", [CausalLM, PolicyLM, DistillationLM])
def test_a_run_that_goes_on_by_another_kind_of_training_says_so(
    make_trainer: Any, folders: tuple[str, str], questions: str, tmp_path: Path, kind: type[CausalLM]
) -> None:
    """A validation of the checkpoint goes on with nothing."""
    saved, options = str(tmp_path / "two.ckpt"), {"peft": LORA, "optimizer": steady, "max_new_tokens": 3}
    fit(make_trainer, folders, questions, {"save_after": 2, "save": saved})
    options |= {"rewards": [ExactAnswer()], "answers_per_prompt": 2} if kind is PolicyLM else {}
    options |= {"teacher": folders[1], "divergence": ReverseKL()} if kind is DistillationLM else {}
    said = r"was trained on the answers of the data by ForwardKL\(temperature=1\) from .*, and goes on with"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="(?s).*was trained on")
        make_trainer().validate(kind(folders[0], **options), data_of(questions), ckpt_path=saved, verbose=False)
    with pytest.warns(UserWarning, match=said):
        make_trainer(max_steps=3, accumulate_grad_batches=2).fit(
            kind(folders[0], **options), data_of(questions), ckpt_path=saved
        )


def test_predicting_needs_no_teacher(make_trainer: Any, folders: tuple[str, str], questions: str) -> None:
    module = DistillationLM(folders[0], teacher="/nowhere/teacher", max_new_tokens=2)
    answers = make_trainer().predict(module, data_of(questions, test_path=questions))
    assert sum(len(batch) for batch in answers) == 10


def test_padded_batches_of_a_plain_loader(make_trainer: Any, folders: tuple[str, str]) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 9]])
    batch = {"input_ids": ids, "labels": torch.tensor([[-100, -100, 7, 8], [-100, -100, -100, 9]])}
    for kind in (DistillationLM, OnPolicyDistillationLM):
        module = kind(folders[0], teacher=folders[1], max_new_tokens=3, optimizer=steady)
        trainer = make_trainer(max_steps=2, log_every_n_steps=1)
        trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
        assert float(trainer.callback_metrics["train/divergence"]) > 0


def test_a_teacher_is_held_during_a_run_alone(
    make_trainer: Any, folders: tuple[str, str], questions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, build = list[weakref.ref[Any]](), ModelSpec.build

    def recorded(spec: ModelSpec, *args: Any) -> Any:
        model = build(spec, *args)
        if spec.pretrained == folders[1]:
            held.append(weakref.ref(model))
        return model

    monkeypatch.setattr(ModelSpec, "build", recorded)
    module, data = DistillationLM(folders[0], teacher=folders[1], optimizer=steady), data_of(questions)
    for number, run in enumerate((Trainer.validate, Trainer.fit, Trainer.fit), start=1):
        run(make_trainer(max_steps=1), module, data)
        assert [model() for model in held] == [None] * number


def test_a_teacher_of_an_evaluation_can_train(folders: tuple[str, str]) -> None:
    """Tensors of inference mode could not be written by a training step, as FSDP does."""
    module = DistillationLM(folders[0], teacher=folders[1])
    module.check_teacher()
    teacher, batch = module.teacher, pack_samples([(np.arange(5, 9), np.arange(5, 9))])
    with torch.inference_mode():
        teacher.load(torch.device("cpu"))
        hidden = teacher.hidden_states(batch)
        logits = teacher.logits(hidden)
    assert teacher._forward is not None
    tensors = [hidden, logits, *teacher._forward.model.parameters()]
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in tensors)


def test_a_teacher_is_read_again_for_another_device(folders: tuple[str, str]) -> None:
    module = DistillationLM(folders[0], teacher=folders[1])
    module.check_teacher()
    places = []
    for name in ("cpu", "cpu", "meta", "cpu"):
        module.teacher.load(torch.device(name))
        assert module.teacher._forward is not None
        places.append((module.teacher._forward, module.teacher._forward.base.device.type))
    assert [place for _, place in places] == ["cpu", "cpu", "meta", "cpu"]
    assert places[0][0] is places[1][0]


@pytest.mark.parametrize(
    "options",
    [
        {"teacher_dtype": "bfloat16"},
        {"teacher_quantization": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")},
    ],
)
def test_a_teacher_in_another_form(
    make_trainer: Any, folders: tuple[str, str], questions: str, options: dict[str, Any]
) -> None:
    how = {"trainer": {"max_steps": 2}, "data": {"val_path": None}}
    steps, _, _ = fit(make_trainer, folders, questions, {**how, "model": options})
    wanted, _, _ = fit(make_trainer, folders, questions, how)
    assert steps != wanted
    assert [loss for loss, _ in steps] == pytest.approx([loss for loss, _ in wanted], rel=0.05)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_leaves_the_teacher_alone(
    make_trainer: Any, folders: tuple[str, str], questions: str, precision: str
) -> None:
    seen = []

    class Watched(ForwardKL):
        def of(self, student: Tensor, teacher: Tensor) -> Tensor:
            seen.append(teacher.detach().clone())
            return super().of(student, teacher)

    of_teacher = []
    for chosen in ("32-true", precision):
        how = {"model": {"divergence": Watched()}, "trainer": {"max_steps": 1, "precision": chosen}}
        seen.clear()
        steps, means, _ = fit(make_trainer, folders, questions, {**how, "data": {"val_path": None}})
        assert means[0]["train/divergence"] == pytest.approx(steps[0][0], rel=1e-6)  # summed in fp32
        of_teacher.append(seen[3:])  # after the tries
        assert torch.isfinite(torch.tensor(steps)).all()
    for plain, cast in zip(*of_teacher, strict=True):
        torch.testing.assert_close(plain, cast)


def _with_tokenizer(folder: str, to: Path, change: Callable[[Any], None], **sizes: Any) -> str:
    written = write_teacher(to, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    change(tokenizer)
    tokenizer.save_pretrained(written)
    return written


def test_a_teacher_with_more_tokens(
    make_trainer: Any, folders: tuple[str, str], questions: str, tmp_path: Path
) -> None:
    """Which the student's tokenizer lacks, and the divergence leaves out."""
    more = _with_tokenizer(folders[1], tmp_path, lambda one: one.add_tokens(["<one>", "<two>"]))
    plain = fit(make_trainer, folders, questions, {"trainer": {"max_steps": 2}})
    assert fit(make_trainer, (folders[0], more), questions, {"trainer": {"max_steps": 2}})[0] == plain[0]


def test_another_tokenizer_is_refused(make_trainer: Any, folders: tuple[str, str], tmp_path: Path) -> None:
    grown = DistillationLM(folders[0], teacher=folders[1], added_tokens=["<new>"])
    with pytest.raises(
        RecipeError, match=r"model.teacher='.*' has another tokenizer: 1 of \d+ tokens .*'<new>': \d+ here"
    ):
        grown.check_teacher()
    small = DistillationLM(folders[0], teacher=write_teacher(tmp_path, vocab_size=100))
    with pytest.raises(RecipeError, match=r"the tokenizer of '.*' has \d+ tokens, the model 100 embeddings"):
        small.check_teacher()


def test_a_quantized_teacher_is_not_sharded(folders: tuple[str, str]) -> None:
    packed = BitsAndBytesConfig(load_in_4bit=True)
    module = DistillationLM(folders[0], teacher=folders[1], teacher_quantization=packed, shard_teacher=True)
    with pytest.raises(RecipeError, match="model.shard_teacher=true with a quantized teacher .*; set it to false"):
        module.check_teacher()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DistillationLM, {"teacher": None}, "model.teacher is not set; name the model whose probabilities"),
        (DistillationLM, {"kd_ratio": 0.0}, "kd_ratio=0.0 must be above 0 and up to 1"),
        (DistillationLM, {"kd_ratio": 1.5}, "kd_ratio=1.5 must be above 0 and up to 1"),
        (DistillationLM, {"token_weights": DFT()}, "that of the teacher's probabilities; leave token_weights out"),
        (DistillationLM, {"divergence": "forward"}, "model.divergence='forward'"),
        (OnPolicyDistillationLM, {"on_policy": 0.0}, "on_policy=0.0 must be above 0 and up to 1"),
        (OnPolicyDistillationLM, {"kd_ratio": 0.5}, "kd_ratio=0.5 with model.on_policy=1: cross-entropy has no part"),
        (OnPolicyDistillationLM, {"answers_per_prompt": 0}, "answers_per_prompt=0 must be 1 or more"),
    ],
)
def test_options_that_are_refused(
    folders: tuple[str, str], kind: type[DistillationLM], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        kind(folders[0], **{"teacher": folders[1], **options})


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("/nowhere/teacher", "model.teacher='/nowhere/teacher' does not exist"),
        ("empty", "model.teacher='.*' is"),
    ],
)
def test_a_teacher_that_is_not_there(
    make_trainer: Any, folders: tuple[str, str], questions: str, tmp_path: Path, teacher: str, message: str
) -> None:
    """Before the weights of the student are read."""
    module = DistillationLM(folders[0], teacher=str(tmp_path) if teacher == "empty" else teacher)
    with pytest.raises(RecipeError, match=message):
        make_trainer(max_steps=1).fit(module, data_of(questions))
    assert module.model is None


def test_samples_that_are_too_long_for_the_teacher(
    make_trainer: Any, folders: tuple[str, str], questions: str, tmp_path: Path
) -> None:
    short = write_teacher(tmp_path, max_position_embeddings=90)
    module = DistillationLM(folders[0], teacher=short)
    with pytest.raises(
        RecipeError,
        match="data.max_length of 96 tokens is beyond the 90 positions of model.teacher=.*; set data.max_length lower",
    ):
        make_trainer(max_steps=1).fit(module, data_of(questions))
    own = OnPolicyDistillationLM(folders[0], teacher=folders[1], max_new_tokens=500)
    with pytest.raises(RecipeError, match="data.max_length with an answer"):
        make_trainer(max_steps=1).fit(own, data_of(questions))


def test_options_of_the_data_for_own_answers(make_trainer: Any, folders: tuple[str, str], questions: str) -> None:
    module = OnPolicyDistillationLM(folders[0], teacher=folders[1], max_new_tokens=2)
    with pytest.raises(RecipeError, match="data.packing=96 counts tokens of the data's own answers"):
        make_trainer(max_steps=1).fit(module, data_of(questions, packing=96))
    with pytest.raises(RecipeError, match="known answers of val, whose prompts the model answers; set data.overlong"):
        make_trainer(max_steps=1).fit(module, data_of(questions, max_length=30))


def test_a_ledger_keeps_losses_of_the_data(make_trainer: Any, folders: tuple[str, str], questions: str) -> None:
    ledger = LossLedger()
    module = DistillationLM(folders[0], teacher=folders[1], peft=LoraConfig(r=2), optimizer=steady)
    trainer = make_trainer(max_epochs=1, callbacks=[ledger])
    trainer.fit(module, data_of(questions, val_path=None))
    assert (Path(trainer.default_root_dir) / "loss_ledger").exists() or list(
        Path(trainer.default_root_dir).rglob("*ledger*")
    )
    own = OnPolicyDistillationLM(folders[0], teacher=folders[1], max_new_tokens=2)
    with pytest.raises(RecipeError, match="LossLedger keeps the loss of each sample of the data, and OnPolicy"):
        make_trainer(max_steps=1, callbacks=[LossLedger()]).fit(own, data_of(questions))
    assert own.model is None


def test_default_divergences(folders: tuple[str, str]) -> None:
    kinds: dict[type[DistillationLM], type[Divergence]] = {
        DistillationLM: ForwardKL,
        OnPolicyDistillationLM: ReverseKL,
    }
    for kind, divergence in kinds.items():
        assert type(kind(folders[0], teacher=folders[1]).divergence) is divergence

"""Policy optimization in one process: against plain transformers, for any split of a step, and after a resume."""

import csv
import hashlib
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from compared_strategies import adamw, sgd
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lit_callbacks import LossLedger
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from sampled_answers import LORA, SEED, FewLetters, assert_same_runs, data_of, fit, write_questions
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from lit_ft import (
    DAPO,
    DFT,
    GRPO,
    RLOO,
    CausalLM,
    DrGRPO,
    ExactAnswer,
    FinalNumber,
    OverlongPenalty,
    PolicyLM,
    RecipeError,
    Similarity,
    Source,
    TextDataModule,
)
from lit_ft.model import generation
from lit_ft.model.generation import Sampling, generate_answers
from lit_ft.training.metrics import metric_names
from lit_ft.training.policy.algorithms import Algorithm
from lit_ft.training.policy.rewards import Reward, SampledAnswer
from lit_ft.training.policy.rollouts import asked_of

PROMPTS = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_questions(tmp_path_factory.mktemp("questions"))


def _plain(
    folder: str,
    path: str,
    lr: float,
    steps: int,
    kl_weight: float = 0.0,
    counts_tokens: bool = False,
    lora: LoraConfig = LORA,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Steps of GRPO as its paper has it, answer by answer: losses, rewards, weights; of LoRA with a KL weight."""
    policy = AutoModelForCausalLM.from_pretrained(folder)
    data, module = data_of(path, shuffle=False), PolicyLM(folder, rewards=[FewLetters()])
    if kl_weight:
        os.environ["PL_GLOBAL_SEED"] = str(SEED)
        begin = PolicyLM(folder, rewards=[FewLetters()], peft=lora)
        begin.configure_model()
        policy = get_peft_model(policy, lora)
        policy.load_state_dict({name: w.detach().clone() for name, w in begin.model.state_dict().items()})
    data.load(module.tokenizer)
    samples, losses, means = data.splits["train"], [], []
    for step in range(steps):
        terms, rewards, lengths = [], [], []
        for index in range(4 * step, min(4 * step + 4, len(samples))):
            ids, labels = samples[index]
            first = int((labels != -100).argmax())
            prompt, expected = ids[:first].tolist(), ids[labels != -100].tolist()
            text = f"{step} %d {prompt} {expected}"
            seeds = [_seed(text % answer) for answer in range(3)]
            drawn = Sampling(temperature=1.0, seed=SEED)
            base = policy.get_base_model() if kl_weight else policy
            answers = generate_answers(policy, base, module.tokenizer, [prompt] * 3, 3, drawn, seeds)
            of = [SampledAnswer("", one.text.strip(), "", 0, None) for one in answers]
            reward = torch.tensor(FewLetters().of(of))
            advantage = (reward - reward.mean()) / (reward.std() + 1e-4)
            rewards.append(reward)
            for one, factor in zip(answers, advantage, strict=True):
                row = torch.tensor([*prompt, *one.ids])[None]
                logits = policy(row).logits[0, len(prompt) - 1 : -1]
                losses_of_tokens = cross_entropy(logits, torch.tensor(one.ids), reduction="none")
                terms.append(factor * (losses_of_tokens.sum() if counts_tokens else losses_of_tokens.mean()))
                lengths.append(len(one.ids))
                if kl_weight:
                    with policy.disable_adapter(), torch.no_grad():
                        of_base = policy(row).logits[0, len(prompt) - 1 : -1]
                    ratio = -cross_entropy(of_base, torch.tensor(one.ids), reduction="none") + losses_of_tokens
                    terms[-1] = terms[-1] + kl_weight * (ratio.exp() - ratio - 1).mean()
        loss = torch.stack(terms).sum() / (sum(lengths) if counts_tokens else len(lengths))
        policy.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in policy.parameters():
                if parameter.requires_grad:
                    parameter -= lr * parameter.grad
        losses.append(float(loss.detach()))
        means.append(float(torch.cat(rewards).mean()))
    trained = {f"model.{name}": p.detach() for name, p in policy.named_parameters() if p.requires_grad}
    return losses, means, trained


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


@pytest.fixture
def many_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of all tokens ends an answer, so that answers have unequal lengths."""
    monkeypatch.setattr(generation, "stop_ids", lambda *_: list(range(0, 320, 3)))


@pytest.mark.usefixtures("many_ends")
@pytest.mark.parametrize("algorithm", [GRPO(), DAPO()])
def test_steps_are_those_of_plain_transformers(
    make_trainer: Any, model_folder: str, questions: str, algorithm: Algorithm
) -> None:
    counts = algorithm.counts_tokens
    losses, means, weights = _plain(model_folder, questions, lr=0.02, steps=3, counts_tokens=counts)
    model = {"peft": None, "algorithm": algorithm}
    how = {"data": {"shuffle": False}, "model": model, "trainer": {"max_steps": 3}}
    steps, measured, found = fit(make_trainer, model_folder, questions, how)
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    assert [one["train/reward"] for one in measured[:-1]] == pytest.approx(means, rel=1e-5)
    assert 1 < measured[0]["train/answer_tokens"] < 3
    assert max(map(abs, losses)) > 1e-4
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("many_ends")
@pytest.mark.parametrize("architecture", ["qwen2", "mixtral"])
def test_the_divergence_is_that_of_plain_peft(
    make_trainer: Any, tmp_path: Path, questions: str, architecture: str
) -> None:
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    lora = LoraConfig(r=4, target_modules=["q_proj"], **(experts if architecture == "mixtral" else {}))
    folder = save_model(architecture, tmp_path / "model", layers=2)
    losses, means, weights = _plain(folder, questions, lr=0.2, steps=3, kl_weight=2.0, lora=lora)
    how = {
        "data": {"shuffle": False},
        "model": {"kl_weight": 2.0, "peft": lora},
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
        "trainer": {"max_steps": 3},
    }
    steps, measured, found = fit(make_trainer, folder, questions, how)
    assert weights.keys() == found.keys()
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    assert [one["train/reward"] for one in measured[:-1]] == pytest.approx(means, rel=1e-5)
    divergences = [one["train/kl"] for one in measured[:-1]]
    assert divergences[0] == pytest.approx(0, abs=1e-9)
    assert min(divergences[1:]) > 1e-5
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("algorithm", [GRPO(), DrGRPO(), DAPO(), RLOO()])
def test_rewards_rise(make_trainer: Any, model_folder: str, questions: str, algorithm: Algorithm) -> None:
    trainer = {"accumulate_grad_batches": 1, "max_epochs": 12}
    make = lambda **options: make_trainer(**{**options, **trainer})  # noqa: E731
    model = {"algorithm": algorithm, "answers_per_prompt": 6, "peft": None}
    how = {"model": model, "data": {"micro_batch_size": 5}, "optimizer": adamw}
    _, means, _ = fit(make, model_folder, questions, how)
    rewards = [one["train/reward"] for one in means[:-1]]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


@pytest.mark.usefixtures("many_ends")
@pytest.mark.parametrize("algorithm", [GRPO(scale_rewards=False), DrGRPO(), DAPO(), RLOO()])
@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(
    make_trainer: Any, model_folder: str, questions: str, algorithm: Algorithm, trains: str
) -> None:
    model = {"algorithm": algorithm, "peft": LORA if trains == "adapter" else None}
    one = fit(make_trainer, model_folder, questions, {"model": model, "data": {"micro_batch_size": 4}})
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"micro_batch_size": 2, "num_workers": 1}):
        assert_same_runs(fit(make_trainer, model_folder, questions, {"model": model, "data": data}), one, 1e-5)
    of_answers = {f"val/{name}" for name in ("reward", "rewards/FewLettersOfRow", "cut_share", "answer_tokens")}
    assert one[1][-1].keys() == {"val/loss", "val/perplexity", "val/token_accuracy", *of_answers}


def test_a_resumed_run_draws_the_same_answers(
    make_trainer: Any, model_folder: str, questions: str, tmp_path: Path
) -> None:
    how = {"save_after": 2, "save": str(tmp_path / "two.ckpt")}
    one, means, weights = fit(make_trainer, model_folder, questions, how)
    steps, same, found = fit(make_trainer, model_folder, questions, {"resume": how["save"]})
    assert steps == one[2:]
    assert same == means[2:]
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert len({mean["train/reward"] for mean in means[:-1]}) == len(one)  # each step draws others


OTHER_POSITIONS: dict[str, dict[str, Any]] = {
    "gpt2": {  # learned positions
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        **dict.fromkeys(["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0),
    },
    "recurrent_gemma": {  # padding changes its answers
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "lru_width": 48,
        "attention_window_size": 64,
    },
}


@pytest.mark.usefixtures("many_ends")
@pytest.mark.parametrize("architecture", OTHER_POSITIONS)
def test_answers_do_not_depend_on_how_many_are_generated_together(
    make_trainer: Any, model_folder: str, questions: str, tmp_path: Path, architecture: str
) -> None:
    own = {**OTHER_POSITIONS[architecture], "vocab_size": 384, "initializer_range": 0.1, "dtype": "float32"}
    torch.manual_seed(0)
    folder = str(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **own)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    runs = [
        fit(make_trainer, folder, questions, {"model": {"peft": None, "answers_at_once": size, "max_new_tokens": 6}})
        for size in (1, 5, 128)
    ]
    assert len({mean["train/answer_tokens"] for mean in runs[0][1][:-1]}) > 1
    for other in runs[1:]:
        assert_same_runs(other, runs[0], 1e-5)


def test_calls_of_tools_and_their_results_are_prompt_or_known_answer(
    make_trainer: Any, model_folder: str, tmp_path: Path
) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "sky"}}}]}
    question, ending = {"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Grey."}
    result = {"role": "tool", "content": "clouds"}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    rows = [{"tools": tools, "messages": messages} for messages in ([question, call], [question, call, result, ending])]
    (tmp_path / "calls.json").write_text(json.dumps(rows), "utf-8")
    module = PolicyLM(model_folder, rewards=[FewLetters()], answers_per_prompt=2, max_new_tokens=2, optimizer=sgd)
    data = TextDataModule(str(tmp_path / "calls.json"), micro_batch_size=2, shuffle=False, max_length=None)
    make_trainer(max_steps=1).fit(module, data)
    (batch,) = data.first_batches(1)
    of_call, of_end = module.known_answers(asked_of(batch))
    assert '"look"' in of_call.expected
    assert of_call.prompt.endswith("<|im_start|>assistant\n")
    assert of_end.expected == "Grey."
    assert of_call.expected in of_end.prompt
    assert "clouds" in of_end.prompt.rpartition(of_call.expected)[2]


def test_another_policy_is_named(make_trainer: Any, model_folder: str, questions: str, tmp_path: Path) -> None:
    of_grpo, supervised = str(tmp_path / "grpo.ckpt"), str(tmp_path / "supervised.ckpt")
    fit(make_trainer, model_folder, questions, {"save_after": 2, "save": of_grpo})
    with pytest.warns(
        UserWarning, match=r"trained on 3 answers .* by GRPO\(scale_rewards=True\) of FewLettersOfRow\(\), and goes"
    ):
        fit(make_trainer, model_folder, questions, {"resume": of_grpo, "model": {"algorithm": RLOO()}})
    module = CausalLM(model_folder, peft=LORA, optimizer=sgd)
    trainer = make_trainer(max_steps=2, accumulate_grad_batches=2)
    trainer.fit(module, data_of(questions))
    trainer.save_checkpoint(supervised)
    with pytest.warns(UserWarning, match="trained on the answers of the data, and goes on with 3 answers of its own"):
        fit(make_trainer, model_folder, questions, {"resume": supervised})


class Constant(Reward):
    """Reward that tells no answers apart."""

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        return [0.5] * len(answers)


def test_steps_without_a_signal_train_nothing_and_are_named(
    make_trainer: Any, model_folder: str, questions: str
) -> None:
    module = PolicyLM(model_folder, rewards=[Constant()], answers_per_prompt=2, max_new_tokens=2, optimizer=sgd)
    module.configure_model()
    before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    trainer = make_trainer(max_steps=21, log_every_n_steps=1)
    with pytest.warns(
        UserWarning,
        match="in 10 optimizer steps rewards have trained nothing: all answers to each prompt",
    ) as said:
        trainer.fit(module, data_of(questions))
    assert sum("in 10 optimizer steps" in str(one.message) for one in said) == 1
    assert all(torch.equal(weight, before[name]) for name, weight in module.named_parameters())
    measured = {name: float(trainer.callback_metrics[f"train/{name}"]) for name in ("loss", "signal_share", "reward")}
    assert measured == {"loss": 0, "signal_share": 0, "reward": 0.5}


def test_cut_answers_are_left_out_where_asked(make_trainer: Any, model_folder: str, questions: str) -> None:
    """Random weights end next to no answer themselves."""
    model = {"train_on_cut_answers": False, "max_new_tokens": 2}
    steps, means, _ = fit(make_trainer, model_folder, questions, {"model": model})
    of_cut = [(step, one) for step, one in zip(steps, means, strict=False) if one["train/cut_share"] == 1]
    assert len(of_cut) > 3
    assert {step for step, _ in of_cut} == {(0.0, 0.0)}
    assert {one["train/signal_share"] for _, one in of_cut} == {0.0}
    assert min(one["train/reward_std"] for _, one in of_cut) > 0


@pytest.mark.usefixtures("many_ends")
def test_what_nothing_was_measured_of_is_not_logged(make_trainer: Any, tmp_path: Path, questions: str) -> None:
    """Every answer of one token: with ``train_on_cut_answers: false`` some steps have none that counts."""
    folder = save_model("qwen3_moe", tmp_path / "model", layers=2)
    lora = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    of_answers = {"algorithm": DAPO(), "answers_per_prompt": 2, "max_new_tokens": 1, "train_on_cut_answers": False}
    options = {"peft": lora, "kl_weight": 0.1, "router_aux_loss": 0.01, "optimizer": sgd, **of_answers}
    module = PolicyLM(folder, rewards=[FewLetters()], **options)
    trainer = make_trainer(max_steps=12, log_every_n_steps=1, logger=CSVLogger(tmp_path))
    trainer.fit(module, data_of(questions, micro_batch_size=1))
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    assert all(math.isfinite(float(value)) for row in rows for value in row.values() if value)
    without = [row for row in rows if row["train/cut_share"] == "1.0"]
    assert 1 < len(without) < len(rows)
    for row in rows:
        assert (row["train/kl"] == "") == (row["train/router_aux_loss"] == "") == (row in without)
    assert {row["train/loss"] for row in without} == {"0.0"}


def test_rewards_are_weighted_and_logged_by_name_and_source(
    make_trainer: Any, model_folder: str, questions: str
) -> None:
    module = PolicyLM(
        model_folder,
        rewards=[FewLetters(), Constant(), Constant()],
        reward_weights=[2, 1, -3],
        answers_per_prompt=2,
        max_new_tokens=3,
        optimizer=sgd,
    )
    sources = [Source(questions, name="one"), Source(str(Path(questions).with_name("val.json")), name="two")]
    trainer = make_trainer(max_steps=2, log_every_n_steps=1)
    trainer.fit(module, TextDataModule(sources=sources, micro_batch_size=8, shuffle=False))
    means = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert means["train/rewards/Constant"] == means["train/rewards/Constant_2"] == 0.5
    assert means["train/reward"] == pytest.approx(2 * means["train/rewards/FewLetters"] - 1)
    per_source = means["train/reward/one"], means["train/reward/two"]  # of 2 and 3 prompts
    assert means["train/reward"] == pytest.approx((2 * per_source[0] + 3 * per_source[1]) / 5)
    assert not any(name.startswith("train/loss/") for name in means)


def test_answers_are_written_with_their_rewards(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FewLetters()], answers_per_prompt=2, max_new_tokens=3, optimizer=sgd)
    trainer = make_trainer(
        max_steps=4, log_every_n_steps=2, logger=CSVLogger(make_trainer.keywords["default_root_dir"])
    )
    trainer.fit(module, data_of(questions, join_micro_batches=False))
    file = Path(trainer.default_root_dir) / "sampled_answers.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 4, 4]
    for line in lines:
        one = SampledAnswer(*(line[name] for name in SampledAnswer._fields if name in line))
        assert [line["reward"]] == pytest.approx(FewLetters().of([one]))
        assert line["rewards"] == {"FewLetters": line["reward"]}
        assert "assistant" in line["prompt"]


def test_validation_asks_once_and_greedily(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FewLetters()], answers_per_prompt=2, max_new_tokens=4)
    data = data_of(questions)
    found = make_trainer().validate(module, data, verbose=False)[0]
    prompts = [one["prompt"] for one in data.splits.prompts("val")]
    answers = [SampledAnswer("", text.strip(), "", 4, "length") for text in module.answer(prompts, 4)]
    assert found["val/reward"] == pytest.approx(sum(FewLetters().of(answers)) / len(answers))
    plain = make_trainer().validate(CausalLM(model_folder), data_of(questions), verbose=False)[0]
    assert found["val/loss"] == pytest.approx(plain["val/loss"])
    tested = make_trainer().test(module, data_of(questions), verbose=False)[0]
    assert tested["test/reward"] == pytest.approx(found["val/reward"])


def test_metrics_to_monitor_are_those_that_are_logged(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FewLetters()], answers_per_prompt=2, max_new_tokens=2, optimizer=sgd)
    trainer = make_trainer(max_steps=1, log_every_n_steps=1, limit_train_batches=1)
    trainer.fit(module, data_of(questions))
    of_some = ("router_aux_loss", "regularization", "expert_load_max_over_mean", "padding_share", "grad_norm")
    for split in ("train", "val"):
        known = set(metric_names(split, module.measured)) - {f"{split}/{name}" for name in of_some}
        assert {name for name in trainer.callback_metrics if name.startswith(f"{split}/")} - {
            "train/grad_norm"
        } == known


def test_padded_batches_of_a_plain_loader(make_trainer: Any, model_folder: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 9, 9]])
    batch = {"input_ids": ids, "labels": torch.tensor([[-100, -100, 7, 8], [-100, 6, -100, -100]])}
    module = PolicyLM(model_folder, rewards=[FewLetters()], answers_per_prompt=2, max_new_tokens=4, optimizer=sgd)
    trainer = make_trainer(max_steps=2)
    with pytest.raises(RecipeError, match="has no prompt"):
        trainer.fit(module, DataLoader([batch], batch_size=None))
    batch["labels"] = torch.tensor([[-100, -100, 7, 8], [-100, -100, -100, 9]])
    batch["attention_mask"] = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1]])
    trainer = make_trainer(max_steps=2, log_every_n_steps=1)
    trainer.fit(module, DataLoader([batch] * 2, batch_size=None))
    assert float(trainer.callback_metrics["train/answer_tokens"]) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rewards": None}, "model.rewards is not set; say what an answer is worth"),
        ({"rewards": []}, "model.rewards is not set"),
        ({"rewards": [ExactAnswer]}, "model.rewards"),
        ({"reward_weights": [1.0, 2.0]}, r"reward_weights=\[1.0, 2.0\] has 2 numbers for 1 rewards"),
        (
            {"rewards": [OverlongPenalty(8, 16)], "max_new_tokens": 15},
            "max_new_tokens=15: no answer is as long as max_tokens=16; set it to model.max_new_tokens or lower",
        ),
        ({"reward_weights": [0.0]}, "0.0 must be finite and not 0; leave a reward of no weight out"),
        ({"answers_per_prompt": 1}, "answers_per_prompt=1 must be 2 or more: answers to one prompt are compared"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be 1 or more"),
        ({"token_weights": DFT()}, "the weights of tokens come from rewards; leave token_weights out"),
        ({"algorithm": "grpo"}, "model.algorithm='grpo'"),
        ({"kl_weight": -1.0, "peft": LORA}, "kl_weight=-1.0 must be 0 or above, and finite"),
        ({"kl_weight": 0.1}, "kl_weight=0.1 compares the model with itself without its adapter, and all weights train"),
        ({"kl_weight": 0.1, "peft": PROMPTS}, "and PromptTuningConfig is no part of layers; take LoRA"),
    ],
)
def test_options_that_are_refused(model_folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PolicyLM(model_folder, **{"rewards": [Similarity()], **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": 96}, "data.packing=96 counts tokens of the data's own answers, and the model trains on"),
        ({"micro_batch_tokens": 500}, "data.micro_batch_tokens=500 counts tokens"),
        (
            {"supervise": "all"},
            "it has no prompt; give conversations or instructions, and leave data.supervise=all out",
        ),
        ({"max_length": 505}, "set data.max_length or model.max_new_tokens lower"),
    ],
)
def test_data_that_is_refused(
    make_trainer: Any, model_folder: str, questions: str, options: dict[str, Any], message: str
) -> None:
    """Before the weights are read."""
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=10)
    with pytest.raises(RecipeError, match=message):
        make_trainer(max_steps=1).fit(module, data_of(questions, **options))
    assert module.model is None


def test_weights_of_the_base_that_train_are_no_reference(make_trainer: Any, model_folder: str, questions: str) -> None:
    """Biases beside LoRA's factors stay where the adapter is switched off."""
    biases = LoraConfig(r=4, target_modules=["q_proj"], bias="lora_only")
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=2, peft=biases, kl_weight=0.1)
    with pytest.raises(RecipeError, match=r"q_proj.base_layer.bias is in no adapter that PEFT switches off; set kl"):
        make_trainer(max_steps=1).fit(module, data_of(questions, val_path=None))


def test_known_answers_that_are_cut_are_refused(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=4)
    with pytest.raises(
        RecipeError, match=r"data.max_length=30 cuts \d+ of \d+ known answers of train, .*data.overlong=drop"
    ):
        make_trainer(max_steps=1).fit(module, data_of(questions, max_length=30, val_path=None))
    streamed = data_of(questions, streaming=True, val_path=None)
    with pytest.raises(RecipeError, match="data.overlong=truncate would cut known answers of the stream"):
        make_trainer(max_steps=1).fit(module, streamed)
    trainer = make_trainer(max_steps=2, limit_train_batches=2)
    trainer.fit(module, data_of(questions, streaming=True, overlong="drop", val_path=None))
    assert float(trainer.callback_metrics["train/answer_tokens"]) > 0


def test_rewards_are_tried_before_weights_are_read(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FinalNumber()], max_new_tokens=4)
    with pytest.raises(RecipeError, match="FinalNumber compares numbers, and the data's answer '.*' has none"):
        make_trainer(max_steps=1).fit(module, data_of(questions))
    assert module.model is None


def test_an_adapter_that_is_not_neutral_is_no_reference(
    make_trainer: Any, model_folder: str, questions: str, tmp_path: Path
) -> None:
    changed = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=2, peft=changed, kl_weight=0.1)
    with pytest.raises(RecipeError, match=r"this adapter changes it before it has trained \(by [\d.]+ nats a token\)"):
        make_trainer(max_steps=1).fit(module, data_of(questions, val_path=None))
    module.save_adapter(tmp_path)
    with pytest.raises(RecipeError, match="which is not what model.adapter makes of it; merge that adapter"):
        PolicyLM(model_folder, rewards=[FewLetters()], adapter=str(tmp_path), kl_weight=0.1)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_text_among_conversations_is_refused(
    make_trainer: Any, model_folder: str, questions: str, tmp_path: Path, split: str
) -> None:
    """Before anything is trained, wherever it is."""
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "Nobody asked."}\n' * 2)
    several = [Source(questions, name="one"), Source(str(texts), name="two")]
    sources = {"sources": several} if split == "train" else {"path": questions, "val_sources": several}
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=4)
    with pytest.raises(
        RecipeError, match=rf"texts.jsonl: row 1 is .* \(2 of \d+ samples of {split}\), and the model answers"
    ):
        make_trainer(max_steps=1).fit(module, TextDataModule(**sources, micro_batch_size=1, shuffle=False))
    assert module.model is None


def test_a_loss_ledger_is_refused(make_trainer: Any, model_folder: str, questions: str) -> None:
    module = PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=2)
    with pytest.raises(
        RecipeError, match="LossLedger keeps the loss of each sample of the data, and PolicyLM trains on"
    ):
        make_trainer(max_steps=1, callbacks=[LossLedger()]).fit(module, data_of(questions))
    assert module.model is None


class Shouting(PolicyLM):
    """With an ``answer`` of its own: of the model's answers, or of others."""

    asks_model = True

    def answer(self, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
        texts = super().answer(prompts, max_new_tokens) if self.asks_model else []
        return [text.upper() for text in texts] if self.asks_model else ["YES"] * 4


def test_an_own_answer_trains_where_it_is_the_models(make_trainer: Any, model_folder: str, questions: str) -> None:
    given = {"rewards": [FewLetters()], "max_new_tokens": 4, "answers_per_prompt": 2, "optimizer": sgd}
    trainer = make_trainer(max_steps=1, log_every_n_steps=1)
    trainer.fit(Shouting(model_folder, **given), data_of(questions, val_path=None))
    assert float(trainer.callback_metrics["train/answer_tokens"]) > 0
    other = Shouting(model_folder, **given)
    other.asks_model = False
    with pytest.raises(RecipeError, match="Shouting trains on the tokens of its answers, and its own `answer` gives"):
        make_trainer(max_steps=1).fit(other, data_of(questions, val_path=None))


def test_a_batch_is_bounded_by_what_answers_may_have(make_trainer: Any, model_folder: str, questions: str) -> None:
    data, module = data_of(questions), PolicyLM(model_folder, rewards=[FewLetters()], max_new_tokens=4)
    trainer = make_trainer(max_steps=1, accumulate_grad_batches=2)
    trainer.fit(module, data)
    assert data.token_budget == 2 * 8 * (96 + 4)
    assert data.plan().token_budget is None  # micro-batches are not joined: a forward pass has 2 prompts
    trainer.validate(module, data, verbose=False)
    assert len(data.val_dataloader()) == 1  # 16 prompts with one answer each


@pytest.mark.parametrize(("at_once", "calls"), [(128, [12]), (5, [5, 5, 2])])
def test_answers_of_a_step_are_generated_together(
    make_trainer: Any,
    model_folder: str,
    questions: str,
    monkeypatch: pytest.MonkeyPatch,
    at_once: int,
    calls: list[int],
) -> None:
    sizes: list[int] = []
    of_batch = generation._generate

    def counted(*arguments: Any) -> Any:
        sizes.append(len(arguments[3]))
        return of_batch(*arguments)

    monkeypatch.setattr(generation, "_generate", counted)
    how = {"model": {"answers_at_once": at_once}, "data": {"micro_batch_size": 1, "val_path": None}}
    found = fit(make_trainer, model_folder, questions, {**how, "trainer": {"max_steps": 2}})
    assert sizes == 2 * calls
    monkeypatch.undo()
    one = fit(make_trainer, model_folder, questions, {"data": {"val_path": None}, "trainer": {"max_steps": 2}})
    assert_same_runs(found, one, 1e-5)


def test_answering_changes_neither_modes_nor_random_states(
    make_trainer: Any, model_folder: str, questions: str
) -> None:
    seen = []

    class Watched(FewLetters):
        def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
            seen.append((torch.get_rng_state(), [part.training for part in module.modules()]))
            return super().of(answers)

    class Before(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            seen.append((torch.get_rng_state(), [part.training for part in module.modules()]))

    module = PolicyLM(model_folder, rewards=[Watched()], max_new_tokens=2, answers_per_prompt=2, optimizer=sgd)
    make_trainer(max_steps=1, callbacks=[Before()]).fit(module, data_of(questions, val_path=None))
    (state, modes), (after, same) = seen[-2:]  # before them, rewards are tried on known answers
    assert torch.equal(state, after)
    assert modes == same
    assert all(modes[1:])

"""Training of reward models: steps and scores are those of plain transformers, for any split, and in what is saved."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from compared_strategies import assert_same, sgd
from lit_callbacks.export.merging import save_merged
from peft import LoraConfig, PeftModel, PromptTuningConfig
from preference_pairs import LORA, data_of, fit, write_judged, write_pairs
from sampled_answers import save_reward_model
from shared_fixtures import make_tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lit_ft import CausalLM, ExactMatch, RecipeError, RewardLM, RewardModel
from lit_ft.inference.opening import open_model
from lit_ft.model.loading import DENSE, pick_attention
from lit_ft.packed_batch import pack_pairs
from lit_ft.training.policy.rewards import SampledAnswer
from lit_ft.training.preference.pairs import with_reference
from lit_ft.training.preference.reward_lm import at_ends

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""It writes a line break behind the end of the last turn, where the score of a conversation is."""


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model to train further."""
    folder = save_reward_model(tmp_path_factory.mktemp("judge"), chat_template=CHATML, tie_word_embeddings=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    torch.nn.init.normal_(model.score.weight, std=0.05)
    model.save_pretrained(folder)
    return folder


def _conversations(path: str) -> list[list[list[dict[str, str]]]]:
    rows = map(json.loads, Path(path).read_text("utf-8").splitlines())
    return [[row["prompt"] + row[name] for name in ("chosen", "rejected")] for row in rows]


def _score(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]]) -> Tensor:
    return model(tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)).logits[0, 0]


def test_steps_are_those_of_plain_transformers(make_trainer: Any, judge: str, pairs: str) -> None:
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    model.config.pad_token_id = None  # so that the last token counts, whatever it is
    rows, losses = _conversations(pairs), []
    for start in range(0, len(rows), 4):
        scores = [[_score(model, tokenizer, turns) for turns in pair] for pair in rows[start : start + 4]]
        of_pairs = [-logsigmoid(chosen - rejected) + 0.01 * (chosen + rejected) ** 2 for chosen, rejected in scores]
        model.zero_grad()
        torch.stack(of_pairs).mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
        losses.append(float(torch.stack(of_pairs).detach().mean()))
    how = {"kind": RewardLM, "data": {"shuffle": False}, "model": {"peft": None, "center_weight": 0.01}}
    make = lambda **options: make_trainer(**options | {"max_epochs": 1})  # noqa: E731
    steps, means, found = fit(make, judge, pairs, {**how, "optimizer": partial(torch.optim.SGD, lr=0.01)})
    assert [loss for loss, _ in steps] == pytest.approx(losses, rel=1e-4)
    assert len(set(losses)) == len(losses)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], weight.detach(), atol=2e-5, rtol=1e-4)
    val = str(Path(pairs).with_name("val.jsonl"))
    with torch.no_grad():
        scores = [[float(_score(model, tokenizer, turns)) for turns in pair] for pair in _conversations(val)]
    assert means["val/reward_chosen"] == pytest.approx(sum(one for one, _ in scores) / len(scores), rel=1e-3)
    assert means["val/reward_accuracy"] == pytest.approx(sum(one > other for one, other in scores) / len(scores))
    assert means.keys() == {
        *("val/loss", "val/reward_accuracy", "val/reward_margin", "val/reward_chosen", "val/reward_rejected")
    }


@pytest.mark.parametrize("trains", ["adapter", "everything"])
def test_numbers_do_not_depend_on_the_split(make_trainer: Any, model_folder: str, pairs: str, trains: str) -> None:
    """Of a model that gets a new head."""
    how = {"kind": RewardLM, "model": {"peft": LORA if trains == "adapter" else None}}
    one, means, weights = fit(make_trainer, model_folder, pairs, {**how, "data": {"micro_batch_size": 4}})
    for data in ({"micro_batch_size": 1, "join_micro_batches": False}, {"packing": 256}):
        steps, same, found = fit(make_trainer, model_folder, pairs, {**how, "data": data})
        if "packing" not in data:  # which puts pairs into other steps
            assert_same(steps, found, one, weights, 1e-5)
            assert same == pytest.approx(means, rel=1e-4)
    assert any("score" in name for name in weights)
    assert len({round(loss, 5) for loss, _ in one}) == len(one)


def test_a_resumed_run_goes_on(make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path) -> None:
    how = {"kind": RewardLM, "save_after": 3, "save": str(tmp_path / "three.ckpt")}
    one, means, weights = fit(make_trainer, model_folder, pairs, how)
    steps, same, found = fit(make_trainer, model_folder, pairs, {"kind": RewardLM, "resume": how["save"]})
    assert steps == one[3:]
    assert same == means
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_has_the_scores_of_training(
    make_trainer: Any, judge: str, pairs: str, tmp_path: Path, dtype: Any
) -> None:
    """The adapter by peft, and the merged model by transformers and as a reward."""
    module = RewardLM(judge, peft=LORA, dtype=dtype, optimizer=sgd)
    data = data_of(pairs)
    trainer = make_trainer(max_steps=6)
    trainer.fit(module, data)
    expected = float(trainer.validate(module, data, verbose=False)[0]["val/reward_chosen"])
    module.save_adapter(tmp_path / "adapter")
    save_merged(module.model, tmp_path / "merged", module.tokenizer)
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    chosen = [pair[0] for pair in _conversations(str(Path(pairs).with_name("val.jsonl")))]
    answers = [SampledAnswer("", turns[-1]["content"], "", 1, "stop", {}, turns[:-1]) for turns in chosen]
    merged = RewardModel(str(tmp_path / "merged"))
    merged.check()
    assert merged.scores(chosen) == merged.of(answers)
    assert sum(merged.of(answers)) / len(answers) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    base = AutoModelForSequenceClassification.from_pretrained(judge, num_labels=1, dtype=dtype)
    base.config.pad_token_id = None
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokenizer = AutoTokenizer.from_pretrained(judge)
    with torch.no_grad():
        scores = [float(_score(adapted, tokenizer, turns)) for turns in chosen]
    assert sum(scores) / len(scores) == pytest.approx(expected, rel=tolerance, abs=tolerance)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    again = RewardLM(judge, adapter=str(tmp_path / "adapter"), dtype=dtype, optimizer=sgd)
    same = make_trainer().validate(again, data, verbose=False)[0]["val/reward_chosen"]
    assert same == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("overlong", ["drop", "truncate_left_prompt"])
def test_conversations_end_as_the_template_ends_them(judge: str, pairs: str, overlong: str) -> None:
    """Also those that lose the beginning of their prompt."""
    tokenizer = AutoTokenizer.from_pretrained(judge)
    longest = max(
        len(tokenizer.apply_chat_template(one)["input_ids"]) for both in _conversations(pairs) for one in both
    )
    data = data_of(pairs, max_length=longest - 2, overlong=overlong, val_path=None)
    data.take_rows_of(RewardLM(judge))
    data.load(tokenizer)
    samples = data.splits["train"]
    assert data.splits.prepared["train"][0].notes["dropped" if overlong == "drop" else "prompt truncated"]
    ends = {int(ids[-1]) for number in range(len(samples)) for ids, _ in samples.pair(number)}
    assert ends == set(tokenizer("\n")["input_ids"])


def test_a_causal_model_gets_a_head_that_is_saved(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path, capsys: Any
) -> None:
    module = RewardLM(model_folder, optimizer=sgd, peft=LORA)
    make_trainer(max_steps=2).fit(module, data_of(pairs, val_path=None))
    save_merged(module.model, tmp_path / "merged", module.tokenizer)
    read = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not read[1]["missing_keys"]
    assert not read[1]["unexpected_keys"]  # the head for tokens is left out
    assert read[0].config.num_labels == 1
    torch.testing.assert_close(read[0].score.weight, module.base_model.score.weight)


def test_the_padding_token_does_not_hide_the_end_of_texts(make_trainer: Any, tmp_path: Path, pairs: str) -> None:
    """In a template that ends with the padding token, transformers would take the score of the token before."""
    ends_with_padding = CHATML.replace("<|im_end|>\n'", "<|im_end|>'")
    folder = save_reward_model(tmp_path / "judge", chat_template=ends_with_padding)
    module = RewardLM(folder, optimizer=sgd)
    make_trainer(max_steps=1).fit(module, data_of(pairs, val_path=None))
    assert module.base_model.config.pad_token_id is None
    kept = RewardLM(save_reward_model(tmp_path / "other", chat_template=CHATML), optimizer=sgd)
    make_trainer(max_steps=1).fit(kept, data_of(pairs, val_path=None))
    assert kept.base_model.config.pad_token_id is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"center_weight": -1.0}, r"model.center_weight=-1.0 must be 0 or above"),
        ({"peft": PromptTuningConfig(num_virtual_tokens=4)}, "PromptTuningConfig cannot train the head that scores"),
        ({"trainable": ["norm"]}, "model.trainable leaves out the head that scores texts; add score"),
        (
            {"peft": LoraConfig(init_lora_weights="lora_ga")},
            "'lora_ga' looks at gradients of the tokens of answers",
        ),
        ({"peft": LoraConfig(task_type="TOKEN_CLS")}, "task_type=TOKEN_CLS is not for reward models"),
    ],
)
def test_what_cannot_be_trained_is_refused(model_folder: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        RewardLM(model_folder, **options).check()


def test_other_models_are_refused(judge: str, tmp_path: Path, model_folder: str) -> None:
    two = save_reward_model(tmp_path / "two", num_labels=2)
    with pytest.raises(RecipeError, match="tells apart 2 labels, and a reward model has one score"):
        RewardLM(two).check()
    with pytest.raises(RecipeError, match=r"is a Qwen2ForSequenceClassification, which scores texts and has no head"):
        CausalLM(judge).check()
    config = json.loads((Path(model_folder) / "config.json").read_text())
    other = tmp_path / "granite"
    other.mkdir()
    for file in Path(model_folder).glob("tokenizer*"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "config.json").write_text(json.dumps({**config, "model_type": "granite", "architectures": []}))
    with pytest.raises(RecipeError, match="transformers has no model of granite that scores texts"):
        RewardLM(str(other), init="random").check()


def test_it_writes_no_answers(
    make_trainer: Any, model_folder: str, pairs: str, tmp_path: Path, write_rows: Any
) -> None:
    module = RewardLM(model_folder, optimizer=sgd, peft=LORA)
    with pytest.raises(RecipeError, match="trainer.callbacks: ExactMatch: a reward model scores texts, and writes"):
        make_trainer(max_steps=1, callbacks=[ExactMatch()]).fit(module, data_of(pairs))
    with pytest.raises(RecipeError, match="^predict: .* writes none; for scores of answers run export RUN --merge"):
        make_trainer().predict(module, data_of(pairs))
    judged = write_judged(tmp_path)
    with pytest.raises(RecipeError, match=r"model.center_weight: BradleyTerry\(.*\) compares two answers to a prompt"):
        make_trainer(max_steps=1).fit(module, data_of(judged, format="unpaired_preference"))
    make_trainer(max_steps=1).fit(module, data_of(pairs, val_path=None))
    module.save_adapter(tmp_path / "adapter")
    with pytest.raises(RecipeError, match="is a reward model, which scores texts and writes none"):
        open_model(str(tmp_path / "adapter"))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt_neox", "qwen3_5_text"])
def test_scores_of_other_architectures(tmp_path: Path, pairs: str, architecture: str) -> None:
    """In a packed batch they are those that transformers computes of each text alone."""
    module = RewardLM(save_model(architecture, tmp_path / architecture), peft=LORA)
    data = data_of(pairs)
    data.load(module.tokenizer)
    samples = data.splits["train"]
    module.configure_model()
    halves = [half for number in range(3) for half in samples.pair(number)]
    packed = at_ends(pack_pairs([samples.pair(number) for number in range(3)], range(3), [0] * 3))
    base = module.eval().base_model
    with torch.no_grad():
        scores = -module(with_reference(packed)).per_token
        base.set_attn_implementation(pick_attention(base.config, DENSE))
        base.config.pad_token_id = None
        expected = [
            base(torch.from_numpy(ids.astype("int64"))[None], use_cache=False).logits[0, 0] for ids, _ in halves
        ]
    assert scores.tolist() == pytest.approx(torch.stack(expected).tolist(), rel=1e-4, abs=1e-6)
    assert len({round(score, 5) for score in scores.tolist()}) == 6


def test_another_head_than_one_layer_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    AutoConfig.for_model("bert", is_decoder=True, vocab_size=512, **sizes).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="becomes a BertForSequenceClassification, which has other layers than one"):
        RewardLM(str(tmp_path), init="random").check()

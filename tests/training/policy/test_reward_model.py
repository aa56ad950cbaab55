"""Rewards by a reward model: its scores are those of plain transformers, in any batch, on its own chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_strategies import sgd
from sampled_answers import data_of, judged_answers, save_reward_model, write_questions
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lit_ft import PolicyLM, RecipeError, RewardModel
from lit_ft.training.policy.rewards import rewards_of


@pytest.mark.parametrize("architecture", ["qwen2", "gemma2"])
def test_scores_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = save_reward_model(tmp_path / "judge", architecture)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    model.config.pad_token_id = None  # so that one row's last token counts, whatever it is
    expected = []
    for one in judged_answers():
        turns = [*one.messages, {"role": "assistant", "content": one.answer}]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=False)
        expected.append(float(model.eval()(ids).logits))
    assert len({round(value, 4) for value in expected}) == len(expected)
    for at_once in (16, 2):
        reward = RewardModel(folder, answers_at_once=at_once)
        reward.check()
        assert rewards_of(reward, judged_answers()) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert repr(reward) == f"RewardModel(pretrained={folder!r}, dtype='auto', answers_at_once=2)"


def test_a_policy_learns_by_it(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    """The reward that is logged is the mean of its scores, and no weight of it is in a checkpoint."""
    reward, questions = RewardModel(save_reward_model(tmp_path / "judge")), write_questions(tmp_path)
    module = PolicyLM(model_folder, rewards=[reward], answers_per_prompt=3, max_new_tokens=4, optimizer=sgd)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, data_of(questions, micro_batch_size=4))
    assert abs(float(trainer.callback_metrics["train/reward"])) > 1e-3
    assert float(trainer.callback_metrics["train/reward_std"]) > 0
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=False)
    assert not any("score" in name for name in saved["state_dict"])
    assert "RewardModel(pretrained=" in saved["trained_on"]


def test_what_is_no_reward_model_is_refused(
    make_trainer: Any, model_folder: str, tmp_path: Path, write_rows: Any
) -> None:
    with pytest.raises(
        RecipeError, match=r"model.rewards: RewardModel.pretrained='.*' has 2 labels, and a reward model"
    ):
        RewardModel(model_folder).check()
    one_label = tmp_path / "one_label"
    one_label.mkdir()
    for file in Path(model_folder).iterdir():
        (one_label / file.name).write_bytes(file.read_bytes())
    config = json.loads((one_label / "config.json").read_text())
    (one_label / "config.json").write_text(json.dumps({**config, "num_labels": 1, "id2label": {"0": "good"}}))
    (bare := RewardModel(str(one_label))).check()
    with pytest.raises(RecipeError, match=r"lacks weights, which would be random \(score.weight\); name a trained"):
        bare.of(judged_answers())
    with pytest.raises(RecipeError, match="RewardModel.pretrained='.*' does not exist"):
        RewardModel(str(tmp_path / "none")).check()
    with pytest.raises(RecipeError, match="has a tokenizer without a chat template"):
        RewardModel(save_reward_model(tmp_path / "no_template", chat_template=None)).check()
    short = RewardModel(save_reward_model(tmp_path / "short", max_position_embeddings=16))
    with pytest.raises(
        RecipeError, match="a conversation with its answer of .* is beyond the 16 positions of the reward"
    ):
        short.of(judged_answers())
    texts = data_of(write_rows([{"prompt": "the red one is a", "completion": "book"}] * 4), val_path=None)
    module = PolicyLM(model_folder, rewards=[short], answers_per_prompt=2, max_new_tokens=2)
    with pytest.raises(
        RecipeError, match=r"RewardModel reads the turns of conversations, and .*rows.json.* is no conversation"
    ):
        make_trainer(max_epochs=1).fit(module, texts)

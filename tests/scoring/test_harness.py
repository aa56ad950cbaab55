"""Tasks of lm-evaluation-harness give what the harness gives by hand, over the tokens of training."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from command_line import losses, recipe
from forked_commands import run_forked
from served import serving
from shared_fixtures import make_rows

pytest.importorskip("lm_eval", reason="needs the extra `evaluate`")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from lit_ft import AnswerScores
from lit_ft.commands.inference.evaluate import run as evaluate
from lit_ft.data.text_data import TextDataModule
from lit_ft.inference.opening import OpenedModel, open_model
from lit_ft.model.generation import dense_attention
from lit_ft.packed_batch import IGNORE_INDEX
from lit_ft.scoring.harness_models import TrainedLM

pytestmark = pytest.mark.slow
ROWS = make_rows(12, seed=5)
GENERATE = """\
task: continue
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: generate_until
doc_to_text: "{{instruction}}"
doc_to_target: "{{output}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """\
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{instruction}}"
doc_to_choice: ["{{output.split()[0]}}", book, lamp]
doc_to_target: 0
metric_list: [{metric: acc}, {metric: brier_score}]
"""


@pytest.fixture(scope="module", autouse=True)
def without_environment() -> Iterator[None]:
    """Leave out the harness's description of the machine, which starts a dozen processes each time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """Run of four steps with a merged model, tasks, and held-out rows."""
    folder = tmp_path_factory.mktemp("evaluated")
    for name, rows in (("train.json", make_rows(22)), ("val.json", ROWS)):
        (folder / name).write_text(json.dumps(rows, ensure_ascii=False))
    for name, text in (("continue.yaml", GENERATE), ("choose.yaml", CHOOSE)):
        (folder / name).write_text(text.replace("ROWS", str(folder / "val.json")))
    answers = {"class_path": "lit_ft.AnswerScores", "init_args": {"max_new_tokens": 4}}
    steps = {"max_steps": 4, "val_check_interval": 4}
    arguments = recipe(folder, model_folder, str(folder / "train.json"), callbacks=[answers], **steps)
    options = ["--run_dir", str(folder / "run"), "--data.val_path", str(folder / "val.json"), "--merge"]
    done = run_forked(*arguments, *options)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def opened(trained: Path) -> OpenedModel:
    return open_model(str(trained / "run"))


def results(folder: Path, number: int, side: str) -> dict[Any, Any]:
    content = json.loads((folder / "run" / "evaluations" / str(number) / f"harness-{side}.json").read_text())
    return figures(content)


def figures(content: dict[str, Any]) -> dict[Any, Any]:
    """Figures of the tasks with the digits that the harness prints, and the generated texts."""
    every = {(task, name): value for task, found in content["results"].items() for name, value in found.items()}
    texts = {(task, "texts"): [row["resps"] for row in rows] for task, rows in content["samples"].items()}
    return {key: f"{value:.4f}" for key, value in every.items() if isinstance(value, float)} | {
        key: value for key, value in texts.items() if isinstance(value[0][0][0], str)
    }


def by_hand(model: str, task: Path, in_template: bool) -> dict[Any, Any]:
    lm = HFLM(pretrained=model, dtype="float32", device="cpu", batch_size=8)
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(lm, tasks=[str(task)], task_manager=manager, apply_chat_template=in_template)
    assert found is not None
    return figures(dict(found))


def test_figures_are_those_of_the_harness_by_hand(
    trained: Path, model_folder: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(trained))  # which is no repository
    tasks = [trained / "continue.yaml", trained / "choose.yaml"]
    evaluate(["evaluate", str(trained / "run"), "--tasks", str(tasks[0])])
    evaluate(["evaluate", str(trained / "run"), "--tasks", str(tasks[1]), "--apply_chat_template", "false"])
    for side, model in (("fine-tuned", str(trained / "run" / "merged")), ("base", model_folder)):
        assert results(trained, 1, side) == by_hand(model, tasks[0], True)
        assert results(trained, 2, side) == by_hand(model, tasks[1], False)
    assert results(trained, 2, "base") != results(trained, 2, "fine-tuned")
    table = json.loads((trained / "run" / "tables" / "evaluation-2.json").read_text())
    assert [row[:2] for row in table["rows"]] == [["choose", "acc"], ["choose", "brier_score"]]
    assert all(row[4] == row[3] - row[2] for row in table["rows"])
    printed = capfd.readouterr()
    assert "choose" in printed.out
    assert "fatal" not in printed.err  # git's


def request(prompt: str, answer: str) -> Instance:
    return Instance("loglikelihood", {}, (prompt, answer), 0)


def test_log_likelihoods_are_over_the_tokens_of_training(trained: Path, opened: OpenedModel) -> None:
    data = TextDataModule(str(trained / "val.json"))
    data.load(opened.tokenizer)
    ids, labels = (torch.tensor(part) for part in data.splits["train"][0])
    answered = labels != IGNORE_INDEX
    with torch.no_grad(), dense_attention(opened.base):
        logprobs = opened.model(input_ids=ids[None]).logits[0].log_softmax(-1)
    wanted = logprobs[:-1].gather(1, ids[1:, None])[answered[1:], 0].sum().item()
    border = int(answered.nonzero()[0])
    prompt, answer = opened.tokenizer.decode(ids[:border]), opened.tokenizer.decode(ids[answered])
    assert prompt.endswith("\n")  # which the harness would score with the answer
    with dense_attention(opened.base):
        ((ours, _),) = TrainedLM(opened, 1, has_chat=True).loglikelihood([request(prompt, answer)])
        plain = HFLM(pretrained=opened.model, tokenizer=opened.tokenizer, backend="causal")
        ((theirs, _),) = plain.loglikelihood([request(prompt, answer)])
    assert ours == pytest.approx(wanted, abs=1e-4)
    assert abs(theirs - wanted) > 0.1


@pytest.fixture
def url(opened: OpenedModel) -> Iterator[str]:
    with serving(opened) as address:
        yield address


def test_a_server_gives_the_same_figures(trained: Path, url: str) -> None:
    tasks = [str(trained / name) for name in ("continue.yaml", "choose.yaml")]
    before = len(list((trained / "run" / "evaluations").glob("*")))
    evaluate(["evaluate", str(trained / "run"), "--tasks", *tasks, "--no_base"])
    served = ["--url", url, "--api_key", "secret", "--model", "run"]
    evaluate(["evaluate", str(trained / "run"), "--tasks", *tasks, *served])
    assert results(trained, before + 2, "fine-tuned") == results(trained, before + 1, "fine-tuned")
    evaluate(["evaluate", str(trained / "run"), "--tasks", tasks[0], *served, "--api", "chat"])
    wanted = {key: value for key, value in results(trained, before + 1, "fine-tuned").items() if key[0] == "continue"}
    assert results(trained, before + 3, "fine-tuned") == wanted
    command = json.loads((trained / "run" / "tables" / f"evaluation-{before + 2}.json").read_text())["command"]
    assert "secret" not in command
    assert "--api_key KEY" in command


def test_held_out_figures_are_those_of_validation(trained: Path) -> None:
    before = len(list((trained / "run" / "evaluations").glob("*")))
    evaluate(["evaluate", str(trained / "run"), "--data.path", str(trained / "val.json"), "--max_new_tokens", "4"])
    scores = json.loads((trained / "run" / "evaluations" / str(before + 1) / "scores.json").read_text())["rows"]
    tuned = {row[1]: row[3] for row in scores}
    for name in ("loss", "token_accuracy", *AnswerScores.names):
        logged = losses(trained / "run", f"val/{name}")
        assert tuned[name] == pytest.approx(logged[max(logged)], rel=1e-5), name
    for name in AnswerScores.names:
        logged = losses(trained / "run", f"val/{name}")
        assert {row[1]: row[2] for row in scores}[name] == logged[min(logged)]  # the base, before training
    answers = (trained / "run" / "evaluations" / str(before + 1) / "answers-base.jsonl").read_text().splitlines()
    assert json.loads(answers[0])["expected"] == ROWS[0]["output"]


@pytest.mark.parametrize("is_first", [True, False], ids=["the run", "the other"])
def test_what_is_compared_with_a_run_reads_the_same_tokens(
    trained: Path, model_folder: str, is_first: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shorter = tmp_path / "run"
    shutil.copytree(trained / "run", shorter)
    config = yaml.safe_load((shorter / "config.yaml").read_text())
    config["data"]["init_args"]["max_length"] = 24
    (shorter / "config.yaml").write_text(yaml.safe_dump(config))
    shared = ["--data.path", str(trained / "val.json"), "--max_new_tokens", "1", "--out", str(tmp_path / "out")]
    shutil.rmtree(shorter / "tables", ignore_errors=True)
    (shorter / "tables").touch()  # as a folder that may only be read
    with pytest.warns(UserWarning, match=f"the report of {shorter} does not have this table: .*tables: File exists"):
        evaluate(["evaluate", str(shorter), *shared])
    assert caplog.text.count("longer than data.max_length=24") == 1
    compared = (str(shorter), model_folder) if is_first else (model_folder, str(shorter))
    evaluate(["evaluate", compared[0], *shared, "--against", compared[1]])
    switched_off, read = (
        [row[2:4] for row in json.loads((tmp_path / "out" / number / "scores.json").read_text())["rows"]]
        for number in "12"
    )
    assert read == [pytest.approx(row if is_first else row[::-1], rel=1e-5) for row in switched_off]

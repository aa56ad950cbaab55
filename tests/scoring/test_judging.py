"""A judge's verdicts in both orders, and the win rate that they make."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from jsonargparse import Namespace
from served import in_thread
from shared_fixtures import make_rows
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from lit_ft.commands.inference import evaluate as command
from lit_ft.commands.inference.evaluate import run as evaluate
from lit_ft.errors import RecipeError
from lit_ft.inference.openai.client import OpenAIClient
from lit_ft.model.generation import GeneratedAnswer
from lit_ft.protocols import Question
from lit_ft.scoring.judging import Judge, Judgment, compare, outcome_of, verdict_of, win_rates
from lit_ft.scoring.scores import Score


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Both are fine, but A is shorter. [[A]]", "A"),
        ("[[C]]", "C"),
        ("I would say [[B]]. My final verdict is: [[B]]", "B"),
        ("[[A]] or [[B]]?", None),
        ("A is better", None),
        ("", None),
    ],
)
def test_a_verdict_is_one_of_three_marks(text: str, verdict: str | None) -> None:
    assert verdict_of(text) == verdict


@pytest.mark.parametrize(
    ("first", "swapped", "outcome"),
    [
        ("A", "B", "win"),
        ("B", "A", "loss"),
        ("A", "A", "tie"),  # the judge prefers a place
        ("B", "B", "tie"),
        ("A", "C", "tie"),
        ("C", "C", "tie"),
        ("A", None, "unread"),
        (None, "B", "unread"),
    ],
)
def test_a_win_needs_both_orders(first: str | None, swapped: str | None, outcome: str) -> None:
    assert outcome_of(first, swapped) == outcome  # type: ignore[arg-type]


def test_a_win_rate_counts_ties_half_and_leaves_out_what_cannot_be_read() -> None:
    outcomes = ["win", "win", "win", "loss", "tie", "tie", "unread"]
    judgments = [Judgment("q", "a", "b", outcome, ("x", "y")) for outcome in outcomes]  # type: ignore[arg-type]
    ((own,), (base,), note) = win_rates("questions", judgments)
    assert own.value == pytest.approx(4 / 6)
    assert base.value == pytest.approx(2 / 6)
    # points 1, 1, 1, 0, 0.5, 0.5: variance 5/6 / 5
    assert own.standard_error == pytest.approx((5 / 6 / 5 / 6) ** 0.5)
    assert "3 wins, 1 losses, 2 ties of 7" in note
    assert "1 without a verdict" in note


def test_no_verdict_at_all_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"no verdict .*it said 'hello'"):
        win_rates("questions", [Judgment("q", "a", "b", "unread", ("hello",))])


Decision = Callable[[str, str], str]
Refusal = Callable[[dict[str, object]], JSONResponse | None]


@contextmanager
def judging(decide: Decision, refuse: Refusal = lambda _: None, path: str = "/v1") -> Iterator[str]:
    """Address of a judge with OpenAI's interface, which decides on what stands at each place."""

    async def answer(request: Request) -> JSONResponse:
        body = await request.json()
        if refused := refuse(body):
            return refused
        text = body["messages"][-1]["content"]
        answer_a, answer_b = (text.partition(f"<{place}>")[2].partition(f"</{place}>")[0] for place in "AB")
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": decide(answer_a, answer_b)}}]})

    async def models(request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "judge"}]})

    routes = [Route(f"{path}/chat/completions", answer, methods=["POST"]), Route("/v1/models", models)]
    with in_thread(uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning"))) as address:
        yield address


PROMPT = "{question}: <A>{answer_a}</A> or <B>{answer_b}</B>, with {braces} of its own"


def longer(answer_a: str, answer_b: str) -> str:
    return "[[A]]" if len(answer_a) > len(answer_b) else "[[B]]"


def question(text: str) -> Question:
    return {"row": 0, "id": text, "question": text, "prompt": text, "expected": None}


PAIRS = [
    Judgment("one", "long answer", "brief"),
    Judgment("two", "short", "much longer"),
    Judgment("three", "same {answer_b}", "same {answer_b}"),
]


def judged(client: OpenAIClient) -> list[str]:
    rows = [question(pair.question) for pair in PAIRS]
    return [judgment.outcome for judgment in compare(rows, PAIRS, Judge(client, "judge", PROMPT, None))]


def outcomes(decide: Decision) -> list[str]:
    with judging(decide) as url:
        return judged(OpenAIClient(url))


@pytest.mark.slow
def test_a_judge_behind_an_address_sees_both_orders() -> None:
    assert outcomes(longer) == ["win", "loss", "tie"]
    assert outcomes(lambda *_: "[[A]]") == ["tie", "tie", "tie"]
    assert outcomes(lambda one, _: "who knows" if one == "brief" else "[[A]]") == ["unread", "tie", "tie"]


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1", "/api/v3", "/api/paas/v4", "/v1beta/openai"])
def test_a_judge_of_a_provider_with_a_path_of_its_own(path: str) -> None:
    with judging(longer, path=path) as url:
        assert judged(OpenAIClient(url + path + "/")) == ["win", "loss", "tie"]


def test_a_judge_that_thinks_takes_other_options() -> None:
    asked: list[set[str]] = []

    def refuse(body: dict[str, object]) -> JSONResponse | None:
        asked.append(set(body) - {"model", "messages"})
        is_refused = "max_tokens" in body or "temperature" in body
        return JSONResponse({"error": "Use 'max_completion_tokens' instead"}, 400) if is_refused else None

    with judging(longer, refuse) as url:
        assert judged(OpenAIClient(url)) == ["win", "loss", "tie"]
    assert asked.count({"max_completion_tokens"}) == 4
    assert {"max_tokens", "temperature"} in asked


def test_a_judge_that_is_busy_is_asked_again() -> None:
    busy = iter([503, 429])

    def refuse(_: dict[str, object]) -> JSONResponse | None:
        status = next(busy, None)
        return None if status is None else JSONResponse({}, status, {"Retry-After": "0"})

    with judging(longer, refuse) as url, pytest.warns(UserWarning, match=r"answers 503: .*; asked again in 0 s"):
        assert judged(OpenAIClient(url, tries=3)) == ["win", "loss", "tie"]
    with (
        judging(longer, lambda _: JSONResponse({}, 503, {"Retry-After": "0"})) as url,
        pytest.warns(UserWarning, match="answers 503"),
        pytest.raises(RecipeError, match="answers 503"),
    ):
        judged(OpenAIClient(url, tries=2))


def test_a_judge_without_a_list_of_models_has_the_name_that_is_given() -> None:
    with judging(longer) as url:
        client = OpenAIClient(f"{url}/v2")
        with pytest.warns(UserWarning, match="J is taken as it is: .* has no list of models at /v2/models"):
            assert client.chosen("J", option="--judge_model") == "J"
        with pytest.raises(RecipeError, match="without a list of models, name the model with --judge_model"):
            client.chosen(None, option="--judge_model")


@pytest.mark.slow
def test_the_command_compares_a_model_with_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "questions.json").write_text(json.dumps(make_rows(3, seed=9), ensure_ascii=False))
    (tmp_path / "judge.txt").write_text(PROMPT)
    options = ["--questions", "questions.json", "--judge_prompt", "judge.txt", "--max_new_tokens", "5", "--out", "here"]
    with judging(longer) as url:
        with pytest.raises(RecipeError, match="its base is not known; name one with --against"):
            evaluate(["evaluate", model_folder, *options, "--judge_url", url])
        evaluate(["evaluate", model_folder, *options, "--judge_url", url, "--against", model_folder])
    assert not (tmp_path / "here" / "1" / "harness-base.json").exists()
    lines = (tmp_path / "here" / "1" / "judgments.jsonl").read_text().splitlines()
    assert [json.loads(line)["outcome"] for line in lines] == ["tie"] * 3  # greedy answers of the same model
    assert "questions.json by judge: 0 wins, 0 losses, 3 ties of 3 (3 with equal answers" in capsys.readouterr().out
    (tmp_path / "judge.txt").write_text("{question} {answer_a}")
    with pytest.raises(RecipeError, match=r"has no \{answer_b\}"):
        Judge.with_prompt(OpenAIClient(url), "judge", "judge.txt", 1)


def refuse_the_second(body: dict[str, object]) -> JSONResponse | None:
    return JSONResponse({}, 400) if "much longer" in str(body) else None


def test_a_question_that_is_refused_does_not_refuse_the_others() -> None:
    """Requests of several threads share a client, which learns from refusals what a server lacks."""
    with judging(longer, refuse_the_second) as url:
        judge = Judge(OpenAIClient(url), "judge", PROMPT, None)
        with pytest.raises(RecipeError, match="refuses a question"):
            judge.ask("two", "short", "much longer", None)
        assert verdict_of(judge.ask("one", "long answer", "brief", None)) == "A"


def test_a_judge_that_fails_costs_no_judgments() -> None:
    evaluation = command.Evaluation(
        [], command.harness.HarnessOptions(), command.DataSets(Namespace(path="m", against=None))
    )
    evaluation.questions = [question(pair.question) for pair in PAIRS]
    evaluation.replies = {
        "fine-tuned": [GeneratedAnswer(pair.answer, "stop") for pair in PAIRS],
        "base": [GeneratedAnswer(pair.base_answer, "stop") for pair in PAIRS],
    }

    with judging(longer, refuse_the_second) as url, pytest.raises(RecipeError, match="refuses a question"):
        evaluation.judge(Judge(OpenAIClient(url), "judge", PROMPT, None), "q.json")
    assert [(one.answer, one.outcome) for one in evaluation.judgments] == [
        ("long answer", "win"),
        ("short", "not judged"),
        ("same {answer_b}", "not judged"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["base", "judge"])
def test_what_fails_costs_no_figures(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(evaluation: command.Evaluation, side: command.Side, *_: object) -> None:
        if side == fails:
            raise RecipeError("no memory")
        evaluation.scores[side].append(Score("rows.json", "loss", 0.5))

    def judge(*_: object) -> None:
        raise RecipeError("no verdict")

    monkeypatch.setattr(command, "_judge", lambda _: "a judge")
    monkeypatch.setattr(command.DataSets, "check", lambda _: None)
    monkeypatch.setattr(command, "_sides", lambda _: [("fine-tuned", "model", None), ("base", "model", None)])
    monkeypatch.setattr(command.Evaluation, "measure", measure)
    monkeypatch.setattr(command.Evaluation, "judge", judge)
    why = "no memory" if fails == "base" else "no verdict"
    with pytest.raises(RecipeError, match=why):
        evaluate(["evaluate", "model", "--questions", "q", "--judge_url", "http://j", "--out", str(tmp_path)])
    written = json.loads((tmp_path / "1" / "scores.json").read_text())
    assert written["rows"][0][:2] == ["rows.json", "loss"]
    assert written["rows"][0][3] == 0.5
    assert written["notes"] == [f"ended early, not all of it was measured: {why}"]

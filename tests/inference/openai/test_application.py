"""The server through the real ``openai`` client: answers equal to those of ``chat``, refusals, cut connections."""

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from shared_fixtures import make_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lit_ft.inference.continuous_batching import Engine, Generation, SequentialEngine, start_engine
from lit_ft.inference.openai.answers import token_bytes
from lit_ft.inference.openai.application import GracefulServer, Limits, application
from lit_ft.inference.opening import OpenedModel, open_model, open_together
from lit_ft.inference.text_stream import Decoding, stream_answer

pytestmark = pytest.mark.slow
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
PROMPTS = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
ASKED = [{"role": "user", "content": "the green lamp"}]
KEY = "secret"
ORIGIN = "http://localhost:3000"
NAMES = ("base", "run-a", "run-b", "prompted")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> dict[str, str]:
    """Two LoRA adapters with random weights and one of prompt tuning, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, config) in enumerate({"run-a": LORA, "run-b": LORA, "prompted": PROMPTS}.items()):
        torch.manual_seed(seed)
        get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(folder / name)
    return {name: str(folder / name) for name in NAMES[1:]}


class Served:
    """A running server, and its models opened a second time, alone."""

    def __init__(self, folders: dict[str, str], base: str) -> None:
        self.alone = {"base": open_model(base)} | {name: open_model(path) for name, path in folders.items()}
        limits = Limits(max_model_len=512, max_requests=21, max_body_bytes=50_000, api_key=KEY, origins=[ORIGIN])
        opened = open_together(list(folders.values()))
        self.engines = {name: start_engine(model, 16_000, 20) for name, model in opened.items()}
        app = application(self.engines, limits, dict.fromkeys(opened, base))
        self.server = GracefulServer(app, self.engines.values(), stop_seconds=0.5)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([listener],))
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=KEY, max_retries=0, timeout=60)

    def ask(self, model: str = "run-a", messages: Any = ASKED, **options: Any) -> Any:
        options = {"max_tokens": 12, "temperature": 0, "extra_body": {"return_token_ids": True}, **options}
        return self.client.chat.completions.create(model=model, messages=messages, **options)

    def running(self) -> int:
        url = str(self.client.base_url).replace("/v1/", "/health")
        return int(self.client.get(url, cast_to=object)["running"])  # type: ignore[index]

    def wait_until_idle(self) -> None:
        deadline = time.monotonic() + 20
        while self.running():
            assert time.monotonic() < deadline, "the answer goes on without a client"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def served(folders: dict[str, str], model_folder: str) -> Iterator[Served]:
    served = Served(folders, model_folder)
    yield served
    with ThreadPoolExecutor(4) as pool:
        long = {"max_tokens": 450, "n": 10, "temperature": 1}
        cut = [pool.submit(served.ask, name, **long) for name in ("run-a", "prompted")]
        stream = served.ask("run-b", **{**long, "n": 1}, stream=True)
        next(stream)
        deadline = time.monotonic() + 30  # a test that failed may have left fewer
        while served.running() < 20 and time.monotonic() < deadline:
            time.sleep(0.01)
        silent = socket.create_connection(("127.0.0.1", served.port))  # the rest of its request never comes
        silent.sendall(f"{HEAD}Content-Length: 9\r\n\r\n{{".encode())
        served.server.should_exit = True
        served.thread.join(10)
        silent.close()
        assert not served.thread.is_alive()
        assert all("the server stops" in str(one.exception()) for one in cut)
        assert [one.exception().status_code for one in cut] == [503, 503]  # type: ignore[union-attr]
    for engine in served.engines.values():
        engine.stop()
    assert not any(engine.is_alive() for engine in served.engines.values())


def alone(opened: OpenedModel, messages: Any, tokens: int = 12) -> tuple[str, list[int]]:
    prompt = opened.template.render(messages, generation=True)
    answer = stream_answer(opened, prompt, Decoding(max_new_tokens=tokens, temperature=0), lambda _: None)
    return answer.text, list(answer.ids)


class HoldingEngine:
    """Engine that begins no answer before it is released."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.opened = engine, engine.opened
        self._held: list[Generation] = []
        self.cancel, self.is_alive = engine.cancel, engine.is_alive
        self.end_answers, self.stop = engine.end_answers, engine.stop

    def submit(self, generation: Generation) -> None:
        self._held.append(generation)

    def release(self) -> None:
        for generation in self._held:
            self._engine.submit(generation)


@pytest.mark.parametrize("stream", [False, True])
def test_a_burst_of_requests_does_not_pass_the_limit(served: Served, stream: bool) -> None:
    engine = HoldingEngine(served.engines["run-a"])
    app = application({"run-a": engine}, Limits(max_model_len=512, max_requests=3), {"run-a": "x"})
    question = {"model": "run-a", "messages": ASKED, "max_tokens": 4, "stream": stream}

    async def burst() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            asked = [asyncio.create_task(client.post("/v1/chat/completions", json=question)) for _ in range(8)]
            for answer in islice(asyncio.as_completed(asked, timeout=60), 5):
                assert (await answer).status_code == 429
            engine.release()
            codes = [answer.status_code for answer in await asyncio.gather(*asked)]
            assert (await client.get("/health")).json()["running"] == 0
            return codes

    assert sorted(asyncio.run(burst())) == [200] * 3 + [429] * 5


def test_sixteen_at_once_get_the_answers_of_each_model_alone(served: Served) -> None:
    talks = [
        [*ASKED, {"role": "assistant", "content": "blue"}, {"role": "user", "content": f"{'red ' * count}book"}]
        for count in (1, 7, 40, 3)
    ]
    asked = [(name, talk) for talk in talks for name in NAMES]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda one: served.ask(*one), asked))
    for (name, talk), answer in zip(asked, answers, strict=True):
        choice = answer.choices[0]
        assert (choice.message.content, choice.token_ids) == alone(served.alone[name], talk), name
        prompt = served.alone[name].template.render(talk, generation=True)
        ids = served.alone[name].tokenizer(prompt, add_special_tokens=False)["input_ids"]
        assert answer.prompt_token_ids == ids
        assert answer.usage.to_dict() == {
            "prompt_tokens": len(ids),
            "completion_tokens": 12,
            "total_tokens": len(ids) + 12,
        }
        assert choice.finish_reason == "length"
    assert len({answer.choices[0].message.content for answer in answers[: len(NAMES)]}) == len(NAMES)
    assert isinstance(served.engines["prompted"], SequentialEngine)


@pytest.mark.parametrize("model", ["run-a", "prompted"])
def test_a_stream_has_the_text_and_tokens_of_the_whole_answer(served: Served, model: str) -> None:
    whole = served.ask(model, logprobs=True, max_tokens=60)
    options = {"max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
    chunks = list(served.ask(model, logprobs=True, **options))
    parts = [chunk.choices[0] for chunk in chunks[:-1]]
    assert len(parts) > 3
    assert "".join(part.delta.content for part in parts) == whole.choices[0].message.content
    ids = [token for part in parts for token in getattr(part, "token_ids", [])]
    assert ids == whole.choices[0].token_ids
    assert all(part.logprobs.content for part in parts if part.logprobs)
    assert parts[-1].logprobs is None or parts[-1].token_ids
    logprobs = [one for part in parts if part.logprobs for one in part.logprobs.content]
    assert logprobs == whole.choices[0].logprobs.content
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert chunks[-1].usage == whole.usage
    assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_over_two_tokens_is_never_shown(served: Served, stream: bool) -> None:
    text, ids = alone(served.alone["run-a"], ASKED, 40)
    tokens = [served.alone["run-a"].tokenizer.decode([token]) for token in ids]
    parts = [text[at : at + 3] for at in range(len(text) // 2, len(text) - 3)]
    stop = next(part for part in parts if not any(part in token for token in tokens))
    answer = served.ask(max_tokens=40, stop=["never there", stop], stream=stream)
    if stream:
        parts = [chunk.choices[0] for chunk in answer]
        shown, reason = "".join(part.delta.content for part in parts), parts[-1].finish_reason
    else:
        shown, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (shown, reason) == (text[: text.index(stop)], "stop")
    served.wait_until_idle()


def test_an_answer_ends_at_the_models_end_token(served: Served) -> None:
    _, ids = alone(served.alone["run-a"], ASKED)
    base = served.engines["run-a"].opened.base
    given, base.generation_config.eos_token_id = base.generation_config.eos_token_id, [ids[5]]
    try:
        choice = served.ask().choices[0]
    finally:
        base.generation_config.eos_token_id = given
    assert choice.finish_reason == "stop"
    assert choice.token_ids == ids[: ids.index(ids[5]) + 1]


def test_draws_depend_on_the_seed_and_not_on_the_batch(served: Served) -> None:
    def drawn(seed: int, **options: Any) -> list[str]:
        answer = served.ask(temperature=1.5, top_p=0.9, seed=seed, **options)
        return [choice.message.content for choice in answer.choices]

    first = drawn(1)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(drawn, [2, 1, 3, 4, 1, 5]))
    assert [one == first for one in together] == [False, True, False, False, True, False]
    three = drawn(1, n=3)
    assert three[:1] == first
    assert len(set(three)) == 3


def test_options_of_single_requests_do_what_generate_does(served: Served) -> None:
    opened = served.alone["run-a"]
    prompt = opened.template.render(ASKED, generation=True)
    penalized = Decoding(60, 0, repetition_penalty=1.8)
    wanted = stream_answer(opened, prompt, penalized, lambda _: None).ids
    choice = served.ask(max_tokens=60, extra_body={"return_token_ids": True, "repetition_penalty": 1.8}).choices[0]
    assert tuple(choice.token_ids) == wanted != tuple(alone(opened, ASKED, 60)[1])
    sure = served.ask(temperature=1.5, extra_body={"return_token_ids": True, "top_k": 1}).choices[0]
    assert sure.token_ids == alone(opened, ASKED)[1]


@pytest.mark.parametrize("model", ["run-b", "prompted"])
def test_logprobs_are_those_of_the_model(served: Served, model: str) -> None:
    answer = served.ask(model, temperature=0.7, seed=3, logprobs=True, top_logprobs=4)
    choice, opened = answer.choices[0], served.alone[model]
    ids = torch.tensor([answer.prompt_token_ids + choice.token_ids])
    with torch.no_grad():
        logprobs = opened.model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
    logprobs = logprobs[-len(choice.token_ids) - 1 : -1]
    own = logprobs.gather(1, torch.tensor(choice.token_ids)[:, None])[:, 0].tolist()
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(own, abs=1e-4)
    for one, row in zip(choice.logprobs.content, logprobs, strict=True):
        assert [near.logprob for near in one.top_logprobs] == pytest.approx(row.topk(4)[0].tolist(), abs=1e-4)


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    text = "a 绿😀"
    tokenizer = make_tokenizer()
    parts = [token_bytes(tokenizer, token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert len(parts) > len(text)
    assert b"".join(map(bytes, parts)).decode() == text
    pieces = Tokenizer(BPE({"a": 0, "\ufffd": 1, "<0xF0>": 2, "\u4e00\ufffd": 3}, [], unk_token="a"))
    pieces.decoder = ByteFallback()
    by_piece = PreTrainedTokenizerFast(tokenizer_object=pieces)
    assert [token_bytes(by_piece, token) for token in range(4)] == [[97], None, [0xF0], None]


def test_completions_score_and_continue_text_and_tokens(served: Served) -> None:
    opened = served.alone["run-a"]
    ids = opened.tokenizer("the green lamp is blue")["input_ids"]
    create = served.client.completions.create
    scored = create(model="run-a", prompt=ids, max_tokens=0, echo=True, logprobs=2).choices[0]
    with torch.no_grad():
        rows = opened.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    own = rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert scored.logprobs.token_logprobs[0] is None  # type: ignore[union-attr]
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-4)  # type: ignore[union-attr]
    assert scored.text == "the green lamp is blue"
    tokens, near = scored.logprobs.tokens, scored.logprobs.top_logprobs  # type: ignore[union-attr]
    assert scored.logprobs.text_offset == [scored.text.index(token) for token in tokens]  # type: ignore[union-attr]
    assert [one[token] for one, token in zip(near[1:], tokens[1:], strict=True)] == pytest.approx(own, abs=1e-4)
    assert all(len(one) in (2, 3) for one in near[1:])  # the token's own is there in any case
    both = create(model="run-a", prompt=["the green lamp is blue", "red"], max_tokens=6, temperature=0)
    echoed = create(model="run-a", prompt=ids, max_tokens=6, temperature=0, echo=True)
    assert both.choices[0].text == echoed.choices[0].text.removeprefix("the green lamp is blue")
    assert (both.usage.completion_tokens, echoed.usage.completion_tokens) == (12, 6)  # type: ignore[union-attr]
    options: dict[str, Any] = {"model": "run-a", "prompt": ids, "max_tokens": 6, "temperature": 0, "logprobs": 0}
    streamed = [chunk.choices[0] for chunk in create(**options, stream=True)]
    assert "".join(part.text for part in streamed) == both.choices[0].text
    whole = create(**options).choices[0].logprobs
    assert [one for part in streamed if part.logprobs for one in part.logprobs.text_offset] == whole.text_offset


def test_tools_reach_the_prompt_as_in_training(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]
    answer = served.ask(tools=tools)
    prompt = served.alone["run-a"].tokenizer.decode(answer.prompt_token_ids)
    assert "look_up" in prompt
    without = served.ask(tools=tools, tool_choice="none")
    assert without.prompt_token_ids == served.ask().prompt_token_ids
    body = {"model": "run-a", "messages": ASKED, "tools": tools}
    counted = served.client.post("/../tokenize", body=body, cast_to=object)
    assert counted == {"count": len(answer.prompt_token_ids), "max_model_len": 512, "tokens": answer.prompt_token_ids}


def test_defaults_that_clients_of_vllm_send_change_nothing(served: Served) -> None:
    both = {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "ignore_eos": False, "min_tokens": 0, "best_of": 1}
    both |= {"skip_special_tokens": True, "spaces_between_special_tokens": True, "use_beam_search": False}
    both |= {"stop_token_ids": [], "include_stop_str_in_output": False, "length_penalty": 1.0}
    of_chat = {"echo": False, "add_generation_prompt": True, "add_special_tokens": False}
    asked: dict[str, Any] = {"temperature": 1, "seed": 3}
    plain = served.ask(**asked, extra_body={"top_k": 0, "repetition_penalty": 1.0})
    assert served.ask(**asked, extra_body=both | of_chat).choices == plain.choices
    create = served.client.completions.create
    completed = [create(model="run-a", prompt="red", **asked, extra_body=body) for body in ({"top_k": 0}, both)]
    assert completed[0].choices == completed[1].choices
    ids = create(model="run-a", prompt="red", extra_body={"add_special_tokens": False, "return_token_ids": True})
    tokenizer = served.alone["run-a"].tokenizer
    assert ids.choices[0].prompt_token_ids == tokenizer("red", add_special_tokens=False)["input_ids"]  # type: ignore[attr-defined]


CALL = {"role": "assistant", "tool_calls": [{"id": "a", "type": "function", "function": {"name": "look"}}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "1"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "other"}, openai.NotFoundError, "there are base, run-a, run-b, prompted"),
        ({"max_tokens": 600}, openai.BadRequestError, "takes 512 tokens for both"),
        ({"max_tokens": 0}, openai.BadRequestError, "must be 1 or more"),
        ({"max_tokens": -3}, openai.BadRequestError, "max_tokens=-3 must be 1 token or more"),
        ({"temperature": -1}, openai.BadRequestError, "temperature=-1.0 must be 0 .greedy. or above"),
        (
            {"temperature": 10**400},
            openai.BadRequestError,
            "temperature=inf must be 0 .greedy. or a finite number above",
        ),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature='hot' must be a number"),
        ({"max_completion_tokens": 5}, openai.BadRequestError, "max_tokens=12 are the same limit; leave one out"),
        ({"top_logprobs": 3}, openai.BadRequestError, "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 30}, openai.BadRequestError, "ask for 0 to 20"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty=0.5 is not supported"),
        ({"extra_body": {"min_p": 2}}, openai.BadRequestError, "min_p=2.0 must be from 0 .all tokens. to 1"),
        ({"extra_body": {"ignore_eos": True}}, openai.BadRequestError, "ignore_eos=True is not supported"),
        ({"extra_body": {"min_tokens": 3}}, openai.BadRequestError, "min_tokens=3 is not supported"),
        ({"extra_body": {"chat_template_kwargs": {"color": 1}}}, openai.BadRequestError, "uses no 'color'"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options needs stream=true"),
        ({"model": "x" * 9_000}, openai.NotFoundError, "^.{,300}x[.]{3}x.{,300}$"),
        ({"extra_body": {"y" * 9_000: 1}}, openai.BadRequestError, "^.{,300}yyy=1 is not supported.{,200}$"),
        ({"stop": [""]}, openai.BadRequestError, "none of them empty"),
        ({"stop": "x" * 1_001}, openai.BadRequestError, "a text of 1,001 characters; give texts of 1,000"),
        ({"n": 22}, openai.BadRequestError, "asks for 22 answers; ask for 21 at most"),
        ({"n": 0}, openai.BadRequestError, "n=0 must be 1 or more"),
        ({"messages": []}, openai.BadRequestError, "must be a list of turns"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "content"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "a"}]}, openai.BadRequestError, "ends with one of the"),
        ({"messages": [{"role": "user", "content": "x" * 60_000}]}, openai.APIStatusError, "more than 50,000 bytes"),
        ({"messages": [ASKED[0] | {"prefix": True}]}, openai.BadRequestError, "item 1: .prefix. is read by neither"),
        ({"messages": [*ASKED, CALL, RESULT | {"tool_call_id": "b"}]}, openai.BadRequestError, "=.b. is none of the c"),
        ({"messages": [*ASKED, CALL, RESULT | {"x": 1}]}, openai.BadRequestError, "item 3: .x. is read by neither"),
        ({"tool_choice": "required"}, openai.BadRequestError, "tool_choice='required' is not supported"),
        ({"tools": [{"x": 1}]}, openai.BadRequestError, "'tools' item 1 is no function with a name; it needs 'name'"),
        ({"parallel_tool_calls": False}, openai.BadRequestError, "parallel_tool_calls=False is not supported"),
    ],
)
def test_what_is_refused(served: Served, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        served.ask(**options)


def test_more_than_the_queue_holds_is_to_be_tried_again(served: Served) -> None:
    with served.ask(stream=True, n=20, max_tokens=400, extra_body={}) as stream:
        next(stream)
        with pytest.raises(openai.RateLimitError, match="20 answers are generated or wait, and 2 more exceed 21"):
            served.ask(n=2)
    served.wait_until_idle()


HEAD = (
    f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    "Content-Type: application/json\r\n"
)
HALF = b'{"model": "run-a", "messages": [{"role": "user", "content": "\\uD800"}]}'
HALVES = [HALF, HALF.decode().encode("utf-16"), HALF.replace(b"\\uD800", b"\xed\xa0\x80")]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 30_000, b'{"model": 3}', *HALVES])
def test_malformed_bodies_are_refused_as_json(served: Served, body: bytes) -> None:
    head = f"{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    status, answer = exchange(served.port, head.encode() + body)
    assert status == 400
    assert json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (
            HALF,
            r"the body has \ud800, one half of a surrogate pair, which is no character; write both halves, or UTF-8",
        ),
        (b'{"messages": []}', "the field model is missing; give one of base, run-a"),
        (b'{"model": null, "messages": []}', "the field model is missing; give one of base, run-a"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(served: Served, body: bytes, reason: str) -> None:
    head = f"{HEAD}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    status, answer = exchange(served.port, head.encode() + body)
    assert status == 400
    assert json.loads(answer)["error"]["message"].startswith(reason)


def test_a_key_is_needed_for_all_but_health(served: Served) -> None:
    client = served.client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError, match="no key, or another one"):
        client.models.list()
    models = list(served.client.models.list(extra_headers={"Authorization": f"bearer {KEY}"}))
    assert models == list(served.client.models.list())
    assert [model.id for model in models] == list(NAMES)
    assert [served.client.models.retrieve(name) for name in NAMES] == models
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; there are base, run-a"):
        served.client.models.retrieve("other")
    assert exchange(served.port, b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0] == 200
    with pytest.raises(openai.APIStatusError, match="GET /tokenize: Method Not Allowed") as refused:
        served.client.get("/../tokenize", cast_to=object)
    assert (refused.value.status_code, refused.value.response.headers["allow"]) == (405, "POST")
    assert exchange(served.port, b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")[0] == 404


@pytest.mark.parametrize(("origin", "granted"), [(ORIGIN, ORIGIN), ("https://other.example", None)])
def test_pages_of_given_origins_alone_may_use_the_server(served: Served, origin: str, granted: str | None) -> None:
    url, page = f"http://127.0.0.1:{served.port}/v1/chat/completions", {"Origin": origin}
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, x-stainless-os",
    }
    asked = httpx.options(url, headers=page | wanted)
    assert asked.status_code == (200 if granted else 400)
    with served.ask(stream=True, extra_headers=page) as stream:
        answers = [asked, stream.response, httpx.post(url, headers=page)]  # the last has no key: pages see errors too
    assert [answer.headers.get("access-control-allow-origin") for answer in answers] == [granted] * 3
    if granted:
        assert asked.headers["access-control-allow-headers"] == wanted["Access-Control-Request-Headers"]


@pytest.mark.parametrize("model", ["run-a", "prompted"])
@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_ends_when_its_client_is_gone(served: Served, model: str, stream: bool) -> None:
    body = json.dumps({"model": model, "messages": ASKED, "max_tokens": 470, "temperature": 0, "stream": stream})
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while not served.running():
            time.sleep(0.01)
        if stream:
            assert connection.recv(100)
    served.wait_until_idle()
    assert served.ask(model).choices[0].token_ids == alone(served.alone[model], ASKED)[1]


def test_an_empty_answer_can_be_sent_back(served: Served) -> None:
    messages = [*ASKED, {"role": "assistant", "content": ""}, {"role": "user", "content": "red"}]
    answer = served.ask(messages=messages)
    prompt = served.alone["run-a"].template.render(messages, generation=True)  # type: ignore[arg-type]
    assert served.alone["run-a"].tokenizer.decode(answer.prompt_token_ids) == prompt
    said_nothing = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls", "parsed", "reasoning_content"))
    as_sent_back = [{**one, **said_nothing, "annotations": [], "name": "ann"} for one in messages]
    assert served.ask(messages=as_sent_back).prompt_token_ids == answer.prompt_token_ids
    assert served.ask(messages=[*ASKED, CALL, RESULT]).prompt_token_ids


def test_a_second_signal_ends_the_answers_at_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    app = served.server.config.app
    server = GracefulServer(app, [served.engines["run-a"]], stop_seconds=100)  # type: ignore[arg-type]
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    client = served.client.with_options(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    stream = client.completions.create(model="run-a", prompt="red", max_tokens=480, n=4, temperature=1, stream=True)
    next(stream)
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    with pytest.raises(openai.APIError, match="the server stops"):
        list(stream)
    thread.join(10)
    assert not thread.is_alive()
    assert not caplog.records


def exchange(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of an answer to bytes that no client would send."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(request)
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body

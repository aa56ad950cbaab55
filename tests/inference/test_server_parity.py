"""``parity`` finds no difference where a run is served as it was trained, and each kind of fault where it is not."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from command_line import recipe
from forked_commands import run_forked

from lit_ft.commands.inference.parity import run as parity
from lit_ft.data.text.chat_template import ChatTemplate, set_chat_template
from lit_ft.errors import RecipeError
from lit_ft.inference.continuous_batching import start_engine
from lit_ft.inference.openai.application import GracefulServer, Limits, application
from lit_ft.inference.opening import OpenedModel, open_model

pytestmark = pytest.mark.slow
CALL = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "red"}'}}
ROWS = [
    {"messages": [{"role": "user", "content": "red book"}, {"role": "assistant", "content": "blue cup"}] * 2},
    {
        "messages": [
            {"role": "system", "content": "the lamp"},
            {"role": "user", "content": "green"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "blue"},
            {"role": "assistant", "content": "the cup"},
        ]
    },
    *[{"messages": [{"role": "user", "content": "cup"}, {"role": "assistant", "content": "the green lamp"}]}] * 6,
]
WITH_BOS = "{{ '<|endoftext|>' }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"  # noqa: E501
WITHOUT_BOS = WITH_BOS.removeprefix("{{ '<|endoftext|>' }}")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """Run of two steps with a template that begins with a BOS token."""
    folder = tmp_path_factory.mktemp("run")
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    template = folder / "template.jinja"
    template.write_text(WITH_BOS)
    arguments = recipe(folder, model_folder, str(rows), max_steps=2)
    options = ["--run_dir", str(folder / "run"), "--data.chat_template", str(template), "--data.max_length", "300"]
    done = run_forked(*arguments, *options)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@contextmanager
def serving(opened: OpenedModel, name: str = "run") -> Iterator[str]:
    """Address of a server in a thread."""
    engines = {name: start_engine(opened, 8_000, 8)}
    app = application(engines, Limits(max_model_len=512, api_key="secret"), {name: name})
    server = GracefulServer(app, engines.values(), stop_seconds=0.5)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
        engines[name].stop()


def compared(run: Path, url: str, *options: str) -> int:
    """Exit code of the command."""
    arguments = ["parity", str(run), "--url", url, "--api_key", "secret", "--rows", "3", "--max_new_tokens", "8"]
    try:
        parity([*arguments, *options])
    except SystemExit as end:
        return int(str(end.code))
    return 0


def unchanged(opened: OpenedModel) -> OpenedModel:
    return opened


def other_template(opened: OpenedModel) -> OpenedModel:
    return with_template(opened, WITH_BOS.replace("'<|im_end|>\n'", "'<|im_end|>'"))


def lost_bos(opened: OpenedModel) -> OpenedModel:
    return with_template(opened, WITHOUT_BOS)


def with_template(opened: OpenedModel, template: str) -> OpenedModel:
    set_chat_template(opened.tokenizer, template)
    return replace(opened, template=ChatTemplate(opened.tokenizer))


def other_end(opened: OpenedModel) -> OpenedModel:
    opened.base.generation_config.eos_token_id = list(range(opened.base.config.vocab_size))
    return opened


def wrong_adapter(opened: OpenedModel) -> OpenedModel:
    torch.manual_seed(1)
    for name, weight in opened.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return opened


def merged_in_bf16(opened: OpenedModel) -> OpenedModel:
    merged = opened.model.merge_and_unload()  # type: ignore[operator]
    merged.to(torch.bfloat16).to(torch.float32)
    return replace(opened, model=merged, base=merged)


@pytest.mark.parametrize(
    ("fault", "shown", "hidden"),
    [
        (unchanged, ["tokens of training: 5 of 5", "equal greedy tokens: 100.0%"], ["differs"]),
        (other_template, ["prompt differs at token"], ["log-probability of", "greedy answer differs"]),
        (lost_bos, ["prompt differs at token 1: trained are '<|endoftext|>"], ["log-probability of"]),
        (other_end, ["greedy answer differs at token 2", "the server has nothing more"], ["prompt differs"]),
        (wrong_adapter, ["log-probability of answer token"], ["prompt differs"]),
        (merged_in_bf16, ["log-probability of answer token"], ["prompt differs"]),
    ],
)
def test_each_fault_is_found_and_nothing_else(
    trained: Path,
    fault: Callable[[OpenedModel], OpenedModel],
    shown: list[str],
    hidden: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with serving(fault(open_model(str(trained)))) as url:
        code = compared(trained, url)
        out = capsys.readouterr().out
        assert code == (fault is not unchanged), out
        assert all(text in out for text in shown), out
        assert not any(text in out for text in hidden), out
        if fault is merged_in_bf16:
            assert compared(trained, url, "--bound", "1") == 0
        if fault is unchanged:
            with pytest.raises(RecipeError, match=r"has no model 'other'; give --model one of run"):
                compared(trained, url, "--model", "other")
            with pytest.raises(RecipeError, match="answers 401: .*--api_key"):
                compared(trained, url, "--api_key", "wrong")
            with pytest.raises(RecipeError, match=r"has no data\.val_path"):
                compared(trained, url, "--split", "val")


class Poor(BaseHTTPRequestHandler):
    """Server that has a list of models, and answers without tokens or log-probabilities."""

    tokens: list[int] | None = None

    def answer(self, body: object, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "poor"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/tokenize" and self.tokens is not None:
            self.answer({"tokens": self.tokens})
        elif self.path == "/v1/completions":
            self.answer({"choices": [{"text": "blue", "logprobs": None}]})
        else:
            self.answer({"error": "no such route"}, 404)

    def log_message(self, format: str, *values: object) -> None:
        pass


def test_what_a_server_lacks_is_left_out_by_name(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Poor) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        try:
            with pytest.raises(RecipeError, match=r"gives nothing that can be compared \(prompt: /tokenize: 404"):
                compared(trained, url)
            monkeypatch.setattr(Poor, "tokens", [1, 2])
            assert compared(trained, url) == 1
        finally:
            server.shutdown()
    out = " ".join(capsys.readouterr().out.split())
    assert "left out: logprobs, which the server does not give (/v1/completions with echo" in out
    assert "left out: greedy, which the server does not give (the answer has no token_ids)" in out
    with pytest.raises(RecipeError, match="does not answer .*start the server"):
        compared(trained, url)
    with pytest.raises(RecipeError, match="is no address of a server"):
        compared(trained, "localhost:8000")
    with pytest.raises(RecipeError, match="is no run"):
        compared(trained / "adapter", url)

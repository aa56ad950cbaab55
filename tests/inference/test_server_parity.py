"""``parity`` finds no difference where a run is served as it was trained, and each kind of fault where it is not."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import yaml
from command_line import recipe
from forked_commands import run_forked
from lit_callbacks.report.tables import newest_tables, read_table
from peft import PeftModel
from served import serving

from lit_ft.commands.inference.parity import run as parity
from lit_ft.data.text.chat_template import ChatTemplate, set_chat_template
from lit_ft.errors import RecipeError
from lit_ft.gguf.folders import write_merged_folder
from lit_ft.gguf.llama_server import llama_server
from lit_ft.inference.opening import OpenedModel, open_model

pytestmark = pytest.mark.slow
CALL = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "red"}'}}
ROWS = [
    {"messages": [{"role": "user", "content": "red book"}, {"role": "assistant", "content": "blue cup"}] * 2},
    {
        "messages": [
            {"role": "system", "content": "the lamp"},
            {"role": "user", "content": "green", "source": "forum"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "blue", "seconds": 2},
            {"role": "assistant", "content": "the cup"},
        ]
    },
    {
        "messages": [{"role": "user", "content": "lamp"}, {"role": "assistant", "content": "the cup"}],
        "chat_template_kwargs": {"color": "red"},
    },
    *[{"messages": [{"role": "user", "content": "cup"}, {"role": "assistant", "content": "the green lamp"}]}] * 5,
]
WITH_BOS = "{{ '<|endoftext|>' }}{{ color }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"  # noqa: E501
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
            with pytest.raises(RecipeError, match="answers 401: .*--api_key_file"):
                compared(trained, url, "--api_key", "wrong")
            with pytest.raises(RecipeError, match=r"neither data\.val_path nor data\.val_fraction"):
                compared(trained, url, "--split", "val")
            check_report_table(trained, url)


def check_report_table(run: Path, url: str) -> None:
    """The table for the run's report is the last comparison's, without the key."""
    assert "Parity: " in (run / "report.html").read_text(encoding="utf-8")
    table = read_table(newest_tables(run)["parity"])
    assert table.columns == ["turn", "prompt", "log-probability: largest", "mean", "greedy answer"]
    assert [len(table.rows), table.rows[0][1], table.rows[0][4]] == [5, "same", "same"]
    assert table.notes[0] == "prompts with the tokens of training: 5 of 5"
    assert not table.is_fault
    assert table.command.startswith(f"python -m lit_ft parity {run} --url {url} --model run")
    assert "secret" not in table.command


def test_validation_rows_and_what_is_passed_over(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A copy of the run whose data holds out half of its rows, and has rows that cannot be compared."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    rows = tmp_path / "rows.jsonl"
    one = [{"role": "user", "content": "cup"}, {"role": "assistant", "content": "the cup"}]
    long = [{**one[0], "content": "red cup " * 300}, one[1]]
    different = [{"messages": [{**one[0], "content": word}, one[1]]} for word in ("red", "green", "blue", "book")]
    texts = [json.dumps(row) for row in [*different, {"messages": long}, {"messages": "none"}]]
    rows.write_text("\n".join([*texts, "{"]) + "\n")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["data"]["init_args"] |= {"path": str(rows), "on_bad_row": "skip", "max_length": None}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(open_model(str(run))) as url:
        assert compared(run, url, "--rows", "9") == 0
        out = capsys.readouterr().out
        assert "prompts with the tokens of training: 4 of 4" in out
        assert "passed over: 1 answers end behind the model's last position" in out
        assert "passed over: 2 rows cannot be read (data.on_bad_row)" in out
        rows.write_text("\n".join(texts[:4]) + "\n")
        config["data"]["init_args"] |= {"val_fraction": 0.5}
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        assert compared(run, url, "--split", "val", "--rows", "9") == 0
        assert "prompts with the tokens of training: 2 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fault", "shown"),
    [
        (unchanged, ["tokens of training: 5 of 5", "over 85 tokens (bound 0.05)", "equal greedy tokens: 100.0%"]),
        (lost_bos, ["prompt differs at token 1: trained are '<|endoftext|>"]),
        (wrong_adapter, ["log-probability of answer token"]),
        (merged_in_bf16, ["log-probability of answer token"]),
    ],
)
def test_llama_cpp_serves_what_was_trained_and_faults_are_found(
    trained: Path,
    fault: Callable[[OpenedModel], OpenedModel],
    shown: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr("lit_ft.gguf.folders.has_llama", lambda: False)  # the faults would be found there
    opened = fault(open_model(str(trained)))

    def save(folder: Path, _: object) -> None:
        merged = opened.model.merge_and_unload() if isinstance(opened.model, PeftModel) else opened.base
        merged.save_pretrained(folder)

    write_merged_folder(tmp_path / "gguf", "run", save, opened.tokenizer, "f32")
    with llama_server(tmp_path / "gguf" / "model-f32.gguf") as url:
        bound = [] if fault is unchanged else ["--bound", "0.001"]
        code = compared(trained, url, *bound)
    out = capsys.readouterr().out
    assert code == (fault is not unchanged), out
    assert all(text in out for text in shown), out


class Poor(BaseHTTPRequestHandler):
    """Server that has a list of models, and answers without tokens of an answer and without log-probabilities."""

    tokens: list[int] | None = None
    text: str | None = None

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
            self.answer({"choices": [{"text": self.text, "logprobs": None}]})
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
            monkeypatch.setattr(Poor, "text", None)
            with pytest.raises(RecipeError, match=r"gives nothing that can be compared \(prompt: /tokenize: 404"):
                compared(trained, url)
            monkeypatch.setattr(Poor, "text", "blue")
            monkeypatch.setattr(Poor, "tokens", [1, 2])
            assert compared(trained, url) == 1
        finally:
            server.shutdown()
    out = " ".join(capsys.readouterr().out.split())
    assert "left out: logprobs, which the server does not give (/v1/completions with echo" in out
    assert "greedy answer differs at token" in out  # read from the text
    with pytest.raises(RecipeError, match="does not answer .*start the server"):
        compared(trained, url)
    with pytest.raises(RecipeError, match="is no address of a server"):
        compared(trained, "localhost:8000")
    with pytest.raises(RecipeError, match="is no run"):
        compared(trained / "adapter", url)

"""``chat`` as a user runs it: through a pipe, and in a terminal."""

import io
import json
import os
import pty
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from lit_ft.cli import main
from lit_ft.commands.inference.chat import Chat, side_by_side
from lit_ft.inference.opening import open_model
from lit_ft.inference.text_stream import Decoding, StreamedAnswer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> str:
    """Folder of an adapter with random weights."""
    folder = tmp_path_factory.mktemp("adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    torch.manual_seed(0)  # of other weights some end an answer at once
    get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(folder)
    return str(folder)


def ask(monkeypatch: pytest.MonkeyPatch, capsys: Any, question: str, *options: str) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["chat", *options, "--max_new_tokens", "6", "--temperature", "0"])
    assert end.value.code == 0
    return str(capsys.readouterr().out)


def test_a_question_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, model_folder: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), "utf-8"))
    assert "question or system prompt is no UTF-8 text" in run(capsys, "chat", model_folder, code=2)
    monkeypatch.setattr(sys, "stdin", io.StringIO("coffee"))
    assert "prompt is no UTF-8 text" in run(capsys, "chat", model_folder, "--system", "caf\udce9", code=2)


def test_a_pipe_gets_the_answer_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, adapter: str, model_folder: str
) -> None:
    trained = ask(monkeypatch, capsys, "the green\nlamp\n", adapter)
    untrained = ask(monkeypatch, capsys, "the green\nlamp\n", model_folder)
    assert trained.strip() != untrained.strip()
    both = ask(monkeypatch, capsys, "the green\nlamp\n", adapter, "--compare")
    assert both == f"base:\n{untrained}adapter:\n{trained}"


def test_an_empty_pipe_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any, model_folder: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert "standard input is empty" in run(capsys, "chat", model_folder, code=2)


def test_an_empty_answer_to_a_pipe_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, model_folder: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(600))}))
    monkeypatch.setattr(sys, "stdin", io.StringIO("the green lamp"))
    assert "lit_ft: the answer is empty" in run(capsys, "chat", str(folder))


class Terminal:
    """``chat`` in a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.process, self.file = pty.fork()
        self.unread = ""
        if self.process == 0:
            code: Any = 1
            try:
                sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
                sys.stderr = sys.stdout
                main(["chat", *arguments])
            except SystemExit as end:
                code = end.code
            finally:
                sys.stdout.flush()
                os._exit(code)

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Read the output up to a text; the next call reads on behind it."""
        end = time.monotonic() + seconds
        while text not in self.unread:
            ready = select.select([self.file], [], [], max(0, end - time.monotonic()))[0]
            assert ready, f"no {text!r} in {self.unread!r}"
            self.unread += os.read(self.file, 65536).decode(errors="replace")
        self.unread = self.unread.partition(text)[2]

    def say(self, line: str, answer: str) -> None:
        os.write(self.file, f"{line}\n".encode())
        self.wait_for(answer)


def test_long_answers_without_spaces_are_shown_whole() -> None:
    console = Console(width=60, record=True, file=io.StringIO())
    answers = {"base": "红" * 70, "adapter": " is 大卫 in it. cup 布 in it. end"}
    note = "1,024 tokens, 63.5 tokens/s; cut after 1,024 tokens: max_new_tokens is 1,024"
    console.print(side_by_side(answers, {"base": note, "adapter": "3 tokens"}))
    shown = console.export_text()
    assert all(word in shown for word in note.split())
    assert shown.count("红") == 70
    assert "…" not in shown


def test_a_question_that_one_of_both_refuses_is_in_neither(
    adapter: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    opened = open_model(adapter)
    chat = Chat(opened, Decoding(max_new_tokens=4, temperature=0), None, compare=True)
    chat.conversations["adapter"].add("red " * 400, "blue")  # longer than its positions hold
    chat.conversations["base"].add("red", "blue")
    questions = iter(["the green lamp", "/undo", None])
    monkeypatch.setattr("lit_ft.commands.inference.chat._read", lambda: next(questions))
    chat.talk()
    shown = capsys.readouterr().out
    assert "512 positions" in shown
    assert "taken back" in shown
    assert [len(one.turns) for one in chat.conversations.values()] == [0, 0]


def test_a_question_without_an_answer_is_taken_back(adapter: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    chat = Chat(open_model(adapter), Decoding(max_new_tokens=4, temperature=0), None, compare=False)
    stopped = StreamedAnswer("", (5,), 0.5, "cancelled")
    monkeypatch.setattr(chat, "_answer", lambda *_: stopped)
    questions = iter(["the green lamp", None])
    monkeypatch.setattr("lit_ft.commands.inference.chat._read", lambda: next(questions))
    chat.talk()
    shown = "".join(capsys.readouterr())
    assert "1 token, 2.0 tokens/s; stopped" in shown
    assert "no answer: the question is taken back" in shown
    assert [len(one.turns) for one in chat.conversations.values()] == [0]


def test_a_conversation_in_a_terminal(adapter: str, tmp_path: Path) -> None:
    terminal = Terminal(adapter, "--max_new_tokens", "8", "--compare")
    terminal.wait_for("greedy, up to 8 tokens")
    terminal.say("the green lamp", "adapter")
    file = tmp_path / "chats.jsonl"
    terminal.say(f"/save {file}", "conversation 1 of the file")
    assert file.read_text().count('"role"') == 2
    terminal.say("/undo", "taken back")
    terminal.say(f"/save {file}", "no turn to save")
    terminal.say("/set top_p 3", "top_p=3.0 must be over 0")
    terminal.say("/set temperature=0.5", "sampled, temperature 0.5")
    terminal.say("/nope", "is no command")
    terminal.say("/set temperature=0", "greedy")  # a sampled answer may end at once
    terminal.say("/set max_new_tokens 400", "up to 400 tokens")
    terminal.say("the red cup", "adapter")
    os.kill(terminal.process, signal.SIGINT)  # as Ctrl-C: the answer stops, the program goes on
    terminal.wait_for("stopped")
    os.write(terminal.file, b"/exit\n")
    assert os.waitstatus_to_exitcode(os.waitpid(terminal.process, 0)[1]) == 0

"""The ``serve`` command from outside: its first lines, a stop by signal, and what is refused before weights load."""

import json
import re
import shlex
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from forked_commands import ForkedCommand
from model_folders import change
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lit_ft.commands.inference import serve
from lit_ft.data.text.chat_template import set_chat_template
from lit_ft.inference.opening import OpenedModel, open_together
from lit_ft.inference.vllm_command import vllm_command
from lit_ft.model.files.fingerprint import BaseForm, fingerprint, write_fingerprint

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> str:
    """Folder of a LoRA adapter of rank 12."""
    torch.manual_seed(0)
    config = LoraConfig(r=12, target_modules=["q_proj"], task_type="CAUSAL_LM")
    folder = tmp_path_factory.mktemp("adapters") / "run-a"
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(folder)
    return str(folder)


def test_a_server_stops_gracefully_while_it_answers(
    adapter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "STOP_SECONDS", 100)  # on a machine under load, 400 tokens take longer than its seconds
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        server = ForkedCommand(("serve", adapter, "--port", "0", "--origin", "*"), stdout=out, stderr=err)
        try:
            deadline, port = time.monotonic() + 120, None
            while port is None:
                assert server.poll() is None, (tmp_path / "err").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
                port = re.search(r"listening on http://127.0.0.1:(\d+)/v1", (tmp_path / "out").read_text())
            client = OpenAI(base_url=f"http://127.0.0.1:{port[1]}/v1", api_key="none", max_retries=0)
            stream = client.completions.create(model="run-a", prompt="red", max_tokens=400, stream=True)
            parts = [next(stream).choices[0]]
            server.send_signal(signal.SIGTERM)
            parts += [chunk.choices[0] for chunk in stream]
            assert parts[-1].finish_reason  # the answer that ran has ended by itself
            assert server.wait(60) == 143
        finally:
            server.kill()
    lines = (tmp_path / "out").read_text().splitlines()
    assert lines[0].startswith("base: ")
    assert lines[1] == f"run-a: {adapter}, requests batched together"
    assert lines[3].startswith("any web page that a browser here opens can use the server, and there is no key")
    assert lines[4].startswith("for large loads: vllm serve ")
    assert (tmp_path / "err").read_text().splitlines()[-1] == "lit_ft: stopped by SIGTERM"


def test_a_port_in_use_and_wrong_options_are_one_line(adapter: str, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port} cannot be listened on" in run(capsys, "serve", "no/run", "--port", port, code=2)
    for options, message in {
        ("--port", "70000"): "give another --port (0 is a free one) or --host",
        ("--port", "0", "--max_requests", "0"): "max_requests=0 must be 1 or more",
        ("--port", "0", "--cache_gib", "0"): "cache_gib=0 must be over 0",
        ("--port", "0", "--max_model_len", "1000"): "must be from 2 to the 512 positions",
        ("--port", "0", "--max_model_len", "500", "--cache_gib", "0.0003"): "does not fit in the KV cache",
        ("--port", "0", "--cache_gib", "0.000001"): "does not fit in the KV cache",
        ("--port", "0", "--base", "no/model"): "no/model",
        ("--port", "0", "--origin", "*", "--origin", "http://x/"): "origin='http://x/' must be as a browser's header",
    }.items():
        said = run(capsys, "serve", adapter, *options, code=2)
        assert message in said
        assert len(said.splitlines()) == 1
    assert "is taken; rename" in run(capsys, "serve", adapter, adapter, "--port", "0", code=2)


def test_adapters_of_two_bases_are_refused_in_one_line(
    adapter: str, capsys: Any, model_folder: str, tmp_path: Path
) -> None:
    base = Path(shutil.copytree(model_folder, tmp_path / "base"))
    change(base)
    other = Path(shutil.copytree(adapter, tmp_path / "run-b"))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    said = run(capsys, "serve", adapter, str(other), "--port", "0", code=2)
    assert said.splitlines()[-1].startswith(
        f"lit_ft: error: {str(base)!r} and {model_folder!r} are not the same base in the same form (dtype auto and auto"
    )
    assert said.splitlines()[-1].endswith("share one base; start a server for each")


def test_a_missing_package_is_named_before_anything_loads(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "package uvicorn, which is not installed; pip install -e '.[serve]'" in run(
        capsys, "serve", "no/run", code=2
    )


def test_the_command_for_vllm_has_the_rank_and_refuses_what_vllm_lacks(
    adapter: str, model_folder: str, tmp_path: Path
) -> None:
    opened = open_together([adapter])
    command = vllm_command(opened, {"run-a": adapter})
    assert command == (
        f"vllm serve {model_folder} --served-model-name base --enable-lora --max-lora-rank 16 "
        f"--lora-modules run-a={adapter}"
    )
    assert vllm_command({"m": opened["base"]}, {"m": model_folder}) == f"vllm serve {model_folder}"
    (run := tmp_path / "full").mkdir()
    (run / "config.yaml").touch()
    both = vllm_command({**opened, "full": opened["base"]}, {"run-a": adapter, "full": str(run)})
    assert both == f"{command} ; python -m lit_ft export --run {run} --merge ; vllm serve {run}/merged"
    scaled = shutil.copytree(adapter, tmp_path / "run-a")
    form = BaseForm("float32", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}})
    write_fingerprint(fingerprint(model_folder), scaled, form)
    words = shlex.split(vllm_command(open_together([str(scaled)]), {"run-a": str(scaled)}))
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    values = json.loads(words[words.index("--hf-overrides") + 1])
    assert values == {"rope_parameters": rope, "max_position_embeddings": 1024}
    set_chat_template(opened["run-a"].tokenizer, "plain")
    assert f"--chat-template {adapter}/chat_template.jinja --max-lora-rank 16" in vllm_command(
        opened, {"run-a": adapter}
    )
    config = adapter_config(opened["run-a"])
    refused = {"modules_to_save": ["lm_head"], "use_dora": True, "rank_pattern": {"q_proj": 4}, "r": 700}
    for name, value in refused.items():
        given = getattr(config, name)
        setattr(config, name, value)
        said = vllm_command(opened, {"run-a": adapter})
        setattr(config, name, given)
        assert "export" in said
        assert ("rank 700 is over 512" if name == "r" else name) in said


def adapter_config(opened: OpenedModel) -> LoraConfig:
    assert isinstance(opened.model, PeftModel)
    config = opened.model.peft_config["default"]
    assert isinstance(config, LoraConfig)
    return config

"""With local folders nothing outside this machine is contacted."""

import socket
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from command_line import recipe, run
from huggingface_hub import HfApi

pytestmark = pytest.mark.slow


@pytest.fixture
def contacted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts that somebody asked for; the hub is not offline, and each contact outside fails."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("LIT_FT_RUN_DIR", raising=False)
    hosts: list[str] = []
    ask, connect = socket.getaddrinfo, socket.socket.connect

    def note(host: Any) -> None:
        if str(host) not in ("None", "localhost", "127.0.0.1", "::1", socket.gethostname()):
            hosts.append(str(host))
            raise OSError(f"{host} was contacted")

    def noted_ask(host: Any, *arguments: Any, **options: Any) -> Any:
        note(host)
        return ask(host, *arguments, **options)

    def noted_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            note(address[0])
        connect(self, address)

    monkeypatch.setattr(socket, "getaddrinfo", noted_ask)
    monkeypatch.setattr(socket.socket, "connect", noted_connect)
    return hosts


def test_a_run_contacts_nobody(
    capsys: Any, tmp_path: Path, model_folder: str, write_rows: Any, contacted: list[str]
) -> None:
    arguments = recipe(tmp_path, model_folder, write_rows(), max_steps=1)[1:]
    folder = ["--run_dir", str(tmp_path / "run")]
    run(capsys, "check", *arguments)
    run(capsys, "fit", *arguments, *folder, "--merge", "true")
    run(capsys, "validate", *arguments, *folder, "--ckpt_path", "last", "--data.val_path", write_rows(name="v.json"))
    run(capsys, "export", "--run", str(tmp_path / "run"), "--out", str(tmp_path / "out"))
    assert contacted == []
    with pytest.raises(Exception, match=r".+"):  # the test sees contacts
        HfApi().model_info("someone/some-model", timeout=1)
    assert contacted

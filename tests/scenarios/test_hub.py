"""Models and data sets of a hub, as users name them: downloaded, from the cache without a network, and missing."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import RepositoryNotFoundError
from local_hub import serving
from shared_fixtures import make_rows

from lit_ft.internals.hub import remedy

NO_HUB = "http://127.0.0.1:9"
RUNS = "first", "second"


def fit(endpoint: str, folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """A run of one step in a new process: address and cache of the hub are read at its start."""
    command = [sys.executable, "-m", "lit_ft", "fit"]
    command += ["--model.pretrained", "someone/nano", "--data.path", "someone/rows"]
    command += ["--trainer.max_steps", "1", "--trainer.callbacks", "[]", "--merge", "false", "--run_dir", name]
    hub = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, env={**os.environ, **hub}, cwd=folder, capture_output=True, text=True, timeout=150)


@pytest.mark.slow
def test_a_run_downloads_model_and_rows_and_needs_no_hub_for_the_next(model_folder: str, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "models" / "someone" / "nano")
    rows = tmp_path / "datasets" / "someone" / "rows" / "data"
    rows.mkdir(parents=True)
    for split, count in (("train", 12), ("test", 3)):
        (rows / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in make_rows(count)))
    with serving(tmp_path) as endpoint:
        first = fit(endpoint, tmp_path, RUNS[0])
    assert first.returncode == 0, first.stderr
    assert "an epoch is 12 samples" in first.stderr
    second = fit(NO_HUB, tmp_path, RUNS[1])
    assert second.returncode == 0, second.stderr
    assert (
        f"{NO_HUB} cannot be reached (ConnectError): models and data sets are read from the cache alone"
        in second.stderr
    )
    assert "Retry" not in second.stderr
    first_steps, second_steps = ((tmp_path / name / "metrics.csv").read_text().splitlines() for name in RUNS)
    first_step, second_step = next(csv.DictReader(first_steps)), next(csv.DictReader(second_steps))
    assert first_step["train/loss"] == second_step["train/loss"]


@pytest.mark.parametrize(
    ("model", "advice"), [("someone/nano", "or it is private"), ("gated/nano", "accept the terms")]
)
def test_what_helps_where_a_hub_has_no_such_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, advice: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with serving(tmp_path) as endpoint, pytest.raises(RepositoryNotFoundError) as raised:
        HfApi(endpoint).model_info(model)
    said = remedy(model, raised.value)
    assert said is not None
    assert advice in said
    assert f"/{model}" in said
    assert remedy(model, ConnectionError()) is None

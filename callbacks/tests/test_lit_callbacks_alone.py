"""lit_callbacks installed alone: what importing it costs, and all callbacks on plain modules."""

import csv
import json
import shutil
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_process import python

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
IMPORT = "import time; import lightning.pytorch, torch; t = time.perf_counter(); import lit_callbacks, sys; "


def test_importing_costs_under_a_fifth_of_a_second(tmp_path: Path) -> None:
    """Beyond lightning and torch; the best of three, because other work goes on beside."""
    costs = [
        float(python(sys.executable, "-c", f"{IMPORT} print(time.perf_counter() - t)", folder=tmp_path))
        for _ in range(3)
    ]
    assert min(costs) < 0.2


def test_importing_brings_nothing_but_lightning_and_torch(tmp_path: Path) -> None:
    """What Lightning or torch bring already does not count."""
    extras = {"peft", "transformers", "matplotlib", "pyarrow", "pandas", "jinja2", "plotly", "bokeh", "lit_ft"}
    code = (
        "import lightning.pytorch, torch, sys; before = set(sys.modules); import lit_callbacks; "
        f"print({extras} & (set(sys.modules) - before))"
    )
    assert python(sys.executable, "-c", code, folder=tmp_path).strip() == "set()"


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment of its own with ``pip install ./callbacks`` and a logger that needs a package."""
    root = tmp_path_factory.mktemp("clean")
    venv.create(root / "venv", with_pip=True)
    executable = root / "venv" / "bin" / "python"
    source = root / "callbacks"
    shutil.copytree(HERE.parent, source, ignore=shutil.ignore_patterns("*.egg-info", "tests", "__pycache__", "build"))
    python(executable, "-m", "pip", "install", "-q", str(source), "tensorboard", folder=root, timeout=500)
    yield executable
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.processes
def test_every_callback_on_plain_modules(clean_python: Path, tmp_path: Path) -> None:
    for name in ("run_alone.py", "plain_modules.py"):
        shutil.copy(HERE / name, tmp_path)
    for kind in ("digits", "text"):
        for how in ("single", "ddp", "fsdp"):
            folder = tmp_path / f"{kind}_{how}"
            python(clean_python, "run_alone.py", kind, how, str(folder), folder=tmp_path)
            check(folder, kind)


def check(folder: Path, kind: str) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert said["importable"] == {"lit_ft": False, "transformers": False, "peft": False}
    assert said["steps"] == 8
    assert said["throughput"]["mfu"] > 0
    assert ("tokens_per_second" in said["throughput"]) is (kind == "text")
    assert all(said["memory"][name] > 0 for name in ("parameters", "gradients", "optimizer_state", "activations"))
    with (folder / "csv" / "metrics.csv").open() as file:
        logged = {name for row in csv.DictReader(file) for name, value in row.items() if value}
    wanted = {"train/loss", "val/loss", "throughput/samples_per_second", "throughput/step_seconds/callbacks"}
    assert logged >= wanted | {"memory/backward/host_rss_mib", "memory/breakdown/activations_mib", "forgetting/loss"}
    assert list((folder / "tensorboard").glob("events*"))
    assert {path.name for path in folder.glob("adapter*")} == {"adapter", "adapter-step-8"}
    assert [json.loads(line)["step"] for line in (folder / "samples.jsonl").read_text().splitlines()] == [
        0,
        0,
        4,
        4,
        8,
        8,
    ]
    assert (folder / "loss_ledger" / "summary.json").is_file()
    assert (folder / "memory" / "memory_timeline.csv").is_file()

"""lit_callbacks installed alone: what importing it costs, and all callbacks on plain modules."""

import csv
import json
import shutil
import sys
import venv
from collections.abc import Iterator
from importlib.metadata import distribution, distributions, version
from pathlib import Path

import pytest
from fresh_process import python
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
IMPORT = """
import os, sys, time
begin = time.process_time()
import lightning.pytorch, torch
imported, before = time.process_time(), set(sys.modules)
if (child := os.fork()) == 0:  # as where modules are missing that only Unix has
    sys.modules |= dict.fromkeys(("resource", "fcntl", "pwd", "grp", "termios"))
    import lit_callbacks
    assert lit_callbacks.peak_memory.host_peak() is None
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
start = time.process_time()
import lit_callbacks
print((time.process_time() - start) / (imported - begin), *set(sys.modules) - before)
"""


def test_importing_costs_a_twentieth_of_lightning_and_needs_no_other_package_nor_unix(tmp_path: Path) -> None:
    """Beyond lightning and torch; CPU time in parts of theirs, because machines differ and other work runs there."""
    cost, *modules = python(sys.executable, "-c", IMPORT, folder=tmp_path).split()
    assert "lit_callbacks" in modules
    extras = {"peft", "transformers", "matplotlib", "pyarrow", "pandas", "jinja2", "plotly", "bokeh", "lit_ft"}
    assert not extras & set(modules)
    assert float(cost) < 0.05


def link(names: list[str], site: Path) -> None:
    """Link the packages of distributions, and of all that they declare to need, from the environment of this test."""
    seen = set[str]()
    while names:
        if (name := canonicalize_name(names.pop())) in seen:
            continue
        seen.add(name)
        wanted = distribution(name)
        for top in {file.parts[0] for file in wanted.files or [] if not file.parts[0].startswith("..")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(wanted.locate_file(top))))
        needs = [Requirement(line) for line in wanted.requires or []]
        names += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


@pytest.fixture(scope="module")
def clean_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment with the built ``lit_callbacks``, what it declares to need, and a logger that needs a package.

    What it needs is linked from the environment of this test: pip would unpack gigabytes.
    """
    root = tmp_path_factory.mktemp("clean")
    venv.create(root / "venv")
    (site,) = (root / "venv" / "lib").glob("python*/site-packages")
    source = root / "callbacks"
    shutil.copytree(HERE.parent, source, ignore=shutil.ignore_patterns("*.egg-info", "tests", "__pycache__", "build"))
    install = "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target", str(site), str(source)
    python(sys.executable, "-m", "pip", *install, folder=root, timeout=500)
    (built,) = distributions(path=[str(site)])
    assert built.version == version("lit-ft-callbacks")
    link([Requirement(line).name for line in built.requires or [] if "extra ==" not in line] + ["tensorboard"], site)
    yield root / "venv" / "bin" / "python"
    shutil.rmtree(root)


@pytest.mark.slow
@pytest.mark.processes
def test_every_callback_on_plain_modules(clean_python: Path, tmp_path: Path) -> None:
    for name in ("run_alone.py", "plain_modules.py"):
        shutil.copy(HERE / name, tmp_path)
    for together in ("single", "ddp,fsdp"):  # what needs two ranks shares their start
        python(clean_python, "run_alone.py", together, str(tmp_path), folder=tmp_path)
    for how in ("single", "ddp", "fsdp"):
        for kind in ("digits", "text"):
            check(tmp_path / how / kind, kind)


def check(folder: Path, kind: str) -> None:
    said = json.loads((folder / "said.json").read_text())
    assert said["importable"] == {"lit_ft": False, "transformers": False, "peft": False}
    assert said["steps"] == 8
    assert said["throughput"]["mfu"] > 0
    assert ("tokens_per_second" in said["throughput"]) is (kind == "text")
    assert said["memory"]["parameters"] > 0
    with (folder / "memory" / "memory_step.csv").open() as file:
        events = list(csv.DictReader(file))
    # At the step's peak FSDP may have no gradients yet: when it frees its buffers depends on the other rank.
    for purpose in ("parameters", "gradients", "optimizer_state", "activations"):
        assert any(float(event[f"{purpose}_mib"]) > 0 for event in events), purpose
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

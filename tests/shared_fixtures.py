"""Fixtures: a model, a tokenizer and rows, small enough to build in each test session."""

import contextlib
import gc
import itertools
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import faster_parsing  # noqa: F401
import hypothesis  # noqa: F401  # before torch, as it collects garbage when it is imported
import pytest
import torch
import torch.utils.cpp_extension  # what every rank under DeepSpeed would import
from lightning.fabric.utilities import registry
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from ranks import LiveRanks
from torch import distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.workload import train_tokenizer
from lit_ft.process import seed_torch
from lit_ft.recipe import allowed_code

with contextlib.suppress(ImportError):
    # Before a test captures output: DeepSpeed speaks when it is imported, and its log stays with that stream.
    import deepspeed  # noqa: F401

# Each Trainer would read the entry points of all installed packages, which do not change.
registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]
if not torch.cuda.is_available():
    # Each call of `log` would search all logged values for tensors to move to the device where they are.
    _ResultMetric.to = lambda self, *_, **__: self  # type: ignore[method-assign]

WORDS = "red green blue book cup lamp under over beside the a is was 红 绿 书 杯子 在 的".split()


def make_rows(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Alpaca rows of unequal length."""
    rng = random.Random(seed)

    def text(low: int, high: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, high)))

    return [
        {"instruction": text(2, 12), "input": text(1, 5) if i % 3 == 0 else "", "output": text(1, 9)}
        for i in range(count)
    ]


def make_tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS)] * 4, vocab_size=320)


differences: dict[str, tuple[float, float]] = {}
"""Largest relative difference of a step's loss, and of a weight, for each parity test."""


matrix: dict[str, dict[str, str]] = {}
"""Largest relative difference from one process, or the refusal, for each architecture and layout."""


def record_cell(architecture: str, layout: str, text: str) -> None:
    matrix.setdefault(architecture, {})[layout] = text


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and let workers of ``pytest -n`` start with what takes long."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none (docs/gpu.md)"))
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not any(map(item.get_closest_marker, ("processes", "slow"))))


def pytest_collection_finish(session: pytest.Session) -> None:
    is_grouped = session.config.getoption("loadgroup", False)
    for item in session.items if is_grouped else []:
        # A version of pytest that xdist does not know leaves groups apart in silence (pytest 9.2 with xdist 3.8).
        if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid} is not in its group: pytest-xdist does not fit pytest {pytest.__version__}"
            )
    # Imported objects stay alive; a collection that visits all of them takes a third of a second.
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let no draw depend on the tests before."""
    seed_torch(0)


_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Leave out of collections, which took a tenth of the time, what earlier tests have imported and kept."""
    if next(_finished) % 16 == 0:
        gc.collect()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if path := session.config.getoption("--matrix"):
        layouts = list(dict.fromkeys(layout for row in matrix.values() for layout in row))
        lines = [f"| architecture | {' | '.join(layouts)} |", "|---" * (len(layouts) + 1) + "|"]
        lines += [f"| {name} | {' | '.join(row.get(c, '') for c in layouts)} |" for name, row in matrix.items()]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    if not (path := session.config.getoption("--numerics")):
        return
    lines = ["| test | loss, relative | weights, absolute |", "|---|---|---|"]
    for name, (loss, weight) in sorted(differences.items()):
        lines.append(f"| `{name}` | {loss:.1e} | {'not compared' if math.isnan(weight) else f'{weight:.1e}'} |")
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def record_difference(losses: list[tuple[float, float]], weights: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Store the differences of a parity test under its name; ``weights`` may be empty if a peer's have other names."""
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].rsplit(" (", 1)[0]
    loss = max(abs(a - b) / abs(b) for a, b in losses)
    weight = max((float((a - b).abs().max()) for a, b in weights), default=math.nan)
    before = differences.get(name, (0.0, weight))
    differences[name] = max(before[0], loss), max(before[1], weight)


def tiny_qwen2(**changes: Any) -> tuple[Qwen2ForCausalLM, Any]:
    """A Qwen2 of 60 thousand parameters (random, fp32, tied, grouped queries), with changes, and its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    values = {
        "vocab_size": 384,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "dtype": "float32",
        "initializer_range": 0.2,  # logits far from uniform, so that a wrong mask or position changes the loss
    }
    return Qwen2ForCausalLM(Qwen2Config(**(values | changes))), tokenizer


def make_model(folder: Path) -> str:
    """Write the model of most tests."""
    model, tokenizer = tiny_qwen2()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


OF_RUNS = (
    *("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", allowed_code.VARIABLE),
)
"""Environment variables that commands, launchers, seeds and DeepSpeed set for the rest of their process."""
_AT_START = {name: os.environ[name] for name in OF_RUNS if name in os.environ}


@pytest.fixture(autouse=True)
def _leaves_no_state() -> Iterator[None]:
    """End the process group that a trainer of one process leaves, and take back what it has set in the environment.

    In forks of later tests the group would wait for threads that they do not have.
    """
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in OF_RUNS:
        os.environ.pop(name, None)
    os.environ.update(_AT_START)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model that ``make_model`` writes."""
    return make_model(tmp_path_factory.mktemp("models") / "nano-qwen2")


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Function that writes rows to a JSON file and returns its path."""

    def write(rows: list[Any] | None = None, name: str = "rows.json", count: int = 22) -> str:
        path = tmp_path / name
        path.write_text(json.dumps(make_rows(count) if rows is None else rows, ensure_ascii=False), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """File of 13 rows, which several ranks share unevenly; beside it, ``val.json`` with five others."""
    folder = tmp_path_factory.mktemp("rows")
    for name, count, seed in (("val.json", 5, 1), ("rows.json", 13, 0)):
        (folder / name).write_text(json.dumps(make_rows(count, seed), ensure_ascii=False), encoding="utf-8")
    return str(folder / "rows.json")


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    """Results of fits on one process, which other tests of a module compare with."""
    return {}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Function that writes a small model of an architecture once, and returns its folder."""
    from architectures import save_model  # it imports this module

    parent = tmp_path_factory.mktemp("architectures")

    def write(architecture: str) -> str:
        folder = parent / architecture
        return str(folder) if folder.exists() else save_model(architecture, folder)

    return write


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    """Function that makes a CPU trainer without progress output; it can be pickled."""
    seed_everything(7, verbose=False)
    yield partial(silent_trainer, default_root_dir=tmp_path)
    os.environ.pop("PL_GLOBAL_SEED", None)


def silent_trainer(**options: Any) -> Trainer:
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    # Two micro-batches of validation before training would take as long as a step; runs of commands keep them.
    return Trainer(**{"accelerator": "cpu", "num_sanity_val_steps": 0, **dict.fromkeys(silent, False), **options})


@pytest.fixture(scope="module")
def live_ranks() -> Iterator[LiveRanks]:
    """Function that runs another one on several ranks, whose processes all tests of a module share."""
    ranks = LiveRanks()
    yield ranks
    ranks.end()

"""The token cache: never stale, never half-written, made once for all ranks."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import grimp
import pytest
from lightning.pytorch.strategies import DDPStrategy
from ranks import on_ranks
from shared_fixtures import make_rows, make_tokenizer
from torch.distributed import distributed_c10d

from lit_ft import CausalLM, RecipeError, TextDataModule, cli
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens import cache as token_cache
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.tokenization import Tokenization


def key_of(path: Path, tokenizer: Any = None, source: Any = None, **options: Any) -> str:
    """The name of the cache entry that a preparation makes or finds."""
    cache = path.parent / "cache"
    before = {entry.name for entry in (cache / "tokens").glob("*") if entry.is_dir()}
    Preparation(tokenizer or make_tokenizer(), cache_dir=str(cache), **options).prepare(
        Source(str(path), **(source or {}))
    )
    after = {entry.name for entry in (cache / "tokens").glob("*") if entry.is_dir()}
    return next(iter(after - before), "found")


def other_vocabulary() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["red green"])
    return tokenizer


def other_template() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "helper")
    return tokenizer


CHANGES: dict[str, dict[str, Any]] = {
    "system": {"system": "be brief"},
    "masks": {"supervise": "last"},
    "length": {"max_length": 30},
    "overlong": {"overlong": "drop"},
    "vocabulary": {"tokenizer": other_vocabulary()},
    "template": {"tokenizer": other_template()},
    "rows": {"source": {"max_rows": 5}},
    "format": {"source": {"columns": {"input": "input", "output": "output"}}},
}


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_decides_the_tokens_makes_another_entry(tmp_path: Path, change: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(make_rows(20)))
    assert key_of(path) != "found"
    assert key_of(path) == "found"
    assert key_of(path, **CHANGES[change]) != "found"
    assert key_of(path) == "found"


def test_other_content_under_the_same_name_time_and_size(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = make_rows(20)
    path.write_text(json.dumps(rows))
    stamp = path.stat()
    assert key_of(path) != "found"
    content = path.read_text()
    path.write_text(content.replace("book", "kobo", 1))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert path.stat().st_size == stamp.st_size
    assert key_of(path) != "found"


def test_what_check_tokenized_is_found_by_fit(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps(row) for row in make_rows(20)]
    path.write_text("\n".join(rows))
    assert key_of(path, on_bad_row="skip") != "found"
    assert key_of(path) == "found"
    path.write_text("\n".join([*rows[:9], "{}", *rows[9:]]))
    assert key_of(path, on_bad_row="skip") != "found"
    with pytest.raises(RecipeError, match=r"rows.jsonl:10: .*\(data.on_bad_row=skip leaves such rows out"):
        key_of(path)


def test_a_file_that_changes_while_it_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in make_rows(20)))
    encode = Tokenization.encode

    def after_a_change(self: Tokenization, rows: Any) -> Any:
        path.write_text(path.read_text().replace("book", "kobo"))
        return encode(self, rows)

    with monkeypatch.context() as patch:
        patch.setattr(Tokenization, "encode", after_a_change)
        with pytest.raises(RecipeError, match="rows.jsonl: has changed while it was tokenized; start again when"):
            key_of(path)
    assert [file.suffix for file in (tmp_path / "cache" / "tokens").iterdir()] in ([".lock"], [])
    assert key_of(path) != "found"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Any] = {
    "a flipped bit of a label": (lambda entry: flip(entry / "labels.npy"), "labels.npy not as written"),
    "a flipped bit of the notes": (lambda entry: flip(entry / "meta.json"), "meta.json not as written"),
    "a short file": (lambda entry: os.truncate(entry / "ids.npy", 200), "ids.npy not as written"),
    "no file": (lambda entry: (entry / "rows.npy").unlink(), "rows.npy not as written"),
    "sums that are none": (lambda entry: (entry / "sums.json").write_text("[1"), "sums.json cannot be read"),
    "sums of nothing": (lambda entry: (entry / "sums.json").write_text("3"), "sums.json holds no sums"),
    "no sums": (lambda entry: (entry / "sums.json").unlink(), "sums.json cannot be read"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_entry_is_said_and_written_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    damage, message = DAMAGES[case]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(make_rows(20)))
    entry = tmp_path / "cache" / "tokens" / key_of(path)
    before = {file.name: file.read_bytes() for file in entry.iterdir()}
    damage(entry)
    assert key_of(path) == "found"
    assert f"entry {entry} is damaged ({message}" in caplog.text
    assert {file.name: file.read_bytes() for file in entry.iterdir()} == before
    caplog.clear()
    assert key_of(path) == "found"
    assert caplog.text == ""


def test_other_code_makes_another_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenization = Preparation(make_tokenizer()).tokenization(Source("rows.json", format="completion"))
    before = token_cache.fingerprint("rows", tokenization)
    files = [(token_cache._PACKAGE / name, tmp_path / name) for name in token_cache.files_that_tokenize()]
    for file, copied in files:
        copied.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copied)
    monkeypatch.setattr(token_cache, "_PACKAGE", tmp_path)
    found = {token_cache.fingerprint("rows", tokenization)}
    assert found == {before}
    for _, copied in files:
        copied.write_bytes(copied.read_bytes() + b"# changed")
        found.add(token_cache.fingerprint("rows", tokenization))
    assert len(found) == 1 + len(files)


CANNOT_CHANGE_TOKENS = {
    "lit_callbacks.internals.transformers_internals": "attention, of models",
    "lit_callbacks.output.printable": "texts of errors",
    "lit_callbacks.output.quantities": "texts of errors",
    "lit_callbacks.protocols": "types",
    "lit_ft.balanced_partition": "packs samples into micro-batches",
    "lit_ft.data.tokens.cache": "keeps what is made",
    "lit_ft.data.tokens.row_count": "shows progress",
    "lit_ft.data.worker_processes": "starts and ends processes",
    "lit_ft.errors": "texts of errors",
    "lit_ft.internals.executors": "ends processes",
    "lit_ft.internals.hub": "finds files, whose content is in the key",
    "lit_ft.internals.torch": "modules, of models",
    "lit_ft.model.files.git_pointer": "refuses files",
    "lit_ft.process": "signals, and the number of cores",
}
"""Modules that those which tokenize import, and that are no part of the cache's key, nor is what they import."""


def test_the_code_that_tokenizes_is_complete() -> None:
    """A module that one of them imports is one of them too, or is in the list above."""
    graph = grimp.build_graph("lit_ft", "lit_callbacks", cache_dir=None)
    tokenize = {f"lit_ft/{name}".removesuffix(".py").replace("/", ".") for name in token_cache.files_that_tokenize()}
    tokenize = {name.removesuffix(".__init__") for name in tokenize}
    assert tokenize < graph.modules
    assert {"lit_ft.data.tokens.tokenization", "lit_ft.data.tokens.preparation"} < tokenize
    imported = {name for module in tokenize for name in graph.find_modules_directly_imported_by(module)}
    assert imported - tokenize == CANNOT_CHANGE_TOKENS.keys()


def test_template_variables_make_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(make_rows(20)))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ thinking }}" + tokenizer.chat_template
    assert key_of(path, tokenizer, template_options={"thinking": "a"}) != "found"
    assert key_of(path, tokenizer, template_options={"thinking": "b"}) != "found"
    assert key_of(path, tokenizer, template_options={"thinking": "b"}) == "found"


def _write_slowly(folder: str, started: Any, seconds: float) -> None:
    def write(place: Path) -> None:
        (place / "half").write_text("half")
        started.set()
        time.sleep(seconds)
        (place / "whole").write_text("whole")

    token_cache.entry(Path(folder), "key", write)


@pytest.mark.processes
def test_a_killed_writer_leaves_nothing_and_blocks_nobody(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    writer = context.Process(target=_write_slowly, args=(str(tmp_path), started, 60))
    writer.start()
    assert started.wait(30)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    assert not (tmp_path / "key").exists()
    place = token_cache.entry(tmp_path, "key", lambda place: (place / "whole").touch())
    assert sorted(file.name for file in place.iterdir()) == ["sums.json", "whole"]


@pytest.mark.processes
def test_others_wait_for_the_writer(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    writer = context.Process(target=_write_slowly, args=(str(tmp_path), started, 2))
    writer.start()
    assert started.wait(30)
    place = token_cache.entry(tmp_path, "key", lambda place: pytest.fail("written twice"))
    assert (place / "whole").read_text() == "whole"
    writer.join()


def _members(session: int) -> list[str]:
    found = subprocess.run(["ps", "-o", "stat=,pid=", "-s", str(session)], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if not line.startswith("Z")]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_while_workers_tokenize_leaves_no_worker(tmp_path: Path, number: signal.Signals) -> None:
    mark, rows = tmp_path / "mark", tmp_path / "rows.json"
    rows.write_text(json.dumps(make_rows(4000)))
    if (process := os.fork()) == 0:
        code: Any = 1
        try:
            os.setsid()
            encode = Tokenization.encode

            def slowly(self: Tokenization, batch: Any) -> Any:
                mark.touch()
                time.sleep(0.3)
                return encode(self, batch)

            Tokenization.encode = slowly  # type: ignore[method-assign]
            with cli._exit_on_signals():
                Preparation(make_tokenizer(), cache_dir=str(tmp_path), workers=2).prepare(Source(str(rows)))
        except SystemExit as stop:
            code = stop.code
        finally:
            os._exit(code)
    deadline = time.monotonic() + 30
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process, number)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) in (128 + number, -number)
    deadline = time.monotonic() + 3
    while _members(process):
        assert time.monotonic() < deadline, _members(process)
        time.sleep(0.05)
    if number != signal.SIGKILL:
        assert not list((tmp_path / "tokens").glob("*.unfinished"))


@pytest.mark.processes
def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    path, cache = tmp_path / "rows.json", tmp_path / "cache"
    path.write_text(json.dumps(make_rows(20)))

    def fill() -> str:
        # What the kernel does at a quota: no more than a kilobyte fits.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        with pytest.raises(RecipeError) as error:
            Preparation(make_tokenizer(), cache_dir=str(cache)).prepare(Source(str(path)))
        return str(error.value)

    (message,) = on_ranks(1, fill, timeout=60)
    folder = cache / "tokens"
    assert message.startswith(f"data.cache_dir={str(folder)!r}: tokens cannot be written (File too large)")
    assert [file.suffix for file in folder.iterdir()] in ([".lock"], [])


class Impatient(DDPStrategy):
    def setup_distributed(self) -> None:
        super().setup_distributed()  # processes may take longer than that to find each other
        distributed_c10d._set_pg_timeout(timedelta(seconds=5))


@pytest.mark.processes
def test_slow_tokenization_outlasts_the_process_groups_timeout(
    make_trainer: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    data, encode = write_rows(), Tokenization.encode

    def slowly(tokenization: Tokenization, rows: Any) -> Any:
        with (tmp_path / "tokenized").open("a") as file:
            file.write("once\n")
        time.sleep(8)  # longer than the process group waits
        return encode(tokenization, rows)

    def train() -> int:
        Tokenization.encode = slowly  # type: ignore[method-assign]
        trainer = make_trainer(devices=2, strategy=Impatient(process_group_backend="gloo"), max_steps=2)
        trainer.fit(CausalLM(model_folder), TextDataModule(data, max_length=128, cache_dir=str(tmp_path / "cache")))
        return trainer.global_step

    assert on_ranks(2, train) == [2, 2]
    assert (tmp_path / "tokenized").read_text() == "once\n"


def test_a_package_that_is_missing_is_named() -> None:
    assert token_cache.version_of("numpy").count(".") == 2
    with pytest.raises(RecipeError, match="no-such-package is not installed, .*; pip install no-such-package"):
        token_cache.version_of("no-such-package")

"""Manifests of folders: every difference is found and named, and a manifest never reads outside its folder."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from lit_callbacks.durable_writes import write_durably
from lit_callbacks.export.manifest import (
    MANIFEST,
    ManifestError,
    read_manifest,
    sha256_of,
    verify_manifest,
    write_manifest,
)
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "weights").write_bytes(bytes(range(256)) * 9000)  # more than a chunk
    (tmp_path / "config").write_text("a")
    (tmp_path / "empty").touch()
    write_manifest(tmp_path)
    return tmp_path


def test_an_untouched_folder_has_no_differences(folder: Path) -> None:
    files = read_manifest(folder)

    assert not verify_manifest(folder)
    assert list(files) == ["config", "empty", "part/weights"]
    assert files["config"] == (1, "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb")


def test_each_difference_is_named(folder: Path) -> None:
    weights = bytearray((folder / "part" / "weights").read_bytes())
    weights[-1] ^= 1  # one bit
    (folder / "part" / "weights").write_bytes(weights)
    (folder / "config").write_text("ab")
    (folder / "empty").unlink()
    (folder / "thesis.txt").touch()

    found = verify_manifest(folder)

    assert found.damaged
    assert str(found) == (
        "missing: empty; of another size: config (2 bytes, not 1); with other bytes: part/weights; "
        "not in the manifest: thesis.txt"
    )
    assert not verify_manifest(folder, only=lambda name: name.endswith(".json"))


@pytest.mark.parametrize(("of_folder", "of_files"), [(0o755, 0o644), (0o775, 0o664), (0o700, 0o600)])
def test_files_are_as_readable_as_their_folder(tmp_path: Path, of_folder: int, of_files: int) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter").chmod(of_folder)
    save_file({"a": torch.ones(1)}, tmp_path / "adapter" / "adapter_model.safetensors")  # which it gives 0600

    write_manifest(tmp_path / "adapter")

    assert stat.S_IMODE((tmp_path / "adapter" / "adapter_model.safetensors").stat().st_mode) == of_files
    assert stat.S_IMODE((tmp_path / "adapter").stat().st_mode) == of_folder


def test_an_added_file_does_no_damage(folder: Path) -> None:
    (folder / "more").touch()

    found = verify_manifest(folder)

    assert found
    assert not found.damaged


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "part/../../secret", ""])
def test_a_manifest_reads_nothing_outside_its_folder(folder: Path, name: str) -> None:
    (folder / MANIFEST).write_text(json.dumps({"version": 1, "files": {name: {"size": 1, "sha256": "0" * 64}}}))

    with pytest.raises(ManifestError, match="lies outside the folder"):
        verify_manifest(folder)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"version": 1}', '{"version": 2, "files": {}}', '{"version": 1, "files": {"a": 1}}', "\xff"],
)
def test_garbage_is_no_manifest(folder: Path, text: str) -> None:
    (folder / MANIFEST).write_bytes(text.encode("latin-1"))

    with pytest.raises(ManifestError, match="manifest.json"):
        read_manifest(folder)


def test_a_folder_without_a_manifest_is_not_taken_for_verified(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        verify_manifest(tmp_path)


def test_the_sum_is_the_same_without_file_digest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sha256_of(folder / "part" / "weights")
    monkeypatch.delattr("hashlib.file_digest", raising=False)  # Python 3.10 has none

    assert sha256_of(folder / "part" / "weights") == expected


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("old")

    def full(_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(tmp_path / "a", "new")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"

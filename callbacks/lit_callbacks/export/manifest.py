"""Manifests: the files of a folder with their sizes and SHA-256 sums.

A manifest is written last and atomically, so a folder that has one is complete.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lit_callbacks.durable_writes import sync, write_durably

MANIFEST = "manifest.json"
"""File name of a manifest."""

VERSION = 1
"""Version of the manifest format."""

_CHUNK_BYTES = 2**20
_HEX_DIGITS_OF_SHA256 = 64


class ManifestError(ValueError):
    """A manifest cannot be read or is malformed."""


class FileSum(NamedTuple):
    """Size and SHA-256 sum of a file."""

    size: int
    """In bytes."""
    sha256: str
    """In hexadecimal digits."""


@dataclass(frozen=True)
class Differences:
    """Differences between a folder and its manifest; false if there are none."""

    missing: list[str] = field(default_factory=list)
    """Files that are in the manifest and not in the folder."""
    wrong_size: list[str] = field(default_factory=list)
    """Files whose size differs from the manifest's, each with both sizes in bytes."""
    wrong_hash: list[str] = field(default_factory=list)
    """Files of the right size whose SHA-256 sum differs."""
    unknown: list[str] = field(default_factory=list)
    """Files that are in the folder and not in the manifest."""

    @property
    def damaged(self) -> bool:
        """Whether a file of the manifest is missing or has changed; additional files do not count as damage."""
        return bool(self.missing or self.wrong_size or self.wrong_hash)

    def __bool__(self) -> bool:
        """Whether there is any difference."""
        return self.damaged or bool(self.unknown)

    def __str__(self) -> str:
        """One line that names up to three files of each kind."""
        kinds = {
            "missing": self.missing,
            "of another size": self.wrong_size,
            "with other bytes": self.wrong_hash,
            "not in the manifest": self.unknown,
        }
        return "; ".join(f"{kind}: {_first(names)}" for kind, names in kinds.items() if names)


def sha256_of(path: Path) -> str:
    """SHA-256 sum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):  # Python 3.11 and later
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()


def file_sum(path: Path) -> FileSum:
    """Size and SHA-256 sum of a file."""
    return FileSum(path.stat().st_size, sha256_of(path))


def file_sums(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileSum]:
    """Sums of a folder's files by name relative to it, in order; the manifest itself is left out.

    Args:
        folder: folder of the files; subfolders are included.
        names: relative names of the files to read; None takes all.
    """
    names = sorted(list_files(folder) if names is None else names)
    # hashlib releases the global interpreter lock, so files are read in parallel.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(names, pool.map(lambda name: file_sum(folder / name), names), strict=True))


def list_files(folder: Path) -> list[str]:
    """Sorted names of a folder's files relative to it, subfolders included, without the manifest."""
    paths = (Path(root, name).relative_to(folder) for root, _, names in os.walk(folder) for name in names)
    return sorted(name for path in paths if (name := path.as_posix()) != MANIFEST)


def write_manifest(folder: Path, names: Iterable[str] | None = None, sums: Mapping[str, FileSum] | None = None) -> None:
    """Sync a folder's files to the disk, then write their manifest atomically.

    Files that only their owner may read can be read by all who may read the folder.

    Args:
        folder: complete folder that no other process writes to.
        names: relative names of the files to list; None lists all.
        sums: known sums by name; these files are not read again.
    """
    known = dict(sums or {})
    unknown = [name for name in (list_files(folder) if names is None else names) if name not in known]
    sums = dict(sorted((known | file_sums(folder, unknown)).items()))
    _open_to_readers_of(folder)
    sync_folder(folder)
    files = {name: entry._asdict() for name, entry in sums.items()}
    text = json.dumps({"version": VERSION, "files": files}, indent=1)
    write_durably(folder / MANIFEST, text + "\n")


def _open_to_readers_of(folder: Path) -> None:
    """Give a folder's files the modes that its own follows: safetensors writes weights for their owner alone."""
    shared = folder.stat().st_mode & 0o666
    for name in list_files(folder):
        mode = (folder / name).stat().st_mode
        if mode | shared != mode:
            with suppress(PermissionError):  # file systems without modes
                (folder / name).chmod(mode | shared)


def read_manifest(folder: Path) -> dict[str, FileSum]:
    """Files that the manifest of a folder lists, by name.

    Raises:
        FileNotFoundError: there is no manifest.
        ManifestError: the manifest cannot be read, is malformed, or has another version.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {_within(name): _entry(entry) for name, entry in manifest["files"].items()}
        version = manifest["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} is no readable manifest ({type(error).__name__}: {error})") from error
    if version != VERSION:
        raise ManifestError(f"{path} has version {version!r}; this program reads version {VERSION}")
    return files


def verify_manifest(folder: Path, only: Callable[[str], bool] = lambda _: True, with_sums: bool = True) -> Differences:
    """Compare a folder's files with its manifest.

    Args:
        folder: folder with a manifest.
        only: filter of the compared files, by name.
        with_sums: whether to read the files and compare their SHA-256 sums too, not only names and sizes.

    Returns:
        The differences; false if there are none.

    Raises:
        FileNotFoundError: the folder has no manifest.
        ManifestError: the manifest cannot be read, is malformed, or has another version.
    """
    listed = {name: entry for name, entry in read_manifest(folder).items() if only(name)}
    sizes = {name: (folder / name).stat().st_size for name in listed if (folder / name).is_file()}
    right_size = [name for name, size in sizes.items() if size == listed[name].size]
    sums = file_sums(folder, right_size) if with_sums else {}
    return Differences(
        missing=[name for name in listed if name not in sizes],
        wrong_size=[
            f"{name} ({size:,} bytes, not {listed[name].size:,})"
            for name, size in sizes.items()
            if size != listed[name].size
        ],
        wrong_hash=[name for name, entry in sums.items() if entry.sha256 != listed[name].sha256],
        unknown=[name for name in list_files(folder) if name not in listed and only(name)],
    )


def sync_folder(folder: Path) -> None:
    """Sync a folder to the disk: its files, its subfolders and its directory entries."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def _entry(entry: Any) -> FileSum:
    size, sha256 = entry["size"], entry["sha256"]
    if not isinstance(size, int) or not isinstance(sha256, str) or len(sha256) != _HEX_DIGITS_OF_SHA256:
        raise ValueError(f"{entry!r} is no size and SHA-256 sum")
    return FileSum(size, sha256)


def _within(name: str) -> str:
    """Check that a file name lies within the manifest's folder; manifests may come from untrusted sources."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} lies outside the folder")
    return name


def _first(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more

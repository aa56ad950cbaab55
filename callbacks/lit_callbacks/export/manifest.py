"""Manifests: the files of a folder with their sizes and SHA-256 sums.

A manifest is written last and atomically, so a folder that has one was written to its end.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

MANIFEST = "manifest.json"
"""Name of the manifest within its folder."""

VERSION = 1
"""Version of the manifest's format."""

_CHUNK_BYTES = 2**20
_HEX_DIGITS_OF_SHA256 = 64


class ManifestError(ValueError):
    """A manifest that cannot be read or does not have the form of one."""


class FileSum(NamedTuple):
    """Size and SHA-256 sum of a file."""

    size: int
    """In bytes."""
    sha256: str
    """In hexadecimal digits."""


@dataclass(frozen=True)
class Differences:
    """How a folder differs from its manifest; false where it does not."""

    missing: list[str] = field(default_factory=list)
    """Files that the manifest names and the folder lacks."""
    wrong_size: list[str] = field(default_factory=list)
    """Files that are shorter or longer than the manifest says, each with both sizes."""
    wrong_hash: list[str] = field(default_factory=list)
    """Files of the right size with other bytes."""
    unknown: list[str] = field(default_factory=list)
    """Files that the manifest does not name."""

    @property
    def damaged(self) -> bool:
        """Whether a file that the manifest names is missing or has changed; files that were added do no damage."""
        return bool(self.missing or self.wrong_size or self.wrong_hash)

    def __bool__(self) -> bool:
        """Whether there are any."""
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
        folder: searched with its subfolders.
        names: which files; None takes all.
    """
    wanted = sorted(list_files(folder) if names is None else names)
    # hashlib lets go of the interpreter's lock, so files are read side by side.
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        return dict(zip(wanted, pool.map(lambda name: file_sum(folder / name), wanted), strict=True))


def list_files(folder: Path) -> list[str]:
    """Names of a folder's files relative to it, those of subfolders included, without the manifest; sorted."""
    found = (Path(root, name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names)
    return sorted(name for name in found if name != MANIFEST)


def write_manifest(
    folder: Path,
    facts: Mapping[str, Any] | None = None,
    names: Iterable[str] | None = None,
    sums: Mapping[str, FileSum] | None = None,
) -> None:
    """Make a folder's files durable, then write their manifest atomically.

    Args:
        folder: complete, and written to by nobody else.
        facts: further entries of the manifest, as JSON; ``version`` and ``files`` are its own.
        names: which files; None takes all.
        sums: of files whose sums are known, which are not read.
    """
    known = dict(sums or {})
    wanted = [name for name in (list_files(folder) if names is None else names) if name not in known]
    sums = dict(sorted((known | file_sums(folder, wanted)).items()))
    sync_folder(folder)
    files = {name: entry._asdict() for name, entry in sums.items()}
    text = json.dumps({**(facts or {}), "version": VERSION, "files": files}, indent=1)
    write_durably(folder / MANIFEST, text + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """A manifest as it was written: ``files`` by name, each a ``FileSum``, and the facts.

    Args:
        path: of the manifest, or of its folder.

    Raises:
        FileNotFoundError: there is none.
        ManifestError: it is not one.
    """
    path = path / MANIFEST if path.is_dir() else path
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        files = {_within(name): _entry(entry) for name, entry in manifest["files"].items()}
        version = manifest["version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{path} is no readable manifest ({type(error).__name__}: {error})") from error
    if version != VERSION:
        raise ManifestError(f"{path} has version {version!r}; this program reads version {VERSION}")
    return {**manifest, "files": files}


def verify_manifest(folder: Path, only: Callable[[str], bool] = lambda _: True, with_sums: bool = True) -> Differences:
    """Compare a folder's files with its manifest.

    Args:
        folder: holds the manifest.
        only: which files are compared, by name.
        with_sums: read the files and compare their sums; else only their names and sizes are compared.

    Returns:
        What differs; false if nothing does.

    Raises:
        FileNotFoundError: it has no manifest.
        ManifestError: its manifest is not one.
    """
    wanted = {name: entry for name, entry in read_manifest(folder)["files"].items() if only(name)}
    there = [name for name in wanted if (folder / name).is_file()]
    sizes = {name: (folder / name).stat().st_size for name in there}
    whole = [name for name in there if sizes[name] == wanted[name].size]
    cut = [name for name in there if sizes[name] != wanted[name].size]
    sums = file_sums(folder, whole) if with_sums else {}
    return Differences(
        missing=[name for name in wanted if name not in sizes],
        wrong_size=[f"{name} ({sizes[name]:,} bytes, not {wanted[name].size:,})" for name in cut],
        wrong_hash=[name for name, entry in sums.items() if entry.sha256 != wanted[name].sha256],
        unknown=[name for name in list_files(folder) if name not in wanted and only(name)],
    )


def write_durably(path: Path, text: str) -> None:
    """Replace a file atomically: after a kill or a power cut at any moment it holds the old text or the new."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Have the system write a folder's files, its subfolders and its own entries to the disk."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(entry: Any) -> FileSum:
    size, sha256 = entry["size"], entry["sha256"]
    if not isinstance(size, int) or not isinstance(sha256, str) or len(sha256) != _HEX_DIGITS_OF_SHA256:
        raise ValueError(f"{entry!r} is no size and SHA-256 sum")
    return FileSum(size, sha256)


def _within(name: str) -> str:
    """A name from a manifest, which may come from anywhere: nothing outside its folder is read."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} lies outside the folder")
    return name


def _first(names: list[str], count: int = 3) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more

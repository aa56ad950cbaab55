"""Token cache on disk, shared by all ranks, with atomic writes.

A cache entry is a folder named by a fingerprint of everything that decides its content. It is
written under a temporary name and renamed when complete. A file lock lets one process write while all others
wait: no rank waits in a collective, which would time out, and the lock of a killed writer is released at once.
Checksums of its files are compared before it is used: a damaged entry is written again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.errors import DISK_ERRORS, RecipeError

SECONDS_BEFORE_SAYING_SO = 5
SUMS = "sums.json"
"""File of an entry with the checksums of its other files."""
_CHUNK_BYTES = 2**22
_PACKAGE = Path(__file__).parents[2]
_FOLDERS_THAT_TOKENIZE = ("data/text", "data/tokens")
_NO_PART_OF_IT = ("data/tokens/cache.py", "data/tokens/row_count.py")
_FILES_THAT_TOKENIZE = ("internals/transformers.py", "model/render_limits.py", "packed_batch.py")
"""Files besides; a test compares all with what they import."""


def default_folder() -> Path:
    """Default folder of the cache: ``LIT_FT_CACHE``, or ``lit_ft`` in the user's cache folder."""
    given = os.environ.get("LIT_FT_CACHE")
    return (
        Path(given).expanduser()
        if given
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lit_ft"
    )


def fingerprint(source_digest: str, tokenization: Tokenization, **more: object) -> str:
    """Name of an entry: a digest of the rows' content, the tokenization settings, and the code that tokenizes."""
    tokenizer = tokenization.tokenizer
    settings = {f.name: getattr(tokenization, f.name) for f in fields(tokenization) if f.name != "tokenizer"}
    ingredients = {
        "rows": source_digest,
        "settings": {**settings, **more},
        "tokenizer": [type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template],
        "special tokens": tokenizer.special_tokens_map,
        "code": {name: (_PACKAGE / name).read_text(encoding="utf-8") for name in files_that_tokenize()},
        "libraries": [version_of(name) for name in ("transformers", "tokenizers", "jinja2", "datasets", "numpy")],
    }
    text = json.dumps(ingredients, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@cache
def files_that_tokenize() -> tuple[str, ...]:
    """Files of lit_ft that decide what tokens rows become, as paths from its folder."""
    of_folders = [path for folder in _FOLDERS_THAT_TOKENIZE for path in (_PACKAGE / folder).glob("*.py")]
    names = {path.relative_to(_PACKAGE).as_posix() for path in of_folders}
    return tuple(sorted((names | set(_FILES_THAT_TOKENIZE)) - set(_NO_PART_OF_IT)))


@cache
def version_of(package: str) -> str:
    """Version of an installed package, which decides what tokens rows become.

    Raises:
        RecipeError: it is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError as error:
        raise RecipeError(
            f"{package} is not installed, whose version names the entries of the token cache; pip install {package}"
        ) from error


def entry(folder: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Folder of a cache entry; the first process that needs the entry writes it.

    Raises:
        RecipeError: the cache cannot be written.
    """
    path = folder / key
    if path.is_dir() and not damage_of(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / f"{key}.lock")
        _acquire(lock)
    except OSError as error:
        raise RecipeError(
            f"data.cache_dir={str(folder)!r} cannot be written ({error.strerror}); give another folder, there or "
            "as LIT_FT_CACHE in the environment"
        ) from error
    try:
        if path.is_dir() and (damage := damage_of(path)):
            rank_zero_info(f"the token cache's entry {path} is damaged ({damage}); it is written anew")
            _remove(path)
        if not path.is_dir():
            _write(folder / f"{key}.unfinished", path, write)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise RecipeError(
            f"data.cache_dir={str(folder)!r}: tokens cannot be written ({error.strerror}); make room there, or give "
            "another folder, there or as LIT_FT_CACHE in the environment"
        ) from error
    finally:
        lock.release()
    return path


def damage_of(entry_folder: Path) -> str:
    """Damage of an entry, found by reading all its bytes, as text; empty if there is none."""
    try:
        written = json.loads((entry_folder / SUMS).read_text(encoding="utf-8"))
        present = _sums_of(entry_folder)
    except (OSError, ValueError) as error:
        return f"{SUMS} cannot be read: {error}"
    if not isinstance(written, dict):
        return f"{SUMS} holds no sums"
    wrong = [name for name in sorted(written.keys() | present.keys()) if written.get(name) != present.get(name)]
    return f"{', '.join(wrong)} not as written" if wrong else ""


def _sums_of(entry_folder: Path) -> dict[str, str]:
    """XXH3 checksum of each file: it finds accidental damage at memory speed; SHA-256 would slow every start."""
    import xxhash  # comes with datasets

    sums = {}
    for path in sorted(entry_folder.iterdir()):
        if path.name != SUMS:
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
            sums[path.name] = digest.hexdigest()
    return sums


def _remove(entry_folder: Path) -> None:
    """Remove an entry; other processes that have mapped its files can still read them."""
    removed = entry_folder.with_name(f"{entry_folder.name}.removed")
    shutil.rmtree(removed, ignore_errors=True)
    entry_folder.rename(removed)
    shutil.rmtree(removed)


def _write(unfinished: Path, entry_folder: Path, write: Callable[[Path], None]) -> None:
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        write(unfinished)
        (unfinished / SUMS).write_text(json.dumps(_sums_of(unfinished)), encoding="utf-8")
        unfinished.rename(entry_folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _acquire(lock: FileLock) -> None:
    try:
        lock.acquire(timeout=SECONDS_BEFORE_SAYING_SO)
    except Timeout:
        rank_zero_info(f"another process tokenizes the data; waiting for it ({lock.lock_file})")
        lock.acquire()

"""Output paths of commands, checked before the work starts."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from lit_ft.errors import RecipeError


def writable(out: str | Path) -> Path:
    """Path of a file or folder to write, with ``~`` as the home folder.

    Args:
        out: as the user gives it with ``--out``, or a default.

    Raises:
        RecipeError: neither a file nor a folder can be made there.
    """
    path = Path(out).expanduser()
    if not path.absolute().name:
        raise RecipeError(f"out={str(out)!r} is the root of all folders; name one below it with --out")
    # Not Path.exists, which raises an error where a folder may not be looked into.
    parent = next(one for one in path.absolute().parents if os.path.exists(one))
    try:
        with suppress(FileNotFoundError):
            os.stat(path)  # refuses a loop of symbolic links
        # Not os.access, which says yes to root where nothing can be made, as in /proc.
        Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent)).rmdir()
    except (OSError, ValueError) as error:  # ValueError: a null character
        why = getattr(error, "strerror", error) if parent.is_dir() else f"{str(parent)!r} is a file"
        raise RecipeError(f"out={str(out)!r} cannot be written ({why}); name another place with --out") from error
    return path

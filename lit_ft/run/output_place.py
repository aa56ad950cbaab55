"""Output paths of commands, checked before the work starts."""

import os
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
    parent = next(one for one in path.absolute().parents if one.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "Permission denied" if parent.is_dir() else f"{str(parent)!r} is a file"
        raise RecipeError(f"out={str(out)!r} cannot be written ({why}); name another place with --out")
    return path

"""Keys of servers: from the environment or a file, which other users of the machine do not see, or from an option."""

import os
from pathlib import Path

from lit_ft.errors import RecipeError

API_KEY = "LIT_FT_API_KEY"
"""Environment variable with the key of ``serve``, and of the server that ``evaluate`` and ``parity`` ask."""
JUDGE_API_KEY = "LIT_FT_JUDGE_API_KEY"
"""Environment variable with the key of the judge's server."""


def given_key(option: str, key: str | None, file: str | None, variable: str) -> str | None:
    """Key that an option, a file or an environment variable gives, the first there is; None if there is none.

    Args:
        option: name of the option; that of the file has ``_file`` behind it.
        key: value of the option.
        file: value of the option of the file, whose text without white space at its ends is the key.
        variable: environment variable.

    Raises:
        RecipeError: both options are given, the file cannot be read, or the key is empty or not ASCII.
    """
    if key is not None and file is not None:
        raise RecipeError(f"--{option} and --{option}_file both give a key; leave one of them out")
    source = f"--{option}"
    if file is not None:
        source = f"{option}_file={file!r}"
        try:
            key = Path(file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise RecipeError(f"{source} cannot be read ({error}); name a text file that holds the key") from error
    elif key is None:
        source, key = variable, os.environ.get(variable) or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
        raise RecipeError(f"{source} gives no key: it must be ASCII text in one line, and not empty")
    return key

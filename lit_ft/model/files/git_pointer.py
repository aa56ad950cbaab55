"""Files that Git holds in place of large ones."""

from pathlib import Path

from lit_ft.errors import RecipeError

_BEGINNING = b"version https://git-lfs"


def refuse_pointer(file: Path, name: str) -> None:
    """Refuse the small text that a clone without Git LFS holds in place of a large file; ``name`` is for the message.

    Raises:
        RecipeError: it is such a text.
    """
    with file.open("rb") as stream:
        if stream.read(len(_BEGINNING)) == _BEGINNING:
            raise RecipeError(
                f"{name} is Git's pointer to the file, not the file; run `git lfs pull` in the folder, or download it "
                "with `hf download`"
            )

"""Check that all weight files of a model folder are inside the folder."""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath

from lit_ft.errors import RecipeError


def check_weight_files(pretrained: str) -> None:
    """Refuse a folder whose index names files outside of it, or that also holds an adapter.

    transformers joins the names in an index to the folder without a check, and silently applies an adapter that is in
    the folder. Names in hub repositories are checked by huggingface_hub.

    Args:
        pretrained: folder or hub id.

    Raises:
        RecipeError: the folder is refused; the message names the file.
    """
    folder = Path(pretrained).expanduser()
    if not folder.is_dir():
        return
    if (folder / "adapter_config.json").is_file():
        raise RecipeError(
            f"model.pretrained={pretrained!r} holds an adapter (adapter_config.json) beside the model, which would be "
            "put on it; move it to a folder of its own"
        )
    for index in sorted(folder.glob("*.index.json")):
        for name in sorted(set(_weight_map(index).values())):
            if not _lies_within(name):
                raise RecipeError(
                    f"model.pretrained={pretrained!r}: {index.name} names a file outside of the folder ({name!r}); "
                    "download the model again from where you trust it"
                )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"{str(index)!r} is no index of weights ({type(error).__name__}: {error}); download the model again"
        ) from error


def _lies_within(name: str) -> bool:
    return not any(path.is_absolute() or ".." in path.parts for path in (PurePosixPath(name), PureWindowsPath(name)))

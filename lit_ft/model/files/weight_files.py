"""Weight files of a model's folder: none of those that it names may lie outside."""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath

from lit_ft.errors import RecipeError


def check_weight_files(pretrained: str) -> None:
    """Refuse a folder whose index of weights leads elsewhere, or that holds an adapter as well.

    transformers joins the names in an index to the folder as they are, and puts an adapter that lies in the folder on
    the model without a word. Names in hub repositories are checked by huggingface_hub.

    Args:
        pretrained: folder or hub id.

    Raises:
        RecipeError: it names the file.
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

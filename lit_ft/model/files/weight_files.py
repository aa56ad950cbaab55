"""Check that all weight files of a model folder are inside the folder."""

import json
from pathlib import Path, PurePosixPath, PureWindowsPath

from lit_ft.errors import RecipeError, explained


def check_weight_files(pretrained: str) -> None:
    """Refuse a folder whose index names files outside of it, or that also holds an adapter.

    transformers joins the names in an index to the folder without a check, and silently applies an adapter that is in
    the folder. Names in hub repositories are checked by huggingface_hub.

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
        with explained(f"{str(index)!r} is no index of weights", "download the model again"):
            names = sorted(set(map(str, json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())))
        for name in names:
            paths = PurePosixPath(name), PureWindowsPath(name)
            if any(path.is_absolute() or ".." in path.parts for path in paths):
                raise RecipeError(
                    f"model.pretrained={pretrained!r}: {index.name} names a file outside of the folder ({name!r}); "
                    "download the model again from where you trust it"
                )

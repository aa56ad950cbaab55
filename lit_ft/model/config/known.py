"""Architectures that transformers does not have, found in a config.json that it cannot read."""

import transformers
from packaging.version import InvalidVersion, Version
from transformers import CONFIG_MAPPING, PretrainedConfig

from lit_ft.errors import LIBRARY_ERRORS


def unknown_architecture(pretrained: str) -> str:
    """Reason why a model's config cannot be read, with the fix; empty if its architecture is known or unclear."""
    try:
        values, _ = PretrainedConfig.get_config_dict(pretrained)
    except LIBRARY_ERRORS:
        return ""
    kind, here = values.get("model_type"), transformers.__version__
    if kind in CONFIG_MAPPING:
        return ""
    if "auto_map" in values:
        return (
            "config.json: it wants Python code of its own (auto_map) to be run, which is never done: it could do all "
            f"that you can do. transformers {here} has no model_type {kind!r}; name a model that it has, perhaps a "
            "conversion of this one"
        )
    if not isinstance(kind, str):
        return ""
    written_by = str(values.get("transformers_version", ""))
    try:
        is_newer = Version(written_by) > Version(here)
    except InvalidVersion:
        is_newer = False
    if is_newer:
        return (
            f"config.json: transformers {here} has no model_type {kind!r}, and {written_by}, which the model was saved "
            f"with, has it: pip install -U 'transformers>={written_by}'"
        )
    return (
        f"config.json: transformers {here} has no model_type {kind!r}, and the file names no newer version that has "
        "it; name another model, or try pip install -U transformers"
    )

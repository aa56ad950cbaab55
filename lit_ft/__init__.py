"""Fine-tune Hugging Face causal language models with Lightning.

Public names are imported lazily (PEP 562), so that ``python -m lit_ft --help`` answers without importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from lit_ft import old_names

if TYPE_CHECKING:
    from lit_ft.data.text.sources import Source
    from lit_ft.data.text_data import TextDataModule
    from lit_ft.errors import RecipeError
    from lit_ft.training.causal_lm import CausalLM
    from lit_ft.training.exact_match import ExactMatch

__version__ = "0.1.0"
__all__ = ["CausalLM", "ExactMatch", "RecipeError", "Source", "TextDataModule"]

_HOME = {
    "CausalLM": "lit_ft.training.causal_lm",
    "ExactMatch": "lit_ft.training.exact_match",
    "RecipeError": "lit_ft.errors",
    "Source": "lit_ft.data.text.sources",
    "TextDataModule": "lit_ft.data.text_data",
}

old_names.install()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lit_ft' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)

"""Aliases of modules: former module names, and short ones that recipes use, each mapped to the current module.

Recipes, run folders and checkpoints contain class paths with these names.
"""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

NEW_NAMES = {
    "lit_ft.adapter_start": "lit_ft.tuning.lora_init",
    "lit_ft.bottleneck": "lit_ft.tuning.bottleneck",
    "lit_ft.causal_lm": "lit_ft.training.causal_lm",
    "lit_ft.data.sources": "lit_ft.data.text.sources",
    "lit_ft.evaluation": "lit_ft.training.answer_scores.exact_match",
    "lit_ft.galore": "lit_ft.training.optimizers.galore",
    "lit_ft.losses": "lit_ft.training.loss.token_cross_entropy",
    "lit_ft.metrics": "lit_ft.training.metrics",
    "lit_ft.optimizers": "lit_ft.training.optimizers.configure",
    "lit_ft.precision": "lit_ft.training.precision",
    "lit_ft.reporting": "lit_ft.training.console",
    "lit_ft.schedule_free": "lit_ft.training.optimizers.schedule_free",
    "lit_ft.training.exact_match": "lit_ft.training.answer_scores.exact_match",
    "lit_ft.schedules": "lit_ft.training.optimizers.schedules",
}


class _NewModule(Loader):
    """Loader that returns the module of the new name for the old name."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(NEW_NAMES[spec.name])
        self.own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec, which the import system has replaced; do not execute the module again."""
        module.__spec__ = self.own_spec


class _OldNames(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return spec_from_loader(name, _NewModule()) if name in NEW_NAMES else None


def install() -> None:
    """Make the old names importable; a second call does nothing."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.append(_OldNames())

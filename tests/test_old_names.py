"""Module paths from before there were folders, which recipes, run folders and checkpoints name."""

import importlib
import sys

import pytest
from killed_runs import in_a_child

from lit_ft.old_names import NEW_NAMES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [*NEW_NAMES, "lit_callbacks.flops", "lit_callbacks.merging"])
def test_an_old_name_is_the_same_module(name: str) -> None:
    module = importlib.import_module(name)
    assert sys.modules[module.__name__] is module
    assert module.__spec__ is not None
    assert module.__spec__.name == module.__name__ == NEW_NAMES.get(name, module.__name__)


def test_an_unknown_name_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match="lit_ft.nothing"):
        importlib.import_module("lit_ft.nothing")


def import_the_old_name_first() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lit_ft"]:
        del sys.modules[name]
    old = importlib.import_module("lit_ft.schedules")
    assert old.CosineWithWarmup.__module__ == "lit_ft.training.optimizers.schedules"
    assert old is importlib.import_module("lit_ft.training.optimizers.schedules")


def test_classes_have_one_identity_whichever_name_is_imported_first() -> None:
    assert in_a_child(import_the_old_name_first) == 0

"""Objects of ``pytorch_lightning``, whose classes are copies of those of ``lightning``."""

from typing import Any

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lit_callbacks.either_package import is_a


def copied(kind: type, package: str) -> type:
    """A class as the other package has it: the same name in the same module, and no relation to ``kind``."""
    module = kind.__module__.replace("lightning.pytorch", package).replace("lightning.fabric", package)
    return type(kind.__qualname__, (), {"__module__": module})


@pytest.mark.parametrize(
    ("kind", "package"),
    [
        (ModelCheckpoint, "pytorch_lightning"),
        (DeepSpeedStrategy, "pytorch_lightning"),
        (SLURMEnvironment, "lightning_fabric"),
    ],
)
def test_a_copy_and_its_subclasses_are_of_the_class(kind: type, package: str) -> None:
    other: Any = copied(kind, package)
    assert not isinstance(other(), kind)
    assert is_a(other(), kind)
    assert is_a(type("Own", (other,), {})(), kind)


def test_isinstance_is_kept_and_a_name_alone_is_not_enough() -> None:
    assert is_a(ModelCheckpoint(), Callback)
    assert not is_a(ModelCheckpoint(), DDPStrategy)
    assert not is_a(type("ModelCheckpoint", (), {})(), ModelCheckpoint)
    assert not is_a(copied(ModelCheckpoint, "pytorch_lightning")(), DDPStrategy)

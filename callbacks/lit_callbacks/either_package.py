"""Classes of Lightning, from either package in which it is published: ``lightning`` and ``pytorch_lightning``."""

from typing import TypeGuard, TypeVar

_Class = TypeVar("_Class")
_PACKAGES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def is_a(value: object, kind: type[_Class]) -> TypeGuard[_Class]:
    """``isinstance``, which also holds for objects of the same class in the other package.

    A project that imports ``pytorch_lightning`` has a second copy of every class: its ``ModelCheckpoint`` is not an
    instance of that of ``lightning.pytorch``.

    Args:
        value: any object.
        kind: class of ``lightning``.
    """
    return isinstance(value, kind) or _name(kind) in map(_name, type(value).__mro__)


def _name(one: type) -> tuple[str, str]:
    """Module, as the package ``lightning`` names it, and name of a class."""
    package, dot, rest = one.__module__.partition(".")
    return _PACKAGES.get(package, package) + dot + rest, one.__qualname__

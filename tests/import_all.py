"""Import every module of both packages, and of the benchmarks that need no other trainer.

python tests/import_all.py
"""

import importlib
import pkgutil
import sys
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def modules(package: str) -> list[str]:
    """Names of a package's modules, without those that run when they are imported."""
    found = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
    return [module.name for module in found if not module.name.endswith("__main__")]


def failures(names: list[str]) -> dict[str, str]:
    """The error of each module that cannot be imported."""
    found = {}
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    names = [name for package in ("lit_ft", "lit_callbacks", "benchmarks") for name in modules(package)]
    names = [name for name in names if not name.startswith("benchmarks.peers.")]
    failed = failures(names)
    print("".join(failed.values()), end="")
    print(f"{len(names) - len(failed)} of {len(names)} modules can be imported")
    sys.exit(1 if failed else 0)

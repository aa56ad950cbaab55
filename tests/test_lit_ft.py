"""``import lit_ft`` in the folder that a clone named lit_ft lies in, and in the clone."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
SCRIPT = """
from importlib.util import find_spec
import lit_ft
print(lit_ft.__file__)
print(lit_ft.RecipeError.__module__)
print(find_spec("lit_callbacks").origin)
try:
    lit_ft.CausalLM
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside the clone", "in the clone"])
def test_a_script_finds_the_package_without_an_installation(tmp_path: Path, is_beside: bool) -> None:
    (tmp_path / "lit_ft").symlink_to(REPOSITORY)
    folder = tmp_path if is_beside else REPOSITORY
    # -S: without site-packages, so neither lit_ft nor what it needs is installed.
    script = SCRIPT if is_beside else SCRIPT.replace('print(find_spec("lit_callbacks").origin)\n', "")
    command = [sys.executable, "-S", "-c", script]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    package, errors, *callbacks, reason = done.stdout.splitlines()
    assert Path(package).resolve() == REPOSITORY / "lit_ft" / "__init__.py"
    assert errors == "lit_ft.errors"
    assert [Path(path).parent.parent.resolve() for path in callbacks] == [REPOSITORY / "callbacks"] * is_beside
    assert reason.startswith("lit_ft.CausalLM needs '")
    assert reason.endswith(f"which is not installed; pip install -e {REPOSITORY} -e {REPOSITORY}/callbacks")


def test_an_installed_package_is_found_beside_the_clone(tmp_path: Path) -> None:
    """With site-packages, where ``pip install -e`` has a finder that comes after the folder of the script."""
    (tmp_path / "lit_ft").symlink_to(REPOSITORY)
    script = "import lit_ft, lit_ft.errors; from lit_ft import RecipeError; print(lit_ft.__file__, lit_ft.__version__)"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, env={})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(REPOSITORY / "lit_ft" / "__init__.py"), "0.1.0"]

"""The ``verify`` command: check checkpoints and exported folders against their SHA-256 sums."""

import sys
from pathlib import Path

from lit_ft.checkpointing.verification import Finding, verify
from lit_ft.errors import RecipeError
from lit_ft.recipe.parser import RecipeParser


def run(arguments: list[str]) -> None:
    """Compare files with their recorded sizes and SHA-256 sums; exit with 1 if any is damaged."""
    parser = RecipeParser(prog="python -m lit_ft verify", description=(run.__doc__ or ""))
    parser.add_argument("path", nargs="+", help="a checkpoint, a run's folder, or an exported adapter's or model's")
    findings = [finding for path in parser.parse_args(arguments[1:]).path for finding in verify(Path(path))]
    for finding in findings:
        print(describe(finding))
    if any(finding.state == "damaged" for finding in findings):
        sys.exit(1)
    if all(finding.state == "without sums" for finding in findings):
        raise RecipeError(
            "no file has a checksum (an earlier version or another program wrote them): nothing was compared"
        )


def describe(finding: Finding) -> str:
    """Line of output about a checkpoint or a folder."""
    return f"{finding.state:<12} {finding.path}" + (f": {finding.detail}" if finding.detail else "")

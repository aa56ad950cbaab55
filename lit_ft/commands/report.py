"""The ``report`` command: write one HTML page about a run folder."""

from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.report.run_report import write_report

from lit_ft.errors import RecipeError
from lit_ft.recipe.option_parser import OptionParser
from lit_ft.run.output_place import writable


def run(arguments: list[str]) -> None:
    """Parse the options and write the page."""
    # Not with RecipeParser: it imports models, which takes seconds.
    parser = OptionParser(prog="python -m lit_ft report", description=(report.__doc__ or "").split("\n")[0])
    parser.add_argument("run", metavar="RUN", help="folder of the run")
    parser.add_argument("--out", metavar="FILE", help="the page; RUN/report.html by default")
    report(**vars(parser.parse_args(arguments[1:])))


def report(run: str, out: str | None = None) -> None:
    """Write one HTML page about a finished or running run: curves, answers, worst rows, configuration, versions.

    Args:
        run: folder of the run.
        out: file of the page; RUN/report.html by default.

    Raises:
        RecipeError: there is no run, or the page cannot be written.
    """
    folder = Path(run)
    if not (folder / "config.yaml").is_file():
        raise RecipeError(f"run={run!r} holds no run (no config.yaml there); name the folder that fit wrote")
    page = None if out is None else writable(out)
    try:
        path, data = write_report(folder, page)
    except OSError as error:
        raise RecipeError(f"the page cannot be written ({error}); give another place with --out FILE") from error
    rank_zero_info(f"{path}: {len(data.curves):,} metrics, {path.stat().st_size / 1024:,.0f} KiB")

"""What every run imports and builds, done once in the test process before runs are forked from it.

The forks have its modules, the parsers of a recipe's classes, and the templates and axes of a report.
"""

import contextlib
import io
from pathlib import Path

from lit_callbacks.report.report_data import RunData
from lit_callbacks.report.run_report import render

from lit_ft.cli import main

quickstart = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["fit", "--config", str(quickstart), "--print_config"])
render(RunData(Path(), curves={"train/loss": [(0, 1.0), (1, 0.5)]}))

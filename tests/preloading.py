"""What every run imports and builds, done once in the test process before runs are forked from it.

The forks have its modules, the parsers of a recipe's classes, the first calls of operators, and the templates and axes
of a report.
"""

import contextlib
import io
import logging
import os
import tempfile
from pathlib import Path

from lit_callbacks.report.report_data import RunData
from lit_callbacks.report.run_report import render

from lit_ft.cli import main

logging.disable()
recipes, environment = Path(__file__).parents[1] / "recipes", dict(os.environ)
with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()),
    contextlib.suppress(SystemExit),
):
    main(
        [
            *("fit", "--config", str(recipes / "quickstart.yaml"), "--run_dir", f"{folder}/run"),
            *("--model.pretrained", str(recipes.parent / "checkpoints" / "tiny-qwen2")),
            *("--data.path", str(recipes / "data" / "quickstart_val.json"), "--data.val_path", "null"),
            *("--trainer.max_steps", "1", "--trainer.callbacks", "[]", "--data.micro_batch_size", "2"),
            *("--trainer.enable_progress_bar", "false"),  # its thread would be in no fork
        ]
    )
logging.disable(logging.NOTSET)
os.environ.clear()
os.environ.update(environment)
render(RunData(Path(), curves={"train/loss": [(0, 1.0), (1, 0.5)]}))

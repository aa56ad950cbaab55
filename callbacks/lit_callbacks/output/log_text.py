"""Tables of text for a trainer's loggers."""

from collections.abc import Sequence
from inspect import signature

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lit_callbacks.protocols import HasExperiment, LogsText, LogsTextList, adds_text


def log_text(trainer: Trainer, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> bool:
    """Log a table of texts to every logger that takes text: TensorBoard, and those with ``log_text`` (W&B, SwanLab).

    Args:
        trainer: trainer of the run; this function is called on rank 0 only.
        name: name of the table.
        columns: names of the columns.
        rows: cells of each row, one per column.
        step: optimizer step.

    Returns:
        Whether a logger took the table, or the trainer has no logger.
    """
    taken = [_log(logger, name, columns, rows, step) for logger in trainer.loggers]
    return any(taken) or not taken


def _log(logger: Logger, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]], step: int) -> bool:
    experiment = logger.experiment if isinstance(logger, HasExperiment) else None
    if adds_text(experiment):
        # Markdown shows text that is indented by four spaces verbatim.
        cells = [cell for row in rows for cell in zip(columns, row, strict=True)]
        text = "\n\n".join(f"**{column}**\n\n    " + cell.replace("\n", "\n    ") for column, cell in cells)
        experiment.add_text(name, text, step)
    elif isinstance(logger, LogsText) and "columns" in signature(logger.log_text).parameters:
        logger.log_text(key=name, columns=list(columns), data=[list(row) for row in rows], step=step)
    elif isinstance(logger, LogsTextList) and "texts" in signature(logger.log_text).parameters:
        texts = [f"{column}: {cell}" for row in rows for column, cell in zip(columns, row, strict=True)]
        logger.log_text(key=name, texts=texts, step=step)
    else:
        return False
    return True

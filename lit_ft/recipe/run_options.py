"""Options of a run that are neither model, data nor trainer."""

from dataclasses import fields
from typing import Literal, Optional, get_type_hints

from jsonargparse import ActionYesNo
from jsonargparse.typing import PositiveInt
from lightning.pytorch.cli import LightningArgumentParser, LRSchedulerCallable, OptimizerCallable

from lit_ft.internals.jsonargparse import allow_untyped, leave_first_out_of_help
from lit_ft.model.generation import Sampling
from lit_ft.recipe.parser import DEFAULT_CLASSES

_HELP = {
    "run_dir": "Folder of the run: config.yaml, metrics.csv, tensorboard/, checkpoints/, adapter/, merged/. "
    "Default: checkpoints/runs/<recipe>/<time>.",
    "resume": "For fit: auto resumes the newest good checkpoint of run_dir, or starts where there is none, so that one "
    "command does for both. Without run_dir it resumes the recipe's newest run that did not come to its end.",
    "resume_data": "Where the checkpoint was written on other data, or in another order: same refuses, changed begins "
    "its epoch again on what there is now.",
    "merge": "After training, also write the merged model (in full fine-tuning: the model) to RUN_DIR/merged.",
    "optimizer": "Optimizer class and its arguments. Default: torch.optim.AdamW with a learning rate of 1e-4.",
    "lr_scheduler": "Schedule class and its arguments, e.g. lit_ft.schedules.CosineWithWarmup. Default: constant.",
}

_PREDICT_HELP = {
    "out": "File of the answers, which must not exist. Default: predictions.jsonl in the run folder, or, where that "
    "exists, predictions-2.jsonl, ...",
    "max_new_tokens": "Longest answer, in tokens. Default: that of the model, model.max_new_tokens.",
    "temperature": "Divisor of the logits; 0 is greedy: always the most probable token.",
    "top_p": "Draw among the most probable tokens that together have this probability; needs a temperature.",
    "top_k": "Draw among this many most probable tokens; needs a temperature.",
    "seed": "Seed of the draws. The answer to a row depends on it and on the number of the row alone, not on batches "
    "or ranks.",
}


def add_run_options(parser: LightningArgumentParser) -> None:
    """Add the options of a run, and lit_ft's classes as defaults."""
    parser.add_argument("--resume", type=Optional[Literal["auto"]], default=None, help=_HELP["resume"])
    parser.add_argument("--run_dir", type=Optional[str], default=None, help=_HELP["run_dir"])
    same_or_changed = Literal["same", "changed"]
    parser.add_argument("--resume_data", type=same_or_changed, default="same", help=_HELP["resume_data"])
    parser.add_argument("--merge", action=ActionYesNo, nargs="?", default=False, help=_HELP["merge"])
    for name, kind in (("optimizer", OptimizerCallable), ("lr_scheduler", LRSchedulerCallable)):
        allow_untyped(parser.add_argument(f"--{name}", type=Optional[kind], default=None, help=_HELP[name]))
        leave_first_out_of_help(parser, name)
    for part, default in DEFAULT_CLASSES.items():
        parser.set_defaults({part: {"class_path": f"lit_ft.{default.__name__}"}})
    for name in ("optimizer", "lr_scheduler"):
        parser.link_arguments(name, f"model.init_args.{name}")


def add_predict_options(parser: LightningArgumentParser) -> None:
    """Add the options of ``predict``."""
    parser.add_argument("--out", type=Optional[str], default=None, help=_PREDICT_HELP["out"])
    tokens = Optional[PositiveInt]
    parser.add_argument("--max_new_tokens", type=tokens, default=None, help=_PREDICT_HELP["max_new_tokens"])
    for option in fields(Sampling):
        kind = get_type_hints(Sampling)[option.name]
        parser.add_argument(f"--{option.name}", type=kind, default=option.default, help=_PREDICT_HELP[option.name])

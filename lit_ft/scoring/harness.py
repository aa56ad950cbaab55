"""Runs of lm-evaluation-harness on one model, and its figures as scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lit_ft.errors import LIBRARY_ERRORS, RecipeError
from lit_ft.inference.opening import OpenedModel
from lit_ft.model.generation import dense_attention
from lit_ft.scoring.scores import Score

if TYPE_CHECKING:  # of the extra `evaluate`
    from lm_eval.api.group import Group
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task

_TASK_ERRORS: tuple[type[Exception], ...] = (*LIBRARY_ERRORS, TemplateError)


@dataclass(frozen=True)
class HarnessOptions:
    """How tasks are run; None leaves a value to the harness."""

    limit: float | None = None
    """Rows of each task; below 1 a fraction of them."""
    num_fewshot: int | None = None
    """Examples before each question."""
    batch_size: int = 8
    """Requests of a forward pass, or sent to a server at the same time."""
    seed: int | None = None
    """Seed of the examples' choice and of sampling; the harness's own are 0 and 1234."""
    unsafe_code: bool = False
    """Run tasks that execute code which the model writes."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            RecipeError: one is out of range.
        """
        limit = self.limit
        if limit is not None and not (0 < limit < 1 or (limit >= 1 and limit == int(limit))):
            raise RecipeError(f"limit={limit:g} must be a number of rows, 1 or more, or a fraction between 0 and 1")
        for name, value, least in (("num_fewshot", self.num_fewshot, 0), ("batch_size", self.batch_size, 1)):
            if value is not None and value < least:
                raise RecipeError(f"{name}={value} must be {least} or more")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise RecipeError(f"seed={self.seed} must be 0 or more, and below 2**32")


def run_opened(
    opened: OpenedModel, tasks: "Sequence[Task | Group]", options: HarnessOptions, has_chat: bool
) -> dict[str, Any]:
    """Results of tasks on an opened model; ``has_chat`` puts tasks into the chat template."""
    from lit_ft.scoring.harness_models import TrainedLM

    with dense_attention(opened.base):
        return run_harness(TrainedLM(opened, options.batch_size, has_chat), tasks, options, has_chat)


def run_harness(lm: "LM", tasks: "Sequence[Task | Group]", options: HarnessOptions, has_chat: bool) -> dict[str, Any]:
    """Results of tasks, as lm-evaluation-harness returns them.

    Raises:
        RecipeError: a task cannot be run.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    try:
        results = simple_evaluate(
            model=lm,
            tasks=list(tasks),
            num_fewshot=options.num_fewshot,
            batch_size=options.batch_size,
            limit=options.limit,
            apply_chat_template=has_chat,
            task_manager=TaskManager(include_defaults=False),  # the default one reads 14,000 files
            confirm_run_unsafe_code=options.unsafe_code,
            **({} if options.seed is None else dict.fromkeys(seeds, options.seed)),
        )
    except RecipeError:
        raise
    except _TASK_ERRORS as error:
        if isinstance(error, MemoryError | RuntimeError):  # of the device, not of the task
            raise
        reason = " ".join(str(error).split())[:400]
        raise RecipeError(
            f"lm-evaluation-harness cannot run the tasks ({type(error).__name__}: {reason}); mend the task, its data, "
            "or the options; --debug shows where"
        ) from error
    assert results is not None, "rank 0 gets results"
    return dict(results)


def scores_of(results: dict[str, Any]) -> list[Score]:
    """Figures of a harness's results, with its standard errors."""
    scores = []
    for task, figures in results["results"].items():
        for key, value in figures.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or isinstance(value, str):
                continue
            error = figures.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else f"{metric} ({chosen})"
            scores.append(Score(task, name, float(value), float(error) if isinstance(error, float) else None))
    return scores

"""File of answers that train the model, with their rewards: what a reward is right about is seen there."""

from collections.abc import Callable, Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lit_callbacks.internals.lightning_internals import attributes_of
from lit_callbacks.output.attempts import written
from lit_callbacks.output.step_lines import add_lines, drop_after_step

from lit_ft.packed_batch import RowValues
from lit_ft.training.policy.rewards import SampledAnswer
from lit_ft.training.policy.rollouts import Rollouts

NAME = "sampled_answers.jsonl"


class AnswersFile:
    """``sampled_answers.jsonl`` in the run folder: all answers to one prompt of each step that is logged.

    A line has the optimizer step that the answer trains in, prompt, answer, expected answer, number of tokens, what
    ended it, and where there are rewards its reward and the parts of it by name. A run without loggers writes none.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        """Names of the parts of the reward."""
        self._last_step = -1
        self._is_unwritable = False

    def begin(self, trainer: Trainer) -> None:
        """Drop the lines that a resumed run writes again."""
        self._last_step, self._is_unwritable = -1, False
        if trainer.is_global_zero and trainer.loggers:
            self._write(trainer, lambda path: drop_after_step(path, trainer.global_step))

    def add(self, trainer: Trainer, rollouts: Rollouts) -> None:
        """Write the answers to the first prompt of rollouts, once in a step that is logged."""
        step, every = trainer.global_step + 1, attributes_of(trainer).log_every_n_steps
        is_logged = bool(trainer.loggers) and (step == 1 or (every > 0 and step % every == 0))
        if not (rollouts.answers and trainer.is_global_zero and is_logged) or step == self._last_step:
            return
        self._last_step = step
        each = rollouts.total.shape[1]
        rewards, parts = rollouts.total[0].tolist(), rollouts.rewards[:, 0].T.tolist()
        lines = [
            {"step": step, **_shown(one), **self._judged(reward, of_one)}
            for one, reward, of_one in zip(rollouts.answers[:each], rewards, parts, strict=True)
        ]
        self._write(trainer, lambda path: add_lines(path, lines))

    def _judged(self, reward: float, parts: Sequence[float]) -> dict[str, object]:
        return {"reward": reward, "rewards": dict(zip(self.names, parts, strict=True))} if self.names else {}

    def _write(self, trainer: Trainer, write: Callable[[Path], None]) -> None:
        path = Path(trainer.default_root_dir) / NAME
        if not self._is_unwritable:
            what = f"cannot write sampled answers to {str(path)!r}, and stops writing them; give another --run_dir"
            self._is_unwritable = not written(what, lambda: write(path))


def _shown(answer: SampledAnswer) -> dict[str, object]:
    """What a line shows of an answer: all but what rewards read of the row, which need not be JSON."""
    return {name: value for name, value in answer._asdict().items() if name not in RowValues._fields}

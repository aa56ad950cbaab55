"""``PolicyLM`` from Python. Options: ``epochs``, ``adapter``, ``answers``, ``new_tokens``. Rows: ``messages``."""

from collections.abc import Sequence

from lightning.pytorch import LightningModule, Trainer, seed_everything

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.lit_ft_python import OPTIMIZER, ClockFromBeginning, data_of, fit
from benchmarks.peers.text_reward import length_of
from lit_ft import GRPO, PolicyLM
from lit_ft.training.policy.rewards import Reward, SampledAnswer


class TextLength(Reward):
    """Length of an answer's text."""

    def of(self, answers: Sequence[SampledAnswer]) -> Sequence[float]:
        """Length of each answer."""
        return [length_of(one.answer) for one in answers]


class AnswerClock(ClockFromBeginning):
    """Clock that also records mean reward and number of tokens of each step's answers."""

    def __init__(self, measured: Measured, answers: int) -> None:
        """Record into ``measured``; ``answers`` are those of a step."""
        super().__init__(measured)
        self.answers = answers
        measured.tokens = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: object) -> None:
        """Record the answers of a step that has ended."""
        before = len(self.losses)
        super().on_train_batch_end(trainer, pl_module, *rest)
        if len(self.losses) > before and self.measured.tokens is not None:
            means = trainer.callback_metrics
            self.measured.rewards.append(float(means["train/reward"]))
            self.measured.tokens.append(round(float(means["train/answer_tokens"]) * self.answers))


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    seed_everything(0)
    answers = job.options["answers"]
    module = PolicyLM(
        job.model,
        rewards=[TextLength()],
        algorithm=GRPO(scale_rewards=True),
        answers_per_prompt=answers,
        max_new_tokens=job.options["new_tokens"],
        adapter=job.options["adapter"],
        dtype="float32",
        optimizer=OPTIMIZER,
    )
    clock = AnswerClock(Measured(), job.micro_batch_size * job.accumulate * answers)
    return fit(job, module, data_of(job, format="messages"), clock)


if __name__ == "__main__":
    serve(run)

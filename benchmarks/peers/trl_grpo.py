"""TRL's ``GRPOTrainer``. Options: any of ``GRPOConfig``, and those of ``lit_ft_grpo``. Rows: ``messages``."""

from typing import Any

from datasets import Dataset
from peft import PeftModel
from transformers import AutoTokenizer, TrainerState
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.text_reward import length_of
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of

SAME: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "beta": 0.0,
    "loss_type": "grpo",
    "scale_rewards": "group",
    "num_iterations": 1,
    "use_vllm": False,
    "bf16": False,
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
}
"""Settings with which TRL does what lit_ft does: no term of a reference, and all answers anew in each step."""


def text_length(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    """Length of each answer."""
    return [length_of(messages[0]["content"]) for messages in completions]


def logged(state: TrainerState, name: str) -> list[float]:
    """A logged mean of each optimizer step."""
    return [entry[name] for entry in state.log_history if name in entry]


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    options = {**SAME, **job.options}
    adapter, answers = options.pop("adapter"), options.pop("answers")
    sizes = {
        "num_train_epochs": options.pop("epochs"),
        "num_generations": answers,
        "max_completion_length": options.pop("new_tokens"),
        "per_device_train_batch_size": job.micro_batch_size * answers,
    }
    base, measured = base_model(job, options), Measured()
    trainer = GRPOTrainer(
        model=PeftModel.from_pretrained(base, adapter, is_trainable=True) if adapter else base,
        reward_funcs=[text_length],
        args=GRPOConfig(**{**arguments(job), **options, **sizes}),
        train_dataset=Dataset.from_list([{"prompt": row["messages"][:-1]} for row in job.read_rows()]),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        callbacks=[Clock(measured)],
    )
    measured.step_ended()
    trainer.train()
    measured.losses, measured.rewards = losses_of(trainer.state), logged(trainer.state, "reward")
    each = job.micro_batch_size * job.accumulate * answers
    measured.tokens = [round(mean * each) for mean in logged(trainer.state, "completions/mean_length")]
    return measured


if __name__ == "__main__":
    serve(run)

"""lit_ft's command line, with all default callbacks and loggers. Options: ``arguments`` of the command line."""

from typing import Any

import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve
from lit_ft.commands.train import TrainingCLI


class Clock(Callback):
    """Callback that records the end and the loss of each optimizer step, after all other callbacks."""

    def __init__(self, measured: Measured) -> None:
        """Record into ``measured``."""
        self.measured = measured
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Record end and loss; the loss tensor is read after training."""
        if trainer.global_step > len(self.losses):
            self.losses.append(trainer.callback_metrics["train/loss"].clone())
            self.measured.step_ended()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read the losses."""
        self.measured.losses = [float(loss) for loss in self.losses]


def command(job: Job) -> list[str]:
    """Command line of ``python -m lit_ft`` for a job."""
    recipe = {
        "seed_everything": 0,
        "run_dir": f"{job.folder}/run",
        "model": {
            "class_path": "lit_ft.CausalLM",
            "init_args": {
                "pretrained": job.model,
                "dtype": "bfloat16",
                "peft": {"class_path": "peft.LoraConfig", "init_args": job.lora},
            },
        },
        "data": {
            "class_path": "lit_ft.TextDataModule",
            "init_args": {
                "path": job.rows,
                "max_length": job.max_length,
                "micro_batch_size": job.micro_batch_size,
                "shuffle": False,
            },
        },
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
        },
        "trainer": {
            "accelerator": "cpu" if job.device == "cpu" else "gpu",
            "devices": 1,
            "max_epochs": 1,
            "accumulate_grad_batches": job.accumulate,
            "log_every_n_steps": 1,
        },
    }
    path = f"{job.folder}/recipe.yaml"
    with open(path, "w", encoding="utf-8") as file:
        yaml.safe_dump(recipe, file)
    return ["fit", "--config", path, *job.options.get("arguments", [])]


def run(job: Job) -> Measured:
    """Train the job."""
    measured = Measured()

    class TimedCLI(TrainingCLI):
        def _with_defaults(self, given: list[Callback]) -> list[Callback]:
            return [*super()._with_defaults(given), Clock(measured)]

    TimedCLI(command(job))
    return measured


if __name__ == "__main__":
    serve(run)

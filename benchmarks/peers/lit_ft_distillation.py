"""``DistillationLM`` from Python, or ``OnPolicyDistillationLM``. Options: ``epochs``, ``teacher``, ``new_tokens``.

``new_tokens`` is the length of the student's own answers; 0 trains on those of the data. Rows: ``messages``.
"""

from typing import Any

import torch
from lightning.pytorch import seed_everything

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.lit_ft_python import OPTIMIZER, ClockFromBeginning, data_of, fit
from lit_ft import DistillationLM, JensenShannon, OnPolicyDistillationLM


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    seed_everything(0)
    options: dict[str, Any] = {
        "teacher": job.options["teacher"],
        "divergence": JensenShannon(beta=0.5),
        "dtype": "float32",
        "teacher_dtype": "float32",
        "optimizer": OPTIMIZER,
    }
    new_tokens = job.options["new_tokens"]
    if new_tokens:
        module: DistillationLM = OnPolicyDistillationLM(job.model, max_new_tokens=new_tokens, **options)
    else:
        module = DistillationLM(job.model, **options)
    module.check_teacher()
    module.teacher.load(torch.device(job.device))  # as TRL, before the clock runs
    return fit(job, module, data_of(job, format="messages"), ClockFromBeginning(Measured()))


if __name__ == "__main__":
    serve(run)

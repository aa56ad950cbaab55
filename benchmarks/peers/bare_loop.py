"""Plain training loop over lit_ft's model and loss: no Lightning trainer, no callbacks, no logging.

The additional time of lit_ft's command is the cost of Lightning, callbacks and logging. Options: arguments of
``CausalLM``.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch import seed_everything
from peft import LoraConfig

from benchmarks.peers.job import LEARNING_RATE, WEIGHT_DECAY, Job, Measured, serve
from lit_ft import CausalLM
from lit_ft.packed_batch import PackedBatch, pack_samples


def windows(job: Job) -> Iterator[list[PackedBatch]]:
    """Packed batches of each optimizer step; micro-batches are joined while they fit into the limit of one."""
    samples = [(np.array(row["input_ids"]), np.array(row["labels"])) for row in job.read_rows()]
    size = job.micro_batch_size
    for start in range(0, len(samples), size * job.accumulate):
        rows: list[list[Any]] = []
        step = samples[start : start + size * job.accumulate]
        for first in range(0, len(step), size):
            micro_batch = step[first : first + size]
            tokens = sum(len(ids) for ids, _ in [*(rows[-1] if rows else []), *micro_batch])
            if rows and tokens <= size * job.max_length:
                rows[-1] += micro_batch
            else:
                rows.append(micro_batch)
        yield [pack_samples(row) for row in rows]


def run(job: Job) -> Measured:
    """Train the job."""
    measured, losses = Measured(), []
    seed_everything(0)  # for the random initialization of adapters
    module = CausalLM(job.model, dtype="bfloat16", peft=LoraConfig(**job.lora), **job.options)
    module.configure_model()
    module.to(job.device)
    optimizer = torch.optim.AdamW(module.trainable_parameters().values(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    for rows in windows(job):
        tokens = sum(len(row["targets"]) for row in rows)
        loss = torch.zeros((), device=job.device)
        for row in rows:
            part = module({name: v.to(job.device) if isinstance(v, torch.Tensor) else v for name, v in row.items()})
            share = part.loss_sum / tokens
            share.backward()
            loss += share.detach()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        measured.step_ended()
    measured.losses = [float(loss) for loss in losses]
    return measured


if __name__ == "__main__":
    serve(run)

"""TRL's ``SFTTrainer``. Options: any argument of ``SFTConfig``, and ``weights`` (dtype)."""

from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.transformers_trainer import Clock, arguments, base_model, losses_of


def run(job: Job) -> Measured:
    """Train the job; packed steps have other samples than the job's, so the tokens of each step are counted here."""
    options = dict(job.options)
    measured = Measured()
    trainer = SFTTrainer(
        model=base_model(job, options),
        args=SFTConfig(**(arguments(job) | options)),
        train_dataset=Dataset.from_list(job.read_rows()),
        processing_class=AutoTokenizer.from_pretrained(job.model),
        peft_config=LoraConfig(**job.lora),
        callbacks=[Clock(measured)],
    )
    trainer.train()
    measured.losses = losses_of(trainer.state)
    if options.get("packing"):
        lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
        rows = trainer.args.per_device_train_batch_size * job.accumulate
        measured.tokens = [sum(lengths[start : start + rows]) for start in range(0, len(lengths), rows)]
    return measured


if __name__ == "__main__":
    serve(run)

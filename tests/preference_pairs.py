"""Pairs of preference data, and fits of PreferenceLM on them that record what each step and validation measures."""

import json
from pathlib import Path
from typing import Any

from compared_strategies import Record, sgd
from lit_callbacks.distributed.gather import full_weights
from peft import LoraConfig
from shared_fixtures import make_rows

from lit_ft import DPO, PreferenceLM, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO

LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def write_pairs(folder: Path) -> str:
    """File of 13 pairs of unequal lengths; beside it, ``val.jsonl`` with five others."""
    for name, count, seed in (("val.jsonl", 5, 1), ("pairs.jsonl", 13, 0)):
        answered, others = make_rows(count, seed), make_rows(count, seed + 10)
        rows = [
            {
                "prompt": [{"role": "user", "content": one["instruction"]}],
                "chosen": [{"role": "assistant", "content": f"{one['output']} red"}],
                "rejected": [{"role": "assistant", "content": f"{other['output']} blue {other['output']}"}],
            }
            for one, other in zip(answered, others, strict=True)
        ]
        (folder / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(folder / "pairs.jsonl")


def data_of(path: str, **options: Any) -> TextDataModule:
    given = {"micro_batch_size": 2, "max_length": 96, "val_path": str(Path(path).with_name("val.jsonl")), **options}
    return TextDataModule(path, format="preference", **given)


def fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any], world: int = 1, strategy: Any = "auto") -> Any:
    """Losses and norms of two epochs in steps of 4 pairs of 13, the last validation's means, and the final weights."""
    model = {"peft": LORA, "objective": DPO(beta=0.5), **how.get("model", {})}
    module = PreferenceLM(folder, optimizer=how.get("optimizer", sgd), **model)
    record = Record(how.get("save_after"), how.get("save"))
    data = data_of(path, **how.get("data", {}))
    replicas = how.get("replicas", world)
    trainer = make_trainer(
        max_epochs=2,
        devices=world,
        strategy=strategy() if callable(strategy) else strategy,
        accumulate_grad_batches=4 // (data.micro_batch_size * replicas),
        log_every_n_steps=1,
        gradient_clip_val=100.0,
        callbacks=[record, *how.get("callbacks", [])],
        use_distributed_sampler=False,
        plugins=[AnyCheckpointIO()],
        **how.get("trainer", {}),
    )
    trainer.fit(module, data, ckpt_path=how.get("resume"))
    means = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    gather = getattr(trainer.strategy, "full_weights", full_weights)
    return record.steps, means, gather(module, lambda _, p: p.requires_grad, keep=True)

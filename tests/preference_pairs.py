"""Pairs, judged answers, and fits of PreferenceLM on them that record what each step and validation measures."""

import json
from pathlib import Path
from typing import Any

from compared_strategies import Record, fit_in_steps_of_4, sgd
from peft import LoraConfig
from shared_fixtures import make_rows

from lit_ft import DPO, PreferenceLM, TextDataModule

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


def write_judged(folder: Path) -> str:
    """Files of one answer of each of these pairs, of every third row the bad one."""
    path = write_pairs(folder)
    for file in folder.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        judged = [
            {"prompt": row["prompt"], "completion": row["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
            for n, row in enumerate(rows)
        ]
        file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in judged), "utf-8")
    return path


def data_of(path: str, **options: Any) -> TextDataModule:
    beside = str(Path(path).with_name("val.jsonl"))
    given = {"format": "preference", "micro_batch_size": 2, "max_length": 96, "val_path": beside, **options}
    return TextDataModule(path, **given)


def fit(make_trainer: Any, folder: str, path: str, how: dict[str, Any], world: int = 1, strategy: Any = "auto") -> Any:
    """Losses and norms of two epochs in steps of 4 pairs of 13, the last validation's means, and the final weights."""
    kind = how.get("kind", PreferenceLM)
    model = {"peft": LORA, **({"objective": DPO(beta=0.5)} if kind is PreferenceLM else {}), **how.get("model", {})}
    module = kind(folder, optimizer=how.get("optimizer", sgd), **model)
    record = Record(how.get("save_after"), how.get("save"))
    data = data_of(path, **how.get("data", {}))
    return record.steps, *fit_in_steps_of_4(make_trainer, module, data, record, how, world, strategy)

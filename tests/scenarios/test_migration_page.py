"""docs/migration.md: its recipe trains, its Python writes the text of Alpaca, its columns are mapped as it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from command_line import run

from lit_ft import TextDataModule
from lit_ft.model.loading import load_tokenizer

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "migration.md").read_text(encoding="utf-8")


def test_the_recipe_trains(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    (block,) = re.findall(r"```yaml\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "recipe.yaml").write_text(block)
    short = ["--trainer.max_steps", "11", "--trainer.accelerator", "cpu", "--run_dir", str(tmp_path / "run")]
    run(capsys, "fit", "--config", str(tmp_path / "recipe.yaml"), *short)
    assert {file.name for file in (tmp_path / "run" / "checkpoints").iterdir()} == {"epoch=0-step=10.ckpt", "last.ckpt"}


def test_the_text_of_alpaca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [
        {"instruction": "Say it in English.", "input": "红色", "output": "Red."},
        {"instruction": "Say red in English.", "input": "", "output": "Red."},
    ]
    Path("alpaca.json").write_text(json.dumps(rows))
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(block, {})
    data, tokenizer = TextDataModule("prompts.jsonl"), load_tokenizer(str(REPOSITORY / "checkpoints" / "tiny-qwen2"))
    data.load(tokenizer)
    samples = [data.splits["train"][i] for i in range(2)]
    asked = [tokenizer.decode([i for i, label in zip(*sample, strict=True) if label < 0]) for sample in samples]
    learned = [tokenizer.decode([label for label in labels if label >= 0]) for _, labels in samples]
    assert learned == ["Red.<|im_end|>"] * 2
    assert asked[0].endswith("\n\n### Instruction:\nSay it in English.\n\n### Input:\n红色\n\n### Response:\n")
    assert asked[1].endswith(" request.\n\n### Instruction:\nSay red in English.\n\n### Response:\n")


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"q": "a", "c": "b", "a": "c"}, {"instruction": "q", "input": "c", "output": "a"}),
        ({"turns": [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c"}]}, {"conversations": "turns"}),
        (
            {"turns": [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]},
            {"messages": "turns"},
        ),
        ({"query": "a\nb", "response": "c", "history": []}, {"instruction": "query", "output": "response"}),
    ],
)
def test_columns(tmp_path: Path, row: dict[str, Any], columns: dict[str, str]) -> None:
    assert f"{{{', '.join(f'{ours}: {theirs}' for ours, theirs in columns.items())}}}" in TEXT
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    data, tokenizer = (
        TextDataModule(str(tmp_path / "rows.jsonl"), columns=columns),
        load_tokenizer(str(REPOSITORY / "checkpoints" / "tiny-qwen2")),
    )
    data.load(tokenizer)
    ids, _ = data.splits["train"][0]
    assert tokenizer.decode(ids) == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>"

"""The worked examples of docs/data.md are what lit_ft does, and the tables of what works where are its own."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import support_tables
from lit_ft import TextDataModule
from lit_ft.data.inspection import show_example, stretches
from lit_ft.data.text.formats import FORMATS, Pair
from lit_ft.model.loading import load_tokenizer

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n([^`]*?)\n```\n\n```text\n(.*?)\n```", TEXT, re.DOTALL)


def test_each_format_has_an_example() -> None:
    assert len(EXAMPLES) == 7
    assert re.findall(r"^### (\w+)", TEXT, re.MULTILINE)[:8] == [
        "alpaca",
        "sharegpt",
        "messages",
        "prompt_completion",
        "completion",
        "tokenized",
        "indexed",
        "preference",
    ]


@pytest.mark.parametrize(("row", "wanted"), EXAMPLES)
def test_examples(tmp_path: Path, row: str, wanted: str) -> None:
    path = tmp_path / "row.jsonl"
    path.write_text(row, encoding="utf-8")
    data = TextDataModule(str(path), format="preference" if '"chosen"' in row else "auto")
    tokenizer = load_tokenizer(str(REPOSITORY / "checkpoints" / "tiny-qwen2"))
    data.load(tokenizer)
    samples = data.splits["train"]
    (conversations,) = [samples.conversations(i) for i in range(len(samples))]
    shown = [stretches(show_example(*one, tokenizer)["head"]) for one in conversations]
    texts = ["".join(f"»{text}«" if supervised else text for text, supervised in one) for one in shown]
    assert "\n".join(texts) == wanted


@pytest.mark.parametrize("row", re.findall(r"^\| .* \| `(\{.*)` \|$", TEXT, re.MULTILINE))
def test_shapes_of_pairs(row: str) -> None:
    assert isinstance(FORMATS["preference"].read(json.loads(row)), Pair)


@pytest.mark.parametrize("path", support_tables.tables(), ids=lambda path: path.name)
def test_tables_of_what_works_where_are_printed_from_the_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert support_tables.with_table(text, support_tables.tables()[path]) == text, (
        "run python -m benchmarks.support_tables"
    )

"""Examples and tables of the pages of docs/ are what lit_ft does."""

import inspect
import json
import re
from pathlib import Path

import pytest

from benchmarks import support_tables
from lit_ft import DPO, IPO, KTO, ORPO, SimPO, TextDataModule
from lit_ft.cli import main
from lit_ft.data.inspection import show_example, stretches
from lit_ft.data.text.formats import FORMATS, Pair
from lit_ft.model.loading import load_tokenizer

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "docs" / "data.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```json\n([^`]*?)\n```\n\n```text\n(.*?)\n```", TEXT, re.DOTALL)


def test_each_format_has_an_example() -> None:
    assert len(EXAMPLES) == 8
    assert re.findall(r"^### (\w+)", TEXT, re.MULTILINE)[:9] == [
        "alpaca",
        "sharegpt",
        "messages",
        "prompt_completion",
        "completion",
        "tokenized",
        "indexed",
        "preference",
        "unpaired_preference",
    ]


@pytest.mark.parametrize(("row", "wanted"), EXAMPLES)
def test_examples(tmp_path: Path, row: str, wanted: str) -> None:
    path = tmp_path / "row.jsonl"
    path.write_text(row, encoding="utf-8")
    marks = {'"chosen"': "preference", '"label"': "unpaired_preference"}
    data = TextDataModule(str(path), format=next((form for mark, form in marks.items() if mark in row), "auto"))
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


PREFERENCES = {
    name: (REPOSITORY / "docs" / name).read_text("utf-8") for name in ("preferences.md", "preferences.zh-CN.md")
}


def test_both_pages_of_preference_tuning_have_the_same_commands_and_they_parse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    of_page = [re.findall(r"^    python -m lit_ft ((?:[^\n\\]|\\\n)*)$", text, re.M) for text in PREFERENCES.values()]
    assert len(of_page[0]) == 11
    assert of_page[0] == of_page[1]
    for command in of_page[0]:
        with pytest.raises(SystemExit) as stop:
            main([*command.replace("\\\n", " ").replace("check", "fit").split(), "--print_config"])
        assert stop.value.code == 0
        objective = "lit_ft.KTO" if "kto" in command.lower() else "lit_ft.DPO"
        objective = "lit_ft.RewardLM" if "reward" in command else objective
        assert objective in capsys.readouterr().out or "preference" not in command


@pytest.mark.parametrize("objective", [DPO, IPO, SimPO, ORPO, KTO])
@pytest.mark.parametrize("page", PREFERENCES)
def test_defaults_of_objectives_are_those_of_the_page(page: str, objective: type) -> None:
    row = next(line for line in PREFERENCES[page].splitlines() if line.startswith(f"| `lit_ft.{objective.__name__}` |"))
    told = dict(re.findall(r"`(\w+): ([\d.]+)`", row))
    assert {name: float(value) for name, value in told.items()} == {
        name: one.default for name, one in inspect.signature(objective).parameters.items()
    }

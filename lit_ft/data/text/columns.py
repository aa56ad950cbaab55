"""Advice for rows that no format reads: the option that maps their columns, filled in with the row's own."""

import json
from collections.abc import Mapping, Sequence

from lit_ft.data.text.sources import RawRow
from lit_ft.errors import BadRow

PREFERENCE = ("chosen", "rejected")
"""Columns of preference data: the better and the worse answer."""
JUDGMENTS = ("label", "kto_tag")
"""Columns that say of a single answer whether it is a good one (KTO)."""
_ALIKE = {
    "instruction": "question query prompt input user human problem request ask 问题 问 提问 指令 输入",
    "output": "answer response completion reply target solution assistant gpt bot label 回答 答案 答 回复 输出",
    "prompt": "question query instruction input problem request 问题 问 指令 输入",
    "completion": "answer response output reply target solution label 回答 答案 答 回复 输出",
    "text": "content document body article passage raw_content story 文本 内容 正文",
}
"""Usual names, in lower case, of columns that stand for a format's own, the most usual first."""
_BY_PREFERENCE = (("instruction", "output"), ("prompt", "completion"), ("text",))


def suggested_columns(row: RawRow) -> dict[str, str]:
    """Mapping of a format's column names to those of a row, where the row's names or values tell; else empty."""
    for name, value in row.items():
        if (kind := _kind_of_turns(value)) is not None and name not in PREFERENCE:
            return {kind: name}
    texts = {name.strip().lower(): name for name, value in row.items() if isinstance(value, str)}
    for columns_of_format in _BY_PREFERENCE:
        columns: dict[str, str] = {}
        for name in columns_of_format:
            alike = (other for other in (name, *_ALIKE[name].split()) if other in texts)
            if (
                alternative := next((other for other in alike if texts[other] not in columns.values()), None)
            ) is not None:
                columns[name] = texts[alternative]
        if len(columns) == len(columns_of_format) and any(name != column for name, column in columns.items()):
            has_context = "output" in columns and "input" not in texts and "context" in texts
            return {**columns, "input": texts["context"]} if has_context else columns
    return {}


def _kind_of_turns(value: object) -> str | None:
    """Format that a list of turns is in, by the keys of its first; None for another value."""
    first = value[0] if isinstance(value, Sequence) and not isinstance(value, str) and value else None
    if not isinstance(first, Mapping):
        return None
    return "messages" if "role" in first else "conversations" if {"from", "value"} <= first.keys() else None


def as_option(columns: Mapping[str, str]) -> str:
    """Option of the command line and of a recipe that maps columns."""
    mapping = ", ".join(f"{name}: {_in_yaml(column)}" for name, column in columns.items())
    return f"--data.columns '{{{mapping}}}'"


def _in_yaml(name: str) -> str:
    return name if name.isidentifier() else json.dumps(name, ensure_ascii=False)


def refuse_preferences(row: RawRow, complete: str | None) -> None:
    """Refuse a row of preference data, whose better answer can be trained on.

    ``complete`` is the format whose columns are all in the row; None if there is none.

    Raises:
        BadRow: the row has a chosen and a rejected answer, or a mark whether its answer is a good one.
    """
    mark = next((name for name in JUDGMENTS if isinstance(row.get(name), bool)), None)
    if mark is not None and complete not in (None, "completion", "tokenized"):
        raise BadRow(
            f"is preference data ({mark!r} says whether the answer is a good one), and bad answers would be trained on "
            "too; to learn from both, set data.format=unpaired_preference, model.class_path=lit_ft.PreferenceLM and "
            f"model.objective=lit_ft.KTO; or keep the rows whose {mark} is true, without that column"
        )
    if not set(PREFERENCE) <= row.keys():
        return
    chosen, kind = row["chosen"], _kind_of_turns(row["chosen"])
    asked = next((name for name in ("prompt", *_ALIKE["prompt"].split()) if row.get(name)), None)
    if isinstance(chosen, str) and isinstance(row.get(asked or ""), str):
        as_text = as_option({"prompt": str(asked), "completion": "chosen"})
        as_chat = as_option({"instruction": str(asked), "output": "chosen"})
        fix = f"to train on the chosen answers, map them: {as_text} for bare texts, {as_chat} for the chat template"
    elif kind == "messages" and isinstance(row.get("prompt"), list):
        fix = f"to train on the chosen answers, map them: {as_option({'prompt': 'prompt', 'completion': 'chosen'})}"
    elif kind is not None:
        fix = f"to train on the chosen conversations, map them: {as_option({kind: 'chosen'})}"
    else:
        fix = (
            "to train on the chosen answers, write rows of 'prompt' and 'completion' (or 'messages') that end with "
            "the chosen answer"
        )
    if complete is not None:
        fix += f"; or set data.format={complete} to train on its columns alone"
    raise BadRow(
        "is preference data (columns 'chosen' and 'rejected'); to train on both answers, set data.format=preference "
        f"and model.class_path=lit_ft.PreferenceLM; {fix}"
    )

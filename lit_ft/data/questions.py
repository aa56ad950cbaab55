"""Rows as questions for ``predict``: with an answer that is known, or without one."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.output.quantities import as_count

from lit_ft.data.text.columns import PREFERENCE
from lit_ft.data.text.formats import Chat, Text, answers_of, good_answer_of, renamed, without_answer
from lit_ft.data.text.rendering import expected_answer, is_closed, prompt_of
from lit_ft.data.text.sources import RawRow, Source
from lit_ft.data.tokens.preparation import Preparation, describe_bad_rows
from lit_ft.data.tokens.tokenization import Tokenization
from lit_ft.errors import BadRow
from lit_ft.protocols import Question

_ANSWER_COLUMNS = frozenset({"output", "completion", *PREFERENCE})


def questions_of(preparation: Preparation, source: Source, rows: frozenset[int] | None = None) -> list[Question]:
    """Read rows of a source as questions: those of some numbers, or all; a message counts those that ask none.

    Raises:
        RecipeError: a file cannot be read, or a row cannot be used.
    """
    if source.index_prefix is not None:
        rank_zero_info(f"{source.path}: holds tokens and no questions; left out")
        return []
    tokenization = _tokenization(preparation, source)
    questions: list[Question] = []
    left_out, read, bad = Counter[str](), 0, list[str]()
    for number, (location, row) in enumerate(source.rows()):
        if rows is not None and number not in rows:
            continue
        read += 1
        try:
            if isinstance(row, BadRow):
                raise row
            question = _question(row, tokenization, source.columns)
        except BadRow as error:
            preparation.refuse(location, error)
            bad.append(f"{location}: {error}")
            continue
        if question is None:
            left_out["without a question, text or tokens alone"] += 1
            continue
        name = row.get("id")
        prompt, asked, expected = question
        questions.append(
            {
                "row": number,
                "id": name if isinstance(name, str | int) and name != "" else location,
                "question": asked,
                "prompt": prompt,
                "expected": expected,
            }
        )
    if bad:
        rank_zero_info(f"{source.path}: {describe_bad_rows(bad, len(bad), read)}")
    for why, count in left_out.items():
        rank_zero_info(f"{source.path}: {count:,} of {as_count(read, 'row')} {why}; left out")
    return questions


def _tokenization(preparation: Preparation, source: Source) -> Tokenization:
    # The column of the answer may be missing, so the format is found without it.
    columns = {name: column for name, column in (source.columns or {}).items() if name not in _ANSWER_COLUMNS}
    asking = replace(preparation, takes_questions=True)
    return replace(asking.tokenization(replace(source, columns=columns or None)), columns=None)


def _question(
    row: RawRow, tokenization: Tokenization, columns: Mapping[str, str] | None
) -> tuple[str, str, str | None] | None:
    """Prompt, question and known answer (None if there is none) of a row; None for raw text and tokens."""
    given = renamed(row, columns)
    asked = without_answer(given, tokenization.format)
    read = tokenization.example(given if asked is None else asked)
    example, is_known = answers_of(read)[0], asked is None and good_answer_of(read) is not None
    if isinstance(example, Chat):
        template = tokenization.template_of(example)
        prompt, question = prompt_of(example, template)
        return prompt, question["content"], expected_answer(example, template) if is_known else None
    if isinstance(example, Text) and example.prompt:
        prompt, text, expected = asked_by(example, tokenization)
        return prompt, text, expected if is_known else None
    return None


def asked_by(example: Text, tokenization: Tokenization) -> tuple[str, str, str]:
    """Prompt, question and answer of raw text with a prompt."""
    begin = tokenization.tokenizer.bos_token if tokenization.opening is not None else ""
    prompt = example.prompt if example.prompt.startswith(begin) else begin + example.prompt
    return prompt, example.prompt, _without_closing(example.text, tokenization)


def _without_closing(text: str, tokenization: Tokenization) -> str:
    """Raw text without an end-of-sequence token of its own, which answers are compared without."""
    closing = tokenization.tokenizer.eos_token or ""
    return text.rstrip().removesuffix(closing) if closing and is_closed(text, closing) else text

"""Mutated rows: each is refused with its place, or loads with exactly the supervised text that an oracle expects."""

import csv
import gzip
import io
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import datasets
import fuzz_folders
import fuzz_recipes
import numpy as np
import pytest
from fuzz_cases import in_fork, in_turn, judge, run_case
from fuzz_folders import damage_bytes
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.data.tokens.megatron_indexed import IndexedWriter
from lit_ft.packed_batch import IGNORE_INDEX

pytestmark = pytest.mark.slow

END = "<|im_end|>"
DEEP = "@deep@"
"""Stands for a list nested deeper than any parser goes; json.dumps could not write it."""


class Refused(Exception):
    pass


def must(condition: Any) -> None:
    if not condition:
        raise Refused


# --- the oracle: what a row's supervised text must be --------------------------------------------------


def written(*texts: str) -> None:
    must(not re.search("[\ud800-\udfff]", "".join(texts)))


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused from error


def optional_text(row: Any, column: str) -> str:
    text = row.get(column)
    must(text is None or isinstance(text, str))
    return text or ""


def listed(value: Any) -> Any:
    """A list, which may be JSON in a text."""
    return parsed(value) if isinstance(value, str) and value.lstrip().startswith("[") else value


def closed(text: str) -> str:
    """Raw text with the token that ends it, if it has none."""
    return text if text.rstrip().endswith(END) else text + END


def listing_of(tools: Any) -> str:
    if isinstance(tools, str):
        tools = parsed(tools) if tools.strip() else None
    if tools is None or tools == [] or tools == {}:
        return ""
    must(isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    return json.dumps(tools, ensure_ascii=False)


def spelled(call: Any) -> str:
    must(isinstance(call, dict))
    function = call.get("function", call)
    must(isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"])
    arguments = function.get("arguments", {})
    arguments = parsed(arguments) if isinstance(arguments, str) else arguments
    must(isinstance(arguments, dict))
    text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


CALLING = ("function_call", "tool_call")
"""Roles of turns that hold calls; they go on with an answer before them."""


def message(turn: Any) -> tuple[str, str]:
    """A letter for what it is (system, user, answer, call, tool), and its text."""
    must(isinstance(turn, dict))
    letters = {"system": "s", "developer": "s", "user": "u", "assistant": "a", "tool": "t", "function": "t"}
    letters |= {"human": "u", "gpt": "a", "observation": "t", "tool_response": "t", **dict.fromkeys(CALLING, "a")}
    must(isinstance(turn.get("role"), str) and turn["role"] in letters)
    letter, content, calls = letters[turn["role"]], turn.get("content"), turn.get("tool_calls")
    texts = []
    if turn["role"] in CALLING:
        must(isinstance(content, str | list | dict))
        content, calls = "", parsed(content) if isinstance(content, str) else content
        must(isinstance(calls, list | dict) and calls)
    if calls is not None:
        calls = parsed(calls) if isinstance(calls, str) else calls
        must(letter == "a" and calls != [])
        letter, texts = "c", [spelled(call) for call in (calls if isinstance(calls, list) else [calls])]
    content = "" if content is None and letter in "sct" else content
    if letter == "t" and isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False)
    parts = [isinstance(part, dict) and "type" in part for part in content] if isinstance(content, list) else []
    if letter == "t" and parts and not any(parts):
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, list):
        must(all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content))
        content = "".join(part["text"] for part in content)
    must(isinstance(content, str) and (content or letter in "sct"))
    return letter, "\n".join(text for text in [content, *texts] if text)


def mark(turn: Any) -> tuple[str, bool] | None:
    for key in ("train", "weight"):
        if (value := turn.get(key)) is not None:
            must(isinstance(value, int | float) and value in (0, 1))
            return key, value == 1
    return None


def joined(turns: Any, unlearned: int) -> tuple[list[tuple[str, str]], list[tuple[str, bool] | None], int]:
    """Messages and their marks, where turns that hold calls are one with the answer before them."""
    said: list[tuple[str, str]] = []
    marks: list[tuple[str, bool] | None] = []
    first = 0
    for i, turn in enumerate(turns):
        (letter, text), own = message(turn), mark(turn)
        if i == unlearned:
            first = len(said)
        elif turn["role"] in CALLING and said and said[-1][0] in "ac":
            must(i < unlearned or own is None or (marks[-1] is not None and own[1] == marks[-1][1]))
            said[-1] = "c", "\n".join(part for part in (said[-1][1], text) if part)
            continue
        said.append((letter, text))
        marks.append(own)
    return said, marks, first if unlearned < len(turns) else len(said)


def conversation(turns: Any, tools: Any, unlearned: int = 0, system: str = "") -> list[str]:
    """Supervised text of each learned turn; answers among the first ``unlearned`` turns are not."""
    listing = listing_of(tools)
    said, marks, unlearned = joined(turns, unlearned)
    if system:
        must(not said or said[0][0] != "s")
        said, marks, unlearned = [("s", system), *said], [None, *marks], unlearned + 1
    letters = "".join(letter for letter, _ in said)
    must(re.fullmatch("s*(u|(?<!a)a|(?<!a)c(t+|$))*", letters) and re.search("[ac]", letters[unlearned:]))
    runs, through = [], 0
    for i, ((letter, text), own) in enumerate(zip(said, marks, strict=True)):
        if letter in "ac" and i >= unlearned and own not in (("train", False), ("weight", False)):
            runs.append(text + END)
            through = i + 1
        elif letter not in "ac" and own == ("train", True):
            if listing or re.search("[ct]", letters):
                pytest.skip("the place of a learned question among functions is not the oracle's to know")
            runs.append(text + END)
            through = i + 1
    if runs:
        must(all(run != END and run.removesuffix(END).strip() for run in runs))
        written(listing, *(text for _, text in said[:through]))
    return runs


def alpaca(row: Any) -> list[str]:
    must(isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str) and row["output"])
    question = "\n".join(part for part in (row["instruction"], optional_text(row, "input")) if part)
    history = [] if row.get("history") in (None, "") else listed(row["history"])
    must(isinstance(history, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in history))
    texts = [*(text for pair in history for text in pair), question, row["output"]]
    must(all(isinstance(text, str) and text for text in texts))
    written(optional_text(row, "system"), listing_of(row.get("tools")), *texts)
    must(all(answer.strip() for answer in texts[1::2]))
    return [answer + END for answer in texts[1::2]]


def sharegpt(row: Any) -> list[str]:
    names = [*"human user gpt assistant system observation tool tool_response".split(), *CALLING]
    given = listed(row.get("conversations"))
    must(isinstance(given, list) and given)
    turns = []
    for turn in given:
        must(isinstance(turn, dict) and isinstance(turn.get("from"), str) and turn["from"] in names)
        must(isinstance(turn.get("value"), str))
        own = {key: turn.get(key) for key in ("train", "weight")}
        turns.append({"role": turn["from"], "content": turn["value"], **own})
    return conversation(turns, row.get("tools"), system=optional_text(row, "system"))


def messages(row: Any) -> list[str]:
    given = listed(row.get("messages"))
    must(isinstance(given, list) and given)
    return conversation(given, row.get("tools"), system=optional_text(row, "system"))


def completion(row: Any) -> list[str]:
    must(isinstance(row.get("text"), str) and row["text"])
    written(row["text"])
    return [closed(row["text"])] if row["text"] != END else []  # one token predicts nothing


def prompt_completion(row: Any) -> list[str]:
    prompt, answer = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(answer, list):
        system = optional_text(row, "system")
        return conversation(prompt + answer, row.get("tools"), unlearned=len(prompt), system=system)
    must(isinstance(prompt, str) and prompt and isinstance(answer, str) and answer)
    written(prompt, answer)
    return [closed(answer)]


VOCABULARY = len(make_tokenizer())


def tokenized(row: Any) -> list[list[int]]:
    """The labels, if there is one to learn."""

    def numbers(column: str, *types: type) -> list[int]:
        must(isinstance(row.get(column), list) and all(type(item) in types for item in row[column]))
        return row[column]

    ids = labels = numbers("input_ids", int)
    masks = [name for name in ("loss_mask", "completion_mask", "assistant_masks") if row.get(name) is not None]
    if row.get("labels") is not None:
        labels = numbers("labels", int)
    elif masks:
        mask = numbers(masks[0], int, bool)
        must(len(mask) == len(ids) and all(item in (0, 1) for item in mask))
        labels = [i if learned else IGNORE_INDEX for i, learned in zip(ids, mask, strict=True)]
    must(len(ids) == len(labels))
    if row.get("attention_mask") is not None:
        real = numbers("attention_mask", int, bool)
        must(len(real) == len(ids) and all(item in (0, 1) for item in real))
        ids, labels = ([v for v, keep in zip(values, real, strict=True) if keep] for values in (ids, labels))
    must(ids and all(0 <= i < VOCABULARY for i in [*ids, *(i for i in labels if i != IGNORE_INDEX)]))
    return [labels] if any(label != IGNORE_INDEX for label in labels[1:]) else []


# --- rows and what is done to them -------------------------------------------------------------------

ASK, SAY = {"role": "user", "content": "the cup 红?"}, {"role": "assistant", "content": "a red book"}
FUNCTION = {"name": "add", "description": "adds", "parameters": {"type": "object", "properties": {"x": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
CALLS = {"role": "assistant", "content": "wait", "tool_calls": [CALL, {"name": "add", "arguments": {"x": [2]}}]}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "c1"}

SEEDS: dict[str, tuple[Callable[[Any], list[Any]], list[dict[str, Any]]]] = {
    "alpaca": (
        alpaca,
        [
            {"instruction": "a cup", "input": "", "output": "a book"},
            {
                "instruction": "a",
                "input": "绿",
                "output": "b ",
                "system": "s",
                "history": [["q 1", "a 1"], ["q 2", "a 2"]],
            },
        ],
    ),
    "sharegpt": (
        sharegpt,
        [
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}] * 2, "system": "s"},
            {
                "conversations": [
                    {"from": "human", "value": "q"},
                    {"from": "function_call", "value": json.dumps([FUNCTION | {"arguments": {"x": 1}}] * 2)},
                    {"from": "observation", "value": "3"},
                    {"from": "gpt", "value": "it is 3"},
                ],
                "tools": json.dumps([FUNCTION]),
            },
        ],
    ),
    "messages": (
        messages,
        [
            {"messages": [ASK, SAY, {**ASK, "weight": 0}, {**SAY, "train": False}, ASK, {**SAY, "weight": 1}]},
            {"messages": [{"role": "system", "content": "s"}, {**ASK, "train": True}, SAY]},
            {"messages": [ASK, CALLS, RESULT, RESULT, SAY], "tools": [FUNCTION]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}] * 2}, {**SAY, "name": "n"}]},
        ],
    ),
    "completion": (completion, [{"text": "the red\nbook 红"}, {"text": " ", "meta": {"id": [1]}}]),
    "prompt_completion": (
        prompt_completion,
        [
            {"prompt": "the red ", "completion": "book"},
            {"prompt": [ASK, SAY, ASK], "completion": [SAY, ASK, SAY]},
            {"prompt": [ASK], "completion": [CALLS, RESULT, SAY], "tools": [FUNCTION]},
        ],
    ),
    "tokenized": (
        tokenized,
        [
            {"input_ids": [5, 6, 7, 8], "labels": [IGNORE_INDEX, 6, IGNORE_INDEX, 8]},
            {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]},
            {"input_ids": [0, 5, 6], "completion_mask": [False, False, True], "attention_mask": [0, 1, 1]},
            {"input_ids": [5, 6, 7]},
        ],
    ),
}

TEXTS = [
    "",
    " ",
    "\n",
    END,
    f"a{END}\n",
    "<|im_start|>user\n",
    "\x00",
    "\ufeff",
    "e\u0301🙂",
    "\ud83d",
    "null",
    "[]",
    "{",
    "x" * 999,
]
ROLES = ["user", "assistant", "system", "developer", "tool", "function", "human", "gpt", "observation", "function_call"]
NUMBERS = [0, 1, 2, -1, True, False, 0.5, 1.0, IGNORE_INDEX, VOCABULARY, 2**31, 10**30, float("nan"), float("inf")]
OTHERS = [None, [], {}, [[]], [None], {"role": "user", "content": "q"}, [ASK, SAY], {"from": "gpt", "value": "a"}, DEEP]
OTHERS += [json.loads("[" * 50 + "]" * 50)]
KEYS = [
    "train",
    "weight",
    "system",
    "tools",
    "history",
    "tool_calls",
    "content",
    "attention_mask",
    "labels",
    "x",
    "\udc00",
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container below a value, with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def mutate(rng: random.Random, row: Any) -> None:
    found = list(places(row)) or [(row, "text")]
    # All depths alike: most places lie deep.
    value, key = rng.choice(found[:1] if rng.random() < 0.1 else found)
    junk = deepcopy(rng.choice(rng.choice([TEXTS, TEXTS, ROLES, NUMBERS, NUMBERS, OTHERS])))
    deed = rng.randrange(7)
    if deed == 0:
        value[key] = junk
    elif deed == 1 and isinstance(value.get(key) if isinstance(value, dict) else value[key], str):
        text = value[key]
        at = rng.randrange(len(text) + 1)
        value[key] = text[:at] + rng.choice(TEXTS) + text[at:]
    elif deed == 2 and key in (value if isinstance(value, dict) else range(len(value))):
        del value[key]
    elif isinstance(value, list):
        other = rng.randrange(len(value))
        if deed == 3:
            value[key], value[other] = value[other], value[key]
        elif deed == 4:
            value.insert(key, value[other])
        else:
            value.insert(key, junk)
    elif deed == 5:
        value[rng.choice(KEYS)] = junk
    elif deed == 6 and {"role", "from"} & value.keys():
        value["role" if "role" in value else "from"] = rng.choice(ROLES)
    else:
        value[key] = junk


def mutated_line(rng: random.Random, seeds: list[dict[str, Any]]) -> bytes:
    row = deepcopy(rng.choice(seeds))
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        mutate(rng, row)
    text = json.dumps(row, ensure_ascii=rng.random() < 0.5)
    line = text.replace(json.dumps(DEEP), "[" * 100_000 + "]" * 100_000).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(line))
        middle = bytes(byte for byte in rng.randbytes(2) if byte not in b"\r\n")
        line = line[:at] + middle + line[at + rng.choice([0, 1, 1000]) :]
    return line if line.strip() else b"{}"


def test_the_seeds_are_good() -> None:
    for oracle, seeds in SEEDS.values():
        assert all(oracle(json.loads(json.dumps(row))) for row in seeds)


# --- every mutated row ---------------------------------------------------------------------------------


def expected(oracle: Callable[[Any], list[Any]], line: bytes) -> list[Any] | None:
    """Supervised text by run (tokenized: all labels); none where nothing is to learn; None where it is refused."""
    try:
        row = json.loads(line.decode())
        must(isinstance(row, dict))
        return oracle(row)
    except (Refused, ValueError, RecursionError):
        return None


def found(tokenizer: Any, form: str, sample: tuple[np.ndarray, np.ndarray]) -> list[Any]:
    """What a sample supervises, as the oracle has it."""
    ids, labels = (part.tolist() for part in sample)
    if form == "tokenized":
        return [labels]
    assert all(label in (IGNORE_INDEX, i) for i, label in zip(ids, labels, strict=True))
    edges = np.flatnonzero(np.diff([0, *(label != IGNORE_INDEX for label in labels), 0]))
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False) for start, end in spans]


def attempt(load: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[list[Any], str]:
    """What each sample supervises, or the message of the refusal; any other error is a bug."""
    try:
        return load(*arguments, **options), ""
    except RecipeError as error:
        return [], str(error)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", SEEDS)
def test_mutated_rows(tmp_path: Path, form: Any, pytestconfig: pytest.Config) -> None:
    oracle, seeds = SEEDS[form]
    count = pytestconfig.getoption("--rows")
    rng, tokenizer = random.Random(f"{form} 1"), make_tokenizer()
    lines: list[bytes] = []
    wanted: list[list[Any] | None] = []
    while len(lines) < count:
        line = mutated_line(rng, seeds)
        try:
            wanted.append(expected(oracle, line))
        except pytest.skip.Exception:
            continue
        lines.append(line)

    def read(path: Path, content: list[bytes], **options: Any) -> TextDataModule:
        path.write_bytes(b"\n".join(content))
        data = TextDataModule(str(path), **{"format": form, "max_length": None, "cache_dir": str(tmp_path), **options})
        data.load(tokenizer)
        return data

    def load(path: Path, content: list[bytes], **options: Any) -> list[Any]:
        samples = read(path, content, **options).splits["train"]
        return [found(tokenizer, form, samples[i]) for i in range(len(samples))]

    # Alone: what is learned is exactly what the oracle says, what is refused is named.
    for number, (line, want) in enumerate(zip(lines, wanted, strict=True)):
        path = tmp_path / f"{number}.jsonl"
        got, error = attempt(load, path, [line])
        if want:
            assert (got, error) == ([want], ""), line[:2000]
        else:
            where = r": not one of 1 row has a supervised token" if want == [] else r"(:1|, row 1): |: is not JSON"
            assert re.match(re.escape(str(path)) + where, error), (line[:2000], got, error)
        if number % 10 == 0:
            got, error = attempt(load, path, [line], format="auto", on_bad_row="skip")
            assert bool(got) != (str(path) in error), (line[:2000], got, error)

    # Among others: the same rows are left out and counted, and the others are the same.
    lines, wanted = [json.dumps(seeds[0]).encode(), *lines], [oracle(seeds[0]), *wanted]
    path = tmp_path / "all.jsonl"
    data = read(path, lines, on_bad_row="skip")
    (prepared,), samples = data.splits.prepared["train"], data.splits["train"]
    bad = [number for number, want in enumerate(wanted, 1) if want is None]
    assert count / 7 < len(bad) < count * 6 / 7
    assert (prepared.rows, prepared.bad_rows) == (len(lines), len(bad))
    assert [re.match(r".*\.jsonl:\d+: ", text).group() for text in prepared.bad] == [f"{path}:{n}: " for n in bad[:5]]  # type: ignore[union-attr]
    assert samples.rows.tolist() == [row for row, want in enumerate(wanted) if want]
    assert [found(tokenizer, form, samples[i]) for i in range(len(samples))] == [want for want in wanted if want]
    with pytest.raises(RecipeError, match=re.escape(f"{path}:{bad[0]}: ")):
        read(path, lines, on_bad_row="error")


# --- damaged files -------------------------------------------------------------------------------------


TEXT_ROWS = [{"prompt": f'the red {i}, "cup"\n红', "completion": f"book\t{i}"} for i in range(30)]


def write_file(path: Path) -> None:
    """Rows that every kind of file can hold."""
    table = [["prompt", "completion"], *([row["prompt"], row["completion"]] for row in TEXT_ROWS)]
    kind = path.name.removesuffix(".gz").rpartition(".")[2]
    if kind in ("csv", "tsv"):
        file = io.StringIO()
        csv.writer(file, delimiter="\t" if kind == "tsv" else ",").writerows(table)
        text = file.getvalue()
    elif kind == "txt":
        text = "\n".join(row["prompt"] for row in TEXT_ROWS)
    elif kind in ("json", "jsonl"):
        lines = [json.dumps(row, ensure_ascii=False) for row in TEXT_ROWS]
        text = "\n".join(lines) if kind == "jsonl" else f"[{','.join(lines)}]"
    if kind == "parquet":
        datasets.Dataset.from_list(TEXT_ROWS).to_parquet(str(path))
    elif kind == "saved":
        datasets.Dataset.from_list(TEXT_ROWS).save_to_disk(str(path))
    elif kind == "idx":
        writer = IndexedWriter(path.with_suffix(""), VOCABULARY)
        for i in range(30):
            writer.add(range(5, 9 + i))
        writer.close()
    else:
        raw = text.encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


FILES = ["a.json", "a.jsonl", "a.csv", "a.tsv", "a.txt", "a.parquet", "a.json.gz", "a.csv.gz", "a.idx", "a.saved"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(tmp_path: Path, name: str, pytestconfig: pytest.Config) -> None:
    """Refused with the file's name, or read: in a process of its own, as C++ readers may end it."""
    rng, tokenizer, whole = random.Random(name), make_tokenizer(), tmp_path / "whole"
    whole.mkdir()
    write_file(whole / name)
    cases = []
    for number in range(pytestconfig.getoption("--rows") // 10):
        folder = tmp_path / str(number)
        shutil.copytree(whole, folder)
        members = [p for p in sorted(folder.rglob("*")) if p.is_file()]
        cases.append((folder / name, damage_bytes(rng, rng.choice(members))))
    verdicts = in_fork(read_damaged(path, tokenizer) for path, _ in cases)
    for (path, damage), verdict in zip(cases, verdicts, strict=False):  # a process that dies reaches fewer
        assert verdict in ("reads", "refused"), f"{path.parent.name}: {damage}: {verdict}"
    assert len(verdicts) == len(cases)
    assert "refused" in verdicts


def read_damaged(path: Path, tokenizer: Any) -> str:
    data = TextDataModule(str(path), cache_dir=str(path.parent), num_workers=0, tokenize_workers=0)
    try:
        data.load(tokenizer)
        samples = data.splits["train"]
        assert all(len(samples[i][0]) for i in range(len(samples)))
    except RecipeError as error:
        return "refused" if path.stem in str(error) and "\n" not in str(error) else f"refused badly: {error}"
    return "reads"


# --- recipes and folders -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    fuzz_recipes.preload()
    return folder, *fuzz_recipes.make_inputs(folder)


@pytest.mark.timeout(600)
def test_mutated_recipes(tmp_path: Path, inputs: tuple[Path, str, str]) -> None:
    """``python tests/fuzz_recipes.py`` runs 2,000."""
    _, model, rows = inputs
    verdicts = dict(in_turn(fuzz_recipes.cases(30, 0, model, rows), tmp_path))
    assert not {title: outcome for title, outcome in verdicts.items() if not outcome.is_good}
    assert {outcome.verdict for outcome in verdicts.values()} == {"runs", "refused"}


@pytest.mark.timeout(600)
def test_damaged_folders(tmp_path: Path, inputs: tuple[Path, str, str]) -> None:
    """``python tests/fuzz_folders.py`` runs 300."""
    folder, model, rows = inputs
    run = fuzz_folders.make_run(folder, model, rows)
    verdicts = dict(in_turn(fuzz_folders.cases(20, 0, Path(model), run, rows), tmp_path))
    assert not {title: outcome for title, outcome in verdicts.items() if not outcome.is_good}
    assert {outcome.verdict for outcome in verdicts.values()} == {"runs", "refused"}


@pytest.mark.parametrize(
    ("code", "stderr", "verdict"),
    [
        (0, "done\n", "runs"),
        (2, "Seed set to 42\nlit_ft: error: data.path is not set; name it\n", "refused"),
        (1, "lit_ft: failed: TypeError: a\n", "exit 1"),
        (1, "lit_ft: failed: NotFinite: the loss of step 3 is nan: lower it\n", "runs"),
        (0, "Traceback (most recent call last):\n  a\n", "traceback"),
        (2, "lit_ft: error: one line is said\nand another\n", "not one line"),
        (2, "lit_ft: error: \x1b[31mred, and long enough\n", "not a clean line"),
        (2, f"lit_ft: error: {'x' * 2000}\n", "not a clean line"),
        (-11, "", "died of SIGSEGV"),
    ],
)
def test_the_judge(code: int, stderr: str, verdict: str) -> None:
    assert judge(code, ["fit"], stderr)[0] == verdict


def test_a_case_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_ft.cli.main", lambda _: time.sleep(60))
    assert run_case(["fit"], tmp_path, seconds=1).verdict == "hang"

"""Turns of a conversation: added, taken back, saved as training data."""

import json
from pathlib import Path

import pytest

from lit_ft.data.text.formats import messages
from lit_ft.errors import RecipeError
from lit_ft.inference.conversation import Conversation


def test_turns_are_added_and_taken_back() -> None:
    chat = Conversation("be kind")
    chat.add("a", "b")
    assert [one["role"] for one in chat.asked("c")] == ["system", "user", "assistant", "user"]
    assert chat.undo()
    assert not chat.undo()
    assert chat.messages == [{"role": "system", "content": "be kind"}]


def test_a_file_grows_by_one_conversation_at_each_save(tmp_path: Path) -> None:
    chat = Conversation()
    with pytest.raises(RecipeError, match="no turn to save"):
        chat.save(tmp_path / "chats.jsonl")
    chat.add("问\n题", "答")
    with pytest.raises(RecipeError, match="must end in .jsonl"):
        chat.save(tmp_path / "chats.txt")
    assert [chat.save(tmp_path / "to" / "chats.jsonl") for _ in range(2)] == [1, 2]


def test_a_file_whose_last_line_has_no_end_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text('{"messages": []}')
    chat = Conversation()
    chat.add("one\u2028line", "yes")
    assert [chat.save(file) for _ in range(2)] == [2, 3]
    assert [len(json.loads(line)["messages"]) for line in file.read_bytes().splitlines()] == [0, 2, 2]


def test_an_answer_that_is_not_complete_is_saved_as_one_not_to_train_on(tmp_path: Path) -> None:
    chat = Conversation("be kind")
    chat.add("a", "b")
    chat.add("c", "d and", is_complete=False)
    assert chat.incomplete == 1
    assert all(set(one) == {"role", "content"} for one in chat.asked("e"))
    chat.save(tmp_path / "chats.jsonl")
    row = json.loads((tmp_path / "chats.jsonl").read_text())
    assert [one.get("train") for one in row["messages"]] == [None, None, None, None, False]
    read = messages(row)
    assert read.messages[-1] == {"role": "assistant", "content": "d and"}
    assert read.marks == {4: False}  # its turns are not supervised, the others as the recipe says
    assert chat.undo()
    assert chat.incomplete == 0

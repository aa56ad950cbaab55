"""Messages to token ids and labels, through the tokenizer's own chat template.

A conversation is rendered prefix by prefix, so that no template needs generation marks: what a prefix
that ends before an assistant turn renders to (with the generation prompt) is not supervised, the
turn's text and its end-of-turn token are. Each piece is tokenised on its own, exactly as at inference,
where the prompt's tokens are given and the answer's are produced.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from lit_ft.data.formats import Conversation, Message
from lit_ft.errors import RecipeError
from lit_ft.rows import IGNORE_INDEX

Piece = tuple[str, bool]
"""Text, and whether it is supervised."""


def set_chat_template(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    """Give the tokenizer a chat template: Jinja text or the path of a file that holds it."""
    if template is None:
        return
    is_text = "{" in template
    if not is_text and not Path(template).is_file():
        raise RecipeError(f"data.chat_template={template!r} is neither a file nor Jinja text; give one of them")
    tokenizer.chat_template = template if is_text else Path(template).read_text(encoding="utf-8")


def check_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer that cannot render a conversation.

    Raises:
        RecipeError: there is no chat template.
    """
    if not tokenizer.chat_template:
        raise RecipeError(
            f"the tokenizer of {tokenizer.name_or_path!r} has no chat template, which conversations need; "
            "give one with --data.chat_template FILE.jinja, or train on raw text (rows with a 'text' column)"
        )


def prompt_text(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> str:
    """What the model sees before it answers: the messages and the opening of the assistant turn."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)


def pieces_of(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """Cut a rendered conversation into unsupervised and supervised text, in order.

    The last piece ends with the last end-of-turn token: what the template writes after it teaches
    nothing and is left out.

    Raises:
        RecipeError: the template renders a conversation's beginning in another way once more follows.
    """
    pieces: list[Piece] = []
    done = ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = prompt_text(messages[:i], tokenizer)
        through = tokenizer.apply_chat_template(list(messages[: i + 1]), tokenize=False)
        if not before.startswith(done) or not through.startswith(before):
            raise RecipeError(
                f"the chat template of {tokenizer.name_or_path!r} rewrites earlier turns, so that the answer's "
                "place cannot be told; give another one with --data.chat_template FILE.jinja"
            )
        answer, after = _split_at_end_of_turn(through[len(before) :], message["content"], tokenizer)
        pieces += [(before[len(done) :], False), (answer, True)]
        done = through[: len(through) - len(after)]
    return pieces


def _split_at_end_of_turn(text: str, content: str, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    # Searched for behind the content, which may itself hold the token's text.
    start = text.find(content.strip()) + len(content.strip())
    ends = [text.find(token, start) + len(token) for token in tokenizer.all_special_tokens if token in text[start:]]
    cut = min(ends, default=len(text))
    return text[:cut], text[cut:]


def ends_turn(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the last supervised piece ends in a special token, without which a model never learns to stop."""
    return pieces_of(messages, tokenizer)[-1][0].endswith(tuple(tokenizer.all_special_tokens))


def tokenize(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and unshifted labels of one conversation, two int32 arrays of equal length."""
    if isinstance(conversation, str):
        text = [*tokenizer(conversation, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return np.array(text, dtype=np.int32), np.array(text, dtype=np.int32)
    pieces = pieces_of(conversation, tokenizer)
    encoded = tokenizer([text for text, _ in pieces], add_special_tokens=False)["input_ids"]
    ids = np.array([token for piece in encoded for token in piece], dtype=np.int32)
    supervised = np.repeat([flag for _, flag in pieces], [len(piece) for piece in encoded])
    return ids, np.where(supervised, ids, IGNORE_INDEX).astype(np.int32)

"""Comparison of the tokens that training sees with those of ``apply_chat_template``, conversation by conversation.

Training renders a conversation prefix by prefix, and tokenizes prompt and answer separately, as they come at inference.
The conversation at once may have other tokens: a template may write earlier turns otherwise, and a tokenizer may merge
characters across the border of prompt and answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from lit_callbacks.output.quantities import as_count

from lit_ft.data.text.formats import Chat, answers_of
from lit_ft.data.text.rendering import chat_samples, supervised_turns, with_tools
from lit_ft.data.text.sources import RawRow
from lit_ft.data.token_difference import decoded_from, first_difference
from lit_ft.data.tokens.tokenization import Tokenization, check_encodable
from lit_ft.errors import BadRow, RecipeError

ROWS, TOKENS = 1000, 500_000
"""Conversations and tokens per source after which the comparison ends: a few seconds."""


@dataclass
class TemplateComparison:
    """Number of conversations that were compared; where they differ, one text for each, with the place."""

    count: int = 0
    other_text: list[str] = field(default_factory=list)
    """Conversations whose tokens do not decode to the text that the template wrote."""
    other_tokens: list[str] = field(default_factory=list)
    """Conversations with other tokens than ``apply_chat_template`` gives for all turns through an answer."""
    other_prompt: list[str] = field(default_factory=list)
    """Conversations in which an answer does not follow the prompt of ``predict``."""

    def facts(self, name: str) -> dict[str, str]:
        """Counts as text, by name; empty where the source named so has no conversations."""
        if not self.count:
            return {}
        right = [f"{self.count - len(one):,} of {self.count:,}" for one in (self.other_text, self.other_tokens)]
        prompts = f"{self.count - len(self.other_prompt):,} follow the prompt of predict"
        return {
            f"template round trip, {name}": f"{right[0]} conversations",
            f"tokens of apply_chat_template, {name}": f"{right[1]} conversations; {prompts}",
        }

    def warnings(self, name: str) -> list[str]:
        """Messages about what differs in the source named so."""
        differences = (
            (self.other_text, "decoded to another text than the template wrote"),
            (
                self.other_tokens,
                "other tokens than apply_chat_template gives for all turns through an answer (training has those "
                "of inference: the prompt, then the answer)",
            ),
            (self.other_prompt, "an answer that does not follow the prompt of predict"),
        )
        return [
            f"{name}: {len(texts):,} of {as_count(self.count, 'conversation')}: {what}, e.g. {texts[0]}"
            for texts, what in differences
            if texts
        ]


def compare_with_template(
    tokenization: Tokenization, rows: Iterable[tuple[str, RawRow | BadRow]]
) -> TemplateComparison:
    """Compare the first conversations of a source; other rows have no template."""
    comparison, tokens = TemplateComparison(), 0
    for location, row in rows:
        try:
            example = tokenization.example(row)
            for one in answers_of(example):
                if not isinstance(one, Chat):
                    return comparison
                tokens += _compare(one, location, tokenization, comparison)
        except BadRow:
            continue  # counted where the rows were read
        if comparison.count >= ROWS or tokens >= TOKENS:
            break
    return comparison


def _compare(chat: Chat, location: str, tokenization: Tokenization, comparison: TemplateComparison) -> int:
    """Compare a conversation, and return the number of tokens of its samples."""
    template, closing = tokenization.template_of(chat), tokenization.tokenizer.eos_token or ""
    chat = with_tools(chat, template, [])
    samples = chat_samples(chat, template, tokenization.supervise, closing, [])
    check_encodable(samples)
    if not samples:
        return 0
    turns = iter(supervised_turns(chat, tokenization.supervise))
    texts, tokens, prompts, count = [], [], [], 0
    for sample in samples:
        *_, last = islice(turns, len(sample) // 2)  # a sample is, turn by turn, the text before it and its own
        ids = tokenization.encoder.encode([sample])[0].tolist()
        count += len(ids)
        text = "".join(part for part, _ in sample)
        decoded = tokenization.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if decoded.split() != text.split():  # some tokenizers add a space after a special token
            texts.append(f"{location}: {text[:200]!r}")
        through = template.ids(chat.messages[: last + 1], chat.tools)
        if at := first_difference(ids, through[: len(ids)]):  # the template may go on
            tokens.append(_describe(at, ids, through, chat, location, tokenization))
        if last > 0 and chat.messages[last]["role"] == "assistant":
            before = template.ids(chat.messages[:last], chat.tools, generation=True)
            if at := first_difference(ids[: len(before)], before):
                prompts.append(_describe(at, ids, before, chat, location, tokenization))
    comparison.count += 1
    comparison.other_text += texts[:1]
    comparison.other_tokens += tokens[:1]
    comparison.other_prompt += prompts[:1]
    return count


def _describe(
    at: int, ids: Sequence[int], reference: Sequence[int], chat: Chat, location: str, tokenization: Tokenization
) -> str:
    """Place of a difference, and both sides from there on."""
    turns = range(1, len(chat.messages))
    turn = next((n for n in turns if _tokens_through(n, chat, tokenization) >= at), len(chat.messages))
    sides = [decoded_from(at, part, tokenization.tokenizer) for part in (ids, reference)]
    return f"{location}, turn {turn}, token {at:,}: trained are {sides[0]}, the template has {sides[1]}"


def _tokens_through(turns: int, chat: Chat, tokenization: Tokenization) -> int:
    try:
        return len(tokenization.template_of(chat).ids(chat.messages[:turns], chat.tools))
    except RecipeError:
        raise
    except Exception:  # a template may refuse, with any exception, a conversation that ends here
        return 0

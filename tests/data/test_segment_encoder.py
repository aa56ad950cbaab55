import random
import re
import time

import pytest
from shared_fixtures import make_tokenizer

from lit_ft.data.tokens.segment_encoder import TextEncoder, _any_of


def test_the_longest_of_some_texts_is_found_whatever_they_share() -> None:
    draw = random.Random(0)
    for _ in range(300):
        texts = ["".join(draw.choices("ab|.<", k=draw.randint(1, 4))) for _ in range(draw.randint(1, 8))]
        plain = re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")
        text = "".join(draw.choices("ab|.<", k=60))
        assert _any_of(texts).split(text) == plain.split(text)


@pytest.mark.parametrize("texts", [[], [""]])
def test_nothing_is_found_of_no_texts(texts: list[str]) -> None:
    assert _any_of(texts).split("a b") == ["a b"]


def test_thousands_of_special_tokens_cost_little_in_text_that_begins_like_them() -> None:
    def seconds(tokens: int) -> float:
        tokenizer = make_tokenizer()
        tokenizer.add_tokens([f"<new{number}>" for number in range(tokens)], special_tokens=True)
        encoder = TextEncoder(tokenizer)
        began = time.process_time()
        assert not encoder.has_special("<ne" * 30_000)
        return time.process_time() - began

    assert seconds(5000) < 0.1 + 20 * seconds(5)

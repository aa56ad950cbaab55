"""Bodies of requests: how they are read."""

import asyncio

import pytest
from transformers import AutoTokenizer

from lit_ft.inference.openai.requests import Fields, RequestError, text_prompts


def test_other_answers_go_on_while_a_long_prompt_is_encoded(model_folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)

    async def others_while_encoding(text: str) -> int:
        encoding, turns = asyncio.create_task(text_prompts(text, tokenizer)), 0
        while not encoding.done():
            await asyncio.sleep(0.001)
            turns += 1
        assert encoding.result() == [tokenizer(text)["input_ids"]]
        return turns

    assert asyncio.run(others_while_encoding("the green lamp " * 10_000)) > 1


@pytest.mark.parametrize(("name", "taken", "refused"), [("min_tokens", 0.0, False), ("ignore_eos", False, 0)])
def test_false_is_not_zero(name: str, taken: object, refused: object) -> None:
    Fields({name: taken}).end()
    with pytest.raises(RequestError, match=f"{name}={refused} is not supported"):
        Fields({name: refused}).end()

"""Bodies of requests: how they are read."""

import asyncio

from transformers import AutoTokenizer

from lit_ft.inference.openai.requests import text_prompts


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

"""Streamed answers beside each other."""

import asyncio

import pytest

from lit_ft.board.chat_client import all_ended
from lit_ft.errors import RecipeError


def test_an_answer_that_fails_ends_with_the_others() -> None:
    ended: list[str] = []

    async def answer() -> None:
        await asyncio.sleep(0.01)
        ended.append("base")

    async def refused() -> None:
        raise RecipeError("too long")

    with pytest.raises(RecipeError, match="too long"):
        asyncio.run(all_ended(refused(), answer()))
    assert ended == ["base"]


def test_answers_are_stopped_together() -> None:
    stopped: list[str] = []

    async def answer(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(name)

    async def stop() -> None:
        both = asyncio.create_task(all_ended(answer("base"), answer("run")))
        await asyncio.sleep(0.01)
        both.cancel()
        with pytest.raises(asyncio.CancelledError):
            await both

    asyncio.run(stop())
    assert sorted(stopped) == ["base", "run"]

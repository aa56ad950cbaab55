"""Answers as they come: text without stop strings, tokens, log-probabilities; and OpenAI's JSON of them."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lit_ft.inference.continuous_batching import Engine, Generation
from lit_ft.inference.openai.requests import Ask, Json
from lit_ft.inference.openai.tool_calls import ToolCalls
from lit_ft.inference.stop_strings import StopStrings
from lit_ft.inference.text_stream import AnswerText, TextPieces
from lit_ft.inference.token_choice import TokenLogprob

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass
class Delta:
    """Next part of an answer, or a whole one."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    """Tool calls."""

    def add(self, other: "Delta") -> None:
        """Append a part."""
        self.text += other.text
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.thinking += other.thinking
        self.calls += other.calls
        self.finish_reason = other.finish_reason or self.finish_reason


async def deltas(engine: Engine, generation: Generation, stops: Sequence[str]) -> AsyncIterator[Delta]:
    """Generate one answer, part by part; it is cancelled where the caller stops listening.

    Raises:
        RuntimeError: generation failed.
    """
    pieces: list[str] = []
    text, filtered = AnswerText(engine.opened, set(generation.stops), pieces.append), StopStrings(stops)
    part, count = Delta(), 0

    def add_pieces() -> None:
        while pieces and not filtered.found:
            part.text += filtered.add(pieces.pop(0))

    try:
        engine.submit(generation)
        async for tokens in generation.tokens():
            for token in tokens:
                text.add([token])
                part.ids.append(token)
                part.logprobs += generation.choice.logprobs[count : count + 1]
                count += 1
                add_pieces()
                if filtered.found:
                    part.finish_reason = "stop"
                    yield part
                    return
            if part.text:
                yield part
                part = Delta()
        text.end()
        add_pieces()
        part.text += filtered.end()
        ended = text.ids and text.ids[-1] in generation.stops
        part.finish_reason = "stop" if ended or filtered.found else "length"
        yield part
    finally:
        engine.cancel(generation)


async def with_calls(parts: AsyncIterator[Delta], reader: ToolCalls) -> AsyncIterator[Delta]:
    """Parts of an answer with the tool calls in their text taken out of it."""
    async for part in parts:
        read = [reader.add(part.text)]
        if part.finish_reason is not None:
            read.append(reader.end())
        part.text = "".join(one.text for one in read)
        part.thinking = "".join(one.thinking for one in read)
        part.calls = [call for one in read for call in one.calls]
        if part.finish_reason == "stop" and reader.count:
            part.finish_reason = "tool_calls"
        yield part


async def merged(streams: Sequence[AsyncIterator[Delta]]) -> AsyncIterator[tuple[int, Delta]]:
    """Parts of several answers with the number of their answer, as they come.

    Raises:
        RuntimeError: generation failed.
    """
    parts: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for part in stream:
                parts.put_nowait((index, part))
            parts.put_nowait(None)
        except Exception as error:  # handed to the caller, who waits at the other end
            parts.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    open_streams = len(tasks)
    try:
        while open_streams:
            part = await parts.get()
            if isinstance(part, Exception):
                raise part
            if part is None:
                open_streams -= 1
            else:
                yield part
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _message(answer: Delta) -> Json:
    if not answer.calls:
        return {"role": "assistant", "content": answer.text, **_thinking(answer)}
    calls = [{name: value for name, value in call.items() if name != "index"} for call in answer.calls]
    return {"role": "assistant", "content": answer.text or None, **_thinking(answer), "tool_calls": calls}


def _thinking(part: Delta) -> Json:
    return {"reasoning_content": part.thinking} if part.thinking else {}


def token_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> list[int] | None:
    """UTF-8 bytes of a token, which may be a part of a character; None if they are not known."""
    text = tokenizer.decode([token])
    if "\ufffd" not in text:
        return list(text.encode())
    # The decoder replaces a part of a character; the token's name in the vocabulary has its bytes.
    name = str(tokenizer.convert_ids_to_tokens(token))
    if one := re.fullmatch("<0x([0-9A-F]{2})>", name):  # SentencePiece's
        return [int(one[1], 16)]
    bytes_of = {character: byte for byte, character in bytes_to_unicode().items()}  # of GPT-2, and most since
    return [bytes_of[character] for character in name] if bytes_of.keys() >= set(name) else None


class Format:
    """OpenAI's JSON of the answers to one request."""

    def __init__(self, ask: Ask, id: str, tokenizer: PreTrainedTokenizerBase, is_chat: bool) -> None:
        self._ask, self._tokenizer, self._is_chat = ask, tokenizer, is_chat
        self._head: Json = {"id": id, "created": int(time.time()), "model": ask.model}
        self._texts: dict[int, _TextBefore] = {}

    def prompt_of(self, index: int) -> list[int]:
        """Prompt of an answer."""
        return self._ask.prompts[index // self._ask.n]

    def whole(self, answers: Sequence[Delta]) -> Json:
        """Body of a whole answer."""
        choices = []
        for index, answer in enumerate(answers):
            choice: Json = {"index": index, "finish_reason": answer.finish_reason}
            choice["logprobs"] = self._logprobs(index, answer)
            if self._is_chat:
                choice["message"] = _message(answer)
            else:
                choice["text"] = answer.text
            choices.append(choice | self._token_ids(index, answer, is_first=True))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._with_prompt({**self._head, "object": kind, "choices": choices, "usage": self._usage(answers)})

    def opening(self, count: int) -> list[Json]:
        """First chunks of a chat's stream, which name the role; none for completions."""
        if not self._is_chat:
            return []
        return [
            self._with_prompt(self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}}))
            for index in range(count)
        ]

    def chunk(self, index: int, part: Delta, is_first: bool) -> Json:
        """Chunk of a stream."""
        # Clients read the first token's of any that are there.
        logprobs = self._logprobs(index, part) if part.ids else None
        choice: Json = {"index": index, "finish_reason": part.finish_reason, "logprobs": logprobs}
        if self._is_chat:
            calls = {"tool_calls": part.calls} if part.calls else {}
            choice["delta"] = {"content": part.text, **_thinking(part), **calls}
        else:
            choice["text"] = part.text
        return self._chunk(choice | self._token_ids(index, part, is_first))

    def usage_chunk(self, answers: Sequence[Delta]) -> Json:
        """Last chunk of a stream that was asked for the usage."""
        return {**self._chunk({}), "choices": [], "usage": self._usage(answers)}

    def _chunk(self, choice: Json) -> Json:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        if self._is_chat:
            choice = {"finish_reason": None, **choice}
        usage = {"usage": None} if self._ask.include_usage else {}  # the last chunk has it
        return {**self._head, "object": kind, "choices": [choice], **usage}

    def _with_prompt(self, body: Json) -> Json:
        asked = self._is_chat and self._ask.return_token_ids
        return {**body, "prompt_token_ids": self._ask.prompts[0]} if asked else body

    def _token_ids(self, index: int, part: Delta, is_first: bool) -> Json:
        if not self._ask.return_token_ids:
            return {}
        prompt = {} if self._is_chat or not is_first else {"prompt_token_ids": self.prompt_of(index)}
        return {"token_ids": part.ids, **prompt}

    def _usage(self, answers: Sequence[Delta]) -> Json:
        asked = sum(map(len, self._ask.prompts))
        echoed = asked * self._ask.n if self._ask.echo else 0
        answered = sum(len(answer.ids) for answer in answers) - echoed
        return {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered}

    def _logprobs(self, index: int, part: Delta) -> Json | None:
        if self._ask.top_logprobs is None:
            return None
        return self._chat_logprobs(part) if self._is_chat else self._completion_logprobs(index, part)

    def _chat_logprobs(self, part: Delta) -> Json:
        def entry(token: int, logprob: float) -> Json:
            return {
                "token": self._tokenizer.decode([token]),
                "logprob": max(logprob, LOWEST_LOGPROB),
                "bytes": token_bytes(self._tokenizer, token),
            }

        return {
            "content": [
                {**entry(one.id, one.logprob), "top_logprobs": [entry(*near) for near in one.top]}
                for one in part.logprobs
            ]
        }

    def _completion_logprobs(self, index: int, part: Delta) -> Json:
        before = self._texts.setdefault(index, _TextBefore(self._tokenizer))
        unpredicted = len(part.ids) - len(part.logprobs)  # the first token of an echoed prompt
        return {
            "tokens": [self._tokenizer.decode([token]) for token in part.ids],
            "token_logprobs": [None] * unpredicted + [max(one.logprob, LOWEST_LOGPROB) for one in part.logprobs],
            "top_logprobs": [None] * unpredicted + [self._alternatives(one) for one in part.logprobs],
            "text_offset": [before.add(token) for token in part.ids],
        }

    def _alternatives(self, one: TokenLogprob) -> Json:
        """Most probable tokens, and the chosen one where it is none of them; of equal texts the more probable one."""
        logprobs: Json = {}
        for token, logprob in (*one.top, (one.id, one.logprob)):
            logprobs.setdefault(self._tokenizer.decode([token]), max(logprob, LOWEST_LOGPROB))
        return logprobs


class _TextBefore:
    """Length of an answer's text before each of its tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._pieces, self._length = TextPieces(tokenizer), 0

    def add(self, token: int) -> int:
        before = self._length
        self._length += len(self._pieces.add(token))
        return before

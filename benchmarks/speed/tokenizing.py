"""Rows per second from file to labeled tokens, compared with the bare tokenizer on the same text.

    python -m benchmarks.speed.tokenizing --data huanhuan.json --repeat 20 --workers 2

Both start from the same rows in the same number of processes. The bare contestant is given the
conversations as finished text and only calls ``tokenizers``' ``encode_batch`` on them; lit_ft reads
the rows' format, renders the template prefix by prefix, tokenizes, and builds masks. Rounds alternate.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as many cores for both as there are workers

from benchmarks.workload import train_tokenizer
from lit_ft.data.text.formats import Chat, find_format
from lit_ft.data.text.rendering import chat_samples
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import ROWS_PER_BATCH
from lit_ft.data.tokens.tokenization import Tokenization, encode_batches

_backend: Any = None


def _start(tokenizer: Any) -> None:
    global _backend
    _backend = tokenizer.backend_tokenizer


def _encode(texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in _backend.encode_batch(texts, add_special_tokens=False)]


def bare(tokenizer: Any, texts: list[str], workers: int) -> int:
    """Number of tokens of the texts from the bare tokenizer."""
    batches = [texts[i : i + ROWS_PER_BATCH] for i in range(0, len(texts), ROWS_PER_BATCH)]
    if workers < 1:
        _start(tokenizer)
        return sum(len(ids) for batch in batches for ids in _encode(batch))
    with ProcessPoolExecutor(workers, initializer=_start, initargs=(tokenizer,)) as pool:
        return sum(len(ids) for made in pool.map(_encode, batches) for ids in made)


def lit_ft(tokenization: Tokenization, rows: list[Any], workers: int) -> int:
    """Number of tokens of the rows from lit_ft, which makes their labels too."""
    placed = [(0, place, row) for place, row in rows]
    batches = ((None, placed[i : i + ROWS_PER_BATCH]) for i in range(0, len(placed), ROWS_PER_BATCH))
    return sum(
        len(encoded.ids) for _, _, parts in encode_batches(batches, [tokenization], workers) for _, _, encoded in parts
    )


def main() -> None:
    """Measure both and print the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="file of conversations, in any format that lit_ft reads")
    parser.add_argument("--tokenizer", help="folder with a tokenizer; by default one of 32,000 tokens is trained")
    parser.add_argument("--repeat", type=int, default=20, help="the rows are taken so many times")
    parser.add_argument("--workers", type=int, default=2, help="processes; 0 is this one")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows: list[Any] = list(Source(options.data).rows())
    if options.tokenizer:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    else:
        tokenizer = train_tokenizer([json.dumps(row, ensure_ascii=False) for _, row in rows], vocab_size=32_000)
    tokenization = Tokenization(tokenizer, find_format(rows[0][1]))
    texts = []
    for _, row in rows:
        example = tokenization.example(row)
        assert isinstance(example, Chat)
        (pieces,) = chat_samples(example, tokenization.template, "assistant", "", [])
        texts.append("".join(text for text, _ in pieces))
    rows, texts = rows * options.repeat, texts * options.repeat
    seconds: dict[str, list[float]] = {"bare": [], "lit_ft": []}
    tokens = {}
    for _ in range(options.rounds):
        for name in seconds:
            started = time.perf_counter()
            made = (
                bare(tokenizer, texts, options.workers)
                if name == "bare"
                else lit_ft(tokenization, rows, options.workers)
            )
            seconds[name].append(time.perf_counter() - started)
            tokens[name] = made
    assert tokens["bare"] == tokens["lit_ft"], tokens
    print(
        f"{Path(options.data).name} x {options.repeat}: {len(rows):,} rows, {tokens['bare']:,} tokens, "
        f"{options.workers} workers"
    )
    for name, times in seconds.items():
        best = statistics.median(times)
        print(
            f"  {name:<7} {tokens[name] / best:>10,.0f} tokens/s "
            f"(median {best:.2f} s, {min(times):.2f} to {max(times):.2f})"
        )
    print(
        f"  lit_ft at {statistics.median(seconds['bare']) / statistics.median(seconds['lit_ft']):.0%} of the bare rate"
    )


if __name__ == "__main__":
    main()

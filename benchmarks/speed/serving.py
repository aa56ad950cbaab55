"""Requests and tokens per second of ``lit_ft serve`` and ``transformers serve --continuous-batching``.

    python -m benchmarks.speed.serving MODEL [--peer]

Each server is a process of its own with one thread. They run at the same time and are measured in alternating rounds;
medians are printed. The weights are in fp32: in bf16, rounding depends on the batch. All requests are greedy
and streamed. Memory is the largest resident set of the server's process. ``--peer`` also runs transformers' server,
which needs ``pip install 'transformers[serving]'``.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from openai import APIConnectionError, OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.compare import environment

QUESTIONS = [f"翻译成中文。\nThe {color} chair belongs to Helen." for color in ("red", "blue", "green", "yellow")]
TOKENS, PORT = 60, 8191


def one(client: OpenAI, model: str, question: str) -> tuple[int, float, str]:
    """Tokens of one answer, seconds to its first text, and its text."""
    began, first, count, text = time.perf_counter(), 0.0, 0, ""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            first = first or time.perf_counter() - began
            text += piece
        if chunk.usage:
            count = chunk.usage.completion_tokens
    return count, first, text


def measure(client: OpenAI, model: str, at_once: int) -> tuple[tuple[float, float, float], list[str]]:
    """Requests per second, tokens per second, median seconds to the first text, and the answers' texts."""
    requests, began = max(8, 2 * at_once), time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda i: one(client, model, QUESTIONS[i % len(QUESTIONS)]), range(requests)))
    seconds = time.perf_counter() - began
    first = statistics.median(answer[1] for answer in answers)
    rates = requests / seconds, sum(answer[0] for answer in answers) / seconds, first
    return rates, [answer[2] for answer in answers]


def peak_memory_mib(process: "subprocess.Popen[bytes]") -> int:
    """Largest resident set of a process, in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024


@contextmanager
def started(command: list[str], port: int, model: str) -> "Iterator[Server]":
    """A server that has answered once."""
    began = time.perf_counter()
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, env=environ) as process:
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=120)
            while True:
                try:
                    one(client, model, QUESTIONS[0])
                    break
                except APIConnectionError:
                    if process.poll() is not None:
                        sys.exit(f"{command} has ended with exit code {process.returncode}")
                    time.sleep(0.1)
            yield Server(process, client, model, time.perf_counter() - began)
        finally:
            process.terminate()


class Server(NamedTuple):
    """A running server, and a client of it."""

    process: "subprocess.Popen[bytes]"
    client: OpenAI
    model: str
    start_seconds: float


def main() -> None:
    """Print the table, and whether the servers' answers are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--peer", action="store_true", help="measure transformers' server too")
    parser.add_argument("--at_once", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        AutoModelForCausalLM.from_pretrained(options.model, dtype="float32").save_pretrained(folder)
        AutoTokenizer.from_pretrained(options.model).save_pretrained(folder)
        commands = {"lit_ft serve": ([sys.executable, "-m", "lit_ft", "serve", folder], Path(folder).name)}
        if options.peer:
            code = "from transformers.cli.transformers import main; main()"
            peer = [sys.executable, "-c", code, "serve", folder, "--continuous-batching", "--host", "127.0.0.1"]
            peer += ["--cb-num-blocks", "64", "--cb-max-batch-tokens", "512"]
            commands["transformers serve --continuous-batching"] = (peer, folder)
        servers = {
            name: stack.enter_context(started(command, PORT + number, model))
            for number, (name, (command, model)) in enumerate(commands.items())
        }
        print("| server | at once | requests/s | tokens/s | first text | start | peak memory |")
        print("|---|---|---|---|---|---|---|")
        for at_once in options.at_once:
            rounds = [
                {name: measure(one.client, one.model, at_once) for name, one in servers.items()}
                for _ in range(options.rounds)
            ]
            for name, server in servers.items():
                requests, tokens, first = (statistics.median(one[name][0][i] for one in rounds) for i in range(3))
                print(
                    f"| {name} | {at_once} | {requests:.1f} | {tokens:.0f} | {first:.2f} s | "
                    f"{server.start_seconds:.1f} s | {peak_memory_mib(server.process)} MiB |",
                    flush=True,
                )
        if options.peer:
            texts = [rounds[-1][name][1] for name in servers]
            same = sum(a.strip() == b.strip() for a, b in zip(*texts, strict=True))
            print(f"\n{same} of {len(texts[0])} answers are the same text.")
    print(f"\n{environment()}")


if __name__ == "__main__":
    main()

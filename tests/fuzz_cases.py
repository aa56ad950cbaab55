"""Fuzzing of the command line: each case runs in a forked process with limits, and its result is classified."""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

_PR_SET_PDEATHSIG = 1
LONGEST_MESSAGE = 1_000
"""Maximum characters of an error line; a path or a value in it may be long."""


@dataclass(frozen=True)
class Outcome:
    """Result of a case."""

    verdict: str
    """``runs``, ``refused``, or a failure: ``traceback``, ``exit 1``, ``hang``, ``died``, ``not one line``."""
    message: str
    """Last lines of stderr."""
    seconds: float

    @property
    def is_good(self) -> bool:
        return self.verdict in ("runs", "refused")


def run_case(arguments: list[str], folder: Path, seconds: float = 120, gib: int = 8) -> Outcome:
    """Run a command line in a process forked from this one.

    Args:
        arguments: arguments after ``python -m lit_ft``.
        folder: working directory of the process, also for its output.
        seconds: seconds after which the process counts as hanging.
        gib: limit in GiB of the memory in addition to that of this process.
    """
    start, parent = time.monotonic(), os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    if (process := os.fork()) == 0:
        _child(arguments, folder, gib, parent)
    status = _wait(process, start + seconds)
    text = (folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
    if status is None:
        # An option may set a million steps: a long run is correct then.
        verdict = "runs" if re.search(r"^step [\d,]+[^:\n]*: ", text, re.MULTILINE) else "hang"
        return Outcome(verdict, _tail(text), time.monotonic() - start)
    return Outcome(*judge(os.waitstatus_to_exitcode(status), arguments, text), time.monotonic() - start)


def judge(code: int, arguments: list[str], stderr: str) -> tuple[str, str]:
    """Verdict on an exit code and the text on stderr, and the lines to show for it."""
    said = [line for line in stderr.split("\n") if line.startswith("lit_ft: ")]
    if "Traceback (most recent call last)" in stderr:
        return "traceback", _tail(stderr)
    if code < 0:
        return f"died of {signal.Signals(-code).name}", _tail(stderr)
    if code == 0 or (code == 1 and arguments[0] in ("check", "verify") and not said):
        return "runs", ""
    if code == 1 and len(said) == 1 and said[0].startswith("lit_ft: failed: NotFinite: "):
        return "runs", ""  # until a loss or weight is not finite, which is a correct error
    if code == 2 and len(said) == 1 and stderr.rstrip("\n").split("\n")[-1] == said[0]:
        line = said[0]
        is_clean = re.fullmatch(r"lit_ft: error: .{10,}", line) and not re.search(
            r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", line
        )
        return ("refused" if is_clean and len(line) <= LONGEST_MESSAGE else "not a clean line"), line[:2000]
    return (f"exit {code}" if code != 2 else "not one line"), _tail(stderr)


def table(outcomes: Iterable[Outcome]) -> str:
    """Text table of the counts by verdict."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    return "\n".join(f"{verdict:<20} {count:>6,}" for verdict, count in counts.most_common())


def in_turn(
    cases: Iterable[tuple[str, Callable[[Path], list[str]]]], folder: Path, part: str = "1/1", **limits: Any
) -> Iterator[tuple[str, Outcome]]:
    """Run cases one after another; yields the title and the outcome of each.

    Args:
        cases: a title and a function for each case; the function writes files into a folder and returns the arguments.
        folder: parent folder of the cases' folders; those of successful cases are removed.
        part: ``2/3`` runs every third case, from the second on.
        limits: limits for ``run_case``.
    """
    number, count = map(int, part.split("/"))
    for i, (title, write) in enumerate(cases):
        if i % count != number - 1:
            continue
        place = folder / str(i)
        place.mkdir(parents=True)
        outcome = run_case(write(place), place, **limits)
        yield title, outcome
        if outcome.is_good:
            remove(place)


Cases = Iterator[tuple[str, Callable[[Path], list[str]]]]


def main_loop(about: str | None, what: str, count: int, every: Callable[[Path, int, int], Cases]) -> None:
    """Run cases from the command line, and print the failures and a table of all outcomes.

    Args:
        about: help text of the program.
        what: name of the cases.
        count: default number of cases.
        every: function from a folder for inputs, a count and a seed to the cases.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--cases", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="run this case alone, and keep its files")
    parser.add_argument("--part", default="1/1", help="2/3: every third case, from the second on")
    parser.add_argument("--out", type=Path, default=None, help="keep the files of cases that went wrong there")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp(prefix=f"fuzz-{what}-"))
    folder.mkdir(parents=True, exist_ok=True)
    found = list(every(folder / "inputs", options.cases, options.seed))
    if options.only is not None:
        found = [found[options.only]]
    outcomes: list[Outcome] = []
    for title, outcome in in_turn(found, folder / f"cases-{options.part.replace('/', '-')}", options.part):
        outcomes.append(outcome)
        if not outcome.is_good or options.only is not None:
            print(f"--- {title}\n{outcome.verdict} ({outcome.seconds:.0f} s)\n{outcome.message}", flush=True)
    slowest = max(outcome.seconds for outcome in outcomes)
    print(f"\n{len(outcomes):,} {what}, seed {options.seed}, slowest {slowest:.0f} s\n{table(outcomes)}")
    sys.exit(not all(outcome.is_good for outcome in outcomes))


def remove(folder: Path) -> None:
    """Delete a case's folder without following links in it."""
    import shutil

    shutil.rmtree(folder, ignore_errors=True)


def _tail(text: str) -> str:
    return "\n".join(text.rstrip().split("\n")[-30:])[-6000:]


def _child(arguments: list[str], folder: Path, gib: int, parent: int) -> None:
    code = 1
    gc.freeze()  # a collection would visit, and so copy, all memory that this process shares with its parent
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()  # so that its child processes can be ended with it
        tqdm.set_lock(threading.RLock())  # the default lock is shared with all forks, and a kill would leave it locked
        os.chdir(folder)
        for descriptor, name in ((1, "stdout.txt"), (2, "stderr.txt")):
            os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = (
            os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="surrogateescape"),
            os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace"),
        )
        _limit_memory(gib)
        _start_no_process()
        code = _command(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _command(arguments: list[str]) -> int:
    from lit_ft.cli import main

    sys.argv = ["lit_ft", *arguments]
    try:
        main(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def _limit_memory(gib: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + gib * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _start_no_process() -> None:
    """End a case with success where Lightning would start the other ranks: it has passed all earlier checks."""
    from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

    def started(_: Any) -> None:
        sys.stderr.flush()
        os._exit(0)

    _SubprocessScriptLauncher._call_children_scripts = started  # type: ignore[method-assign]


def _wait(process: int, deadline: float) -> int | None:
    """Exit status of a process; None if it was still running at the deadline, and was killed."""
    status = None
    while status is None and time.monotonic() < deadline:
        done, found = os.waitpid(process, os.WNOHANG)
        status = found if done else None
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def in_fork(results: Iterable[str], seconds: float = 60) -> list[str]:
    """Results that are found in a forked process; if it does not reach the last, the way that it ended follows.

    Args:
        results: iterator that the process runs.
        seconds: time limit of each result.
    """
    reading, writing = os.pipe()
    if (process := os.fork()) == 0:
        gc.freeze()
        try:
            signal.alarm(int(seconds))
            for result in results:
                os.write(writing, f"{json.dumps(result)}\n".encode())
                signal.alarm(int(seconds))
        except BaseException as error:
            os.write(writing, f"{json.dumps(f'{type(error).__name__}: {error}'[:2000])}\n".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        found = [json.loads(line) for line in file]
    _, status = os.waitpid(process, 0)
    return found if status == 0 else [*found, f"ended with {os.waitstatus_to_exitcode(status)}"]

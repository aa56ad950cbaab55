"""Limits on the time and memory of a chat template, which comes with a model and may contain endless loops.

The sandbox of transformers protects files and code from a template, but does not limit its time and memory.
In what follows, ``template`` is the name of a template for errors.
"""

import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal

from jinja2.defaults import DEFAULT_FILTERS
from jinja2.filters import do_round
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from lit_callbacks.protocols import Message
from transformers import PreTrainedTokenizerBase

from lit_ft.errors import RecipeError

SECONDS = 5.0
"""Maximum CPU seconds of one rendering; a conversation of a million characters takes well below one."""
BYTES = 4 * 2**30
"""Maximum memory, in bytes, that renderings may allocate on top of the memory of the process."""
CHARACTERS = 1_000_000
"""Maximum length of a rendered conversation, in addition to ten times its own characters."""

HIGHEST_POWER = 1_000
"""Largest exponent in a template."""


class _Progress:
    """Counter of renderings and the last one's start, from which a timer sees whether it takes too long."""

    is_limited = False
    count = 0  # odd during a rendering
    started = 0.0  # CPU seconds of this thread


@contextmanager
def limited(template: str) -> Iterator[None]:
    """Context in which a rendering that exceeds the time or memory limit raises an error.

    One context may span many renderings; entering it costs as much as a few of them. The limits apply on Linux, in the
    main thread, which receives signals.

    Raises:
        RecipeError: a limit was exceeded; the message names it.
    """
    if _Progress.is_limited or sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        yield
        return

    def look(*_: object) -> None:
        # The timer counts all threads of the process, among them those in which torch computes for other requests.
        if _Progress.count % 2 and time.thread_time() - _Progress.started >= SECONDS:
            raise _refused(template, f"takes over {SECONDS:g} seconds of CPU time")

    before = signal.signal(signal.SIGVTALRM, look)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space(limits), limits[1]))
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS, SECONDS)
    _Progress.is_limited = True
    try:
        yield
    finally:
        _Progress.is_limited = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, limits)
        signal.signal(signal.SIGVTALRM, before)


class Rendering:
    """Context of one rendering, or of the compilation of a template; it may be entered repeatedly.

    Raises:
        RecipeError: a limit was exceeded; the message names it.
    """

    def __init__(self, template: str) -> None:
        _bound_powers()
        self._template = template
        self._limits: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if not _Progress.is_limited:
            self._limits = limited(self._template)
            self._limits.__enter__()
        _Progress.started = time.thread_time()
        _Progress.count += 1

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        _Progress.count += 1
        if self._limits is not None:
            limits, self._limits = self._limits, None
            limits.__exit__(None, None, None)
        if isinstance(error, MemoryError):
            raise _refused(self._template, f"takes over {BYTES / 2**30:g} GiB of memory") from error


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    generation: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> str:
    """Render a conversation with a tokenizer's chat template, within the limits.

    Raises:
        RecipeError: a limit was exceeded; the message names it.
    """
    name = f"the chat template of {tokenizer.name_or_path!r}"
    with Rendering(name):
        text = str(
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=generation)
        )
    check_length(name, text, len(str(messages)))
    return text


def check_length(template: str, text: str, contents: int) -> None:
    """Refuse a rendered text that is far longer than its conversation, of ``contents`` characters.

    Raises:
        RecipeError: the text is too long.
    """
    if len(text) > CHARACTERS + 10 * contents:
        raise _refused(template, f"makes {len(text):,} characters of {contents:,}")


def _refused(template: str, what: str) -> RecipeError:
    return RecipeError(f"{template} {what} for one conversation; give another template with data.chat_template")


def _power(base: float, exponent: float) -> float:
    if abs(exponent) > HIGHEST_POWER:
        raise OverflowError(f"a power of {exponent} in a template; {HIGHEST_POWER} is the highest")
    return base**exponent


def _round(value: float, precision: int = 0, method: Literal["common", "ceil", "floor"] = "common") -> float:
    return do_round(value, min(precision, HIGHEST_POWER), method)


def _bound_powers() -> None:
    """Limit exponents of `**` and `round` in Jinja: no signal interrupts the computation of a huge power."""
    # On the class: transformers creates its environments itself, and Jinja computes constants during compilation.
    ImmutableSandboxedEnvironment.intercepted_binops = frozenset({"**"})
    ImmutableSandboxedEnvironment.default_binop_table = {**SandboxedEnvironment.default_binop_table, "**": _power}
    DEFAULT_FILTERS["round"] = _round


def _address_space(limits: tuple[int, int]) -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    needed = pages * resource.getpagesize() + BYTES
    return min([needed, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])

"""Chat templates that would never end, or fill the memory."""

import hashlib
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.model import render_limits

pytestmark = pytest.mark.slow

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" * 1
LOOPS += "{% endfor %}{% endfor %}"
DOUBLING = "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}"
LISTS = "{% set n = namespace(t=[1]) %}{% for i in range(60) %}{% set n.t = n.t + n.t %}{% endfor %}{{ n.t|length }}"
TIME, MEMORY, LENGTH = "seconds of CPU time", "GiB of memory", "characters of"

BOMBS = {
    "nested loops": (LOOPS, TIME),
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        TIME,
    ),
    "lorem ipsum": ("{{ lipsum(n=10 ** 9) }}", TIME),
    "doubled text": (DOUBLING, MEMORY),
    "doubled lists": (LISTS, MEMORY),
    "a product": ("{% set n = 10 ** 11 %}{{ 'x' * n }}", MEMORY),
    "a product of constants": ("{{ 'x' * 100000000000 }}", MEMORY),
    "padding": ("{{ 'x'|center(100000000000) }}", MEMORY),
    "padding by a method": ("{{ 'x'.ljust(100000000000) }}", MEMORY),
    "a format": ("{{ '%99999999999d' % 1 }}", MEMORY),
    "a format method": ("{{ '{:>99999999999}'.format(1) }}", MEMORY),
    "indentation": ("{{ 'a\nb'|indent(99999999999) }}", MEMORY),
    "a join": ("{{ range(99999)|join('x' * 999999) }}", MEMORY),
    "long text": ("{{ 'x' * 5000000 }}", LENGTH),
    "a power": ("{{ (10 ** 100000000) % 2 }}", "OverflowError"),
    "a power of a variable": ("{% set n = 10 ** 8 %}{{ (10 ** n) % 2 }}", "OverflowError"),
    "a root of a power": ("{{ 1.5|round(100000000, 'ceil') }}", "does not render a question and an answer"),
}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_limits, "SECONDS", 0.2)
    monkeypatch.setattr(render_limits, "BYTES", 2**29)


def made(text: str) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bomb, message = BOMBS[name]
    if message == MEMORY:  # half a GiB of lists can take 0.2 s
        monkeypatch.setattr(render_limits, "SECONDS", 5.0)
    if name == "a root of a power":
        bomb += "{{ raise_exception('it got here') }}"
    started = time.process_time()
    with pytest.raises(RecipeError, match=message) as error:
        made(bomb + PLAIN)
    assert time.process_time() - started < 10
    assert "data.chat_template" in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20  # KiB


def test_time_of_other_threads_does_not_count() -> None:
    def compute() -> None:
        while time.process_time() < end:
            hashlib.sha256(bytes(10**6))  # without the interpreter's lock, as torch computes

    thread = threading.Thread(target=compute)
    with render_limits.Rendering("a template"):
        end = time.process_time() + 5 * render_limits.SECONDS
        thread.start()
        while thread.is_alive():
            thread.join(0.01)  # signals that reach the other thread are handled between two waits


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bomb_that_waits_for_some_row(write_rows: Callable[..., str], workers: int) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if 'now' in messages[0].content %}" + LOOPS + "{% endif %}" + PLAIN
    rows = [{"instruction": f"{i} now" if i == 9 else str(i), "output": "yes"} for i in range(20)]
    data = TextDataModule(path=write_rows(rows), on_bad_row="skip", tokenize_workers=workers)
    with pytest.raises(RecipeError, match=TIME):
        data.load(tokenizer)


def test_limits_are_put_back() -> None:
    before = signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)
    template = made(PLAIN)
    with pytest.raises(RecipeError):
        made(LOOPS + PLAIN)
    assert (signal.getsignal(signal.SIGVTALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert template.closing == "<|im_end|>"


def test_many_renderings_may_take_long_together() -> None:
    """The limit holds for each of them, also for one after the others."""
    template = made("{% if 'now' in messages[0].content %}" + LOOPS + "{% endif %}" + PLAIN)
    started, texts = time.process_time(), list[str]()
    with render_limits.limited("a template"):
        while time.process_time() - started < 5 * render_limits.SECONDS:
            texts.append(template.render([{"role": "user", "content": "x"}]))
        with pytest.raises(RecipeError, match=TIME):
            template.render([{"role": "user", "content": "now"}])
    assert set(texts) == {"user: x<|im_end|>"}
    assert len(texts) > 100


def test_a_long_conversation_is_no_bomb() -> None:
    text = made(PLAIN).render([{"role": "user", "content": "x" * 3_000_000}])
    assert len(text) > 3_000_000


def test_a_template_that_does_not_parse(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match=re.escape("is no Jinja template (TemplateSyntaxError: ")):
        made("{% for %}")

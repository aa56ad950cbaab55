"""Chat templates that reach for Python's objects are refused, and nothing of theirs runs."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
from shared_fixtures import make_tokenizer

from lit_ft import RecipeError
from lit_ft.data.text.chat_template import ChatTemplate

PLAIN = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"

# COMMAND becomes one that leaves a file.
RUNS = {
    "subclasses of object": "{% for c in ''.__class__.__mro__[1].__subclasses__() if c.__name__ == '_wrap_close' %}"
    "{{ c.__init__.__globals__.system(COMMAND) }}{% endfor %}",
    "self": "{{ self.__init__.__globals__.__builtins__.__import__('os').system(COMMAND) }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system(COMMAND) }}",
    "joiner": "{{ joiner.__init__.__globals__.os.system(COMMAND) }}",
    "namespace": "{{ namespace.__init__.__globals__.os.system(COMMAND) }}",
    "lipsum": "{{ lipsum.__globals__['os'].system(COMMAND) }}",
    "lipsum, by item": "{{ lipsum['__globals__'].os.system(COMMAND) }}",
    "attr": "{{ (lipsum|attr('__glo' ~ 'bals__')).os.system(COMMAND) }}",
    "attr of attr": "{{ (lipsum|attr('__globals__')|attr('get'))('os').system(COMMAND) }}",
    "map of an attribute": "{{ ([lipsum]|map(attribute='__globals__')|first)['os'].system(COMMAND) }}",
    "map of attr": "{{ ([lipsum]|map('attr', '__globals__')|first)['os'].system(COMMAND) }}",
    "a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__.sys.modules.os.system(COMMAND) }}",
    "a loop": "{% for x in [1] %}{{ loop.__init__.__globals__.sys.modules.os.system(COMMAND) }}{% endfor %}",
}
READS = {
    "a format string": "{{ '{0.__globals__[os]}'.format(lipsum) }}",
    "a format string of a mapping": "{{ '{f.__globals__[os]}'.format_map({'f': lipsum}) }}",
    "a format string, mapped": "{{ (['{0.__globals__[os]}']|map(attribute='format')|first)(lipsum) }}",
    "a chain of attributes": "{{ lipsum.__globals__.os }}",
}
FILES = {
    "import": "{% import 'FILE' as x %}",
    "from": "{% from 'FILE' import x %}",
    "include": "{% include 'FILE' %}",
    "extends": "{% extends 'FILE' %}",
}
OTHERS = {
    "a long range": ("{{ range(10 ** 9)|length }}", "OverflowError: Range too big"),
    "a generator's frame": ("{{ (messages|map('length')).gi_frame.f_globals }}", "SecurityError: .*gi_frame"),
    "code of a global": ("{{ raise_exception.__code__.co_consts }}", "SecurityError: .*__code__"),
    "a change of the messages": ("{{ messages.clear() }}", "SecurityError: .*clear"),
    "a statement that does": ("{% do messages.clear() %}", "TemplateSyntaxError: .*do"),
    "a look at everything": ("{% debug %}", "TemplateSyntaxError: .*debug"),
}


def made(text: str) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text + PLAIN
    return ChatTemplate(tokenizer)


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as error:
        made(text)
    assert "\n" not in str(error.value)
    assert "; give another one with data.chat_template" in str(error.value)
    return str(error.value)


def without_sandbox(text: str, **options: Any) -> str:
    return jinja2.Environment(**options).from_string(text).render(messages=[])


@pytest.mark.parametrize("name", RUNS)
def test_an_escape_runs_nothing(name: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    text = RUNS[name].replace("COMMAND", f"'touch {ran}'")
    assert "(SecurityError: access to attribute '_" in refusal(text)
    assert not ran.exists()
    without_sandbox(text)
    assert ran.exists()  # it is an escape


@pytest.mark.parametrize("name", READS)
def test_an_escape_reads_nothing(name: str) -> None:
    if name == "a chain of attributes":
        # Jinja refuses what is done with an unsafe attribute; one that is only printed is nothing.
        messages = [{"role": "user", "content": "x"}]
        assert made("{{ lipsum.__globals__ }}").render(messages) == made("").render(messages)
    assert "(SecurityError: access to attribute '__globals__' of 'function' object is unsafe" in refusal(READS[name])
    assert "<module 'os'" in without_sandbox(READS[name])


@pytest.mark.parametrize("name", FILES)
def test_no_file_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{% set x = 1 %}secret")
    said = refusal(FILES[name].replace("FILE", str(tmp_path / "file")))
    assert "no loader for this environment" in said
    assert "secret" not in said
    without_sandbox(FILES[name].replace("FILE", "file"), loader=jinja2.FileSystemLoader(tmp_path))


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_out_are_refused(name: str) -> None:
    text, reason = OTHERS[name]
    with pytest.raises(RecipeError, match=reason):
        made(text)

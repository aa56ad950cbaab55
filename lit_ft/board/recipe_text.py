"""A recipe that form and text both edit: a change of one key leaves comments and order of the others."""

import io
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.tokens import CommentToken

from lit_ft.bounded_yaml import load_yaml
from lit_ft.errors import RecipeError

_SECTIONS = ("model", "data")
"""Keys whose class has a default, so that options stand in them directly."""
_PARTS = ("class_path", "init_args", "dict_kwargs")


Kept = Callable[[str, str, Mapping[str, object]], Mapping[str, object]]
"""Gives the arguments that stay: of the option that takes a class, the new class, and the earlier one's arguments."""


class RecipeText:
    """YAML text of a recipe; options have the names that ``--help`` gives them, e.g. ``model.peft.r``."""

    def __init__(self, text: str = "") -> None:
        """Parse a text.

        Args:
            text: YAML; empty is a recipe without options.

        Raises:
            RecipeError: it is no YAML, or no mapping.
        """
        try:
            content = load_yaml(text)  # bounded: anchors cannot grow without limit
            self._yaml = YAML()
            self._yaml.width = 4096  # else long lines are broken
            self._yaml.preserve_quotes = True
            self._yaml.indent(mapping=2, sequence=4, offset=2)
            self._tree = self._yaml.load(text) if content is not None else CommentedMap()
        except (yaml.YAMLError, ValueError) as error:
            mark = getattr(error, "problem_mark", None)
            where = f"line {mark.line + 1}: " if mark is not None else ""
            reason = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise RecipeError(f"{where}is no YAML ({reason}); correct it there, or in the line before") from error
        if not isinstance(self._tree, CommentedMap):
            raise RecipeError("holds no mapping; a recipe is one, e.g. data: {path: rows.json}")
        self._text = text

    @classmethod
    def of_file(cls, file: Path) -> "RecipeText":
        """Parse a file.

        Raises:
            RecipeError: it cannot be read, is not UTF-8, no YAML, or no mapping.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise RecipeError(f"{file}: is not UTF-8 (byte {error.start}); save the recipe as UTF-8 text") from error
        except OSError as error:
            raise RecipeError(f"{file}: cannot be read ({error.strerror}); choose another recipe") from error
        return cls(text)

    @property
    def text(self) -> str:
        """YAML of the recipe."""
        return self._text

    def content(self) -> dict[str, Any]:
        """Recipe as plain values."""
        content = load_yaml(self._text)
        return content if isinstance(content, dict) else {}

    def get(self, name: str) -> object:
        """Value of an option; None where the recipe leaves it out."""
        inside, key = self._place(name, create=False)
        return _plain(inside.get(key)) if inside is not None else None

    def set(self, name: str, value: object) -> None:
        """Set an option; None removes it, and a section that becomes empty with it."""
        inside, key = self._place(name, create=value is not None)
        if inside is None or (value is None and key not in inside):
            return
        if value is None:
            del inside[key]
            self._remove_empty(name)
        else:
            before = _last_comment(inside) if key not in inside else None
            inside[key] = value
            if before is not None:
                _move_below(before, inside, key)
        out = io.StringIO()
        if self._tree:
            self._yaml.dump(self._tree, out)
        self._text = out.getvalue()

    def with_fragment(self, fragment: "RecipeText", kept: Kept) -> "RecipeText":
        """Copy with the options of another recipe in place of its own, as of a second ``--config``.

        A list takes the place of a list. Where the fragment names another class, the arguments that it has too stay.

        Args:
            fragment: the other recipe.
            kept: gives those arguments.
        """
        merged = RecipeText(self._text)
        merged._put(fragment.content(), "", kept)
        return RecipeText(merged.text)

    def _put(self, value: object, name: str, kept: Kept) -> None:
        """Set an option and those below it, as a later ``--config`` does."""
        before = self.get(name) if name else {}
        is_class = isinstance(value, Mapping) and bool({"class_path", "init_args"} & set(value))
        if is_class and isinstance(value, Mapping) and isinstance(before, Mapping):
            chosen = value.get("class_path", before.get("class_path"))
            if chosen != before.get("class_path"):
                # Options stand directly in a section whose class is the default one.
                arguments = before if name in _SECTIONS and not set(_PARTS) & set(before) else before.get("init_args")
                stay = kept(name, str(chosen), arguments or {})
                self.set(name, {"class_path": chosen, **({"init_args": dict(stay)} if stay else {})})
            value = value.get("init_args") or {}
        elif not (isinstance(value, Mapping) and name in ("", "trainer", *_SECTIONS)):
            self.set(name, value)
            return
        for key, inner in value.items():
            self._put(inner, f"{name}.{key}".lstrip("."), kept)

    def callback(self, class_path: str) -> dict[str, Any] | None:
        """Arguments of a callback of ``trainer.callbacks``; None where it is not among them."""
        for one in self._callbacks():
            if one.get("class_path") == class_path:
                arguments = _plain(one.get("init_args"))
                return arguments if isinstance(arguments, dict) else {}
        return None

    def set_callback(self, class_path: str, arguments: dict[str, object] | None) -> None:
        """Add a callback to ``trainer.callbacks``, change its arguments, or remove it (None); the others stay."""
        kept = [one for one in self._callbacks() if one.get("class_path") != class_path]
        if arguments is not None:
            kept.append({"class_path": class_path, **({"init_args": arguments} if arguments else {})})
        self.set("trainer.callbacks", kept or None)

    def _callbacks(self) -> list[Any]:
        inside, key = self._place("trainer.callbacks", create=False)
        callbacks = inside.get(key) if inside is not None else None
        return [one for one in callbacks if isinstance(one, Mapping)] if isinstance(callbacks, list) else []

    def classes(self) -> dict[str, str]:
        """Class paths by the option that takes the class."""
        return dict(_classes(self.content(), ""))

    def options(self) -> dict[str, object]:
        """Values of all options by name; an option that takes a class has its class path."""
        return dict(_options(self.content(), ""))

    def _place(self, name: str, create: bool) -> tuple[MutableMapping[str, Any] | None, str]:
        """Mapping that holds an option, and its key there."""
        *parents, key = name.split(".")
        inside: Any = self._tree
        for depth, parent in enumerate(parents):
            inside = _child(inside, parent, create)
            if inside is None:
                return None, key
            is_class = "class_path" in inside or "init_args" in inside
            if is_class and [*parents, key][depth + 1] not in _PARTS:
                inside = _child(inside, "init_args", create)
                if inside is None:
                    return None, key
        return inside, key

    def _remove_empty(self, name: str) -> None:
        parents = name.split(".")[:-1]
        while parents:
            inside, key = self._place(".".join(parents), create=False)
            if inside is None or inside.get(key) != {}:
                return
            del inside[key]
            parents.pop()


def _child(inside: Any, key: str, create: bool) -> Any:
    child = inside.get(key)
    if not isinstance(child, MutableMapping):
        if not create:
            return None
        inside[key] = child = CommentedMap()
    return child


def _last_comment(tree: Any) -> tuple[Any, Any] | None:
    """Comments that follow the last value of a block, as ruamel keeps them, and their key there."""
    if not isinstance(tree, CommentedMap | CommentedSeq) or not tree:
        return None
    key = list(tree)[-1] if isinstance(tree, CommentedMap) else len(tree) - 1
    is_block = isinstance(tree[key], CommentedMap | CommentedSeq) and not tree[key].fa.flow_style()
    return _last_comment(tree[key]) if is_block and tree[key] else (tree.ca.items, key)


def _move_below(before: tuple[Any, Any], inside: Any, key: str) -> None:
    """Keep empty lines and comments between two sections behind a key that is added to the end of the first."""
    comments, last = before
    comment = comments.get(last)
    token = comment[2 if isinstance(last, str) else 0] if comment else None
    if token is None:
        return
    line, _, rest = token.value.partition("\n")
    if rest:
        token.value = f"{line}\n"
        inside.ca.items[key] = [None, None, CommentToken(f"\n{rest}", token.start_mark, None), None]


def _plain(value: Any) -> Any:
    """Value without the types that keep comments."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, bool) or value is None:
        return value
    return next((kind(value) for kind in (int, float, str) if isinstance(value, kind)), value)


def _classes(value: object, name: str) -> Iterator[tuple[str, str]]:
    if not isinstance(value, dict):
        return
    if isinstance(value.get("class_path"), str):
        yield name, value["class_path"]
    for key, inner in value.items():
        yield from _classes(inner, name if key in _PARTS else f"{name}.{key}".lstrip("."))


def _options(value: object, name: str) -> Iterator[tuple[str, object]]:
    is_section = name in ("", "trainer", *_SECTIONS)
    if not isinstance(value, dict) or not (is_section or "class_path" in value):
        yield name, value
        return
    for key, inner in value.items():
        if key == "init_args" and isinstance(inner, dict):
            for argument, given in inner.items():
                yield from _options(given, f"{name}.{argument}")
        elif key == "class_path":
            yield name, inner
        else:
            yield from _options(inner, f"{name}.{key}".lstrip("."))


# --- one value as text --------------------------------------------------------------------------------


def as_text(value: object) -> str:
    """Text that ``from_text`` reads as a value; empty for None."""
    if value is None:
        return ""
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    try:
        is_plain = from_text(value) in (value, _number(value))
    except RecipeError:
        is_plain = False
    return value if is_plain else json.dumps(value, ensure_ascii=False)


def from_text(text: str) -> object:
    """Value that a field's text stands for, as YAML reads it; None for an empty text.

    Raises:
        RecipeError: it is no YAML.
    """
    if not text.strip():
        return None
    try:
        value = load_yaml(text)
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{text!r} is no YAML value; put a text with signs in quotes") from error
    return _number(value) if value == text.strip() else value


def _number(text: str) -> str | float:
    """Number in the form 1e-4, which YAML 1.1 takes for a text; the text itself otherwise."""
    try:
        return float(text) if any(sign in text for sign in "eE") and text.lower() not in ("nan", "inf") else text
    except ValueError:
        return text

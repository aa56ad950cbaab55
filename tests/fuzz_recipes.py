"""Fuzzing with mutated recipes: each is refused with exit code 2 and one line, or runs.

``python tests/fuzz_recipes.py --cases 2000 --seed 1`` runs 2000 cases and prints the outcomes.
"""

import functools
import inspect
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from fuzz_cases import main_loop
from fuzz_values import CLASSES, NUMBERS, OTHERS, TEXTS

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = sorted((REPOSITORY / "recipes" / "examples").glob("*.yaml"))
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml")) + EXAMPLES
FRAGMENTS = sorted({*(REPOSITORY / "recipes").glob("*/*.yaml")} - {*EXAMPLES})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """All containers of a recipe, each with each of its keys."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key], (*path, key))


def junk(rng: random.Random) -> Any:
    return deepcopy(rng.choice(rng.choice([TEXTS, NUMBERS, NUMBERS, OTHERS, CLASSES])))


def near(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, or of a type that YAML could have read."""
    if isinstance(value, bool):
        return rng.choice([not value, int(value), str(value)])
    if isinstance(value, int | float):
        return rng.choice(
            [0, -value, value * 1000, value * 10**12, value + 0.5, str(value), [value], value / 1000, f"{value}x"]
        )
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice(
            [
                value[:at],
                value[:at] + rng.choice(TEXTS) + value[at:],
                value.upper(),
                [value],
                {value: value},
                value + "x",
            ]
        )
    if isinstance(value, list):
        return rng.choice([value + value, value[:1], dict(enumerate(value)), [value], value[0] if value else None])
    if isinstance(value, dict):
        first = next(iter(value.values())) if value else None
        return rng.choice([[value], first, {"init_args": value}, {"class_path": value}])
    return junk(rng)


Known = dict[str, dict[str, str]]
"""Options of each part of a recipe, each with its type as text."""


def options() -> Known:
    """Options of each part of a recipe, from the signatures."""
    from lightning.pytorch import Trainer

    from lit_ft import CausalLM, TextDataModule
    from lit_ft.data.text.sources import Source

    parts = {"model": CausalLM, "data": TextDataModule, "trainer": Trainer, "source": Source}
    top = {"seed_everything": "int", "run_dir": "str", "merge": "bool", "ckpt_path": "str"}
    found = {name: typed_options(part) for name, part in parts.items()}
    found["trainer"] = {
        name: kind for name, kind in found["trainer"].items() if name != "num_nodes"
    }  # it waits for them
    return found | {"": top | dict.fromkeys(["optimizer", "lr_scheduler", *parts], "Any")}


@functools.cache
def typed_options(named: Any) -> dict[str, str]:
    """Options of a class, or of the class with that path, with their types as text."""
    if isinstance(named, str):
        module, _, name = named.rpartition(".")
        try:
            named = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError):
            return {}
    try:
        parameters = inspect.signature(named).parameters
    except (TypeError, ValueError):
        return {}
    return {name: str(parameter.annotation) for name, parameter in parameters.items()}


def typed(rng: random.Random, annotation: str) -> Any:
    """Value of an option's type, extreme values included."""
    draws: list[Any] = []
    if "bool" in annotation:
        draws += [True, False]
    if "int" in annotation:
        draws += [0, 1, 2, 3, 5, -1, 10**6, 2**62]
    if "float" in annotation or "Tensor" in annotation:
        draws += [0.0, 0.5, 1.0, -0.1, 1e-12, 1e20, math.nan, math.inf]
    if "Literal" in annotation:
        draws += re.findall(r"'([^']*)'", annotation)
    if "str" in annotation or "Path" in annotation:
        draws += [rng.choice(TEXTS)]
    if "list" in annotation.lower():
        draws += [[rng.choice(TEXTS)], [rng.choice(NUMBERS)]]
    if "dict" in annotation.lower():
        draws += [{rng.choice(TEXTS): rng.choice(NUMBERS)}]
    if "None" in annotation:
        draws += [None]
    return rng.choice(draws) if draws else junk(rng)


DEEDS = "junk junk near near delete rename option class move list typed typed typed argument argument argument".split()


def mutate(rng: random.Random, recipe: dict[str, Any], known: Known) -> str:
    """Change a recipe at one position; returns a description of the change."""
    found = list(places(recipe))
    deed = rng.choice(
        ["junk", "junk", "near", "near", "delete", "rename", "option", "class", "move", "list"]
        + 3 * ["typed", "argument"]
    )
    if deed == "argument" and (named := [h for h, k in found if k == "class_path" and isinstance(h[k], str)]):
        holder = rng.choice(named)
        takes, given = typed_options(holder["class_path"]), holder.setdefault("init_args", {})
        if not takes or not isinstance(given, dict):
            return "nothing"
        name = rng.choice(list(takes))
        given[name] = typed(rng, takes[name])
        return f"{holder['class_path']}.{name}={show(given[name])}"
    if not found or deed in ("option", "typed", "argument"):
        part = rng.choice(["model", "data", "trainer", "trainer", ""])
        name = rng.choice(list(known[part]))
        holder = recipe.setdefault(part, {}) if part else recipe
        if isinstance(holder, dict):
            holder[name] = junk(rng) if deed == "option" else typed(rng, known[part][name])
            return f"{part}.{name}={show(holder[name])}"
        return "nothing"
    holder, key = rng.choice(found)
    if deed == "class":
        with_class = [(h, k) for h, k in found if k == "class_path"]
        if with_class:
            holder, key = rng.choice(with_class)
        holder[key] = rng.choice(CLASSES)
    elif deed == "junk":
        holder[key] = junk(rng)
    elif deed == "near":
        holder[key] = near(rng, holder[key])
    elif deed == "delete":
        del holder[key]
        return f"delete {key}"
    elif deed == "rename" and isinstance(holder, dict):
        name = str(key)
        at = rng.randrange(len(name) or 1)
        new = rng.choice(
            [name[:at] + name[at + 1 :], name[:at] + "x" + name[at:], name.upper(), name + "s", f"a.{name}", junk(rng)]
        )
        if isinstance(new, list | dict):
            new = json.dumps(new, default=str)
        holder[new] = holder.pop(key)
        return f"rename {key} {show(new)}"
    elif deed == "move":
        other, _ = rng.choice(found)
        value = deepcopy(holder[key])
        if isinstance(other, dict):
            other[key if isinstance(key, str) else "x"] = value
        else:
            other.append(value)
        return f"move {key}"
    else:
        holder[key] = [holder[key], junk(rng)]
    return f"{key}={show(holder[key])}"


def show(value: Any) -> str:
    return repr(value)[:60]


ENDINGS = [" {", " [", " '", ' "', " &a", " *a", " !!python/object:os.system", " !tag", " |", " ---", "\x00", "%"]


def mutate_text(rng: random.Random, text: str) -> bytes:
    """Damage the text of a recipe file."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    deed = rng.randrange(7)
    if deed == 0:
        lines.insert(at, rng.choice(lines))  # a key twice
    elif deed == 1:
        lines[at] = rng.choice([" ", "  ", "\t", "- "]) + lines[at]
    elif deed == 2:
        lines = [*lines[: at + 1], lines[at][: rng.randrange(len(lines[at]) + 1)]] if at else lines[:1]
    elif deed == 3:
        lines[at] = lines[at].replace(":", rng.choice(["", "=", "::", ": :"]), 1)
    elif deed == 4:
        lines[at] += rng.choice(
            [" {", " [", " '", ' "', " &a", " *a", " !!python/object:os.system", " !tag", " |", " ---", "\x00", "%"]
        )
    elif deed == 5:
        del lines[at]
    raw = "\n".join(lines).encode("utf-8", "surrogatepass")
    if deed == 6:
        where = rng.randrange(len(raw))
        raw = raw[:where] + rng.randbytes(3) + raw[where + rng.choice([0, 1, 10]) :]
    return raw


def small(recipe: dict[str, Any], model: str, rows: str) -> dict[str, Any]:
    """A shipped recipe, changed to a tiny model, tiny data and one step."""
    recipe = deepcopy(recipe)
    recipe.setdefault("model", {})["pretrained"] = model
    data = recipe.setdefault("data", {})
    for source in data.get("sources", []):
        source["path"] = rows
    if "sources" not in data:
        data["path"] = rows
    data |= {"max_length": 64, "cache_dir": "cache"} | ({"val_path": rows} if "val_path" in data else {})
    recipe.setdefault("trainer", {}).update(max_steps=1, max_epochs=1, limit_val_batches=1, accelerator="cpu")
    recipe["trainer"].pop("num_nodes", None)  # it would wait for them
    if "packing" in data:
        data["packing"] = 64
    for callback in recipe["trainer"].get("callbacks", []):
        if callback["class_path"] == "lit_ft.ExactMatch":
            callback["init_args"] = {"max_new_tokens": 2, "samples": 2}
    if recipe.get("merge"):
        recipe["merge"] = False
    return recipe


def small_fragment(fragment: dict[str, Any]) -> dict[str, Any]:
    fragment = deepcopy(fragment)
    if (fragment.get("model") or {}).get("compile") is True:
        fragment["model"]["compile"] = "aot_eager"  # the same without waiting for a C++ compiler
    return fragment


def cases(count: int, seed: int, model: str, rows: str) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """Titles of mutated recipes, and a function that writes each."""
    known, loaded = (
        options(),
        {path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in [*RECIPES, *FRAGMENTS]},
    )
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        command = rng.choices(["fit", "check", "plan", "validate", "predict"], [12, 3, 2, 1, 1])[0]
        path = RECIPES[number % len(RECIPES)]
        recipe, title = small(loaded[path], model, rows), f"{number} {command} {path.stem}"
        files = [recipe]
        if rng.random() < 0.7:
            fragment = FRAGMENTS[number % len(FRAGMENTS)]
            files, title = [recipe, small_fragment(loaded[fragment])], f"{title}+{fragment.stem}"
            if rng.random() < 0.2:
                extra = rng.choice(FRAGMENTS)
                files, title = [*files, small_fragment(loaded[extra])], f"{title}+{extra.stem}"
        for _ in range(rng.choice([1, 1, 1, 2, 2, 3])):
            title += f" | {mutate(rng, rng.choice(files), known)}"
        texts = [
            yaml.dump(file, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass") for file in files
        ]
        if rng.random() < 0.15:
            at = rng.randrange(len(texts))
            texts[at] = mutate_text(rng, as_yaml(files[at]))
            title += " | text"
        yield title, writer(command, texts)


def as_yaml(recipe: Any) -> str:
    return yaml.dump(recipe, allow_unicode=True, sort_keys=False)


def writer(command: str, texts: list[bytes]) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        arguments = [command]
        for number, text in enumerate(texts):
            (folder / f"{number}.yaml").write_bytes(text)
            arguments += ["--config", f"{number}.yaml"]
        return arguments

    return write


def preload() -> None:
    """Import the modules of all commands once, and what runs build."""
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import deepspeed  # noqa: F401
    import preloading  # noqa: F401

    import lit_ft.commands.check
    import lit_ft.commands.export
    import lit_ft.commands.plan
    import lit_ft.commands.report  # noqa: F401


def make_inputs(folder: Path) -> tuple[str, str]:
    """A tiny model and six rows; returns their paths."""
    from shared_fixtures import make_model, make_rows

    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.json"
    rows.write_text(json.dumps(make_rows(6), ensure_ascii=False), encoding="utf-8")
    return make_model(folder / "nano-qwen2"), str(rows)


def main() -> None:
    def every(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
        model, rows = make_inputs(folder)
        return cases(count, seed, model, rows)

    preload()
    main_loop(__doc__, "recipes", 2000, every)


if __name__ == "__main__":
    main()

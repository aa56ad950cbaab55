"""Errors of jsonargparse in one line: what was typed, what is expected, and what to write instead."""

import inspect
import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import requires
from pathlib import Path
from textwrap import dedent

from jsonargparse import ArgumentParser

from lit_ft.data.text.sources import SUFFIXES, Source
from lit_ft.errors import RecipeError
from lit_ft.internals.jsonargparse import option_names, positional_names
from lit_ft.recipe import allowed_code
from lit_ft.recipe.other_trainers import CLASSES, EXAMPLES, OPTIONS
from lit_ft.recipe.value_errors import no_number, reasons, shortened

SECTIONS = ("data", "model")
"""Keys of a recipe whose default class is lit_ft's."""


def unwrap_class_error(error: Exception) -> RecipeError:
    """Extract the error of a recipe's class from the exceptions that jsonargparse wraps around it."""
    if isinstance(error, RecipeError):
        return error
    if not isinstance(error, ValueError):  # the text of a KeyError, for example, is only a key
        reason = f"{type(error).__name__}: {error}"
        return RecipeError(f"a class of the recipe cannot be built: {reason}; fix its init_args")
    cause: BaseException = error
    while cause.__cause__ is not None and _UNION.match(str(cause)) and _reason_of_class(str(cause)) is None:
        cause = cause.__cause__
    if isinstance(cause, RecipeError):
        return cause
    reason = _reason_of_class(str(cause)) or str(cause)
    return RecipeError(reason + next((fix for part, fix in _FIXES.items() if part in reason), ""))


_FIXES = {"No quantity for top_k to track": " To keep the newest ones, set monitor: step and mode: max"}
"""What to write, by a part of a library's message that does not say it."""


_UNION = re.compile("Does not validate against any of the Union subtypes")
_NO_CLASS = ("Expected a", "Not a valid subclass")
_IN_CLASS = re.compile(r"Problem with given class_path '[\w.]*?(\w+)':\s*(?=\S)")


def _reason_of_class(message: str) -> str | None:
    """Reason that a class gave, in a jsonargparse message, which nests reasons by their indentation; None without one.

    Of an option of several types (e.g. a strategy's name or its class) jsonargparse lists a reason for each type.
    """
    first, _, rest = message.strip().partition("\n")
    message = f"{first}\n{dedent(rest)}"
    if _UNION.match(message):
        parts = re.split(r"^  - ", message.partition("\nGiven value type")[0], flags=re.MULTILINE)[1:]
        reasons_of_parts = [_reason_of_class(reason) for reason in parts if not reason.startswith(_NO_CLASS)]
        return reasons_of_parts[-1] if reasons_of_parts else None
    if (head := _IN_CLASS.match(message)) is not None:
        return f"{head[1]}: {_reason_of_class(message[head.end() :])}"
    missing = re.match(r"No module named '([\w.]+)'", first)
    return _how_to_install(missing[1]) if missing is not None else first or None


def explain(message: str, parser: ArgumentParser, classes: Iterable[type]) -> str:
    """Shorten a jsonargparse message to one line that says what to write instead.

    Args:
        message: message of jsonargparse, several lines long where it tried several types.
        parser: parser of the command line, or of the class that the message is about.
        classes: default classes of the recipe, whose options an unknown name is compared with.
    """
    if (line := _of_command_line(message, parser)) is not None:
        return line
    key = ".".join(re.findall(r'Parser key "([\w.]+)"', message))
    key = re.sub(r"^(\w+)\.\1$", r"\1", key)  # a section that cannot be read is named twice
    head = f"{key}: " if key else ""
    if (unknown := _UNKNOWN.search(message)) is not None:
        name = next(group for group in unknown.groups() if group)
        options, without_dashes = _options(message, parser, classes), set(positional_names(parser))
        own = [option for option in option_names(parser) if option not in without_dashes]
        return _unknown_option(name, key, message, parser.prog or "", own, options)
    for reason in _REASONS_OF_VALUES:
        if (text := reason(message, key)) is not None:
            return head + text
    text = reasons(re.sub(r'Parser key "[\w.]+":', "\n", message))
    return f"{key}.{text}" if key and re.match(r"[\w.]+: ", text) else head + text


# --- the command line ----------------------------------------------------------------------------


def _of_command_line(message: str, parser: ArgumentParser) -> str | None:
    """Explanation of a command line that argparse cannot split into options and values; None for other messages."""
    if (without := re.match(r"argument (?:-\w/)?(--[\w.]+): expected one argument", message)) is not None:
        classes = EXAMPLES.get(without[1].removeprefix("--").removesuffix(".help")) if ".help" in without[1] else None
        value = "recipes/qwen.yaml" if without[1] == "--config" else classes[0] if classes else ""
        example = f", e.g. {without[1]} {value}" if value else ""
        return f"{without[1]} has no value behind it; add one{example}"
    if (absent := re.search(r'Parser key "config": File does not exist: \'(.*)\'', message)) is not None:
        return f"--config {absent[1]}: there is no such file{_near_file(Path(absent[1]))}"
    if (folder := re.search(r'Parser key "config": Path is not a file: \'(.*)\'', message)) is not None:
        return f"--config {folder[1]}: is no file; name a recipe in it, e.g. recipes/qwen.yaml"
    if (word := re.search(r"argument --(\w+)/--no_\w+: invalid _boolean_type value: '(.*)'", message)) is not None:
        return f"{word[1]}={shortened(word[2], 100)!r} is neither true nor false"
    if (word := re.match(r"Value not boolean: (.*?)\.?$", message)) is not None:  # of the one option without a type
        return f"merge={shortened(word[1], 100)!r} is neither true nor false"
    if (alone := re.match(r"unrecognized arguments: ([^-\s]\S*)", message)) is not None:
        return _of_a_word(shortened(alone[1], 100), set(option_names(parser)) - set(positional_names(parser)))
    if (needed := re.search(r"following arguments are required: ([\w., ]+)", message)) is not None:
        return _missing([name.rpartition(".")[2] for name in needed[1].split(", ")], parser)
    return None


def _of_a_word(value: str, own: set[str]) -> str:
    """Explanation of a word that stands where an option is expected; ``own`` are the command's options."""
    if (dashes := re.match("[\u2012-\u2015-]*", value)) and dashes[0]:
        return f"{value!r} begins with another dash; write --{value[dashes.end() :]}"
    if value.endswith((".yaml", ".yml")):
        return f"{value!r} stands alone; write --config {value}"
    if value == "help" or re.match(r"[\w.+]+=", value):
        return f"{value!r} has no dashes; write --{value}"
    if value.endswith(SUFFIXES) and "path" in own:
        return f"{value!r} belongs to no option; name data with --path {value}"
    if value.endswith(SUFFIXES):
        several = f"of several files write --data.sources '[{{path: {value}}}, ...]'"
        return f"{value!r} belongs to no option; name data with --data.path {value}; {several}"
    return f"{value!r} belongs to no option; write --OPTION {value}"


def _near_file(path: Path) -> str:
    if re.search(r"\.ya?ml,", path.name):
        return "; give each file a --config of its own"
    folder = path.parent
    names = [file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml")] if folder.is_dir() else []
    near = get_close_matches(path.name, names, n=1)
    return f"; did you mean {folder / near[0]}?" if near else "; name a recipe, e.g. recipes/qwen.yaml"


def _missing(names: list[str], parser: ArgumentParser) -> str:
    if set(names) <= set(SECTIONS):
        sections = " and ".join(sorted(names))
        return f"{sections}: the recipe names the section without options; give them, or leave the name out"
    if names == ["pretrained"]:
        return "pretrained: is missing; name a recipe with --config FILE, or a model's folder or hub id"
    if not (parser.prog or "").startswith("python -m lit_ft "):  # of a class
        return f"{names[0]}: is missing; give it a value"
    positional = positional_names(parser)
    shown = [name.upper() if name in positional else f"--{name}" for name in names]
    words = f"{', '.join(shown[:-1])} and {shown[-1]} are" if len(shown) > 1 else f"{shown[0]} is"
    return f"{words} missing; see {parser.prog} --help"


# --- unknown options -----------------------------------------------------------------------------

_UNKNOWN = re.compile(
    r"unrecognized arguments: --([\w.:-]+)|Option '([\w.:-]+)' is not accepted|[Kk]ey '([\w.]+)' is not expected"
    r"|does not accept option '([\w.+-]+)'"
)


def _unknown_option(name: str, key: str, message: str, prog: str, own: list[str], options: list[str]) -> str:
    """Explanation of an option that there is not, with the nearest one, or the one that is another trainer's.

    Args:
        name: the option.
        key: option of the class whose option it would be; empty for the command line.
        message: message of jsonargparse.
        prog: name of the parser's command.
        own: options of the parser.
        options: options to compare with: those of the parser and of classes.
    """
    head = f"{key}: " if key else ""
    # The full name, or its first section: `optimiser.class_path` is a misspelled `optimizer`.
    section, _, word = name.rpartition(".")
    # Sections of other trainers too, e.g. `train.epochs`.
    is_elsewhere = section in ("", "model", "data", "trainer") or section.split(".")[0] not in _sections(own)
    ours = OPTIONS.get(word) if is_elsewhere else None
    part = (ours or "").rpartition(".")[0]
    is_recipe = _IN_RECIPES in own
    own_command = prog.startswith("python -m lit_ft ") and not is_recipe
    if ours == f"{part}.{name}" and part in EXAMPLES and not is_recipe:
        return _needs_class(name, part)
    if not is_recipe and (section_of_base := _section_of_base(own)) is not None:
        return _needs_class(name, section_of_base)
    if name == "run" and prog.split()[-1:] in (["predict"], ["test"], ["validate"]):
        return "unknown option 'run'; write --config RUN/config.yaml --ckpt_path last"
    if ours is not None:
        return f"{head}unknown option {shortened(name, 100)!r}; {_in_its_place(ours, 'here it is')}"
    dotted = re.sub("[:-]", lambda sign: "." if sign[0] == ":" else "_", name)
    first = dotted.split(".")[0]
    if is_recipe and name in own:
        return f"{name!r} is no option of a section; write it at the left edge of the recipe"
    if is_recipe and (home := home_of(first)) is not None:
        return f"unknown option {shortened(name, 100)!r}; it belongs to {home}: {home}.{dotted}"
    is_below = first != word and first not in _sections(own)  # `objective.beta` of a CausalLM, which has no objective
    elsewhere = None if own_command else (_place_of(first) if is_below else None) or _place_of(word)
    if elsewhere is not None and key in ("", *SECTIONS):
        return f"{head}unknown option {shortened(name, 100)!r}; {elsewhere}"
    near = [option for option in options if option.startswith(dotted)]  # an abbreviation
    near += [word] if own_command and word in own else []  # data.path
    near += [near for part in (dotted, first) for near in get_close_matches(part, options, cutoff=0.7)]
    # In a file, the trainer's options are named without their section.
    of_trainer = [option.removeprefix("trainer.") for option in options if option.startswith("trainer.")]
    near += [f"trainer.{near}" for near in get_close_matches(dotted, of_trainer, cutoff=0.7)]
    own = [option for option in own if not option.endswith("help")]
    advice = "see --help for what there is"
    if near:
        advice = f"did you mean {near[0]!r}?"
    elif elsewhere is not None:
        advice = elsewhere
    elif 0 < len(own) <= _MOST_LISTED and not message.startswith("unrecognized"):
        advice = f"there are {', '.join(own)}"
    return f"{head}unknown option {shortened(name, 100)!r}; {advice}"


_IN_RECIPES = "trainer.max_epochs"
"""Option that the parser of a recipe has, and the parser of a class in it has not."""
_MOST_LISTED = 20
"""Number of options of a class up to which they are all named."""


def _sections(options: list[str]) -> set[str]:
    return {name.split(".")[0] for name in options}


def home_of(option: str) -> str | None:
    """Section of a recipe whose usual class has an option of this name; None where none has."""
    from lightning.pytorch import Trainer
    from peft import LoraConfig

    from lit_ft.data.text_data import TextDataModule
    from lit_ft.training.causal_lm import CausalLM

    homes = {"trainer": Trainer, "data": TextDataModule, "model": CausalLM, "model.peft": LoraConfig}
    return next((home for home, cls in homes.items() if option in inspect.signature(cls).parameters), None)


def _place_of(option: str) -> str | None:
    """Where a recipe has an option of this name: in another section, or in a class below one; None where nowhere."""
    if (home := home_of(option)) is not None:
        return f"it belongs to {home}: {home}.{option}"
    if option in inspect.signature(Source).parameters:
        return f"it is an option of each source: data.sources: [{{path: ..., {option}: ...}}]"
    classes = ((key, class_with(option, key)) for key in _CLASSES_BELOW)
    return next((f"it is an option of {found}, a class for {key}" for key, found in classes if found), None)


def class_with(option: str, key: str) -> str | None:
    """First of the classes for ``key`` that has an option of this name; None where none has."""
    for module, _, name in (class_path.rpartition(".") for class_path in _CLASSES_BELOW.get(key, ())):
        if option in options_of_class(getattr(import_module(module), name)):
            return f"{module}.{name}"
    return None


def options_of_class(cls: type) -> set[str]:
    """Names of a class's options, with those of the bases to which it hands on what it does not name."""
    names: set[str] = set()
    for base in cls.__mro__:
        parameters = inspect.signature(base).parameters
        names |= parameters.keys()
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return names


_CLASSES_BELOW = {
    "optimizer": ("torch.optim.AdamW",),
    "lr_scheduler": ("lit_ft.schedules.CosineWithWarmup",),
    "trainer.callbacks": (
        "lightning.pytorch.callbacks.EarlyStopping",
        "lightning.pytorch.callbacks.ModelCheckpoint",
        "lit_ft.ExactMatch",
    ),
    "trainer.strategy": (
        "lit_ft.strategies.FSDPStrategy",
        "lit_ft.strategies.ModelParallelStrategy",
        "lit_ft.strategies.DeepSpeedStrategy",
    ),
    "model.quantization": ("transformers.BitsAndBytesConfig",),
    "model": (
        "lit_ft.PreferenceLM",
        "lit_ft.RewardLM",
        "lit_ft.PolicyLM",
        "lit_ft.DistillationLM",
        "lit_ft.OnPolicyDistillationLM",
    ),
    "model.algorithm": ("lit_ft.GRPO",),
    "model.objective": ("lit_ft.DPO", "lit_ft.IPO", "lit_ft.SimPO", "lit_ft.KTO"),
    "model.divergence": ("lit_ft.ForwardKL", "lit_ft.JensenShannon"),
    "model.rewards": ("lit_ft.Matches", "lit_ft.OverlongPenalty", "lit_ft.RewardModel"),
    "model.token_weights": ("lit_ft.DFT",),
}
"""Classes whose options are looked for where an option is unknown, by the option that takes the class."""


def _section_of_base(options: list[str]) -> str | None:
    """Section whose base class has these options: jsonargparse takes it where a recipe names no class."""
    from peft import PeftConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

    bases = {"model.peft": PeftConfig, "model.quantization": QuantizationConfigMixin}
    own = {name for name in options if name != "help"}
    return next((key for key, cls in bases.items() if own == set(inspect.signature(cls).parameters)), None)


def _needs_class(option: str, part: str) -> str:
    named, key = class_with(option, part) or EXAMPLES[part][0], part.rpartition(".")[2]
    of_recipe = f"in a recipe {key}: {{class_path: {named}, init_args: {{{option}: ...}}}}"
    return f"{option} is an option of a class, and none is named before it; write --{part} {named}, {of_recipe}"


def _options(message: str, parser: ArgumentParser, classes: Iterable[type]) -> list[str]:
    """Names of the options that an unknown name is compared with: of a recipe, those of its default classes too."""
    without_dashes = set(positional_names(parser))
    options = [name for name in option_names(parser) if not name.endswith("help") and name not in without_dashes]
    compared = list(classes) if _IN_RECIPES in options else []
    for class_path in re.findall(r"class_path '([\w.]+)'", message):
        module, _, name = class_path.rpartition(".")
        if allowed_code.is_allowed(module, [*allowed_code.PACKAGES, *allowed_code.allowed_by_user()]):
            compared.append(getattr(import_module(module), name))
    return options + [name for cls in compared for name in inspect.signature(cls).parameters]


# --- values --------------------------------------------------------------------------------------


def _section_as_value(message: str, key: str) -> str | None:
    """A file, a model or a list as the value of ``data`` or ``model``, whose options a recipe gives by name."""
    given = re.search(r"Given value type: <class '(str|list|int|float|bool)'>\s+Given value: (.*)", message)
    if key not in SECTIONS or given is None or re.fullmatch(r"([A-Za-z_]\w*\.)*[A-Z]\w*", given[2]):  # a class
        return None
    option = {"data": "path", "model": "pretrained"}[key]
    value = shortened(given[2], 100)
    if key == "data" and given[1] == "list":
        return f"{value} is a list; of several files write data: {{sources: [{{path: ...}}, {{path: ...}}]}}"
    return f"{value} is no mapping; give options by name: {key}: {{{option}: {value if given[1] == 'str' else '...'}}}"


def _no_section(message: str, key: str) -> str | None:
    """A text as the value of ``trainer``, which jsonargparse takes for the name of a file of options."""
    given = re.search(r"Unable to load config ['\"](.*?)['\"]", message)
    if key != "trainer" or given is None:
        return None
    return f"{shortened(given[1], 100)!r} is no mapping; give options by name, e.g. trainer: {{max_epochs: 1}}"


def _option_without_class(message: str, key: str) -> str | None:
    """An option of a class where the recipe names no class: jsonargparse then tries to build the type itself."""
    if key not in EXAMPLES:
        return None
    is_no_class = "class_path='typing.Union'" in message or "Expected a dot import path string" in message
    if is_no_class and (option := re.search(r"NestedArg\(key='(?!class_path)(?:init_args\.)?(\w+)'", message)):
        return _needs_class(option[1], key)
    given = re.search(r"Given value: \{'(\w+)'", message)
    is_type = "Importing 'typing.Union' is not allowed" in message
    return _needs_class(given[1], key) if is_type and given is not None else None


def _abstract_without_class(message: str, key: str) -> str | None:
    """Options of an objective or a divergence where the recipe names none: the class of the option is abstract."""
    refused = "(Expected an instantiatable class|Not a valid subclass of (Objective|Divergence))"
    if (part := re.search(f"(objective|divergence): {refused}", message)) is None:
        return None
    option = re.search(rf"'{part[1]}(?:\.|': \{{|', val=\{{)'?(?:init_args(?:\.|': \{{'))?(\w+)'", message)
    return _needs_class(option[1], f"model.{part[1]}") if option else None


def _no_class(message: str, key: str) -> str | None:
    """A switch, a number or a list where a class belongs."""
    given = re.search(r"Given value type: <class '(int|float|bool|list)'>\s+Given value: (.*)", message)
    takes_lists = re.search(r"Subtypes: .*(\[list\[|Iterable\[lightning)", message) is not None
    if key not in EXAMPLES or given is None or (given[1] == "list" and takes_lists):
        return None
    value = given[2].lower() if given[1] == "bool" else shortened(given[2], 100)
    return f"{value} names no class; write e.g. {EXAMPLES[key][0]}, or null for none"


def _class_of_another_kind(message: str, key: str) -> str | None:
    """A class that is none of those that the option takes, or that lacks a method of them."""
    if key not in (takes := {**EXAMPLES, **_EXAMPLES_OF_SECTIONS}):
        return None
    example, modules = takes[key]
    # Options of an objective or a divergence without its class are explained above, from the message about the model.
    unnamed = re.search(r"instantiatable class, but [\w.]*\.(?!Objective|Divergence)(\w+) is abstract", message)
    if unnamed is not None:
        return (
            f"no class is named, and {unnamed[1]} is abstract; write class_path, e.g. {example}, and options in "
            "init_args"
        )
    if (given := _GIVEN_CLASS.search(message)) is None:
        return None
    name, bases = given[1] or given[2] or given[3], re.findall(_BASE, message)
    if bases:
        kinds = [kind for base in bases for kind in re.sub(r"Union\[|]| ", "", base).split(",")]
        return f"{name} is no {' or '.join(dict.fromkeys(kinds))}; {_of_the_kind(kinds, example, modules)}"
    if "Expected an instantiatable class, but is abstract" in message:
        return f"{name} lacks methods that its base class declares (@abstractmethod); define them, or take {example}"
    return None


_BASE = r"to (?:be )?a subclass of (?:<class ')?(Union\[.*?\]|\w+)"
_GIVEN_CLASS = re.compile(
    r"Import path ([\w.]+\.\w+) does not correspond|Expected '([\w.]+\.\w+)' to be a subclass"
    r"|Given value: ([A-Za-z_][\w.]*\.\w+)$",
    re.MULTILINE,
)
"""A class in messages about the class that an option needs, which is that of ``_BASE``."""
_EXAMPLES_OF_SECTIONS = {
    "data": ("lit_ft.TextDataModule", ("lit_ft",)),
    "model": ("lit_ft.CausalLM", ("lit_ft",)),
    "trainer.plugins": ("lightning.pytorch.plugins.MixedPrecision", ()),
}
"""The same as ``EXAMPLES`` of options that a recipe seldom names a class for."""


def _of_the_kind(kinds: Iterable[str], example: str, modules: Iterable[str]) -> str:
    """Advice to take a class that derives from one of some bases, with those of lit_ft.

    Args:
        kinds: names of the bases.
        example: one of the classes.
        modules: modules that have others.
    """
    home, _, name = example.rpartition(".")
    bases = tuple(base for base in getattr(import_module(home), name).__mro__ if base.__name__ in kinds)
    # Not of other libraries: they have many, and transformers would import all its models.
    names = [(module, name) for module in modules if module.startswith("lit_ft") for name in dir(import_module(module))]
    classes = {f"{module}.{name}": getattr(import_module(module), name) for module, name in names if name[0].isupper()}
    found = {path: one for path, one in classes.items() if isinstance(one, type) and issubclass(one, bases)}
    usable = sorted(path for path, one in found.items() if not inspect.isabstract(one))
    if len(usable) > 1:
        return f"take {', '.join(usable[:-1])} or {usable[-1]}, or another class that derives from it"
    return f"name a class that derives from it, e.g. {example}"


def _function_as_class(message: str, key: str) -> str | None:
    """A function of a library where a class belongs: jsonargparse asks for the arguments that Lightning would pass."""
    given = r"Given value: (?:(?:\{'class_path': |Namespace\(class_path=)')?(?:[a-z_]\w*\.)+([a-z]\w*)(?![\w.])"
    named = re.search(given, message)
    is_asked_for = " is missing" in message or "to be a function that returns" in message
    if key not in EXAMPLES or named is None or not is_asked_for:
        return None
    return f"{named[1]!r} is a function, and a class is needed, e.g. {EXAMPLES[key][0]}"


def _texts_as_sources(message: str, key: str) -> str | None:
    first = re.search(r"Given value: (?:\[['\"](.{1,100}?)['\"]|([^\[{\s].{1,100})$)", message)
    if first is None or not key.endswith(("sources", "path")):
        return None
    name = first[1] or first[2]
    if key.endswith("sources"):
        return f"{name!r} is no source; each is a mapping, e.g. [{{path: {name}}}]"
    if key.endswith("path") and first[1] is not None:
        return f"a list is given; of several files write data.sources: [{{path: {name}}}, ...]"
    return None


def _refused_code(message: str, key: str) -> str | None:
    denied = re.search(r"Importing '([\w.]+)' is not allowed", message)
    return None if denied is None else str(allowed_code.refusal(denied[1]))


def _absent_module(message: str, key: str) -> str | None:
    missing = re.search(r"No module named '([\w.]+)'", message)
    return None if missing is None else _how_to_install(missing[1])


def _several_classes(message: str, key: str) -> str | None:
    several = re.search(r"Multiple subclasses with name (\w+)\. .*ambiguity: (.*?)\.?$", message, re.MULTILINE)
    return f"several classes are called {several[1]}; write {several[2].replace(', ', ' or ')}" if several else None


def _short_name(message: str, key: str) -> str | None:
    short = re.search(r"Expected a dot import path string: ([^\s.]+)", message)
    if short is None:
        return None
    if re.search(r"Expected a <class '(float|int)'>", message):  # PyTorch allows tensors as learning rates
        return no_number(short[1], whole=False)
    ours = CLASSES.get(short[1].lower())
    if short[1].lower() in ("none", "no", "off", "false"):
        return f"{short[1]!r} is no class path; for none write null"
    example, modules = EXAMPLES.get(key, ("torch.optim.AdamW", ()))
    of_module = {name: module for module in modules for name in dir(import_module(module)) if name[0].isupper()}
    near = [f"{of_module[name]}.{name}" for name in get_close_matches(short[1], of_module, n=1, cutoff=0.7)]
    otherwise = f"the module and the class, e.g. {example}"
    advice = _in_its_place(ours or next(iter(near), otherwise), "write")
    return f"{shortened(short[1], 100)!r} is no class path; {advice}"


def _absent_class(message: str, key: str) -> str | None:
    absent = re.search(r"module '?([\w.]+)'? has no attribute '?(\w+)", message)
    if absent is None:
        return None
    near = get_close_matches(absent[2], dir(import_module(absent[1])), n=1)
    advice = f"did you mean {absent[1]}.{near[0]}?" if near else "fix the class_path"
    if (ours := CLASSES.get(absent[2].lower())) is not None:
        advice = _in_its_place(ours, "write")
    return f"there is no {absent[1]}.{shortened(absent[2], 100)}; {advice}"


def _in_its_place(ours: str, verb: str) -> str:
    """Advice to write what stands for another trainer's word, or to leave the word out where nothing does."""
    return ours.replace("nothing", "leave it out", 1) if ours.startswith("nothing") else f"{verb} {ours}"


def _text_as_mapping(message: str, key: str) -> str | None:
    text = re.search(r"Given value: (\{.*\})$", message, re.MULTILINE)
    if "Expected a <class 'dict'>" not in message or "Given value type: <class 'str'>" not in message or text is None:
        return None
    return f"{shortened(text[1], 100)!r} is one text; put a space after each colon, e.g. '{{instruction: question}}'"


_REASONS_OF_VALUES: tuple[Callable[[str, str], str | None], ...] = (
    _section_as_value,
    _no_section,
    _option_without_class,
    _abstract_without_class,
    _no_class,
    _class_of_another_kind,
    _function_as_class,
    _texts_as_sources,
    _refused_code,
    _absent_module,
    _several_classes,
    _short_name,
    _absent_class,
    _text_as_mapping,
)
"""Explanations of values by message and key, without the key; the first that knows the message is taken."""


def _how_to_install(module: str) -> str:
    """Advice for a class that needs a module that is not installed."""
    for requirement in requires("lit-ft") or []:
        extra = re.search(r"extra == .(\w+)", requirement)
        package = re.split(r"[^\w.-]", requirement)[0]
        if extra is not None and package.replace("-", "_") == module.split(".")[0]:
            return f"the package {package} is not installed; pip install -e '.[{extra[1]}]', or {package} alone"
    return f"no module {module!r} is installed; fix the class_path, or install the package that has it"

"""Recipe files, pipes and texts that the command line names, checked before they are parsed."""

import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import yaml
from jsonargparse import Namespace

from lit_ft.bounded_yaml import SAFE_LOADER, check_size
from lit_ft.errors import RecipeError
from lit_ft.recipe.other_trainers import OPTIONS
from lit_ft.recipe.parse_errors import class_with, home_of
from lit_ft.recipe.value_errors import shortened

OWN_SECTIONS = ("data", "lr_scheduler", "model", "optimizer", "trainer")
"""Keys of a recipe that hold options."""
_NEEDED_SECTIONS = ("data", "model", "trainer")
_QUOTED = ("'", '"', "|", ">")
_OF_A_CLASS = ("class_path", "init_args", "dict_kwargs")
_THEIR_CLASSES = {"_component_", "_target_"}
"""What torchtune and Hydra write for ``class_path``."""
_OBJECTIVES = {"dpo", "ipo", "kto", "orpo", "simpo"}
"""Objectives of preference tuning, each with a recipe of its name in ``recipes/preference``."""
_ALGORITHMS = {"dapo": "lit_ft.DAPO", "dr_grpo": "lit_ft.DrGRPO", "grpo": "lit_ft.GRPO", "rloo": "lit_ft.RLOO"}
"""Algorithms of policy optimization."""
_NOT_HERE = {"cpo", "ebft", "gdpo", "ppo", "rm"}
"""What ``stage`` of LLaMA-Factory, ``rl`` of Axolotl and ``rlhf_type`` of ms-swift call training that is not here."""
_LISTS_OF_CLASSES = ("callbacks", "callbacks+", "logger", "logger+", "plugins", "plugins+")
_FILES_OF_MODELS = {
    "peft_type": "the config of an adapter, no recipe; name a recipe, or talk to the adapter: python -m lit_ft chat",
    "tokenizer_class": "the config of a tokenizer, no recipe; name the folder of its model: --model.pretrained",
    "architectures": "the config of a model, no recipe; name its folder: --model.pretrained",
    "model_type": "the config of a model, no recipe; name its folder: --model.pretrained",
}
"""By a key of a file that lies in the folder of a model: what the file is; the folder follows."""


def read_once(arguments: Sequence[str]) -> str | None:
    """Value of ``--config`` that one process can read once, a pipe or ``-`` for the standard input; None without."""
    return next((name for _, name in _given(arguments) if name == "-" or _is_pipe(name)), None)


def read_pipes(arguments: Sequence[str]) -> list[str]:
    """Command line with the text of each pipe of ``--config`` in place of its name; the text is checked as a file is.

    Raises:
        RecipeError: as for ``check_files``.
    """
    read = list(arguments)
    for number, name in _given(arguments):
        if _is_pipe(name):
            _refuse_other_ranks(name, "a pipe")
            with _explained(name):
                text = Path(name).read_text(encoding="utf-8")
            _check_yaml(Path(name), text)
            read[number] = read[number].removesuffix(name) + text
    return read


def check_files(arguments: Sequence[str]) -> None:
    """Refuse files and texts of ``--config`` that are no recipes, and values of options that have a key twice.

    Raises:
        RecipeError: a file is not readable, not UTF-8, not YAML, not a mapping, or has a key twice; the message names
            the file and the line.
    """
    for _, name in _given(arguments):
        with _explained(name):
            if name == "-":
                _check_yaml(Path("standard input"), _standard_input())
            elif isinstance(_composed(name), yaml.MappingNode) and not os.path.isfile(name):
                _check_yaml(Path(_TEXT), name)
            elif "\x00" not in name and Path(name).is_file():
                _check_yaml(Path(name), Path(name).read_text(encoding="utf-8"))
    for option, value in pairwise([*arguments, ""]):
        name, joined, text = option.partition("=")
        if (within := re.match(rf"--model\.(init_args\.)?({'|'.join(_OF_THE_TOP_LEVEL)})(?=\.|$)", name)) is not None:
            raise RecipeError(f"{name} would have no effect: write --{within[2]}{name[within.end() :]}")
        given = text if joined else value
        if name.startswith("--") and given.startswith(("{", "[")):
            for key, _, _ in _repeated_keys(_composed(given), set()):
                raise RecipeError(f"{name}: {key!r} stands twice in its value; keep one")


_TEXT = "--config TEXT"
"""Name of a recipe that is given as a text in place of a file's name."""


def _given(arguments: Sequence[str]) -> list[tuple[int, str]]:
    """Values of ``--config``, each with the number of its argument."""
    given = [(number, b) for number, (a, b) in enumerate(pairwise(arguments), 1) if a in ("--config", "-c")]
    joined = [(n, one.split("=", 1)[1]) for n, one in enumerate(arguments) if one.startswith(("--config=", "-c="))]
    return given + joined


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Explain why a file cannot be read."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"--config {name}: is not UTF-8 (byte {error.start}); save the recipe as UTF-8 text"
        ) from error
    except OSError as error:
        raise RecipeError(f"--config {name}: cannot be read ({error.strerror}); name another file") from error


def _composed(text: str) -> yaml.Node | None:
    """Nodes of a YAML text; None where it is no YAML."""
    check_size(text)
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=SAFE_LOADER)
    except yaml.YAMLError:
        return None
    return node


def _is_pipe(name: str) -> bool:
    """Whether a value of ``--config`` names a pipe, as a shell's ``<(command)`` does."""
    return name.startswith(("/dev/fd/", "/proc/self/fd/")) or (os.path.exists(name) and Path(name).is_fifo())


def _refuse_other_ranks(name: str, what: str) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise RecipeError(f"--config {name}: only the first process of a run gets {what}; write the recipe to a file")


def _standard_input() -> str:
    """Text of the standard input, which the parser can read once more."""
    _refuse_other_ranks("-", "the standard input")
    text = sys.stdin.read().encode(errors="surrogateescape").decode("utf-8")
    sys.stdin = io.StringIO(text)
    return text


def expand_home(value: object) -> object:
    """Value of a recipe with ``~`` expanded at the start of its strings, at any depth; namespaces change in place.

    A shell expands it only where a word begins: not in a recipe, and not after ``--run_dir=``.
    """
    if isinstance(value, str):
        return os.path.expanduser(value)
    if isinstance(value, Namespace):
        for name, inner in vars(value).items():
            setattr(value, name, expand_home(inner))
    elif isinstance(value, dict):
        return {name: expand_home(inner) for name, inner in value.items()}
    elif isinstance(value, list):
        return [expand_home(inner) for inner in value]
    return value


# --- YAML ----------------------------------------------------------------------------------------


def _check_yaml(path: Path, text: str) -> None:
    """Refuse a file that is no recipe.

    Args:
        path: the file, for messages.
        text: its content.

    Raises:
        RecipeError: it is no YAML, no mapping, a file of something else, has a key twice, or a key or a text that would
            not be read as it is meant.
    """
    check_size(text)
    try:
        root = yaml.compose(text, Loader=SAFE_LOADER)
    except yaml.YAMLError as error:
        if path.suffix == ".toml":
            names = re.findall(r"^(\w+)\s*=", text, re.MULTILINE)
            raise _of_other_trainer(path, [name for name in names if name in OPTIONS]) from error
        raise _no_yaml(path, text, error) from error
    if root is None:
        raise RecipeError(f"{path}: is empty; a recipe names at least a model and data, as recipes/qwen.yaml does")
    if not isinstance(root, yaml.MappingNode):
        what = "a list" if isinstance(root, yaml.SequenceNode) else "one value"
        example = (
            f"name data with --data.path {path}"
            if path.suffix in (".json", ".jsonl")
            else "e.g. data: {path: rows.json}"
        )
        raise RecipeError(f"{path}: holds {what}; a recipe is a mapping, {example}")
    _refuse_other_files(path, _entries(root))
    for line, message in _odd_spaces(root):
        raise RecipeError(f"{path}:{line}: {message}")
    for key, value in _entries(root).items():
        if key in _NEEDED_SECTIONS and value.tag.endswith(":null"):
            line = value.start_mark.line + 1
            raise RecipeError(f"{path}:{line}: {key} is named without options; give them, or leave the name out")
    if all(isinstance(one, yaml.ScalarNode) and one.value == "" and not one.style for one in _entries(root).values()):
        # jsonargparse would take such a file for a text.
        raise RecipeError(
            f"{path}: gives no value; write null for none, e.g. {next(iter(_entries(root)), 'merge')}: null"
        )
    for key, first, line in _repeated_keys(root, set()):
        raise RecipeError(
            f"{path}:{line}: {key!r} stands in line {first} already, and the later one would replace all of the first; "
            "put both together"
        )
    for line, message in (*_misplaced(root, "", set()), *_of_the_top_level(root)):
        raise RecipeError(f"{path}:{line}: {message}")
    try:
        yaml.load(text, Loader=SAFE_LOADER)
    except yaml.constructor.ConstructorError as error:
        raise _no_yaml(path, text, error) from error


def _no_yaml(path: Path, text: str, error: yaml.YAMLError) -> RecipeError:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    reason = (error.problem if isinstance(error, yaml.MarkedYAMLError) else None) or str(error)
    line = mark.line if mark is not None else 0
    advice = "correct it there, or in the line before"
    lines = text.split("\n")
    if path.suffix in (".jsonl", ".csv", ".tsv"):
        advice = f"a recipe is YAML; name data with --data.path {path}"
    elif any(_WIDE_COLON.match(one.lstrip(" -")) for one in lines[max(line - 1, 0) : line + 1]):
        advice = _NO_WIDE_COLON
    elif "\t" in lines[min(line, text.count("\n"))]:
        advice = "indent with spaces, not with a tab"
    elif "constructor for the tag" in reason:
        advice = "put a text that begins with ! in quotes, and take out other tags"
    elif "another document" in reason:
        advice = "a recipe is one document; take out the line ---"
    elif "escape" in reason:
        advice = "in double quotes a backslash begins an escape; use single quotes"
    elif "undefined alias" in reason or "alphabetic or numeric" in reason:
        advice = "put a text that begins with * in quotes"
    return RecipeError(f"{path}:{line + 1}: is no YAML ({reason}); {advice}")


def _entries(node: yaml.Node) -> dict[str, yaml.Node]:
    """Values of a mapping by key; empty for other nodes, and without keys that are no scalars."""
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {key.value: value for key, value in node.value if isinstance(key, yaml.ScalarNode)}


# --- files of something else ---------------------------------------------------------------------


def _refuse_other_files(path: Path, entries: dict[str, yaml.Node]) -> None:
    if "zero_optimization" in entries:
        raise RecipeError(
            f"--config {path}: is DeepSpeed's configuration, no recipe; it is an option of the strategy: "
            f"--trainer.strategy lit_ft.strategies.DeepSpeedStrategy --trainer.strategy.config {path}"
        )
    sections = {key: _entries(value) for key, value in entries.items() if isinstance(value, yaml.MappingNode)}
    has_their_classes = any(not _THEIR_CLASSES.isdisjoint(options) for options in sections.values())
    theirs = [key for key in entries if key in OPTIONS and key not in _OF_PREDICT]
    has_only_theirs = len(theirs) == len(entries) > 0
    for section, options in sections.items():
        theirs += [key for key in options if OPTIONS.get(key, own := f"{section}.{key}").split()[0] != own]
    if has_only_theirs or has_their_classes or len(theirs) >= 3:
        every = {key: value for part in (*sections.values(), entries) for key, value in part.items()}  # Axolotl's trl
        meant, beyond = _tuning_by_answers(every)
        unknown = [key for key in entries if key not in {*OPTIONS, *meant, *sections, *OWN_SECTIONS}]
        theirs += [key for key in entries if key in _OF_PREDICT]
        theirs += [key for key in every if key in meant.keys() - set(theirs)]
        if is_of_swift := isinstance(entries.get("model"), yaml.ScalarNode):
            theirs.append("model")
        if "model_author" in entries or (is_of_swift and "model_name" in entries):  # a name that the model says
            meant, beyond = {**meant, "model_name": "nothing"}, f"{beyond}; {_FILL_IN}"
        raise _of_other_trainer(path, theirs, unknown, meant, beyond)
    if set(OWN_SECTIONS) & sections.keys():
        return
    for key, what in _FILES_OF_MODELS.items():
        if key in entries and path.suffix == ".json":
            raise RecipeError(f"--config {path}: is {what} {path.parent}")
    sets = [_entries(value).get("file_name") for value in entries.values()]
    if named := [one.value for one in sets if isinstance(one, yaml.ScalarNode)]:
        raise RecipeError(
            f"--config {path}: is LLaMA-Factory's list of data sets, no recipe; name the file of one: "
            f"--data.path {path.parent / named[0]}"
        )


_OF_PREDICT = {"temperature", "top_k", "top_p"}
"""Options of other trainers that are options of the command predict too: no sign of another trainer."""


def _tuning_by_answers(entries: dict[str, yaml.Node]) -> tuple[dict[str, str], str]:
    """What another trainer's file asks for beside supervised training.

    Args:
        entries: keys of the file and of its sections.

    Returns:
        What options stand for in this training, in place of ``OPTIONS``, and what to say of it; empty for other files.
    """
    values = {key: value for key, node in entries.items() if (value := _first_value(node)) not in ("", "~", "null")}
    known = _OBJECTIVES | _ALGORITHMS.keys() | _NOT_HERE | {"gkd"}
    key = next((key for key in ("stage", "rl", "rlhf_type") if values.get(key) in known), None)
    asked = values[key] if key is not None else None
    if asked in _NOT_HERE:
        there_are = f"{_THERE_ARE_OBJECTIVES}, {_THERE_ARE_ALGORITHMS}"
        return {}, f"; there is no {key}: {asked} here, {there_are}; {_ADVICE}"
    # ms-swift calls it grpo where the teacher is the only reward.
    has_teacher = any(not entries[key].tag.endswith(":null") for key in _OF_DISTILLATION & entries.keys())
    if asked == "gkd" or (has_teacher and asked not in _OBJECTIVES and not _OF_REWARDS & values.keys()):
        return _distillation(values, entries.keys(), asked)
    # A file of TRL does not name its trainer.
    if asked in _ALGORITHMS or (asked is None and _OF_POLICIES & entries.keys()):
        name = next((name for name in ("advantage_estimator", "loss_type") if values.get(name, "grpo") != "grpo"), key)
        algorithm = values.get(name or "", "grpo")
        meant = _MEANT_BY_POLICIES
        if algorithm not in _ALGORITHMS:
            return meant, f"; there is no {name}: {algorithm} here, {_THERE_ARE_ALGORITHMS}; {_ADVICE}"
        other = f" --model.algorithm {_ALGORITHMS[algorithm]}" if algorithm != "grpo" else ""
        return meant, f"; for policy optimization add --config recipes/policy/grpo.yaml{other} (docs/policy.md)"
    meant = {"beta": "model.objective.beta", "label_smoothing": "model.objective.label_smoothing of lit_ft.DPO"}
    if key is None:
        return meant, ""
    # LLaMA-Factory has a stage for all objectives, Axolotl and ms-swift have one for DPO and IPO.
    loss = next((loss for loss in _NAMES_OF_LOSSES if values.get(loss, "sigmoid") != "sigmoid"), key)
    if values[loss] in _OBJECTIVES:
        recipe = f"recipes/preference/{values[loss]}.yaml"
        return meant, f"; for preference tuning add --config {recipe} (docs/preferences.md)"
    return meant, f"; there is no {loss}: {values[loss]} here, {_THERE_ARE_OBJECTIVES}; {_ADVICE}"


def _distillation(values: Mapping[str, str], keys: Set[str], asked: str | None) -> tuple[dict[str, str], str]:
    """What options of distillation stand for, and what to say of it.

    Args:
        values: scalars of the file and of its sections, by key.
        keys: all of their keys.
        asked: training that the file names, if it does.
    """
    meant = dict(_MEANT_BY_DISTILLATION)
    if asked in _ALGORITHMS:  # the teacher is a reward, and beta weighs the divergence from the base model
        meant["beta"] = "nothing"
    if "num_generations" in values:
        meant |= _MEANT_BY_ANSWERS
    if "lmbda" in values and asked is None:  # of TRL's GKDTrainer, which divides no logits of the loss
        del meant["temperature"]
    beta = None if asked in _ALGORITHMS else _number(values.get("beta", values.get("kd_beta")))
    divergence = {None: "", 0.0: " --model.divergence lit_ft.ForwardKL", 1.0: " --model.divergence lit_ft.ReverseKL"}
    between = f" --model.divergence lit_ft.JensenShannon --model.divergence.beta {beta}"
    recipe = "--config recipes/distillation/on_policy.yaml"
    if _OF_KNOWN_ANSWERS & keys or _number(values.get("lmbda")) == 0:
        meant["lmbda"] = "nothing"
        recipe = "--model lit_ft.DistillationLM --model.teacher NAME"
    return meant, f"; for distillation add {recipe}{divergence.get(beta, between)} (docs/distillation.md)"


def _number(text: str | None) -> float | None:
    """Value of a text that is a number; None for others, and without a text."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


_OF_KNOWN_ANSWERS = {"kd_alpha", "kd_loss", "kd_loss_fn", "kd_ratio", "kd_trainer"}
"""Options of Axolotl, torchtune and NeMo AutoModel, which train on the answers of the data."""
_OF_DISTILLATION = {
    *_OF_KNOWN_ANSWERS,
    *("lmbda", "teacher_model", "teacher_model_name_or_path", "teacher_model_server", "teacher_model_server_url"),
}
"""Options that only distillation has, unless there are rewards too."""
_OF_REWARDS = {"reward_funcs", "reward_model"}
_MEANT_BY_DISTILLATION = {
    "beta": "model.divergence",
    "kd_ratio": "model.kd_ratio",
    "num_generations": "model.answers_per_prompt",
    "temperature": "model.divergence.temperature",
}
"""What options stand for in distillation, whose names mean something else in other trainings."""
_OF_POLICIES = {"num_generations", "reward_funcs"}
"""Options that only policy optimization has."""
_MEANT_BY_ANSWERS = dict.fromkeys(
    ("micro_batch_size", "per_device_train_batch_size"), "data.micro_batch_size times model.answers_per_prompt"
)
"""Batches count answers, and here prompts."""
_MEANT_BY_POLICIES = {"beta": "model.kl_weight", "loss_type": "model.algorithm", **_MEANT_BY_ANSWERS}
"""What options stand for in policy optimization, whose names mean something else in other trainings."""
_THERE_ARE_OBJECTIVES = f"of preference tuning there are {', '.join(sorted(_OBJECTIVES))} (docs/preferences.md)"
_THERE_ARE_ALGORITHMS = f"of policy optimization there are {', '.join(sorted(_ALGORITHMS))} (docs/policy.md)"
_FILL_IN = "fill the placeholders of the data ({{NAME}}, {{AUTHOR}}; docs/data.md)"
_ADVICE = "take one of these, or keep that trainer for this step"
_NAMES_OF_LOSSES = ("pref_loss", "dpo_loss_type", "loss_type")
"""Options of LLaMA-Factory, Axolotl and ms-swift that name the loss of a pair."""


def _first_value(node: yaml.Node) -> str:
    """Text of a scalar or of the first one of a list, in lower case; empty for other nodes."""
    if isinstance(node, yaml.SequenceNode) and node.value:
        node = node.value[0]
    return node.value.lower() if isinstance(node, yaml.ScalarNode) else ""


def _of_other_trainer(
    path: Path,
    theirs: Iterable[str],
    unknown: Sequence[str] = (),
    meant: Mapping[str, str] = MappingProxyType({}),
    beyond: str = "",
) -> RecipeError:
    """Error about a file with options of another trainer, with what stands for each of them here.

    Args:
        path: the file.
        theirs: options that stand in ``OPTIONS`` or in ``meant``.
        unknown: other options.
        meant: what options stand for in place of ``OPTIONS``.
        beyond: text on what the file asks for and lit_ft does not do, which ends the message.
    """
    same = {key: f"{home}.{key}" for key in unknown if key != "plugins" and (home := home_of(key))}  # Axolotl's own
    below = {key: class_with(key, "trainer.strategy") for key in unknown if key not in same}
    same |= {key: f"an option of {found}" for key, found in below.items() if found}
    options = OPTIONS | {"model": "model.pretrained", **meant}
    short = {key: re.split(r"[;,(:]", options[key])[0].strip() for key in theirs} | same
    told = ", ".join(f"{key} = {ours}" for key, ours in short.items() if ours != "nothing")
    needless = ", ".join(key for key, ours in short.items() if ours == "nothing")
    rest = f"; leave out {needless}" if needless else ""
    rest += f"; nothing is known of {', '.join(rare)}" if (rare := [key for key in unknown if key not in same]) else ""
    here = f". Here {told}{rest}" if told else ""
    return RecipeError(f"{path}: has options of another trainer; begin with recipes/qwen.yaml{here}{beyond}")


# --- keys ----------------------------------------------------------------------------------------


def _repeated_keys(node: yaml.Node | None, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    """Keys that a mapping has twice, each with the two lines, counted from 1."""
    if id(node) in seen:  # an anchor, or a document that refers to itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines and key.value != "<<":
                    yield key.value, lines[key.value], key.start_mark.line + 1
                lines[key.value] = key.start_mark.line + 1
            yield from _repeated_keys(value, seen)


def _misplaced(node: yaml.Node, name: str, seen: set[int]) -> Iterator[tuple[int, str]]:
    """Lines, counted from 1, with what is wrong: options beside a class, classes as keys, colons without a space.

    Args:
        node: value of a key, at any depth.
        name: the key.
        seen: nodes that were looked at.
    """
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if name in _LISTS_OF_CLASSES and isinstance(item, yaml.MappingNode) and "class_path" not in _entries(item):
                first = next(iter(_entries(item)), "")
                advice = f"write class_path: {first or 'NAME'}, and its options under init_args"
                yield item.start_mark.line + 1, f"{name}: {first!r} is no class_path; {advice}"
            yield from _misplaced(item, "", seen)
    if isinstance(node, yaml.ScalarNode) and name in OWN_SECTIONS and (text := _without_space(node)) is not None:
        yield node.start_mark.line + 1, text
    if isinstance(node, yaml.MappingNode):
        names = _entries(node)
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                yield line, "a mapping or a list stands as a key; recipes have no templates such as {{ name }}"
                continue
            if key.value.endswith("+") and (replaced := key.value[:-1]) in names:
                yield line, f"{replaced!r} and {key.value!r} stand side by side; put all in one list"
            if (text := _without_space(key)) is not None:
                yield line, text
            if "class_path" in names and key.value not in (*_OF_A_CLASS, "<<"):
                near = get_close_matches(key.value, _OF_A_CLASS, n=1)
                advice = f"did you mean {near[0]}?" if near else f"put it under init_args: {{{key.value}: ...}}"
                yield line, f"{key.value!r} stands beside class_path; {advice}"
            yield from _misplaced(value, key.value, seen)


_OF_THE_TOP_LEVEL = ("optimizer", "lr_scheduler")
"""Options that the model gets from the top level of a recipe; what stands under model is replaced by it, or by null."""


def _of_the_top_level(root: yaml.Node) -> Iterator[tuple[int, str]]:
    """Lines, counted from 1, with options under ``model`` that belong to the top level, and what is no option there."""
    for name, value in _entries(root).items():
        if name.startswith(("x-", ".")):
            advice = (
                "a recipe has no place for anchors alone: write &NAME where the value is first used, *NAME after it"
            )
            yield value.start_mark.line + 1, f"{name!r} is no option; {advice}"
    model = _entries(root).get("model", root)
    for part in (model, _entries(model).get("init_args")) if model is not root else ():
        for name, value in _entries(part).items() if part is not None else ():
            if name in _OF_THE_TOP_LEVEL and not value.tag.endswith(":null"):
                line = value.start_mark.line + 1
                yield line, f"{name} under model would have no effect; put it at the top level, beside model"


def _without_space(node: yaml.ScalarNode) -> str | None:
    """What is wrong with a text without quotes that is one word to YAML, e.g. ``path:rows.json``; None otherwise."""
    if node.style in _QUOTED:
        return None
    if _WIDE_COLON.match(node.value):
        return f"{shortened(node.value, 100)!r} is one text; {_NO_WIDE_COLON}"
    if not re.match(r"\w+:[^\s/]", node.value):
        return None
    return f"{node.value!r} is one text; put a space after the colon"


_WIDE_COLON = re.compile(r"\w[\w.+]*\s*\uff1a")
_NO_WIDE_COLON = "write an ASCII colon and a space in place of \uff1a"


def _odd_spaces(node: yaml.Node) -> Iterator[tuple[int, str]]:
    """Lines, counted from 1, with keys around which there are spaces of another kind, which are letters to YAML."""
    for key in node.value if isinstance(node, yaml.MappingNode) else ():
        name = key[0]
        if isinstance(name, yaml.ScalarNode) and name.style not in _QUOTED and name.value != name.value.strip():
            odd = next(one for one in name.value if one.isspace())
            yield (
                name.start_mark.line + 1,
                (f"the key {name.value!r} has a space of another kind (U+{ord(odd):04X}); type ordinary spaces"),
            )

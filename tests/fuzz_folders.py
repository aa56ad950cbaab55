"""Fuzzing with damaged model folders, adapters and runs: a command refuses one in one line, exit code 2, or runs.

``python tests/fuzz_folders.py --cases 300 --seed 1`` runs 300 cases and prints the outcomes.
"""

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from fuzz_cases import main_loop, run_case
from fuzz_recipes import make_inputs, places, preload

VALUES: list[Any] = [
    *(None, True, 0, -1, 1, 3, 7, 10**9, 2**63, 10**40, 0.5, math.nan, math.inf, [], [1], [None], {}, {"a": 1}, [[]]),
    *("", "x", "\ud83d", "\x1b[31m", "../../x", "a" * 5000, "auto", "float99"),
    *("Qwen3ForCausalLM", "LlamaForCausalLM", "qwen2", "llama", "bert", "mamba"),
]
"""Values that a key of a JSON file is set to."""


def damage_json(rng: random.Random, path: Path) -> str:
    """Change a value, delete a key, or replace the document."""
    text = path.read_text(encoding="utf-8")
    document = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    found = [(holder, key) for holder, key in places(document)]
    deep, shallow = rng.choice(found), rng.choice([(document, key) for key in document])
    holder, key = rng.choice([deep, shallow, shallow])
    deed = rng.randrange(8)
    if deed <= 4:
        holder[key] = deepcopy(rng.choice(VALUES))
        said = f"{key}={str(holder[key])[:30]!r}"
    elif deed == 5:
        del holder[key]
        said = f"{key} deleted"
    else:
        document = deepcopy(rng.choice([[], [document], "x", None, 3, {"a": document}, {}]))
        said = f"is a {type(document).__name__}"
    text = yaml.safe_dump(document) if path.suffix == ".yaml" else json.dumps(document)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    return said


def damage_bytes(rng: random.Random, path: Path) -> str:
    """Truncate, flip a bit of, overwrite, empty or remove a file."""
    raw = path.read_bytes()
    at = rng.randrange(len(raw) or 1)
    deed = rng.choice(["cut", "flip", "flip early", "noise", "empty", "remove", "folder", "zeros", "long header"])
    if deed == "cut":
        raw = raw[:at]
    elif deed.startswith("flip"):
        at = at if deed == "flip" else min(at, rng.randrange(64))
        raw = raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :] if raw else raw
    elif deed == "noise":
        raw = rng.randbytes(len(raw) or 8)
    elif deed == "empty":
        raw = b""
    elif deed == "zeros":
        raw = raw[:at] + bytes(len(raw) - at)
    elif deed == "long header":
        raw = (2**62).to_bytes(8, "little") + raw[8:]
    path.unlink()
    if deed == "folder":
        path.mkdir()
    elif deed != "remove":
        path.write_bytes(raw)
    return deed


READ_BY_ALL = (".csv", ".json", ".jsonl", ".yaml", ".ckpt")


def cases(
    count: int, seed: int, model: Path, run: Path, rows: str
) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
    """Titles of damaged folders, and a function that writes each."""
    kinds = {"model": files_of(model), "run": files_of(run)}
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        kind = rng.choice(["model", "model", "run"])
        file = rng.choice(kinds[kind])
        if kind == "model":
            command = rng.choice(["fit", "fit", "check", "plan", "export adapter"])
        else:
            command = rng.choice(["report", "export", "export merge", "export adapter", "predict", "resume"])
            if command == "report" or rng.random() < 0.3:
                file = rng.choice([name for name in kinds[kind] if name.suffix in READ_BY_ALL])
        yield f"{number} {command}: {file}", writer(f"{seed} {number}", kind, command, file, model, run, rows)


def files_of(folder: Path) -> list[Path]:
    files = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path for path in files if "tensorboard" not in path.parts and path.name not in ("report.html", "README.md")]


def writer(
    seed: str, kind: str, command: str, file: Path, model: Path, run: Path, rows: str
) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        rng, copies = random.Random(seed), {"model": folder / "model", "run": folder / "run"}
        shutil.copytree(model, copies["model"])
        shutil.copytree(run, copies["run"])
        target = copies[kind] / file
        is_text = target.suffix in (".json", ".yaml") and rng.random() < 0.7
        for _ in range(rng.choice([1, 1, 2])):
            if target.is_file():
                try:
                    said = damage_json(rng, target) if is_text else damage_bytes(rng, target)
                except (TypeError, IndexError, ValueError):  # the second damage found nothing to change
                    continue
                (folder / "damage.txt").write_text(said + "\n", encoding="utf-8", errors="backslashreplace")
        return arguments(command, str(copies["model"]), str(copies["run"]), rows)

    return write


def arguments(command: str, model: str, run: str, rows: str) -> list[str]:
    recipe = [
        "--model.pretrained",
        model,
        "--data.path",
        rows,
        "--data.cache_dir",
        "cache",
        "--model.peft",
        "peft.LoraConfig",
    ]
    recipe += ["--model.peft.r", "2", "--trainer.max_steps", "1", "--trainer.accelerator", "cpu"]
    match command.split():
        case ["export", "adapter"]:
            return ["export", "--adapter", f"{run}/adapter", "--base", model, "--out", "out", "--merge"]
        case ["export", *merge]:
            return ["export", "--run", run, "--out", "out", *(["--merge"] if merge else [])]
        case ["report"]:
            return ["report", run]
        case ["predict"]:
            return ["predict", "--config", f"{run}/config.yaml", "--run_dir", run, "--ckpt_path", "last"]
        case ["resume"]:
            return [
                "fit",
                "--config",
                f"{run}/config.yaml",
                "--run_dir",
                run,
                "--ckpt_path",
                "last",
                "--trainer.max_steps",
                "2",
            ]
        case [other]:
            return [other, *recipe]
    raise AssertionError(command)


def make_run(folder: Path, model: str, rows: str) -> Path:
    """A finished run of one step, with a callback's files in it."""
    run = folder / "run"
    more = ["--data.val_path", rows, "--model.max_new_tokens", "2", "--trainer.callbacks+", "lit_callbacks.LossLedger"]
    more += ["--trainer.callbacks+", "lit_callbacks.SampleGenerations", "--trainer.callbacks.prompts", "[a cup]"]
    done = run_case(
        [*arguments("fit", model, "", rows), *more, "--run_dir", str(run)], folder / "make-run", seconds=300
    )
    assert done.verdict == "runs", done
    return run


def main() -> None:
    def every(folder: Path, count: int, seed: int) -> Iterator[tuple[str, Callable[[Path], list[str]]]]:
        model, rows = make_inputs(folder)
        return cases(count, seed, Path(model), make_run(folder, model, rows), rows)

    preload()
    main_loop(__doc__, "folders", 300, every)


if __name__ == "__main__":
    main()

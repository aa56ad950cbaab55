"""Stress test of resuming: kills runs at random moments, half of them within a save, and resumes them to the end.

    python tests/torture.py --kills 200
    python tests/torture.py --kills 20 --strategies one,ddp --seed 1
    python tests/torture.py --damage 400

``--damage`` flips bits of checkpoints and truncates them instead of killing runs, and counts the detected damages.

Each run is ``fit --resume auto`` on a tiny model, forked from this process, so that a kill costs seconds. Its ranks
are ended with SIGKILL: all at a random time, or one just before a random write, sync, rename or removal of a save, and
then the others. A finished run is compared with an uninterrupted one: weights, optimizer states, learning rates and the
rows of ``metrics.csv``, bit by bit. A table shows the results; the exit code is 1 if there was any error.
"""

import argparse
import csv
import ctypes
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "callbacks")]

import preloading  # noqa: F401  # before runs are forked
import torch
import yaml
from ranks import free_port
from shared_fixtures import make_rows, make_tokenizer
from torch.distributed.checkpoint import FileSystemWriter
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from lit_ft import cli
from lit_ft.checkpointing.selection import newest_good, position_of
from lit_ft.checkpointing.storage import checksum, replacement
from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.checkpointing.storage.integrity import DamagedCheckpoint, check_intact

IN_A_SAVE: list[tuple[Any, str]] = [
    (checksum._HashingFile, "write"),
    (FileSystemWriter, "write_data"),
    (FileSystemWriter, "finish"),
    (os, "fsync"),
    (Path, "rename"),
    (Path, "replace"),
    (shutil, "rmtree"),
]
"""Functions that a save calls; a kill happens just before one of the calls."""

MOST_KILLS_OF_A_RUN = 5


@dataclass(frozen=True)
class Case:
    """A strategy under test."""

    ranks: int
    options: list[str] = field(default_factory=list)


def _strategy(name: str, **arguments: Any) -> list[str]:
    return ["--trainer.strategy", json.dumps({"class_path": name, "init_args": arguments})]


_FSDP, _SPLIT = "lit_ft.strategies.FSDPStrategy", "lit_ft.strategies.ModelParallelStrategy"
_ZERO = "lit_ft.strategies.DeepSpeedStrategy"
CASES = {
    "one": Case(1),
    "ddp": Case(2, ["--trainer.strategy", "ddp"]),
    "fsdp file": Case(2, _strategy(_FSDP, save_distributed_checkpoint=False)),
    "fsdp folder": Case(2, _strategy(_FSDP, save_distributed_checkpoint=True)),
    "fsdp async": Case(2, _strategy(_FSDP, save_distributed_checkpoint=True, async_save=True)),
    "zero1": Case(2, _strategy(_ZERO, stage=1)),
    "zero3": Case(2, _strategy(_ZERO, stage=3)),
    "tp2": Case(2, _strategy(_SPLIT, tensor_parallel_size=2, save_distributed_checkpoint=True)),
    "pp2": Case(2, _strategy(_SPLIT, pipeline_parallel_size=2, save_distributed_checkpoint=True)),
}


@dataclass
class Result:
    """Results of a strategy."""

    kills: int = 0
    in_saves: int = 0
    runs: int = 0
    lost: int = 0
    failed: int = 0
    unequal: int = 0

    @property
    def wrong(self) -> int:
        return self.lost + self.failed + self.unequal


# --- a run ------------------------------------------------------------------------------------------------


def write_recipe(folder: Path, accumulate: int, steps: int = 24) -> Path:
    """Write a model of 60 thousand parameters, rows, and a recipe of ``steps`` steps, half as many on two ranks.

    Every second step writes two checkpoints.
    """
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=384, **sizes, **heads, dtype="float32")).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.json").write_text(json.dumps(make_rows(steps * accumulate), ensure_ascii=False), encoding="utf-8")
    lora = {"r": 4, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    saves = {"every_n_train_steps": 2, "save_last": True, "save_top_k": 1}
    recipe = {
        "seed_everything": 3,
        "model": {"pretrained": str(folder / "model"), "peft": {"class_path": "peft.LoraConfig", "init_args": lora}},
        "data": {"path": str(folder / "rows.json"), "micro_batch_size": 2, "max_length": 96},
        "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
        "lr_scheduler": {"class_path": "lit_ft.schedules.CosineWithWarmup", "init_args": {"warmup": 0.2}},
        "trainer": {
            "accelerator": "cpu",
            "max_epochs": 2,
            "accumulate_grad_batches": accumulate,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": saves}],
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@dataclass
class Aim:
    """A rank, and the call of a save before which it is killed."""

    rank: int
    call: int


class Life:
    """Processes of a run from a start or a resumption to their end."""

    def __init__(
        self,
        case: Case,
        arguments: list[str],
        log: Path,
        aim: Aim | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> None:
        self.log, self.prepare, self.aim = log, prepare, aim
        self.log.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.processes = [self._start(rank, case, arguments, port, aim) for rank in range(case.ranks)]

    def _start(self, rank: int, case: Case, arguments: list[str], port: int, aim: Aim | None) -> int:
        parent = os.getpid()
        if (process := os.fork()) != 0:
            return process
        code = 1
        gc.freeze()  # a collection would visit, and so copy, all memory that this process shares with its parent
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # ends with its parent
            if os.getppid() != parent:
                os._exit(1)
            tqdm.set_lock(threading.RLock())  # the default lock is shared with all forks; a kill would leave it locked
            _redirect_output(self.log / f"output-{rank}")
            if case.ranks > 1:
                os.environ |= _as_torchrun(rank, case.ranks, port)
            self._watch_saves(rank, aim.call if aim is not None and aim.rank == rank else None)
            self.prepare()
            cli.main(arguments)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(code)

    def _watch_saves(self, rank: int, last_call: int | None) -> None:
        """Count the calls of saves, record the complete checkpoints, and kill this rank before one of the calls."""
        calls = 0
        count = os.open(self.log / f"calls-{rank}", os.O_WRONLY | os.O_CREAT)

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                os.pwrite(count, b"%d" % calls, 0)  # a save makes hundreds of calls
                if calls == last_call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **options)

            return run

        replace = replacement.replace

        def noted(temporary: Path, path: Path) -> None:
            position = position_of(temporary)
            replace(temporary, path)
            assert position is not None
            with (self.log / "saved").open("a") as file:
                file.write(f"{position.global_step}\n")

        # Only during saves: other files are written too.
        for owner, name in IN_A_SAVE:
            setattr(owner, name, counted(getattr(owner, name)))
        replacement.replace = noted

    def wait(self, until: float = float("inf")) -> bool:
        """Wait for the end; after ``until``, or after a rank was killed, kill all. Returns whether any was killed."""
        codes: dict[int, int] = {}
        while len(codes) < len(self.processes):
            for process in set(self.processes) - set(codes):
                done, status = os.waitpid(process, os.WNOHANG)
                if done:
                    codes[process] = os.waitstatus_to_exitcode(status)
            if time.monotonic() > until or any(code != 0 for code in codes.values()):
                if any(code > 0 for code in codes.values()):
                    time.sleep(2)  # let the other ranks report their errors
                for process in set(self.processes) - set(codes):
                    os.kill(process, signal.SIGKILL)
                for process in set(self.processes) - set(codes):
                    codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            time.sleep(0.005)
        self.codes = codes
        return -signal.SIGKILL in codes.values()

    @property
    def failed(self) -> bool:
        """Whether a rank failed by itself; after an aimed kill, the others may fail before they are killed."""
        was_aimed_at = self.aim is not None and self.calls(self.aim.rank) >= self.aim.call
        return not was_aimed_at and any(code > 0 for code in self.codes.values())

    def calls(self, rank: int) -> int:
        path = self.log / f"calls-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0


def _redirect_output(path: Path) -> None:
    """Send the output of this process to a file, that of loggers with an earlier stream included."""
    sys.stdout = sys.stderr = path.open("a", buffering=1)
    os.dup2(sys.stderr.fileno(), 1)
    os.dup2(sys.stderr.fileno(), 2)
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", []):
            if type(handler) is logging.StreamHandler:
                handler.stream = sys.stderr  # setStream() would flush the earlier stream, which may be closed


def _as_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "torture",
    }


# --- what came of it ------------------------------------------------------------------------------------


def outcome(run_dir: Path) -> dict[str, Any]:
    """Weights, optimizer states, learning rates and logged losses of a finished run."""
    checkpoint = AnyCheckpointIO().load_checkpoint(newest_good(run_dir / "checkpoints"))
    with (run_dir / "metrics.csv").open(newline="") as file:
        losses = [(row["step"], row["train/loss"]) for row in csv.DictReader(file) if row.get("train/loss")]
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "global_step")
    return {
        **{key: checkpoint[key] for key in kept},
        "losses": losses,
        "adapter": (run_dir / "adapter" / "adapter_model.safetensors").read_bytes(),
        "finished": (run_dir / "finished.json").read_text(),
    }


def differences(got: Any, wanted: Any, where: str = "") -> list[str]:
    """Differences of two nested values by path; tensors are compared bit by bit."""
    if isinstance(wanted, torch.Tensor):
        return [] if torch.equal(got, wanted) and got.dtype == wanted.dtype else [where]
    if isinstance(wanted, dict):
        if got.keys() != wanted.keys():
            return [f"{where}: keys"]
        return [one for key in wanted for one in differences(got[key], wanted[key], f"{where}/{key}")]
    if isinstance(wanted, list | tuple) and len(got) == len(wanted):
        return [
            one for i, (a, b) in enumerate(zip(got, wanted, strict=True)) for one in differences(a, b, f"{where}/{i}")
        ]
    return [] if got == wanted else [f"{where}: {str(got)[:200]} for {str(wanted)[:200]}"]


def torture(name: str, kills: int, recipe: Path, folder: Path, rng: random.Random) -> Result:
    """Kill and resume runs of a strategy, and compare the results with an uninterrupted run."""
    case, result = CASES[name], Result()
    shutil.rmtree(folder, ignore_errors=True)

    def arguments(run_dir: Path) -> list[str]:
        ranks = ["--trainer.devices", str(case.ranks), *case.options]
        return ["fit", "--config", str(recipe), "--run_dir", str(run_dir), "--resume", "auto", *ranks]

    begin = time.monotonic()
    whole = Life(case, arguments(folder / "whole"), folder / "whole-log")
    whole.wait()
    seconds = time.monotonic() - begin
    if whole.failed:
        result.failed += 1
        print(_tail(whole.log), file=sys.stderr)
        return result
    wanted, calls = outcome(folder / "whole"), [whole.calls(rank) for rank in range(case.ranks)]
    while result.kills < kills and result.wrong == 0:
        result.runs += 1
        run_dir, log = folder / f"run-{result.runs}", folder / f"log-{result.runs}"
        _one_run(
            case,
            arguments(run_dir),
            run_dir,
            log,
            min(MOST_KILLS_OF_A_RUN, kills - result.kills),
            calls,
            seconds,
            rng,
            result,
        )
        if not result.wrong:
            if found := differences(outcome(run_dir), wanted):
                result.unequal += 1
                print(f"{name}: {run_dir} differs: {found[:5]}", file=sys.stderr)
            else:
                shutil.rmtree(run_dir)
    return result


def _one_run(
    case: Case,
    arguments: list[str],
    run_dir: Path,
    log: Path,
    kills: int,
    calls: list[int],
    seconds: float,
    rng: random.Random,
    result: Result,
) -> None:
    """Start a run, kill it up to ``kills`` times, and resume it until it ends."""
    for life in range(kills + 1):
        aim, until = None, float("inf")
        if life < kills and rng.random() < 0.5:
            rank = rng.choice([rank for rank in range(case.ranks) if calls[rank]])
            aim = Aim(rank, rng.randint(1, calls[rank]))
        elif life < kills:
            until = time.monotonic() + rng.uniform(0.1, seconds)
        processes = Life(case, arguments, log / str(life), aim)
        killed = processes.wait(until)
        if processes.failed:
            result.failed += 1
            print(_tail(processes.log), file=sys.stderr)
            return
        if not killed:
            return
        result.kills += 1
        result.in_saves += aim is not None
        if (lost := _lost(run_dir, log)) is not None:
            result.lost += 1
            print(lost, file=sys.stderr)
            return


def _lost(run_dir: Path, log: Path) -> str | None:
    """Description of complete checkpoints that were lost by a kill; None if there are none."""
    saved = [int(line) for file in log.glob("*/saved") for line in file.read_text().split()]
    if not saved:
        return None
    found = position_of(newest_good(run_dir / "checkpoints"))
    step = -1 if found is None else found.global_step
    return None if step >= max(saved) else f"{run_dir}: step {max(saved)} was saved, {step} is found"


def _tail(log: Path) -> str:
    return "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in sorted(log.glob("output-*")))


def damage(count: int, recipe: Path, folder: Path, rng: random.Random) -> str:
    """Flip bits of a checkpoint file and of a folder, and truncate them; returns a table of the detected damages."""
    lines = ["| checkpoint | damage | times | found |", "|---|---|---|---|"]
    for name in ("one", "fsdp folder"):
        case, run = CASES[name], folder / name
        options = [
            "--run_dir",
            str(run),
            "--trainer.devices",
            str(case.ranks),
            *case.options,
            "--trainer.max_steps",
            "2",
        ]
        life = Life(case, ["fit", "--config", str(recipe), *options], folder / "log" / name)
        life.wait()
        assert not life.failed, _tail(life.log)
        whole, copy = run / "checkpoints" / "last.ckpt", folder / f"damaged-{name}.ckpt"
        for kind, harm in (("a flipped bit", flip_bit), ("cut short", cut_short)):
            found = sum(_is_found(whole, copy, harm, rng) for _ in range(count))
            lines.append(f"| {'folder' if whole.is_dir() else 'file'} | {kind} | {count} | {found} |")
    return "\n".join(lines)


def _is_found(whole: Path, copy: Path, harm: Callable[[Path, random.Random], None], rng: random.Random) -> bool:
    if copy.is_dir():
        shutil.rmtree(copy)
    (shutil.copytree if whole.is_dir() else shutil.copy)(whole, copy)
    files = sorted(copy.iterdir()) if copy.is_dir() else [copy]
    harm(rng.choices(files, [file.stat().st_size for file in files])[0], rng)
    try:
        check_intact(copy)
    except DamagedCheckpoint:
        return True
    return False


def flip_bit(path: Path, rng: random.Random) -> None:
    """Flip a random bit of a file."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut_short(path: Path, rng: random.Random) -> None:
    """Truncate a file at a random position."""
    os.truncate(path, rng.randrange(path.stat().st_size))


def table(results: dict[str, Result]) -> str:
    """Markdown table of the results."""
    lines = [
        "| strategy | kills | inside a save | runs | lost | failed to resume | not bit-equal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        lines.append(f"| {name} | {r.kills} | {r.in_saves} | {r.runs} | {r.lost} | {r.failed} | {r.unequal} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="in all, shared by the strategies")
    parser.add_argument("--strategies", default=",".join(CASES), help="names, with commas between them")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--damage", type=int, help="damage checkpoints so many times in each way; kill nothing")
    options = parser.parse_args()
    names, rng, results = options.strategies.split(","), random.Random(options.seed), {}
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    recipe = write_recipe(folder, options.accumulate)
    if options.damage is not None:
        print(damage(options.damage, recipe, folder, rng))
        shutil.rmtree(folder)
        return
    for place, name in enumerate(names):
        share = options.kills * (place + 1) // len(names) - options.kills * place // len(names)
        begin = time.monotonic()
        results[name] = torture(name, share, recipe, folder / name.replace(" ", "-"), rng)
        print(f"{name}: {results[name]} in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    print(table(results))
    if any(result.wrong for result in results.values()):
        print(f"what is left of the runs: {folder}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

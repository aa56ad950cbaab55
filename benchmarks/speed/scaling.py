"""Scaling curves: tokens/s and memory by row length, model size, vocabulary, ranks and rows of the data set.

    python -m benchmarks.speed.scaling --curve sequence --out docs/performance
    python -m benchmarks.speed.scaling --draw --out docs/performance

Each point runs in its own process, and its result is added to ``OUT/CURVE.json``; existing points are not measured
again. Then the curve is drawn (needs matplotlib). Models have random weights; rows are random tokens, all supervised
unless stated otherwise. Linux only.
"""

import argparse
import json
import math
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.compare import environment
from benchmarks.peers.job import LORA
from benchmarks.workload import SHAPES, train_tokenizer

GIB = 2**30


def _shape(hidden: int, inner: int, layers: int, heads: int, key_heads: int, vocabulary: int) -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    return {**dict(zip(names, (hidden, inner, layers, heads, key_heads), strict=True)), "vocab_size": vocabulary}


MODELS: dict[str, dict[str, int]] = {
    "2 M": _shape(192, 512, 4, 6, 2, 768),
    "15 M": _shape(384, 1344, 6, 6, 2, 8_000),
    "44 M": SHAPES["0.1b"],
    "0.5 B": SHAPES["qwen2.5-0.5b"],
    "1.5 B": _shape(1536, 8960, 28, 12, 2, 151_936),
    "3 B": _shape(2048, 11_008, 36, 16, 2, 151_936),
    "7 B": _shape(3584, 18_944, 28, 28, 4, 152_064),
    "14 B": _shape(5120, 13_824, 48, 40, 8, 152_064),
}
"""Model shapes: that of checkpoints/tiny-qwen2, two in between, and those of Qwen2.5's public configs."""
PLANNED = ("1.5 B", "3 B", "7 B", "14 B")
"""Models that are planned and not run."""
UNTIED = ("7 B", "14 B")
"""Models whose output head is not tied to the embedding."""

Point = dict[str, Any]
ROW_TOKENS = 512
"""Tokens of a row, in all curves but that of row length."""
ROWS = (1_000, 10_000, 100_000, 1_000_000)


def points(curve: str) -> list[Point]:
    """Points of a curve: ``line`` and ``x``, and the input of the measuring function."""
    if curve == "sequence":
        lengths = [2**power for power in range(8, 15)]
        checkpointing = {"as it is": False, "gradient_checkpointing": True}
        return [{"line": line, "x": x, "checkpointing": on} for line, on in checkpointing.items() for x in lengths]
    if curve == "size":
        measured = [{"line": "measured", "x": name} for name in MODELS if name not in PLANNED]
        return measured + [{"line": "planned", "x": name} for name in MODELS]
    if curve == "vocabulary":
        sizes = (1_000, 4_000, 16_000, 32_000, 64_000, 152_000)
        shares = {"all supervised": 1, "1 in 4 supervised": 4}
        return [{"line": line, "x": x, "one_in": one_in} for line, one_in in shares.items() for x in sizes]
    if curve == "ranks":
        return [{"line": line, "x": x} for line in ("DDP", "FSDP") for x in (1, 2, 4)]
    if curve == "rows":
        lines = ("read and tokenized", "from the cache", "streaming")
        return [{"line": line, "x": x} for x in ROWS for line in lines]
    raise ValueError(f"curve={curve!r}; there are {', '.join(CURVES)}")


# --- in the process of a point -------------------------------------------------------------------------


def train(shape: dict[str, int], tokens: int, steps: int, one_in: int = 1, **options: Any) -> Point:
    """Train on one row repeatedly; measure tokens/s without the first step, unless it is the only one.

    Args:
        shape: config values of the model.
        tokens: number of tokens of the row.
        steps: number of timed steps.
        one_in: interval of supervised tokens: one of ``one_in`` tokens is supervised.
        options: arguments for ``CausalLM`` (``model``) and for the trainer (``trainer``).
    """
    import numpy as np
    import torch
    from lightning.pytorch import Callback, seed_everything
    from torch.utils.data import DataLoader
    from transformers import Qwen2Config

    from benchmarks.memory.sharded_memory import Watch, own_memory
    from lit_ft import CausalLM
    from lit_ft.packed_batch import pack_samples
    from lit_ft.recipe.trainer_checks import quiet_trainer

    class Clock(Callback):
        marks: list[float] = []  # noqa: RUF012

        def on_train_batch_start(self, *_: Any) -> None:
            self.marks = self.marks or [time.perf_counter()]

        def on_train_batch_end(self, *_: Any) -> None:
            self.marks.append(time.perf_counter())

    seed_everything(0, verbose=False)
    clock, before, watch = Clock(), own_memory(), Watch()
    ids = np.random.default_rng(0).integers(3, shape["vocab_size"], tokens)
    labels = np.where(np.arange(tokens) % one_in == 0, ids, -100)
    warm_up = 1 if steps > 1 else 0
    rows: Any = [pack_samples([(ids, labels)])] * (steps + warm_up)
    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**shape, tie_word_embeddings=True, max_position_embeddings=32_768).save_pretrained(folder)
        module = CausalLM(folder, init="random", **options.get("model", {}))
        of_trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, **options.get("trainer", {})}
        trainer = quiet_trainer(**of_trainer, callbacks=[clock])
        trainer.fit(module, DataLoader(rows, batch_size=None))
    seconds = clock.marks[-1] - clock.marks[warm_up]
    return {
        "tokens_per_second": tokens * steps / seconds,
        "gib": watch.take() - before,
        "parameters": sum(p.numel() for p in module.parameters()),
        "threads": torch.get_num_threads(),
    }


def _lora(**options: Any) -> dict[str, Any]:
    from peft import LoraConfig

    return {"dtype": "bfloat16", "peft": LoraConfig(**LORA), **options}


def measure_sequence(point: Point) -> Point:
    """Measure rows of ``x`` tokens."""
    tokens = point["x"]
    steps = max(1, min(16, 8192 // tokens))
    return train(SHAPES["0.1b"], tokens, steps, model=_lora(gradient_checkpointing=point["checkpointing"]))


def measure_size(point: Point) -> Point:
    """Measure the model named ``x``, or plan it."""
    shape = MODELS[point["x"]]
    if point["line"] == "planned":
        return plan(shape, point["x"])
    return train(shape, ROW_TOKENS, 4, model=_lora(gradient_checkpointing=True))


def plan(shape: dict[str, int], name: str) -> Point:
    """Planned memory on one device, as in ``python -m lit_ft plan``: weights, gradients, AdamW state, layer inputs."""
    from transformers import Qwen2Config

    from lit_ft import CausalLM
    from lit_ft.model.loading import decoder_layers
    from lit_ft.planning.communication import bytes_of
    from lit_ft.planning.memory import Memory, optimizer_bytes

    with tempfile.TemporaryDirectory() as folder:
        Qwen2Config(**shape, tie_word_embeddings=name not in UNTIED).save_pretrained(folder)
        train_tokenizer(["a b"], vocab_size=300).save_pretrained(folder)
        module = CausalLM(folder, init="random", **_lora())
        model: Any = module.check()
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs = ROW_TOKENS * shape["hidden_size"] * 2 * len(decoder_layers(model))  # bytes of layer inputs in bf16
    of_optimizer = optimizer_bytes(module.optimizer, trained)
    memory = Memory(bytes_of(model.parameters()), 0, bytes_of(trained), of_optimizer, inputs)
    return {"gib": memory.total / GIB, "parameters": sum(p.numel() for p in model.parameters())}


def measure_vocabulary(point: Point) -> Point:
    """Measure a vocabulary of ``x`` tokens."""
    shape = {**SHAPES["0.1b"], "vocab_size": point["x"]}
    return train(shape, ROW_TOKENS, 6, point["one_in"], model=_lora())


def measure_ranks(point: Point) -> Point:
    """Measure ``x`` processes with one thread and one row each; tokens/s of all together."""
    from benchmarks.ranks import on_ranks

    results = on_ranks(point["x"], _train_rank, point["line"], point["x"])
    rate = sum(result["tokens_per_second"] for result in results)
    return {**results[0], "tokens_per_second": rate, "gib": max(result["gib"] for result in results)}


def _train_rank(line: str, ranks: int) -> Point:
    import torch

    from lit_ft.strategies import FSDPStrategy

    torch.set_num_threads(1)
    strategy: Any = FSDPStrategy() if line == "FSDP" else "ddp" if ranks > 1 else "auto"
    trainer = {"strategy": strategy, "devices": ranks, "use_distributed_sampler": False}
    return train(MODELS["15 M"], ROW_TOKENS, 8, model={"dtype": "float32"}, trainer=trainer)


def measure_rows(point: Point) -> Point:
    """Measure ``x`` rows in a JSON-lines file, from the start of the process to the end of the first step.

    Processor time is that of all processes; other work on the machine has little effect on it.
    """
    from benchmarks.memory.sharded_memory import Watch
    from lit_ft import CausalLM, TextDataModule
    from lit_ft.recipe.trainer_checks import quiet_trainer

    watch, cache = Watch(), Path(point["file"]).with_suffix(".cache")
    if point["line"] == "read and tokenized":
        shutil.rmtree(cache, ignore_errors=True)
    elif point["line"] == "from the cache" and not cache.is_dir():
        raise RuntimeError(f"{cache} is missing; measure 'read and tokenized' first")
    data = TextDataModule(
        point["file"], micro_batch_size=16, cache_dir=str(cache), streaming=point["line"] == "streaming"
    )
    trainer = quiet_trainer(accelerator="cpu", devices=1, max_steps=1)
    trainer.fit(CausalLM("checkpoints/tiny-qwen2", **_lora()), data)
    used = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(one.ru_utime + one.ru_stime for one in used)
    return {"seconds": time.time() - point["started"], "processor_seconds": processor, "gib": watch.take()}


def write_rows(folder: Path, rows: int) -> Path:
    """Write distinct Alpaca-style rows of some 40 tokens."""
    path = folder / f"{rows}.jsonl"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        draw = random.Random(0)
        words = "who what where the red blue house river city lives stands between and under".split()
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("w", encoding="utf-8") as file:
            for i in range(rows):
                question, answer = (" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(2))
                file.write(json.dumps({"instruction": f"{question} {i}?", "output": f"{answer}."}) + "\n")
        unfinished.rename(path)
    return path


# --- in the process that asks for them -----------------------------------------------------------------


def measure(curve: str, point: Point, folder: Path) -> Point:
    """Measure a point in its own process, forked after the imports, except where start-up time is measured."""
    if curve != "rows":
        from lit_ft import CausalLM  # noqa: F401

        with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
            return pool.submit(MEASURES[curve], point).result()
    asked = json.dumps({**point, "file": str(write_rows(folder, point["x"])), "started": time.time()})
    command = [sys.executable, "-m", "benchmarks.speed.scaling", "--rows-point", asked]
    done = subprocess.run(command, capture_output=True, text=True)
    answers = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not answers:
        raise RuntimeError(f"{curve}, {point} failed:\n{done.stderr[-2000:]}")
    return json.loads(answers[-1])


def measure_curve(curve: str, only: list[str] | None, out: Path, folder: Path, until: float = math.inf) -> None:
    """Measure the points that ``OUT/CURVE.json`` lacks.

    Args:
        curve: name of the curve.
        only: values of ``x`` to measure; None measures all.
        out: folder of the results.
        folder: folder for data files.
        until: time after which no further point starts.
    """
    path = out / f"{curve}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"points": []}
    for point in points(curve):
        place = {name: point[name] for name in ("line", "x")}
        known = any(all(one[name] == place[name] for name in place) for one in found["points"])
        if known or (only is not None and str(point["x"]) not in only) or time.time() > until:
            continue
        result = measure(curve, point, folder)
        print(f"{curve}, {place['line']}, {place['x']}: {result}", file=sys.stderr, flush=True)
        found["points"].append({**place, **result})
        found["environment"] = environment()
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Measure and draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--curve", choices=CURVES, help="one of them; by default all")
    parser.add_argument("--only", help="values of x, with commas, e.g. 256,512")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no point later; the next call goes on")
    parser.add_argument("--out", type=Path, default=Path("docs/performance"), help="folder of results and pictures")
    parser.add_argument("--draw", action="store_true", help="only draw what has been measured")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "lit_ft_benchmarks" / "rows")
    parser.add_argument("--rows-point", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rows_point:
        print("RESULT " + json.dumps(measure_rows(json.loads(options.rows_point))))
        return
    from benchmarks.speed.scaling_pictures import draw

    options.out.mkdir(parents=True, exist_ok=True)
    only, until = options.only.split(",") if options.only else None, time.time() + options.seconds
    for curve in [options.curve] if options.curve else CURVES:
        if not options.draw:
            measure_curve(curve, only, options.out, options.folder, until)
        if not (path := options.out / f"{curve}.json").is_file():
            continue
        found = json.loads(path.read_text(encoding="utf-8"))
        print(draw(curve, found["points"], options.out / f"{curve}.svg"))
        print(f"\n{found['environment']}\n")


MEASURES = {
    "sequence": measure_sequence,
    "size": measure_size,
    "vocabulary": measure_vocabulary,
    "ranks": measure_ranks,
    "rows": measure_rows,
}
CURVES = tuple(MEASURES)


if __name__ == "__main__":
    main()

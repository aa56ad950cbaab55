"""Host memory of each rank under each strategy, compared with the formula of the ZeRO paper. Linux only.

    python -m benchmarks.memory.sharded_memory --strategies ddp,fsdp,deepspeed_zero3

Full fine-tuning with AdamW of a model with random weights, one short row per step, in two processes on this machine.
Memory is ``RssAnon`` plus ``RssShmem`` of a process: pages of mapped weight files, which the system may drop, are not
included.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.compare import environment
from benchmarks.workload import SHAPES, train_tokenizer

GIB = 2**30


@dataclass(frozen=True)
class Held:
    """Whether a rank holds 1/N of parameters, gradients and optimizer state (Rajbhandari et al. 2020, section 3)."""

    parameters: bool
    gradients: bool
    optimizer: bool

    def gib(self, parameters: int, ranks: int) -> float:
        """GiB per rank of weights, gradients and Adam's two moments, in float32."""
        whole = [(self.parameters, 1), (self.gradients, 1), (self.optimizer, 2)]
        return sum(count * 4 * parameters / (ranks if split else 1) for split, count in whole) / GIB


STRATEGIES = {
    "ddp": Held(False, False, False),
    "deepspeed_zero1": Held(False, False, True),
    "deepspeed_zero2": Held(False, True, True),
    "deepspeed_zero3": Held(True, True, True),
    "fsdp": Held(True, True, True),
    "tensor": Held(True, True, True),
    "pipeline": Held(True, True, True),
}


def own_memory() -> float:
    """GiB of this process's memory without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    own = [line.split() for line in lines if line.startswith(("RssAnon", "RssShmem"))]
    return sum(int(kib) for _, kib, _ in own) * 1024 / GIB


class Watch:
    """Thread that records the peak memory of this process."""

    def __init__(self) -> None:
        self.most = 0.0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.most = max(self.most, own_memory())
            time.sleep(0.02)

    def take(self) -> float:
        """Peak in GiB since the last call."""
        most, self.most = max(self.most, own_memory()), 0.0
        return most


def run_rank(model: str, rows: str, strategy: str, ranks: int, out: str) -> None:
    """Train three steps and write the measurements; Lightning starts the other ranks with the same command."""
    import torch
    from lightning.pytorch import Callback, seed_everything

    from lit_ft import CausalLM, TextDataModule
    from lit_ft.recipe.trainer_checks import quiet_trainer
    from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

    seed_everything(0, verbose=False)
    torch.set_num_threads(1)
    size: dict[str, Any] = {f"{strategy}_parallel_size": ranks}
    made: Any = (
        "ddp"
        if strategy == "ddp"
        else FSDPStrategy()
        if strategy == "fsdp"
        else ModelParallelStrategy(**size)
        if strategy in ("tensor", "pipeline")
        else DeepSpeedStrategy(stage=int(strategy[-1]))
    )
    found = {"start": own_memory()}
    watch = Watch()

    class Measure(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            found["loading"] = watch.take()
            found["loaded"] = own_memory()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found["training"] = watch.take()

    module = CausalLM(model, dtype="float32", optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5))
    data = TextDataModule(rows, micro_batch_size=ranks if strategy == "pipeline" else 1, max_length=128)
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=made,
        max_steps=3,
        callbacks=[Measure()],
    )
    trainer.fit(module, data)
    Path(f"{out}.{trainer.global_rank}").write_text(json.dumps(found))


def main() -> None:
    """Measure each strategy in its own processes and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=SHAPES)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-of", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        model, rows, strategy, ranks, out = options.rank_of
        run_rank(model, rows, strategy, int(ranks), out)
        return
    with tempfile.TemporaryDirectory() as folder:
        parameters, file_gib = _write_model(Path(folder) / "model", options.shape)
        rows = Path(folder) / "rows.json"
        rows.write_text(json.dumps([{"instruction": f"count to {i}", "output": "one two three"} for i in range(64)]))
        print(f"{parameters:,} parameters, {file_gib:.2f} GiB in bf16; fp32 in training; {options.ranks} ranks\n")
        print("| strategy | formula, GiB | training, at most | after loading | while loading, at most |")
        print("|---|---|---|---|---|")
        for strategy in options.strategies.split(","):
            out = f"{folder}/{strategy}"
            command = [sys.executable, "-m", "benchmarks.memory.sharded_memory", "--rank-of"]
            command += [f"{folder}/model", str(rows), strategy, str(options.ranks), out]
            environ = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800)
            if done.returncode:
                print(f"| {strategy} | failed: {done.stderr.strip().splitlines()[-1][:200]} | | | |")
                continue
            ranks = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(options.ranks)]
            most = {name: max(rank[name] - rank["start"] for rank in ranks) for name in ranks[0]}
            cells = [STRATEGIES[strategy].gib(parameters, options.ranks)]
            cells += [most[name] for name in ("training", "loaded", "loading")]
            print(f"| {strategy} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)
    print(f"\n{environment()}")


def _write_model(folder: Path, shape: str) -> tuple[int, float]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer(["one two three count to 0123456789"] * 4, vocab_size=400)
    config = Qwen2Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="300MB")
    tokenizer.save_pretrained(folder)
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, parameters * 2 / GIB


if __name__ == "__main__":
    main()

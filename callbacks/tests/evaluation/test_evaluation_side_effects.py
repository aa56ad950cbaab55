"""SampleGenerations and ForgettingProbe: what they see, and that training does not notice."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lit_callbacks import ForgettingProbe, SampleGenerations
from lit_callbacks.evaluation.evaluation_side_effects import EvaluatedWeights
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Counter(LightningModule):
    """Its weight falls by 1 each step; it answers with that, and a text costs a nat a letter and what has fallen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(0.5)
        self.drawn: list[float] = []
        self.modes: list[bool] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        self.modes.append(self.dropout.training)
        return self.weight + 0 * batch.sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None: ...

    def answer(self, prompts: list[str], max_new_tokens: int) -> list[str]:
        torch.rand(7)
        assert not self.dropout.training
        assert not torch.is_grad_enabled()
        return [f"{prompt} {self.weight.item():.0f}"[:max_new_tokens] for prompt in prompts]

    def text_loss(self, texts: list[str]) -> tuple[torch.Tensor, int]:
        torch.rand(7)
        tokens = sum(map(len, texts))
        return tokens * (1.0 - self.weight.detach()), tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(
    folder: Path, callback: Any, module: Any = None, batches: int = 5, ckpt_path: Any = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    module = module or Counter()
    run = Trainer(**{**QUIET, "max_epochs": 1, "default_root_dir": folder, "callbacks": callback, **options})
    run.fit(module, DataLoader(torch.ones(batches)), DataLoader(torch.ones(1)), ckpt_path=ckpt_path)
    return module


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_before_during_and_after(tmp_path: Path) -> None:
    fit(tmp_path, SampleGenerations(["a", "b"], every_n_steps=2, expected=["A", "B"]))
    assert [line["expected"] for line in lines(tmp_path / "samples.jsonl")] == ["A", "B"] * 4
    assert [(line["step"], line["prompt"], line["answer"]) for line in lines(tmp_path / "samples.jsonl")] == [
        (step, prompt, f"{prompt} {-step}") for step in (0, 2, 4, 5) for prompt in "ab"
    ]


def test_losses_before_after_each_validation_and_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    probe = ForgettingProbe(["four", "seventh"], batch_size=1)
    fit(tmp_path, probe, val_check_interval=2, logger=CSVLogger(tmp_path), num_sanity_val_steps=1)
    assert lines(tmp_path / "forgetting.jsonl") == [
        {"step": step, "loss": 1.0 + step, "tokens": 11} for step in (0, 2, 4, 5)
    ]
    assert "forgetting/loss" in next(tmp_path.rglob("metrics.csv")).read_text()
    said = "general text: 1.000 nats per token before training, 6.000 after (+5.000: perplexity x 148) over 11 tokens"
    assert said in caplog.text


def test_the_loss_can_be_monitored(tmp_path: Path) -> None:
    stop = EarlyStopping("forgetting/loss", stopping_threshold=0.0, divergence_threshold=8.0, patience=100)
    module = fit(tmp_path, [ForgettingProbe(["x"]), stop], max_epochs=9)
    assert module.weight == -10  # 6 after the first epoch, 11 after the second


def test_losses_every_n_steps(tmp_path: Path) -> None:
    fit(tmp_path, ForgettingProbe(["x"], every_n_steps=3), accumulate_grad_batches=2, batches=10)
    assert [line["step"] for line in lines(tmp_path / "forgetting.jsonl")] == [0, 3, 5]


def test_random_numbers_of_training_are_the_same_whatever_the_functions_draw_from(tmp_path: Path) -> None:
    """As augmentations in the main process do, which draw from Python's and NumPy's generators."""

    class Augmented(Counter):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.drawn += [random.random(), float(numpy.random.rand())]
            return super().training_step(batch, batch_idx)

    def draws(_: Any, asked: Any) -> Any:
        torch.rand(1), random.random(), numpy.random.rand()
        return [str(one) for one in asked]

    callbacks = [
        SampleGenerations(["a"], every_n_steps=2, generate=draws),
        ForgettingProbe(["x"], every_n_steps=2, loss=lambda *given: (float(draws(*given)[0] == "x"), 1)),
    ]
    drawn = []
    for given in ([], callbacks):
        random.seed(0)
        numpy.random.seed(0)
        drawn.append(fit(tmp_path, given, Augmented()).drawn)
    assert drawn[0] == drawn[1]


class Averages(Callback):
    """Puts other weights into the model when training ends, as Lightning's ``WeightAveraging`` does."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Counter)
        pl_module.weight.data.fill_(-100)


def test_weights_that_are_replaced_at_the_end_are_evaluated(tmp_path: Path) -> None:
    probe = ForgettingProbe(["x"], every_n_steps=5)
    fit(tmp_path, [Averages(), SampleGenerations(["a"], every_n_steps=5), probe])
    assert [line["answer"] for line in lines(tmp_path / "samples.jsonl")] == ["a 0", "a -5", "a -100"]
    assert [line["loss"] for line in lines(tmp_path / "forgetting.jsonl")] == [1, 6, 101]


class TwoSets(torch.optim.SGD):
    """Answers with ten times what it trains, as schedule-free optimizers answer with an average."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.param_groups[0]["train_mode"] = True

    def _multiply(self, is_training: bool, factor: float) -> None:
        self.param_groups[0]["train_mode"] = is_training
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(factor)

    def train(self) -> None:
        self._multiply(True, 0.1)

    def eval(self) -> None:
        self._multiply(False, 10)


def test_small_changes_of_weights_in_bf16_and_of_their_signs_are_seen() -> None:
    module, seen, trainer = LightningModule(), EvaluatedWeights(), Trainer(**QUIET)
    module.weight = nn.Parameter(torch.ones(256, 256, dtype=torch.bfloat16))
    for change in (lambda weight: weight[0, 0].fill_(1 + 2**-7), lambda weight: weight.neg_()):
        seen.remember(module)
        assert not seen.have_changed(trainer, module)
        change(module.weight.data)
        assert seen.have_changed(trainer, module)


def test_weights_that_answer_are_evaluated(tmp_path: Path) -> None:
    class ScheduleFree(Counter):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return TwoSets(self.parameters())

        def on_train_epoch_end(self) -> None:
            self.trainer.optimizers[0].eval()  # type: ignore[attr-defined]

    callbacks = [SampleGenerations(["a"], every_n_steps=5), ForgettingProbe(["x"], every_n_steps=5)]
    module = fit(tmp_path, callbacks, ScheduleFree(), batches=10)
    assert module.weight == -100
    assert [line["answer"] for line in lines(tmp_path / "samples.jsonl")] == ["a 0", "a -50", "a -100"]
    assert [line["loss"] for line in lines(tmp_path / "forgetting.jsonl")] == [1, 51, 101]


def test_lists_of_prompts_may_share_a_file_and_probes_may_not(tmp_path: Path) -> None:
    fit(tmp_path, [SampleGenerations(["a"], 5), SampleGenerations(["b"], 5)])
    assert [line["answer"] for line in lines(tmp_path / "samples.jsonl")] == ["a 0", "b 0", "a -5", "b -5"]
    with pytest.raises(ValueError, match=r"another callback, Forg.*, write '.*forgetting.jsonl'; give each its own"):
        fit(tmp_path, [ForgettingProbe(["x"]), ForgettingProbe(["y"])])
    with pytest.raises(ValueError, match=r"another callback, SampleG.*, write '.*samples.jsonl'; give each its own"):
        fit(tmp_path, [SampleGenerations(["a"], 5), ForgettingProbe(["x"], path=tmp_path / "samples.jsonl")])
    fit(tmp_path, [ForgettingProbe(["x"]), ForgettingProbe(["y"], path=tmp_path / "other.jsonl")])


def test_a_probe_goes_on_in_a_file_with_lines_of_others(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    saves = ModelCheckpoint(tmp_path, filename="last", every_n_epochs=1)
    fit(tmp_path, [ForgettingProbe(["x"], path=path), saves], enable_checkpointing=True)
    with path.open("a") as file:
        file.write('{"step": 5, "prompt": "a", "answer": "b"}\n')
    fit(tmp_path, ForgettingProbe(["x"], path=path), max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    assert [line["step"] for line in lines(path) if "loss" in line] == [0, 5, 10]


def test_training_does_not_notice(tmp_path: Path) -> None:
    alone = fit(tmp_path, [])
    for callback in (SampleGenerations(["a"], every_n_steps=1), ForgettingProbe(every_n_steps=1)):
        watched = fit(tmp_path, callback)
        assert watched.drawn == alone.drawn
        assert watched.modes == [True] * 5
        assert watched.weight == alone.weight


def test_the_general_text_that_comes_with_it() -> None:
    batches = ForgettingProbe(batch_size=5).batches
    assert [len(batch) for batch in batches] == [5, 5, 2]
    assert all(len(text) > 100 for batch in batches for text in batch)


@pytest.mark.parametrize("make", [lambda: SampleGenerations(["a"], every_n_steps=2), lambda: ForgettingProbe(["x"], 2)])
def test_a_resumed_run_goes_on_with_the_file(tmp_path: Path, make: Any) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fit(whole, make(), max_epochs=2)
    run = Trainer(**QUIET, max_epochs=1, default_root_dir=parts, callbacks=[make()])
    run.fit(Counter(), DataLoader(torch.ones(5)))
    run.save_checkpoint(parts / "last.ckpt")
    fit(parts, make(), max_epochs=2, ckpt_path=parts / "last.ckpt")
    fit(parts, make(), max_epochs=2, ckpt_path=parts / "last.ckpt")  # again: what the first did is taken back
    (name,) = (path.name for path in whole.glob("*.jsonl"))
    # The end of the first part was an end then.
    assert [line for line in lines(parts / name) if line["step"] != 5] == lines(whole / name)


def test_answers_in_tensorboard(tmp_path: Path) -> None:
    fit(tmp_path, SampleGenerations(["a\nb"]), logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path, "tb", "")])
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    first, last = events.Tensors("samples/text_summary")
    text = "**prompt**\n\n    a\n    b\n\n**answer**\n\n    a\n    b "
    assert (first.step, first.tensor_proto.string_val[0].decode()) == (0, text + "0")
    assert (last.step, last.tensor_proto.string_val[0].decode()) == (5, text + "-5")


class Tables(CSVLogger):
    """Takes texts as Weights & Biases' logger does."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tables: list[Any] = []

    def log_text(self, key: str, columns: Any = None, data: Any = None, step: int | None = None) -> None:
        self.tables.append((key, columns, data, step))


def test_answers_in_loggers_with_tables(tmp_path: Path) -> None:
    logger = Tables(tmp_path)
    fit(tmp_path, SampleGenerations(["a"]), logger=logger)
    assert logger.tables[0] == ("samples", ["prompt", "answer"], [["a", "a 0"]], 0)


class Texts(Tables):
    """Takes texts as SwanLab's logger does."""

    def log_text(self, key: str, texts: list[Any], step: int | None = None, **_: Any) -> None:  # type: ignore[override]
        self.tables.append((key, texts, step))


def test_answers_in_loggers_with_lists_of_texts(tmp_path: Path) -> None:
    logger = Texts(tmp_path)
    fit(tmp_path, SampleGenerations(["a", "b"]), logger=logger)
    assert logger.tables[0] == ("samples", ["prompt: a", "answer: a 0", "prompt: b", "answer: b 0"], 0)


# --- bad input -------------------------------------------------------------------------------------


def test_a_logger_that_takes_no_text_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"CSVLogger takes no text; the answers are in .*samples.jsonl"):
        fit(tmp_path, SampleGenerations(["a"]), logger=CSVLogger(tmp_path))


def test_a_module_without_the_methods_is_a_warning(tmp_path: Path) -> None:
    class Mute(Counter):
        answer = text_loss = None

    with pytest.warns(UserWarning, match=r"Mute has no method answer\(prompts, max_new_tokens\).* pass generate="):
        assert fit(tmp_path, SampleGenerations(["a"], 1), Mute()).weight == -5
    with pytest.warns(UserWarning, match=r"Mute has no method text_loss\(texts\).* pass loss="):
        assert fit(tmp_path, ForgettingProbe(["a"], 1), Mute()).weight == -5


def boom(*_: Any) -> Any:
    raise RuntimeError("no")


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SampleGenerations(["a"], 1, generate=boom), r"cannot generate, and stops asking \(RuntimeError: no\)"),
        (lambda: ForgettingProbe(["a"], 1, loss=boom), r"cannot measure, and stops looking \(RuntimeError: no\)"),
    ],
)
def test_what_raises_is_a_warning_once(tmp_path: Path, make: Any, said: str) -> None:
    with pytest.warns(UserWarning, match=said) as caught:
        assert fit(tmp_path, make()).weight == -5
    assert sum("RuntimeError: no" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ("one", "got one text for all prompts; return a list, with one text for each"),
        (["one", "two"], "got 2 answers of type str; return 1 of type str"),
        ([torch.ones(1)], "got 1 answer of type Tensor; return 1 of type str"),
    ],
)
def test_answers_that_are_not_one_text_per_prompt_are_a_warning(tmp_path: Path, answers: Any, said: str) -> None:
    callback = SampleGenerations(["a"], 1, generate=lambda *_: answers)
    with pytest.warns(UserWarning, match=f"cannot generate, and stops asking .ValueError: {said}"):
        assert fit(tmp_path, callback).weight == -5
    assert not (tmp_path / "samples.jsonl").exists()


class OwnTokenizer:
    """Returns a list, not the mapping of transformers."""

    bos_token = "<s>"

    def __call__(self, text: str) -> list[int]:
        return [1, *map(ord, text)]


@pytest.mark.parametrize("tokenizer", [object(), OwnTokenizer(), SimpleNamespace(bos_token="<s>")])
def test_a_tokenizer_of_another_library_does_not_keep_the_module_from_answering(
    tmp_path: Path, tokenizer: object
) -> None:
    module = Counter()
    module.tokenizer = tokenizer
    fit(tmp_path, SampleGenerations(["a"], 5), module)
    assert [line["answer"] for line in lines(tmp_path / "samples.jsonl")] == ["a 0", "a -5"]


@pytest.mark.parametrize(
    "make", [lambda path: SampleGenerations(["a"], path=path), lambda path: ForgettingProbe(path=path)]
)
def test_an_unwritable_file_is_a_warning(tmp_path: Path, make: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot write .*give path="):
        assert fit(tmp_path, make(tmp_path / "file" / "x.jsonl")).weight == -5


def test_numbers_and_lists_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="every_n_steps=0 must be 1 or more"):
        SampleGenerations(["a"], every_n_steps=0)
    with pytest.raises(ValueError, match="prompts='abc'.*a list of at least one text"):
        SampleGenerations("abc")
    with pytest.raises(ValueError, match=r"expected=\['x'\].*one answer for each of the 2 prompts"):
        SampleGenerations(["a", "b"], expected=["x"])
    with pytest.raises(ValueError, match="got 0 texts and batch_size=8"):
        ForgettingProbe([])
    with pytest.raises(ValueError, match="text 2 of 3 is blank, and has no loss; take it out"):
        ForgettingProbe(["a", " ", "b"])


# --- several ranks ---------------------------------------------------------------------------------


def on_rank(folder: str) -> tuple[float, list[Any]]:
    probe = ForgettingProbe(["four", "seventh", "x"], every_n_steps=2, batch_size=1)
    samples = SampleGenerations(["a"], every_n_steps=2, generate=lambda module, prompts: [str(module.global_rank)])
    module = Counter()
    run = Trainer(**QUIET, max_epochs=1, devices=2, strategy="ddp", default_root_dir=folder, callbacks=[probe, samples])
    run.fit(module, DataLoader(torch.ones(4)))
    return float(module.weight), probe._measured


@pytest.mark.processes
def test_texts_are_split_over_ranks_and_rank_0_writes(tmp_path: Path) -> None:
    """Three texts of 4, 7 and 1 letters on two ranks: the fourth turn counts nothing."""
    ranks = on_ranks(2, on_rank, str(tmp_path), timeout=120)
    seen = [{"step": step, "loss": 1.0 + step, "tokens": 12} for step in (0, 2)]
    assert ranks == [(-2.0, seen), (-2.0, seen)]
    assert lines(tmp_path / "forgetting.jsonl") == seen
    assert [(line["step"], line["answer"]) for line in lines(tmp_path / "samples.jsonl")] == [(0, "0"), (2, "0")]


def one_fails(folder: str) -> float:
    def generate(module: Any, prompts: Any) -> list[str]:
        if module.global_rank == 1:
            boom()
        return ["fine"]

    module = Counter()
    samples = SampleGenerations(["a"], every_n_steps=1, generate=generate)
    run = Trainer(**QUIET, max_epochs=1, devices=2, strategy="ddp", default_root_dir=folder, callbacks=[samples])
    run.fit(module, DataLoader(torch.ones(4)))
    return float(module.weight)


@pytest.mark.processes
def test_ranks_stop_asking_together(tmp_path: Path) -> None:
    assert on_ranks(2, one_fails, str(tmp_path), timeout=120) == [-2.0, -2.0]
    assert not (tmp_path / "samples.jsonl").exists()

"""Streaming: every row once, in proportion, and resumed at the very next micro-batch."""

import json
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import make_rows, make_tokenizer

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.data.loaders.batching import BatchPlan
from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.loaders.streaming import MixedRows, StreamLoader
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.training.optimizers.schedules import ConstantWithWarmup

pytestmark = pytest.mark.slow


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    """Two JSON-lines files of 60 and 25 rows."""
    made = []
    for seed, count in ((1, 60), (2, 25)):
        path = tmp_path / f"s{seed}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in make_rows(count, seed)))
        made.append(Source(str(path), name=f"s{seed}"))
    return made


def loader(sources: list[Source], workers: int = 0, mixing: Any = None, **options: Any) -> StreamLoader:
    plan = {"micro_batch_size": 2, "shuffle": True, "seed": 3, **{k: v for k, v in options.items() if k in PLAN}}
    return StreamLoader(
        sources,
        Preparation(make_tokenizer(), max_length=64),
        BatchPlan(**plan, mixing=mixing or Mixing()),
        names=tuple(source.title for source in sources),
        buffer_rows=options.get("buffer_rows", 20),
        replica=options.get("replica", 0),
        accumulate=lambda: 2,
        epoch_batches=options.get("epoch_batches"),
        workers=workers,
    )


PLAN = ("packing", "shuffle", "replicas", "token_budget", "micro_batch_size")


def pieces(row: Any) -> list[bytes]:
    """The samples of a row."""
    cuts = np.cumsum([0, *row["segment_lengths"]])
    ids = row["input_ids"][0].numpy()
    return [ids[start:end].tobytes() for start, end in pairwise(cuts)]


def as_lists(rows: list[Any]) -> list[Any]:
    return [(row["input_ids"].tolist(), row["targets"].tolist(), row["window_tokens"]) for row in rows]


@pytest.mark.parametrize("options", [{}, {"packing": 128}, {"shuffle": False}, {"token_budget": 128}])
def test_every_row_once(sources: list[Source], options: Any) -> None:
    data = TextDataModule(sources=sources, max_length=64)
    data.load(make_tokenizer())
    whole = data.splits["train"]
    wanted = Counter(np.asarray(whole[i][0], dtype=np.int64).tobytes() for i in range(len(whole)))
    rows = list(loader(sources, **options))
    assert Counter(piece for row in rows for piece in pieces(row)) == wanted
    for step in range(0, len(rows), 2):
        supervised = sum(len(row["targets"]) for row in rows[step : step + 2])
        assert {row["window_tokens"] for row in rows[step : step + 2]} == {supervised}


def test_without_shuffling_rows_keep_their_order(sources: list[Source]) -> None:
    tokenizer = make_tokenizer()
    rows = list(loader(sources[:1], shuffle=False))
    text = "".join(tokenizer.decode(row["input_ids"][0]) for row in rows)
    assert [turn.split("\n")[1].split("<|im_end|>")[0] for turn in text.split("<|im_start|>assistant")[1:]] == [
        row["output"] for row in make_rows(60, 1)
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_order_does_not_depend_on_workers(sources: list[Source], workers: int) -> None:
    assert as_lists(list(loader(sources, workers))) == as_lists(list(loader(sources)))


def test_ranks_share_the_stream(sources: list[Source]) -> None:
    alone = [piece for row in loader(sources) for piece in pieces(row)]
    shares = [list(loader(sources, replicas=2, replica=rank)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1])
    both = Counter(piece for share in shares for row in share for piece in pieces(row) if len(piece) > 8)
    assert both == Counter(alone)


MIXINGS = [Mixing("first_exhausted", (3.0, 1.0)), Mixing("all_exhausted", (1.0, 1.0)), Mixing()]


@pytest.mark.parametrize("mixing", MIXINGS)
@pytest.mark.parametrize("packing", [None, 128])
@pytest.mark.parametrize("workers", [0, 2])
def test_resumed_anywhere_it_goes_on_with_the_next_micro_batch(
    sources: list[Source], workers: int, packing: int | None, mixing: Any
) -> None:
    whole = as_lists(list(loader(sources, mixing=mixing, packing=packing)))
    for handed_out in (1, 2, 7, len(whole) // 2, len(whole) - 1):
        stopped = loader(sources, workers, mixing=mixing, packing=packing)
        rows = iter(stopped)
        for _ in range(handed_out + 1):  # Lightning has drawn one more than it trained on
            next(rows)
        state = stopped.state_dict()
        torch.save(state, "/dev/null")  # a checkpoint can hold it
        resumed = loader(sources, 2 - workers, mixing=mixing, packing=packing)
        resumed.load_state_dict(state)
        assert as_lists(list(resumed)) == whole[handed_out:]


@pytest.mark.parametrize(
    "changed", [{"epoch_batches": 8}, {"micro_batch_size": 4, "epoch_batches": 8}], ids=["limit", "micro-batch"]
)
def test_a_second_resumption_goes_on_too_where_the_first_had_another_limit_or_micro_batch(
    sources: list[Source], changed: dict[str, int]
) -> None:
    """The trainer counts the micro-batches of the epoch from 0, after one that was over."""
    first, second, third = loader(sources, epoch_batches=4), loader(sources, **changed), loader(sources, **changed)
    list(islice(first, 4))
    second.load_state_dict(first.state_dict())
    rows = iter(second)
    list(islice(rows, 6))
    state = second.state_dict()
    StreamLoader.rewind(state, micro_batch=6, ready=6)
    third.load_state_dict(state)
    assert as_lists(list(islice(third, 2))) == as_lists(list(islice(rows, 2)))


def test_ratios_hold_over_the_stream(sources: list[Source]) -> None:
    big = [Source(source.path, name=source.name, weight=1.0) for source in sources]
    stream = MixedRows(big, Mixing("all_exhausted", (0.3, 0.7)))
    drawn = [next(stream)[0] for _ in range(80)]
    assert abs(sum(drawn) / 80 - 0.7) < 0.01


def test_another_order_each_epoch(sources: list[Source]) -> None:
    made = loader(sources)
    first, second = ([piece for row in made for piece in pieces(row)] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second)


def test_bad_rows_stop_a_stream_or_are_counted(sources: list[Source]) -> None:
    path = Path(sources[0].path)
    path.write_text(path.read_text() + '{"instruction": "a"}\n')
    with pytest.raises(RecipeError, match=r"s1.jsonl:61: has no 'output'"):
        list(loader(sources))
    skipping = loader(sources)
    skipping.preparation = Preparation(make_tokenizer(), max_length=64, on_bad_row="skip")
    list(skipping)
    assert skipping.describe() == [f"the stream of {path}: 1 of 61 rows cannot be used, skipped"]


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def _cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:50]))


def _put_another_in_its_place(path: Path) -> None:
    other = path.with_name("other.jsonl")
    other.write_bytes(b"".join(reversed(path.read_bytes().splitlines(keepends=True))))
    other.replace(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_append, "s1.jsonl: 1 file changed, came or vanished while the run reads them, e.g. .*--resume_data changed"),
        (_cut, "s1.jsonl: 1 file changed, .*--ckpt_path last"),
        (_put_another_in_its_place, "s1.jsonl: 1 file changed"),
        (Path.unlink, "s1.jsonl' does not exist"),
    ],
)
def test_a_file_that_changes_ends_the_stream(sources: list[Source], change: Any, said: str) -> None:
    stream = iter(loader(sources))
    next(stream)
    change(Path(sources[0].path))
    with pytest.raises(RecipeError, match=said):
        list(stream)


def test_a_file_that_comes_into_a_folder_ends_the_stream(sources: list[Source]) -> None:
    folder = Path(sources[0].path).parent
    stream = loader([Source(str(folder))])
    list(stream)
    (folder / "s3.jsonl").write_bytes((folder / "s1.jsonl").read_bytes())
    with pytest.raises(RecipeError, match="1 file changed, came or vanished .*, e.g. .*s3.jsonl; put the data back"):
        list(stream)


def test_a_checkpoint_names_the_files_of_the_start(sources: list[Source], make_trainer: Any, model_folder: str) -> None:
    one, data = (TextDataModule(sources[0].path, streaming=True, max_length=64, tokenize_workers=0) for _ in range(2))
    one.load(make_tokenizer())
    wanted = one.order.decides["source 1"]
    make_trainer(max_steps=1).fit(CausalLM(model_folder), data)
    _append(Path(sources[0].path))  # before the first checkpoint
    assert data.state_dict()["order"]["decides"]["source 1"] == wanted


@pytest.mark.parametrize("buffer_rows", [3, 20])
def test_a_stream_that_gives_nothing_to_learn_from_is_an_error(tmp_path: Path, buffer_rows: int) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "red " * 80, "completion": "a"}) + "\n" for _ in range(7)))
    said = (
        f"{path}: not one of 7 rows has a supervised token within data.max_length=64; the stream of {path}: 7 of 7 "
        "rows: longer than "
    )
    with pytest.raises(RecipeError, match=f"^{said}"):
        list(loader([Source(str(path))], buffer_rows=buffer_rows))


@pytest.mark.parametrize("buffer_rows", [10, 200])
@pytest.mark.parametrize("mixing", [Mixing("all_exhausted", (0.3, 0.4, 0.3)), Mixing()])
def test_a_source_of_which_nothing_can_be_trained_on_ends_a_stream(
    sources: list[Source], tmp_path: Path, mixing: Mixing, buffer_rows: int
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "red " * 80, "completion": "a"}) + "\n" for _ in range(7)))
    stream = iter(loader([*sources, Source(str(path))], buffer_rows=buffer_rows, mixing=mixing))
    with pytest.raises(
        RecipeError, match=rf"^{path}: not one of \d+ rows has a supervised token within data.max_length"
    ):
        list(stream)
    path.write_text('{"instruction": "a"}\n' * 7)
    skipping = loader([*sources, Source(str(path), format="alpaca")], buffer_rows=buffer_rows, mixing=mixing)
    skipping.preparation = Preparation(make_tokenizer(), max_length=64, on_bad_row="skip")
    with pytest.raises(RecipeError, match=rf"^{path}: not one of \d+ rows can be used, e.g. {path}:1: has no 'output'"):
        list(skipping)


def test_a_small_source_of_which_nothing_can_be_trained_on_is_refused_before_training(
    sources: list[Source], tmp_path: Path
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "red " * 80, "completion": "a"}) + "\n" for _ in range(7)))
    data = TextDataModule(sources=[*sources, Source(str(path))], streaming=True, max_length=64)
    with pytest.raises(
        RecipeError, match=f"^{path}: not one of 7 rows has a supervised token within data.max_length=64"
    ):
        data.load(make_tokenizer())


def test_what_streaming_cannot_do(sources: list[Source], make_trainer: Any, model_folder: str) -> None:
    with pytest.raises(RecipeError, match="without data.max_length that .*; set data.max_length to 64$"):
        TextDataModule(sources[0].path, streaming=True, packing=64, max_length=None)
    with pytest.raises(RecipeError, match="without weights goes by the sources' sizes, which data.streaming=true does"):
        TextDataModule(sources=sources, streaming=True, mixing="all_exhausted")
    module = CausalLM(model_folder, lr_scheduler=lambda optimizer: ConstantWithWarmup(optimizer, warmup=0.1))
    refused = (
        "ConstantWithWarmup needs the run's length; set trainer.max_steps, .*, or warmup as a number of optimizer st"
    )
    with pytest.raises(RecipeError, match=refused):
        make_trainer(max_epochs=1).fit(module, TextDataModule(sources[0].path, streaming=True, max_length=64))
    trainer = make_trainer(max_steps=4, accumulate_grad_batches=2, limit_train_batches=5)
    with pytest.raises(RecipeError, match="ends a stream within an optimizer step of 2 micro-batches; set it to 6"):
        trainer.fit(CausalLM(model_folder), TextDataModule(sources[0].path, streaming=True, max_length=64))


def test_a_warmup_in_steps_needs_no_length(sources: list[Source], make_trainer: Any, model_folder: str) -> None:
    module = CausalLM(model_folder, lr_scheduler=lambda optimizer: ConstantWithWarmup(optimizer, warmup=2))
    module.optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.5)
    trainer = make_trainer(max_epochs=1, limit_train_batches=1)
    trainer.fit(module, TextDataModule(sources[0].path, streaming=True, max_length=64, micro_batch_size=1))
    (config,) = trainer.lr_scheduler_configs
    assert set(config.scheduler.get_last_lr()) == {0.25}
    assert [config.scheduler.factor(step) for step in range(4)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize("option", ["limit_train_batches", "overfit_batches", "val_check_interval"])
def test_fractions_of_an_epoch_of_unknown_length_are_refused_before_weights_load(
    sources: list[Source], make_trainer: Any, model_folder: str, option: str
) -> None:
    module, path = CausalLM(model_folder), sources[0].path
    with pytest.raises(
        RecipeError, match=rf"trainer\.{option}=0\.5 is a fraction of an epoch, whose length data\.stream"
    ):
        make_trainer(max_steps=1, **{option: 0.5}).fit(module, TextDataModule(path, val_path=path, streaming=True))
    assert not list(module.parameters())


@pytest.mark.parametrize("streaming", [False, True])
def test_training_that_max_steps_ended_goes_on_with_more_steps(
    sources: list[Source], make_trainer: Any, model_folder: str, tmp_path: Path, streaming: bool
) -> None:
    def schedule(optimizer: Any) -> Any:
        return ConstantWithWarmup(optimizer, warmup=2)

    def fit(max_steps: int, checkpoint: str | None = None) -> Any:
        data = TextDataModule(
            sources=sources,
            streaming=streaming,
            micro_batch_size=2,
            max_length=64,
            tokenize_workers=0,
            **({"shuffle_buffer": 20} if streaming else {}),
        )
        trainer = make_trainer(max_steps=max_steps, max_epochs=9, accumulate_grad_batches=2)
        module = CausalLM(model_folder, lr_scheduler=schedule)
        trainer.fit(module, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{max_steps}.ckpt")
        return module

    whole = fit(30)  # a pass is 22 steps
    for steps in (3, 6, 22, 25):
        fit(steps)
        resumed = fit(30, str(tmp_path / f"{steps}.ckpt"))
        for (name, one), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
            assert torch.equal(one, other), (steps, name)

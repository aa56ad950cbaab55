"""TextDataModule: what it reads, splits, says and refuses."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning import Trainer, seed_everything
from shared_fixtures import make_rows, make_tokenizer

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.data.loaders.batching import PackedBatchLoader
from lit_ft.data.option_checks import check_limit, check_overfitted_share
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.samples import Samples

DATA = Path(os.environ.get("LIT_FT_TEST_DATA", "."))


def load(write_rows: Callable[..., str], rows: Any = None, **options: Any) -> TextDataModule:
    data = TextDataModule(write_rows(rows), **options)
    data.load(make_tokenizer())
    return data


def contents(samples: Samples) -> list[bytes]:
    return [np.asarray(samples[i][0]).tobytes() for i in range(len(samples))]


def test_too_long_rows_are_cut_and_counted(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    rows = [{"instruction": "a", "output": "red " * n} for n in (1, 50, 2)]
    line = "1 of 3 rows: longer than data.max_length=40 tokens, truncated at the end"
    for _ in range(2):  # the second time from the cache
        data = load(write_rows, rows, max_length=40)
        assert data.splits["train"].lengths.max() == 40
        assert line in caplog.text
        caplog.clear()


def test_a_row_whose_answer_is_cut_away_is_dropped_and_counted(
    write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    rows = [{"instruction": "a " * n, "output": "red"} for n in (1, 80)]
    data = load(write_rows, rows, max_length=40)
    assert data.splits["train"].rows.tolist() == [0]
    assert "1 of 2 rows: no supervised token left, dropped" in caplog.text


def test_all_answers_cut_away(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match=r"not one of 22 rows has a supervised token within data.max_length=6"):
        load(write_rows, max_length=6)


def test_too_long_rows_can_be_dropped_or_refused(write_rows: Any) -> None:
    rows = [{"instruction": "a", "output": "red " * n} for n in (1, 50, 2)]
    assert load(write_rows, rows, max_length=40, overlong="drop").splits["train"].rows.tolist() == [0, 2]
    with pytest.raises(RecipeError, match=r"row 2: \d+ tokens are over data.max_length=40"):
        load(write_rows, rows, max_length=40, overlong="error")


def test_bad_rows_stop_or_are_skipped_and_named(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*make_rows(3), {"instruction": "a", "output": 7}, *make_rows(2, seed=1), {"instruction": "a"}]
    with pytest.raises(RecipeError, match="row 4: 'output' is an int; text is needed.*data.on_bad_row=skip"):
        load(write_rows, rows)
    caplog.set_level("INFO", "lightning.pytorch")
    data = load(write_rows, rows, on_bad_row="skip")
    assert data.splits["train"].rows.tolist() == [0, 1, 2, 4, 5]
    assert "2 of 7 rows cannot be used, skipped" in caplog.text
    assert "row 4: 'output' is an int" in caplog.text
    assert "row 7: has no 'output'" in caplog.text
    with pytest.raises(RecipeError, match=r"not one of 1 row can be used, e.g. \S+, row 1: 'output' is an int"):
        load(write_rows, rows[3:4], on_bad_row="skip")
    with pytest.raises(RecipeError, match=r"holds no row that can be read; .*; \S+, row 1: is a JSON int; each row"):
        load(write_rows, [3], on_bad_row="skip")


def test_a_tokenizer_without_template(write_rows: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(RecipeError, match="has no chat template.*--data.chat_template"):
        TextDataModule(write_rows()).load(tokenizer)
    TextDataModule(write_rows(), chat_template="{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}").load(
        tokenizer
    )


def test_the_tokenizer_gets_the_options_as_defaults_of_its_template(write_rows: Any) -> None:
    tokenizer = make_tokenizer()
    template = "{% for m in messages %}{{ mood }}{{ m['content'] }}<|im_end|>{% endfor %}"
    TextDataModule(write_rows(), chat_template=template, template_options={"mood": "red"}).load(tokenizer)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "cup"}], tokenize=False) == "redcup<|im_end|>"


@pytest.mark.parametrize("named", [False, True])
def test_validation_share_does_not_overlap_even_where_rows_repeat(write_rows: Any, named: bool) -> None:
    rows = make_rows(50, seed=3) * 2
    path = write_rows(rows)
    data = (
        TextDataModule(sources=[Source(path, name="all")], val_fraction=0.2)
        if named
        else TextDataModule(path, val_fraction=0.2)
    )
    data.load(make_tokenizer())
    train, val = (contents(data.splits[name]) for name in ("train", "val"))
    assert (len(set(train)), len(set(val))) == (40, 10)
    assert not set(train) & set(val)
    assert len(train) + len(val) == 100
    assert data.splits["val"].names == (("all",) if named else ())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("others", [0, 20])
def test_rows_of_several_sources_are_held_out_of_all_of_them(
    write_rows: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    others: int,
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    both, own = make_rows(40, seed=3), [make_rows(others, seed=n) for n in (4, 5)]
    paths = [write_rows([*rows, *both], name=f"{n}.json") for n, rows in enumerate(own)]
    caplog.set_level("INFO", "lightning.pytorch")
    data = TextDataModule(sources=[Source(path) for path in paths], val_fraction=0.25)
    data.load(make_tokenizer())
    train, val = (data.splits[name] for name in ("train", "val"))
    assert not set(contents(train)) & set(contents(val))
    assert [(val.source == n).sum() for n in (0, 1)] == [(40 + others) // 4] * 2  # the fraction of each
    held_out = [val.rows[val.source == n] for n in (0, 1)]
    of_both = [rows[rows >= others] for rows in held_out]
    assert of_both[0].tolist() == of_both[1].tolist()
    said = f"data: {2 * len(of_both[0])} of these {2 * len(held_out[0])} rows are in several sources, and are held out"
    assert f"{said} of each" in caplog.text
    validated = data.validation_rows(make_tokenizer())
    assert [rows for _, rows in validated] == [frozenset(rows.tolist()) for rows in held_out]


def test_sources_without_a_common_row_have_nothing_to_say(write_rows: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    sources = [Source(write_rows(make_rows(12, seed=n), name=f"{n}.json")) for n in (1, 2)]
    TextDataModule(sources=sources, val_fraction=0.25).load(make_tokenizer())
    assert "3 of 12 rows for validation" in caplog.text
    assert "several sources" not in caplog.text


def test_a_source_that_others_hold_out_in_full_is_refused(write_rows: Any) -> None:
    rows = make_rows(40, seed=3)
    path = write_rows(rows, name="whole.json")
    held_out = TextDataModule(path, val_fraction=0.25)
    held_out.load(make_tokenizer())
    part = write_rows([rows[n] for n in held_out.splits["val"].rows[:4]], name="part.json")
    data = TextDataModule(sources=[Source(path), Source(part)], val_fraction=0.25)
    with pytest.raises(
        RecipeError, match="of 4 different rows of '.*part.json' and those held out of other sources leaves none"
    ):
        data.load(make_tokenizer())


def test_prompts_are_those_of_the_rows_that_stayed(write_rows: Any) -> None:
    data = load(write_rows, make_rows(30, seed=2), val_fraction=0.3)
    prompts = data.splits.prompts("val")
    rows = make_rows(30, seed=2)
    wanted = [rows[i] for i in data.splits["val"].rows]
    assert [prompt["expected"] for prompt in prompts] == [row["output"] for row in wanted]
    assert prompts[0]["prompt"].endswith(f"{prompts[0]['question']}<|im_end|>\n<|im_start|>assistant\n")


def test_what_ends_with_the_user_asks_for_the_answer_before(write_rows: Any) -> None:
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "red"), ("user", "b"))]
    data = load(write_rows, [{"messages": turns}] * 2)
    assert [one["expected"] for one in data.splits.prompts("train")] == ["red", "red"]


@pytest.mark.parametrize(("supervise", "wanted"), [("assistant", ["red", "blue"]), ("all", ["green", "blue"])])
def test_the_last_answer_that_is_supervised_is_asked_and_expected(
    write_rows: Any, supervise: Any, wanted: list[str]
) -> None:
    first = [{"role": "user", "content": "the cup"}, {"role": "assistant", "content": "red"}]
    second = [{"role": "user", "content": "the book"}, {"role": "assistant", "content": "green", "train": False}]
    third = [{"role": "user", "content": "the chair"}, {"role": "assistant", "content": "blue"}]
    path = write_rows([{"messages": first + second}, {"messages": first + second + third}], name="val.json")
    data = load(write_rows, make_rows(3), val_path=path, supervise=supervise)
    prompts = data.splits.prompts("val")
    assert [prompt["expected"] for prompt in prompts] == wanted
    asked = ["the cup" if supervise == "assistant" else "the book", "the chair"]
    assert [prompt["question"] for prompt in prompts] == asked
    assert all(p["prompt"].endswith(f"{p['question']}<|im_end|>\n<|im_start|>assistant\n") for p in prompts)


def test_sources_of_several_formats(tmp_path: Path, write_rows: Any) -> None:
    (tmp_path / "text.txt").write_text("the red cup\n\nthe book is blue\n")
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "red"}]}]
    sources = [
        Source(write_rows(make_rows(5), name="alpaca.json"), max_rows=3),
        Source(write_rows(chats, name="chats.json"), name="talk"),
        {"path": str(tmp_path / "text.txt")},  # as in a recipe
    ]
    data = TextDataModule(sources=sources, val_sources=[Source(write_rows(make_rows(2), name="v.json"))])
    data.load(make_tokenizer())
    samples = data.splits["train"]
    assert samples.names == ("alpaca", "talk", "text")
    assert samples.source.tolist() == [0, 0, 0, 1, 2, 2]
    assert data.splits["val"].names == ("v",)


def test_packing_that_cannot_hold_the_longest_sample(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match="data.packing=20 tokens cannot hold the longest sample"):
        load(write_rows, packing=20)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.5}, "at least 0 and below 1"),
        ({"micro_batch_size": 0}, "must be 1 or more"),
        ({"micro_batch_tokens": 0}, "data.micro_batch_tokens=0 must be 1 or more"),
        ({"num_workers": 4_611_686_018_427_387_904}, "must be 0 to 256 processes"),
        ({"tokenize_workers": -1}, "must be 0 to 256 processes"),
        ({"max_length": 1}, "leaves nothing to predict"),
        ({"packing": True}, "says no size; give the token budget"),
        ({"val_path": "x", "val_fraction": 0.1}, "data.val_path='x' and data.val_fraction=0.1 exclude each other"),
        ({"sources": [Source("a")]}, "data.path='rows.json' and data.sources exclude each other"),
        ({"streaming": True, "val_fraction": 0.1}, "needs all rows at once"),
        ({"streaming": True, "packing": 128}, "of data.max_length=2048 that .* to 128, or data.packing to 2048$"),
        ({"shuffle_buffer": 7}, "data.shuffle_buffer=7 has no effect without data.streaming=true"),
        ({"streaming": True, "num_workers": 2}, "data.num_workers=2 has no effect .* data.tokenize_workers; leave it"),
        ({"micro_batch_tokens": 8, "join_micro_batches": False}, "data.micro_batch_tokens=8 has no effect .* one of"),
        ({"mixing": "all_exhausted"}, "data.mixing=all_exhausted has no effect with one source"),
        ({"val_sources": [Source("a/x.json"), Source("b/x.json")]}, "two sources have the name 'x'"),
    ],
)
def test_options_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        TextDataModule("rows.json", **options)


@pytest.mark.parametrize(
    "options", [{"streaming": True, "num_workers": 2}, {"micro_batch_tokens": 8, "join_micro_batches": False}]
)
def test_options_that_an_evaluation_reads(options: Any) -> None:
    for name in ("val_path", "test_path"):
        TextDataModule("rows.json", **{name: "other.json"}, **options)
    if "streaming" not in options:
        TextDataModule("rows.json", val_fraction=0.1, **options)
        TextDataModule("rows.json", format="preference", **options)  # the reference is computed in such batches


# --- a loss for each source ------------------------------------------------------------------------


def three_sources(write_rows: Any) -> list[Source]:
    return [
        Source(write_rows(make_rows(count, seed=seed), name=f"s{seed}.json"), name=f"s{seed}", weight=float(seed))
        for seed, count in ((1, 7), (2, 12), (3, 9))
    ]


@pytest.mark.parametrize("packing", [None, 128])
def test_validation_loss_of_a_source_is_that_of_the_source_alone(
    make_trainer: Any, model_folder: str, write_rows: Any, packing: int | None
) -> None:
    sources = [replace(source, weight=None) for source in three_sources(write_rows)]
    module = CausalLM(model_folder)
    data = TextDataModule(val_sources=sources, micro_batch_size=3, packing=packing, max_length=128)
    trainer = make_trainer()
    together = trainer.validate(module, data, verbose=False)[0]
    assert isinstance(trainer.val_dataloaders, PackedBatchLoader)  # one, however many sources
    for source in sources:
        alone = make_trainer().validate(module, TextDataModule(val_path=source.path), verbose=False)[0]
        assert together[f"val/loss/{source.name}"] == pytest.approx(alone["val/loss"], rel=1e-6)


def test_a_share_of_the_validation_data_is_a_share_of_all_of_it(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    module, rows = CausalLM(model_folder), write_rows(make_rows(16))
    validated, sizes = {}, {}
    for limit in (1.0, 0.5):
        trainer = make_trainer(limit_val_batches=limit)
        data = TextDataModule(rows, val_path=write_rows(make_rows(16, 1), "val.json"), micro_batch_tokens=64)
        trainer.validate(module, data, verbose=False)
        (validated[limit],) = trainer.num_val_batches
        assert isinstance(trainer.val_dataloaders, PackedBatchLoader)
        sizes[limit] = [batch["segment_lengths"] for batch in trainer.val_dataloaders]
    assert validated[1.0] >= 4
    assert validated[0.5] == validated[1.0] // 2
    assert sizes[0.5] == sizes[1.0] != sorted(sizes[1.0], key=max, reverse=True)  # not those of the longest samples


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"packing": 128, "max_length": 128}, {"micro_batch_size": 3}])
def test_training_losses_of_sources_add_up_to_the_total(
    make_trainer: Any, model_folder: str, write_rows: Any, options: Any
) -> None:
    from lightning.pytorch import Callback

    seen: list[dict[str, float]] = []

    class Keep(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    data = TextDataModule(sources=three_sources(write_rows), mixing="all_exhausted", **options)
    trainer = make_trainer(max_epochs=1, accumulate_grad_batches=2, callbacks=[Keep()])
    trainer.fit(CausalLM(model_folder), data)
    samples = data.splits["train"]
    loader = data.train_dataloader()
    rows = list(loader)
    for step in range(0, len(rows) - 1, 2):
        targets = np.concatenate([row["target_sources"].numpy() for row in rows[step : step + 2]])
        counts = np.bincount(targets, minlength=3)
        metrics = seen[step + 1]
        total = sum(counts[i] * metrics[f"train/loss/{name}"] for i, name in enumerate(samples.names) if counts[i])
        assert total / counts.sum() == pytest.approx(metrics["train/loss"], rel=1e-6)


@pytest.mark.skipif(not (DATA / "huanhuan.json").is_file(), reason="LIT_FT_TEST_DATA does not name the data")
@pytest.mark.parametrize("name", ["huanhuan", "alpaca_en_demo"])
def test_real_data_packs_tightly(name: str) -> None:
    data = TextDataModule(str(DATA / f"{name}.json"), packing=2048)
    data.load(make_tokenizer())
    units = data.plan().units(data.splits["train"], 0)
    assert data.splits["train"].lengths.sum() / (len(units) * 2048) > 0.97


def test_json_of_a_cell(write_rows: Any) -> None:
    """Chinese text and escapes come through a file and the cache unchanged."""
    rows = [{"instruction": '红\n"书"', "output": json.dumps({"杯子": 1}, ensure_ascii=False)}]
    data = load(write_rows, rows)
    text = make_tokenizer().decode(data.splits["train"][0][0])
    assert text == '<|im_start|>user\n红\n"书"<|im_end|>\n<|im_start|>assistant\n{"杯子": 1}<|im_end|>'


# --- mistakes ----------------------------------------------------------------------------------------


def test_columns_of_all_sources_unless_one_names_its_own(write_rows: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\nred,blue\ncup,book\n")
    (tmp_path / "b.csv").write_text("q,a\nlamp,cup\n")
    columns = {"instruction": "question", "output": "answer"}
    own = Source(str(tmp_path / "b.csv"), columns={"instruction": "q", "output": "a"})
    data = TextDataModule(sources=[Source(str(tmp_path / "a.csv")), own], columns=columns)
    data.load(make_tokenizer())
    assert len(data.splits["train"]) == 3
    with pytest.raises(RecipeError, match=r"a\.csv:2: .* --data\.columns '\{instruction: question, output: answer"):
        TextDataModule(str(tmp_path / "a.csv")).load(make_tokenizer())


@pytest.mark.parametrize("null", [False, True], ids=["missing", "null"])
def test_a_mapped_column_may_be_empty_in_the_first_row(write_rows: Any, tmp_path: Path, null: bool) -> None:
    import datasets

    rows = [{"question": "q", "answer": "a"}, {"question": "q", "context": "c", "answer": "a"}]
    columns = {"instruction": "question", "input": "context", "output": "answer"}
    if null:  # Arrow's rows lack what is null
        path = str(tmp_path / "rows.parquet")
        datasets.Dataset.from_list([{"context": None, **row} for row in rows]).to_parquet(path)
    else:
        path = write_rows(rows)
    data = TextDataModule(path, columns=columns)
    data.load(make_tokenizer())
    without, with_context = data.splits["train"].lengths
    assert without < with_context
    with pytest.raises(RecipeError, match=r"columns names 'contxt', .* none of the first 500 rows has it; fix it"):
        TextDataModule(path, columns={**columns, "input": "contxt"}).load(make_tokenizer())


def test_weights_of_validation_are_refused(write_rows: Any) -> None:
    path = write_rows()
    with pytest.raises(RecipeError, match=r"data.val_sources: weight=0.3 of 'rows' has no effect, .* leave it out"):
        TextDataModule(path, val_sources=[Source(path, weight=0.3)])


def test_a_weight_of_the_only_source_is_refused(write_rows: Any) -> None:
    with pytest.raises(RecipeError, match=r"data.sources: weight=0.3 of 'rows' has no effect with one source"):
        TextDataModule(sources=[Source(write_rows(), weight=0.3)], mixing="all_exhausted")


TEXTS = [{"text": "red"}, {"text": "blue"}]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"system": "Be brief."}, "data.system='Be brief.' has no effect on raw text"),
        ({"supervise": "last"}, "data.supervise='last' has no effect on raw text or token ids"),
    ],
)
def test_options_of_conversations_are_refused_where_there_are_none(
    write_rows: Any, options: Any, message: str, streaming: bool
) -> None:
    texts, chats = write_rows(TEXTS, name="texts.json"), write_rows(name="chats.json")
    with pytest.raises(RecipeError, match=message):
        TextDataModule(texts, val_path=texts, streaming=streaming, **options).load(make_tokenizer())
    TextDataModule(texts, val_path=chats, streaming=streaming, **options).load(make_tokenizer())
    both = [Source(texts), Source(chats)]
    TextDataModule(sources=both, streaming=streaming, **options).load(make_tokenizer())


def test_a_system_prompt_of_a_source_of_raw_text_is_refused(write_rows: Any) -> None:
    texts, chats = write_rows(TEXTS, name="texts.json"), write_rows(name="chats.json")
    data = TextDataModule(sources=[Source(texts, system="Be brief."), Source(chats)])
    with pytest.raises(RecipeError, match=r"texts.json: system='Be brief.' has no effect on raw text"):
        data.load(make_tokenizer())


def test_a_source_has_its_own_system_prompt_or_none_at_all(write_rows: Any) -> None:
    systems, rows = {"all": None, "own": "lamp", "none": ""}, [{"instruction": "red", "output": "blue"}]
    sources = [Source(write_rows(rows, name=f"{name}.json"), system=text) for name, text in systems.items()]
    data, tokenizer = TextDataModule(sources=sources, system="cup"), make_tokenizer()
    data.load(tokenizer)
    texts = [tokenizer.decode(ids) for ids, *_ in map(data.splits["train"].__getitem__, range(3))]
    assert [("cup" in text, "lamp" in text) for text in texts] == [(True, False), (False, True), (False, False)]


def test_prompts_of_text_that_get_no_system_prompt_are_counted(
    write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    turns = [[{"role": "user", "content": "red"}], [{"role": "assistant", "content": "blue"}]]
    rows = [{"prompt": "red", "completion": "blue"}, dict(zip(("prompt", "completion"), turns, strict=True))]
    load(write_rows, rows, system="Be brief.")
    assert "1 of 2 rows: text without turns, on which data.system and data.supervise have no effect" in caplog.text
    caplog.clear()
    load(write_rows, rows)
    assert "without turns" not in caplog.text


@pytest.mark.parametrize("limit", [0.0001, 0.05])
def test_a_share_of_less_than_one_micro_batch(
    make_trainer: Any, model_folder: str, write_rows: Any, limit: float
) -> None:
    trainer = make_trainer(max_steps=1, limit_train_batches=limit)
    with pytest.raises(RecipeError, match=rf"limit_train_batches={limit} is less than one of the 11 .* at least 0.091"):
        trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), micro_batch_size=2))


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_share_of_less_than_one_batch_is_refused_before_weights_are_loaded(
    make_trainer: Any, model_folder: str, write_rows: Any, stage: str
) -> None:
    limit = {"fit": "limit_val_batches", "validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
    trainer = make_trainer(max_steps=1, **{limit: 0.01})
    rows = write_rows()
    module = CausalLM(model_folder)
    data = TextDataModule(rows, val_path=rows, test_path=rows, micro_batch_size=2, micro_batch_tokens=64)
    run = {"fit": trainer.fit, "validate": trainer.validate, "test": trainer.test, "predict": trainer.predict}[stage]
    with pytest.raises(RecipeError, match=rf"trainer.{limit}=0.01 is less than one of the \d+ .*; set at least 0\.\d+"):
        run(module, data)
    assert module.model is None


def test_a_source_of_one_row_cannot_be_split(write_rows: Any) -> None:
    path = write_rows(count=1)
    with pytest.raises(RecipeError, match=r"of 1 different rows of .* add rows, or set data.val_path in its place"):
        TextDataModule(path, val_fraction=0.1).load(make_tokenizer())


def test_conversations_that_begin_with_the_assistant_are_counted(
    write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    ask, say = {"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}
    first = [{"role": "system", "content": "cup"}, say, ask, say]
    rows = [{"messages": first}, {"messages": [{**say, "train": False}, ask, say]}, {"messages": [ask, say]}]
    data = load(write_rows, rows)
    assert len(data.splits["train"]) == 3
    assert "1 of 3 conversations: begins with the assistant, whose first turn then answers nothing" in caplog.text


def test_data_that_is_trained_and_validated_on_is_named(
    write_rows: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    path = write_rows()
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "link.json").symlink_to(path)
    for train, val in ((path, path), (str(tmp_path / "*.json"), path), (path, str(tmp_path / "more"))):
        caplog.clear()
        TextDataModule(train, val_path=val).load(make_tokenizer())
        assert f"training and validation read the same data ({path}), so val/loss" in caplog.text
    caplog.clear()
    TextDataModule(path, val_path=write_rows(make_rows(3, 5), name="val.json")).load(make_tokenizer())
    assert "the same data" not in caplog.text


def test_a_home_folder_in_paths(write_rows: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows()
    (tmp_path / "a.jinja").write_text("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    data = TextDataModule("~/rows.json", val_path="~/*.json", cache_dir="~/cache", chat_template="~/a.jinja")
    data.load(make_tokenizer())
    assert (tmp_path / "cache" / "tokens").is_dir()
    monkeypatch.setenv("LIT_FT_CACHE", "~/other")
    TextDataModule("~/rows.json").load(make_tokenizer())
    assert (tmp_path / "other" / "tokens").is_dir()


def test_columns_that_no_format_has_are_refused(write_rows: Any) -> None:
    path = write_rows([{"question": "q", "answer": "a", "setting": "s"}])
    columns = {"instruction": "question", "output": "answer", "sytem": "setting"}
    for form in ("auto", "alpaca"):
        with pytest.raises(
            RecipeError, match="columns maps 'sytem', which is no column of the format alpaca; its columns"
        ):
            TextDataModule(path, columns=columns, format=form).load(make_tokenizer())  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "asked"), [(None, [[1, 3], [2, 0]]), (1, [[0, 1], [2, 3]])])
def test_questions_of_about_one_length_are_asked_together_unless_the_first_ones_are_wanted(
    write_rows: Any, limit: int | None, asked: list[list[int]]
) -> None:
    data = TextDataModule(test_path=write_rows([{"instruction": "a" * n} for n in (1, 40, 3, 20)]), micro_batch_size=2)
    data.load(make_tokenizer(), "predict")
    data.trainer = Trainer(limit_predict_batches=limit, logger=False, enable_checkpointing=False, accelerator="cpu")
    assert [[question["row"] for question in batch] for batch in data.predict_dataloader()] == asked


def test_the_least_share_of_one_batch_is_written_as_a_share() -> None:
    """As 1 it would be the number of batches."""
    with pytest.raises(RecipeError, match=r"of the 1 micro-batches of val data; .*: set at least 1\.0, or 1$"):
        check_overfitted_share("val", 1, 0.7)
    with pytest.raises(RecipeError, match=r"of the 1 validation batches; set at least 1\.0, or a number of"):
        check_limit("limit_val_batches", 0.7, 1, "validation batches")


@pytest.mark.parametrize(("rows", "options"), [(40, {"val_fraction": 0.1}), (4, {})], ids=["val", "train"])
def test_a_share_to_overfit_of_no_batch_is_refused(
    make_trainer: Any, model_folder: str, write_rows: Any, rows: int, options: Any
) -> None:
    data = TextDataModule(write_rows(count=rows), micro_batch_size=1, **options)
    refused = r"trainer.overfit_batches=0.1 is less than one of the \d micro-batches of (train|val) data"
    with pytest.raises(RecipeError, match=refused):
        make_trainer(max_epochs=1, overfit_batches=0.1).fit(CausalLM(model_folder), data)


def test_batches_without_a_fit(write_rows: Any) -> None:
    data = TextDataModule(write_rows(), micro_batch_size=2)
    with pytest.raises(RecipeError, match=r"needs a tokenizer: .*; without a Trainer, call load\(tokenizer\)"):
        data.setup("fit")
    data.load(make_tokenizer())
    with pytest.raises(RecipeError, match="to look at batches, call .* and set its attribute trainer to a Trainer"):
        data.train_dataloader()
    data.trainer = Trainer(accelerator="cpu", logger=False)
    assert len(next(iter(data.train_dataloader()))["segment_lengths"]) >= 2


@pytest.mark.parametrize("streaming", [False, True])
def test_a_checkpoint_of_a_second_fit_has_the_seed_and_the_options_of_that_fit(
    make_trainer: Any, model_folder: str, write_rows: Any, streaming: bool
) -> None:
    path, options = write_rows(), {"max_length": 64, "streaming": streaming, "tokenize_workers": 0}
    twice, other = TextDataModule(path, **options), TextDataModule(path, **options)
    for seed in (1, 2):
        seed_everything(seed, verbose=False)
        make_trainer(max_steps=1).fit(CausalLM(model_folder), twice)
        state = twice.state_dict()
        twice.shuffle = False
    assert state["order"]["decides"].items() >= {"seed_everything": "2", "data.shuffle": "False"}.items()
    seed_everything(1, verbose=False)
    make_trainer(max_steps=1).fit(CausalLM(model_folder), other)
    with pytest.raises(RecipeError, match=r"data\.shuffle was False and is True; seed_everything was 2 and is 1\."):
        other.check_order(state)

"""``check`` and ``convert``: what they print, write and exit with."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from model_families import save_family
from shared_fixtures import make_rows, make_tokenizer

from lit_ft import CausalLM, TextDataModule
from lit_ft.cli import main
from lit_ft.commands.check import leak_probe
from lit_ft.data.inspection import histogram
from lit_ft.data.tokens.megatron_indexed import read_documents
from lit_ft.packed_batch import TokenLoss

pytestmark = pytest.mark.slow

DATA = Path(os.environ.get("LIT_FT_TEST_DATA", "."))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Callable[..., str]:
    """Run a command in this process; returns all that it said."""

    def call(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        caplog.clear()
        caplog.set_level("INFO", "lightning.pytorch")
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        said = capsys.readouterr()
        assert stop.value.code == code, said.err
        return said.out + said.err + "\n".join(record.getMessage() for record in caplog.records)

    return call


def recipe(tmp_path: Path, model: str, data: dict[str, Any], **trainer: Any) -> list[str]:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump({"model": {"pretrained": model}, "data": data, "trainer": trainer}))
    return ["--config", str(file)]


def test_good_data(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    rows = [*make_rows(30), make_rows(1)[0]]
    data = {
        "sources": [{"path": write_rows(rows), "name": "one"}, {"path": write_rows(make_rows(9, 5), name="two.json")}],
        "val_path": write_rows([make_rows(1)[0], *make_rows(24, 7)], name="val.json"),
        "packing": 128,
        "max_length": 128,
    }
    arguments = recipe(tmp_path, model_folder, data, accumulate_grad_batches=2)
    output = run("check", *arguments, "--samples", "2", "--html", str(tmp_path / "report.html"))
    assert re.search(r"train: one +alpaca +31 +31 +[\d,]+ +[\d.]+% +\d+ +1 +100.0%", output)
    assert re.search(r"train: two +alpaca +9 +9 ", output)
    assert re.search(r"val: val +alpaca +25 +25 ", output)
    assert "template round trip, one: 31 of 31 conversations" in output
    assert "a sample's losses move by 0 when its neighbor in the packed batch changes" in output
    assert re.search(r"packing: \d+ packed sequences of 128 tokens, \d\d.\d\d% full", output)
    assert "note: one: 1 of 31 samples: repetition of another (3.2%; the most frequent is there 2 times)" in output
    assert "note: 1 of 25 validation samples (4.0%) are in the training data too" in output
    assert re.search(r"max_length that keeps samples whole: 95% with \d+, 99% with \d+, 100% with \d+", output)
    assert output.count("»") == 1 + 2 * 1 + 1  # in each of two headings, around each of two answers
    assert "nothing would train wrong" in output
    page = (tmp_path / "report.html").read_text()
    assert "<h1>recipe</h1>" in page
    assert "<strong>Nothing would train wrong.</strong>" in page
    words = " ".join(f"<span>{word}</span>" for word in ["python", "-m", "lit_ft", "fit", *arguments])
    assert f'<pre class="command">{words}</pre>' in page
    assert page.count('<mark class="special">&lt;|im_end|&gt;</mark></pre>') == 2
    assert "note:</strong> one: 1 of 31 samples: repetition of another" in page
    assert not (tmp_path / "checkpoints").exists()


def test_it_counts_what_the_trainer_then_trains_on(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    data = {"path": write_rows(make_rows(21)), "micro_batch_size": 2}
    output = run("check", *recipe(tmp_path, model_folder, data, accumulate_grad_batches=2))
    module = TextDataModule(**data)
    module.load(make_tokenizer())
    samples = module.splits["train"]
    assert "epoch: 6 optimizer steps of 4 samples" in output
    assert f"tokens per epoch: {samples.lengths.sum():,}, {samples.supervised.sum():,} supervised" in output


def test_it_says_how_many_of_the_samples_a_mixture_takes(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    sources = [
        {"path": write_rows(make_rows(size), f"{size}.json"), "weight": 1.0, "name": f"of {size}"} for size in (4, 20)
    ]
    data = {"sources": sources, "mixing": "first_exhausted"}
    assert "samples per epoch: 8, from 8 of 24 samples" in run("check", *recipe(tmp_path, model_folder, data))
    data["mixing"] = "all_exhausted"
    assert "samples per epoch: 40, from 24 of 24 samples" in run("check", *recipe(tmp_path, model_folder, data))


def test_end_tokens_are_those_of_training_and_of_generation(run: Any, tmp_path: Path, write_rows: Any) -> None:
    """Gemma's turns end with another token than its texts."""
    model = save_family("gemma3", tmp_path / "model")
    output = run("check", *recipe(tmp_path, model, {"path": write_rows(make_rows(21))}))
    assert "end tokens that are trained on: '<end_of_turn>' in 21 of 21 samples" in output
    assert "end tokens that generation stops at: '<eos>', '<end_of_turn>'" in output
    text = recipe(tmp_path, model, {"path": write_rows([{"text": "the red cup"}, {"text": "a blue lamp"}])})
    assert "end tokens that are trained on" not in run("check", *text)


def test_bad_rows_are_all_listed_and_exit_1(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    rows = [*make_rows(3), {"instruction": "a"}, {"instruction": "a", "output": ""}]
    output = run("check", *recipe(tmp_path, model_folder, {"path": write_rows(rows)}), code=1)
    assert ": 2 of 5 rows cannot be used: " in output
    assert "skipped" not in output
    assert "row 4: has no 'output'" in output
    assert "row 5: 'output' is empty" in output
    assert "something would train wrong" in output
    skipped = recipe(tmp_path, model_folder, {"path": write_rows(rows), "on_bad_row": "skip"})
    output = run("check", *skipped)
    assert "2 of 5 rows cannot be used, skipped (data.on_bad_row=skip)" in output
    assert "nothing would train wrong" in output


def test_rows_that_are_too_long_to_train_on(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    rows = [*make_rows(3), {"instruction": "a", "output": "red " * 80}]
    data = {"path": write_rows(rows), "max_length": 60, "overlong": "error"}
    assert "wrong: 1 sample over data.max_length=60" in run("check", *recipe(tmp_path, model_folder, data), code=1)


def test_what_the_token_cache_says_is_said(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    data = {"path": write_rows(), "max_length": 128, "cache_dir": str(tmp_path / "cache")}
    arguments = recipe(tmp_path, model_folder, data)
    assert "token cache" not in run("check", *arguments)
    (meta,) = tmp_path.glob("cache/tokens/*/meta.json")
    meta.write_text("{}")
    assert "is damaged (meta.json not as written); it is written anew" in run("check", *arguments)


def test_one_file_for_training_and_validation(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    path = write_rows(make_rows(12))
    data = {"path": str(tmp_path / "*.json"), "val_path": path}
    output = run("check", *recipe(tmp_path, model_folder, data), code=1)
    assert f"12 of 12 validation samples (100.0%) are in the training data too; both are read from {path}" in output
    held_out = recipe(tmp_path, model_folder, {"path": path, "val_fraction": 0.3})
    assert "validation samples" not in run("check", *held_out)


def test_answers_that_are_mostly_truncated(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    rows = [{"instruction": "a", "output": "red " * n} for n in range(30, 60)]
    output = run("check", *recipe(tmp_path, model_folder, {"path": write_rows(rows), "max_length": 20}), code=1)
    assert "wrong: rows: 30 of 30 answers truncated (100.0%; up to 3% is fine): data.max_length=20" in output
    assert "something would train wrong" in output


@pytest.mark.skipif(not (DATA / "identity.json").is_file(), reason="LIT_FT_TEST_DATA does not name the data")
def test_real_placeholders(run: Any, tmp_path: Path, model_folder: str) -> None:
    output = run("check", *recipe(tmp_path, model_folder, {"path": str(DATA / "identity.json")}), code=1)
    assert "wrong: identity: 85 of 91 rows with placeholders that nobody filled in, e.g. {{name}}" in output


def test_a_stream_is_looked_at_from_its_top(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    data = {"path": write_rows(make_rows(12)), "streaming": True}
    arguments = recipe(tmp_path, model_folder, data, max_steps=3)
    too_long = "wrong: data.max_length of 2,048 tokens is beyond the 512 positions of the model"
    assert too_long in run("check", *arguments, code=1).replace(f"model.pretrained={model_folder!r}", "the model")
    output = run("check", *arguments, "--data.max_length", "512")
    assert "streaming: looked at the first 10,000 rows of each source" in output


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager"])
def test_no_attention_leaks(model_folder: str, attention: str) -> None:
    assert leak_probe(CausalLM(model_folder, attn_implementation=attention)) == 0


def test_a_leak_is_seen(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CausalLM.forward

    def as_one_segment(self: Any, row: Any) -> TokenLoss:
        return forward(self, {**row, "segment_lengths": [sum(row["segment_lengths"])]})

    monkeypatch.setattr(CausalLM, "forward", as_one_segment)
    assert leak_probe(CausalLM(model_folder)) > 1e-3


def test_histogram() -> None:
    assert histogram(np.array([1, 16, 17, 32, 33, 300])) == [(16, 2), (32, 2), (64, 1), (128, 0), (256, 0), (512, 1)]


@pytest.mark.skipif(not (DATA / "huanhuan.json").is_file(), reason="LIT_FT_TEST_DATA does not name the data")
def test_real_data(run: Any, tmp_path: Path, model_folder: str) -> None:
    for name in ("huanhuan", "glaive_toolcall_en_demo", "dummy_conversation"):
        arguments = recipe(tmp_path, model_folder, {"path": str(DATA / f"{name}.json"), "max_length": None})
        output = run("check", *arguments, "--model.config_overrides", "{max_position_embeddings: 32768}")
        assert re.search(rf"train: {name} .* 100.0% *\n", output)


# --- convert ---------------------------------------------------------------------------------------


def test_text_to_megatron_and_back(run: Any, tmp_path: Path, model_folder: str) -> None:
    texts = ["the red cup", "红 书", "a lamp was under the book"]
    (tmp_path / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    out = tmp_path / "new" / "text"
    line = run("convert", "data", "--path", str(tmp_path / "text.txt"), "--tokenizer", model_folder, "--out", str(out))
    assert f"3 documents, {sum(len(i) for i in ids_of(out))} tokens: {out}.bin, {out}.idx" in line
    tokenizer = make_tokenizer()
    assert [tokenizer.decode(ids) for ids in ids_of(out)] == [f"{text}<|im_end|>" for text in texts]


def ids_of(prefix: Path) -> list[np.ndarray]:
    ids, spans = read_documents(prefix)
    return [ids[start:end] for start, end in spans]


def test_conversations_to_parquet_keep_their_masks(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    path, out = write_rows(make_rows(8)), tmp_path / "rows"
    said = ["convert", "data", "--path", path, "--tokenizer", model_folder, "--out", str(out)]
    run(*said, "--to", "parquet")
    one, other = TextDataModule(path), TextDataModule(f"{out}.parquet")
    for data in (one, other):
        data.load(make_tokenizer())
    for i in range(8):
        for a, b in zip(one.splits["train"][i], other.splits["train"][i], strict=True):
            assert a.tolist() == b.tolist()
    assert "tokens not supervised; indexed data holds no labels" in run(*said, "--to", "indexed")
    (tmp_path / "bad.jsonl").write_text('{"instruction": "a lamp"}\n')
    said[3], said[-1] = str(tmp_path / "bad.jsonl"), str(tmp_path / "bad")
    assert "(columns here: 'instruction'); correct the row, or remove it" in run(*said, code=2)


@pytest.mark.parametrize("to", ["indexed", "parquet"])
def test_a_conversion_overwrites_nothing_and_leaves_nothing_half_written(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    said = ["convert", "data", "--path", write_rows(make_rows(8)), "--tokenizer", model_folder, "--to", to]
    run(*said, "--out=~/rows")
    written = {file.name: file.read_bytes() for file in (tmp_path / "home").iterdir() if file.is_file()}
    assert set(written) == ({"rows.parquet"} if to == "parquet" else {"rows.bin", "rows.idx"})
    assert "exists, and is not overwritten" in run(*said, "--out=~/rows", code=2)
    with monkeypatch.context() as full:
        full.setattr("lit_ft.commands.convert._write_parquet", _disk_full)
        full.setattr("lit_ft.commands.convert._write_indexed", _disk_full)
        assert "No space left" in run(*said, "--out=~/others", code=2)
    assert {file.name: file.read_bytes() for file in (tmp_path / "home").iterdir() if file.is_file()} == written
    assert "rows.json' is a file); name another place" in run(*said, "--out", str(tmp_path / "rows.json" / "x"), code=2)


def test_what_a_killed_conversion_left_is_removed(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    for name in (f".rows.{2**22}", ".rows.txt"):  # the first has a number over those of processes
        (tmp_path / "out" / name).mkdir(parents=True)
    path = write_rows(make_rows(2))
    run("convert", "data", "--path", path, "--tokenizer", model_folder, "--out", str(tmp_path / "out" / "rows"))
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"rows.bin", "rows.idx", ".rows.txt"}


def _disk_full(samples: Any, file: Path, *_: Any) -> None:
    Path(f"{file}.bin").write_bytes(b"some")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("rows", "advice"),
    [
        ('{"question": "a", "answer": "b"}\n', "e.g. --columns '{instruction: question, output: answer}'"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "map them: --columns '{prompt: prompt, "),
    ],
)
def test_errors_of_convert_data_name_its_own_options(
    run: Any, tmp_path: Path, model_folder: str, rows: str, advice: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows)
    options = ("--tokenizer", model_folder, "--out", str(tmp_path / "out"))
    line = run("convert", "data", "--path", str(tmp_path / "rows.jsonl"), *options, code=2)
    assert advice in line
    assert "data." not in line


def test_convert_data_takes_names_of_columns(run: Any, tmp_path: Path, model_folder: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    options = ("--tokenizer", model_folder, "--columns", "{instruction: question, output: answer}")
    run("convert", "data", "--path", str(tmp_path / "rows.jsonl"), *options, "--out", str(tmp_path / "out"))
    assert (tmp_path / "out.idx").is_file()


def test_convert_explains_itself(run: Any) -> None:
    for arguments in (["weights"], []):
        assert "say `convert data --path FILE" in run("convert", *arguments, code=2)
    assert "--to {indexed,parquet}" in run("convert", "data", "--help")
    assert "--tensor_parallel" in run("convert", "model", "--help")


def test_unknown_options(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    arguments = recipe(tmp_path, model_folder, {"path": write_rows()})
    assert "did you mean 'packing'?" in run("check", *arguments, "--data.paking", "3", code=2)
    misnamed = run("check", *arguments, "--trainer.strategy", "lit_ft.FSDPStrategy", code=2)
    assert "a class is written --trainer.strategy.class_path lit_ft.strategies.FSDPStrategy, in a recipe" in misnamed


def test_callbacks_are_looked_at(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    monitor = {"class_path": "ModelCheckpoint", "init_args": {"monitor": "val_loss"}}
    arguments = recipe(tmp_path, model_folder, {"path": write_rows(), "val_fraction": 0.2}, callbacks=[monitor])
    assert "monitors 'val_loss', which is not logged; did you mean 'val/loss'?" in run("check", *arguments, code=2)


def test_a_warmup_that_is_longer_than_the_run(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    arguments = recipe(tmp_path, model_folder, {"path": write_rows()}, max_steps=3)
    arguments += ["--optimizer", "torch.optim.SGD", "--optimizer.lr", "0.1"]
    schedule = ("--lr_scheduler", "lit_ft.schedules.LinearWithWarmup", "--lr_scheduler.warmup", "5")
    assert "note: the warm-up takes 5 optimizer steps and the run 3" in run("check", *arguments, *schedule)


# --- what is shown is not obeyed -------------------------------------------------------------------


def test_rows_and_names_cannot_steer_the_terminal_or_the_page(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    evil = "\x1b[31m\x1b]0;title\x07 <script>alert(1)</script> \u202e"
    rows = [{"instruction": f"a {evil}", "output": f"{evil} b"}] * 3 + [{"instruction": "\ud83d", "output": "b"}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    names = ["a[/b]", "$\\frac{$<script>", "\x1b[2J\x1b]8;;x\x07red\nline"]
    sources = [{"path": write_rows(make_rows(3), name=f"{i}.json"), "name": name} for i, name in enumerate(names[1:])]
    data = {"sources": [{"path": str(path), "name": names[0]}, *sources], "on_bad_row": "skip"}
    output = run("check", *recipe(tmp_path, model_folder, data), "--html", str(tmp_path / "page.html"))
    assert "train: a[/b]" in output
    assert "train: $\\frac{$<script>" in output
    assert "train: \\x1b[2J\\x1b]8;;x\\x07red\\nline" in output
    assert "its text holds half of a surrogate pair (\\ud83d)" in output
    assert "template round trip, a[/b]: 3 of 3 conversations" in output
    assert "\\x1b[31m\\x1b]0;title\\x07 <script>" in output
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    for text in (output, page):
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text)


def test_a_page_that_cannot_be_written(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    arguments = recipe(tmp_path, model_folder, {"path": write_rows()})
    assert "--html" in run("check", *arguments, "--html", str(tmp_path / "no" / "page.html"), code=2)


def test_pairs_are_shown_as_two_conversations(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    rows = [{"instruction": f"the red book {n}", "chosen": "cup", "rejected": "lamp"} for n in range(6)]
    data = {"path": write_rows(rows), "format": "preference", "val_fraction": 0.2, "packing": 128, "max_length": 64}
    page = tmp_path / "report.html"
    arguments = *recipe(tmp_path, model_folder, data), "--samples", "2", "--html", str(page)
    assert "wrong: data.format=preference is for lit_ft.PreferenceLM" in run("check", *arguments, code=1)
    output = run("check", *arguments, "--model", "lit_ft.PreferenceLM")
    assert re.search(r"train: rows +preference +6 +5 .* 100.0%", output)
    assert "template round trip, rows: 12 of 12 conversations" in output
    assert "learns to prefer the <mark>marked</mark> tokens of chosen answers to those of" in page.read_text()
    assert re.search(r"end tokens that are trained on: '<\|im_end\|>' in 10 of 10 answers", output)
    assert "tokens per conversation before truncation: half have up to" in output
    for number in (1, 2):
        for name, answer in (("chosen", "cup"), ("rejected", "lamp")):
            assert re.search(rf"pair {number}, {name} \(supervised .*?»{answer}<", output, re.DOTALL)
            assert f"<p>Pair {number}, {name}</p>" in page.read_text()


def test_of_answers_of_the_models_own_the_known_one_is_shown(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    turns = [("user", "the red book"), ("assistant", "cup"), ("user", "and"), ("assistant", "lamp")]
    data = {"path": write_rows([{"messages": [{"role": role, "content": text} for role, text in turns]}] * 3)}
    policy = ["--model", "lit_ft.PolicyLM", "--model.rewards", "[lit_ft.ExactAnswer]", "--model.max_new_tokens", "9"]
    page = tmp_path / "report.html"
    arguments = recipe(tmp_path, model_folder, {**data, "micro_batch_size": 2})
    output = run("check", *arguments, *policy, "--samples", "1", "--html", str(page))
    assert "trained on: 8 answers of its own to each prompt, by GRPO(scale_rewards=True) of ExactAnswer()" in output
    assert "answers per step: 16 answers of up to 9 tokens (model.max_new_tokens)" in output
    assert "mean rewards of known answers: ExactAnswer 1 (of 2)" in output
    assert "end tokens of known answers: '<|im_end|>' in 3 of 3 samples" in output
    assert re.search(r"sample 1 \(known answer in green, between » and «\)[^»]*cup[^»]*»lamp<", output)
    assert "the <mark>marked</mark> tokens are the known answer; the others are the prompt" in (page.read_text())


def test_what_the_model_cannot_train_on_is_a_problem(
    run: Any, tmp_path: Path, model_folder: str, write_rows: Any
) -> None:
    """Where `fit` refuses it: rewards that fail on known answers, cut ones, and data without pairs."""
    path = write_rows([{"instruction": "What is red?", "output": "the red book on the table"}] * 4)
    arguments = recipe(tmp_path, model_folder, {"path": path, "micro_batch_size": 2})
    policy = ["--model", "lit_ft.PolicyLM", "--model.rewards", "[lit_ft.FinalNumber]"]
    output = run("check", *arguments, *policy, code=1)
    assert re.search(r"wrong: model.rewards: FinalNumber compares .*'the red book on the table' has none", output)
    output = run("check", *arguments, *policy, "--data.max_length", "30", code=1)
    assert "wrong: data.overlong=truncate: data.max_length=30 cuts 4 of 4 known answers of train" in output
    output = run("check", *arguments, "--model", "lit_ft.PreferenceLM", code=1)
    assert "wrong: PreferenceLM trains on pairs of a better and a worse answer" in output


def test_pairs_are_not_converted(run: Any, tmp_path: Path, model_folder: str, write_rows: Any) -> None:
    path = write_rows([{"prompt": "a", "chosen": "b", "rejected": "c"}])
    arguments = ("--path", path, "--tokenizer", model_folder, "--out", str(tmp_path / "out"), "--format", "preference")
    assert "format=preference holds answers that are compared" in run("convert", "data", *arguments, code=2)

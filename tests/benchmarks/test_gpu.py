"""``benchmarks.gpu``: its code runs on a CPU with a tiny model, and its counts are worked out by hand."""

import json
from pathlib import Path

import pytest
from forked_commands import forked_subprocess

from benchmarks import gpu, processes
from benchmarks.workload import SHAPES, layer_weights, write_model, write_random_rows
from lit_ft.model.loading import load_tokenizer

DATA = "recipes/data/quickstart_train.json"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")]


def test_work_of_the_timed_steps() -> None:
    shape = {**SHAPES["tiny"], "vocab_size": 10}
    steps = gpu.steps_of(shape, [(9, 9), (3, 1), (5, 2)], samples=1, warm_up=1)
    weights = layer_weights(shape) * 8 + 10 * 64 * 3
    assert steps == (2, 8, 3, 4 * weights, 6 * 2 * 64 * (9 + 25))


def test_weights_of_the_7b_shape() -> None:
    # Qwen2.5-7B has 7,615,616,512 parameters; embeddings, which no product reads, and head are not tied.
    shape = SHAPES["qwen2.5-7b"]
    biases_and_norms = 28 * (3584 + 2 * 512 + 2 * 3584) + 3584
    assert layer_weights(shape) + 2 * 152_064 * 3584 + biases_and_norms == 7_615_616_512


def test_random_rows_are_of_the_tokenizers_ids(tmp_path: Path) -> None:
    """A model has more ids than a tokenizer that little text trained; lit_ft refuses rows with the others."""
    write_model(tmp_path / "model", SHAPES["tiny"], ["red green blue"])
    tokens = len(load_tokenizer(str(tmp_path / "model")))
    rows = json.loads(write_random_rows(tmp_path / "model", rows=3, tokens=1000).read_text())
    assert [len(row["input_ids"]) for row in rows] == [1000] * 3
    assert max(max(row["input_ids"]) for row in rows) == tokens - 1 < SHAPES["tiny"]["vocab_size"] - 1


@pytest.mark.slow
def test_a_measurement_on_a_tiny_shape(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "subprocess", forked_subprocess)
    options = ["--shape", "tiny", "--device", "cpu", "--measure", "nf4", "--data", DATA, "--folder", str(tmp_path)]
    gpu.main(options)
    lines = capfd.readouterr().out.splitlines()
    assert lines[2].startswith("With a tiny model and short rows: Qwen2.5-7B shape, NF4 base beside a bf16 one")
    bf16, nf4, checkpointed = map(cells, lines[6:9])
    assert (bf16[1], nf4[1]) == ("lit_ft", "lit_ft, NF4 base")
    assert float(bf16[3]) > 0
    assert bf16[9] == "0.0000"
    assert 0 < float(nf4[9]) < 0.1  # four bits are not sixteen, and not noise either
    assert checkpointed[9] == nf4[9]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (["--only", "lit_ft,lit"], r"--only \['lit'\]: there are lit_ft, lit_ft_compiled"),
        (["--micro-batch-size", "3"], "--micro-batch-size 3: nf4 has 4 samples a step"),
    ],
)
def test_options_that_name_nothing_are_refused(option: list[str], said: str, tmp_path: Path) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--measure", "nf4", "--data", DATA, "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match=said):
        gpu.main([*options, *option])


@pytest.mark.slow
def test_what_there_is_no_time_for_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--shape", "tiny", "--device", "cpu", "--measure", "7b", "--data", DATA, "--folder", str(tmp_path)]
    for chosen, count in ((["--only", "lit_ft,trl_best"], 2), ([], 3), (["--all"], 6)):
        gpu.main([*options, "--minutes", "0", *chosen])
        lines = capsys.readouterr().out.splitlines()
        assert ("Peak of the products: took more than 1 s" in lines) == ("--only" not in chosen)
        rows = [cells(line) for line in lines if line.startswith("| ")][1:]
        assert [row[2] for row in rows] == ["did not run: no time left (--minutes 0)"] * count

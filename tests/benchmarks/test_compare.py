"""``benchmarks.compare``: the same work for all, proven by losses; what does not run is said, not left out."""

import json
import sys
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from forked_commands import forked_subprocess

from benchmarks import compare, processes
from benchmarks.compare import Comparison, loss_difference, parse
from benchmarks.peers.environments import REQUIREMENTS, python_of, reason_of
from benchmarks.peers.job import Job, asked
from benchmarks.peers.matrix_peak import peaks
from benchmarks.speed import fused_lora
from benchmarks.workload import SHAPES, Work, head_weights, layer_weights, prepare

pytestmark = pytest.mark.slow

DATA = "recipes/data/quickstart_train.json"


def options_for(folder: Path, *more: str) -> list[str]:
    return ["--model", "tiny", "--data", DATA, "--rows", "32", "--rounds", "1", "--folder", str(folder), *more]


@pytest.fixture
def work() -> Work:
    lengths = [(10, 4), (20, 6), (30, 8), (40, 12)]
    return Work(Path("model"), Path("rows"), lengths, layer_weights=1_000_000, head_weights=500_000)


@pytest.fixture
def comparison(work: Work) -> Comparison:
    return Comparison(work, parse(["--setting", "1x2"]))


def run(contestant: str, ends: list[float], losses: list[float], tokens: list[int] | None = None) -> compare.Run:
    return {
        "contestant": contestant,
        "setting": "1x2",
        "round": 1,
        "ends": ends,
        "losses": losses,
        "tokens": tokens,
        "note": "",
        "peak_memory_bytes": 2**30,
        "file_page_bytes": 2**29,
        "seconds_to_first_step": 3.0,
    }


def test_rates_leave_the_first_step_out(comparison: Comparison) -> None:
    assert comparison.step_tokens("1x2") == [(30, 10), (70, 20)]
    assert comparison.rates(run("lit_ft", [5.0, 7.0], [2.0, 1.0])) == (35.0, 10.0)
    # Its own rows: 80 tokens in its second step, supervised as the data is.
    tokens, supervised = comparison.rates(run("trl_packed", [5.0, 7.0], [2.0, 1.0], [20, 80]))
    assert tokens == 40.0
    assert supervised == pytest.approx(40 * 2 / 7)


def test_model_flops(comparison: Comparison) -> None:
    assert comparison.flops_per_token("1x2") == pytest.approx(4 * (1_000_000 + 500_000 * 2 / 7))


def test_weights_of_the_0_5b_shape() -> None:
    # Qwen2.5-0.5B has 494,032,768 parameters: embeddings, which are the head as well, layers, biases and norms.
    shape = SHAPES["qwen2.5-0.5b"]
    biases_and_norms = 24 * (896 + 2 * 128 + 2 * 896) + 896
    assert layer_weights(shape) + head_weights(shape) + biases_and_norms == 494_032_768


def test_table_has_ratios_and_reasons(comparison: Comparison) -> None:
    comparison.runs = [
        {"contestant": compare.PEAK, "setting": "1x2", "round": 1, "flops_per_second": 1e9},
        run("lit_ft", [5.0, 7.0], [2.0, 1.0]),
        run("bare", [5.0, 6.0], [2.0, 1.25]),
        {"contestant": "torchtune", "setting": "1x2", "round": 1, "error": "ImportError: no torchao"},
    ]
    lines = comparison.table("1x2").splitlines()[2:]
    assert lines == [
        "| lit_ft | 35 (35 to 35) | 10 | 1.00x | 16% | 1.00 GiB (0.50) | 1.00x | 3.0 s | 0.0000 |",
        "| bare loop, without Lightning | 70 (70 to 70) | 20 | 0.50x | 32% | 1.00 GiB (0.50) | 1.00x | 3.0 s "
        "| 0.2500 |",
        "| torchtune lora_finetune_single_device, logits in one piece | did not run: ImportError: no torchao "
        "| | | | | | | |",
    ]


def test_a_disturbed_run_does_not_count(comparison: Comparison) -> None:
    quiet, disturbed = run("lit_ft", [5.0, 7.0], [2.0]), run("lit_ft", [5.0, 9.0], [2.0])
    comparison.runs = [{**quiet, "others_share": 0.01}, {**disturbed, "others_share": 0.5}]
    assert comparison.of("lit_ft", "1x2") == [{**quiet, "others_share": 0.01}]


def test_losses_of_other_steps_are_compared_by_their_mean() -> None:
    packed = run("trl_packed", [5.0, 6.0, 7.0], [4.0, 2.0, 1.5], [1, 2, 3])
    assert loss_difference([packed], [2.0, 2.0]) == "0.5000 (of the run's mean: steps hold other samples)"


def test_what_packs_by_itself_is_measured_where_a_step_is_one_row(comparison: Comparison) -> None:
    assert "trl_packed" in {one.key for one in comparison.contestants("16x1")}
    assert "trl_packed" not in {one.key for one in comparison.contestants("1x2")}


def test_unknown_contestant(work: Work) -> None:
    with pytest.raises(SystemExit, match=r"--only \['lit'\]: there are lit_ft, lit_ft_compiled"):
        Comparison(work, parse(["--only", "lit"])).contestants("1x2")


def test_environment_that_failed_says_why(tmp_path: Path) -> None:
    command = "python -m benchmarks.peers.environments --root"
    assert reason_of(tmp_path, "trl") == f"{command} {tmp_path} trl was not run"
    (tmp_path / "trl.failed").write_text("does not install\n")
    assert reason_of(tmp_path, "trl") == "does not install"
    assert all(f"{one.environment}" in REQUIREMENTS for one in compare.contestants("cuda", 1) if one.environment)


def test_peak_is_of_matrix_products() -> None:
    measured = peaks(SHAPES["tiny"], tokens=64, supervised=16, device="cpu", seconds=0.01)
    # More than a core of 1995 on a busy day and less than a thousand of today's: a unit gone wrong is a thousandfold.
    assert 1e7 < measured["streamed_flops_per_second"] < 1e15
    assert 1e7 < measured["flops_per_second"] < 1e15


@pytest.mark.slow
def test_lit_ft_bare_loop_and_a_peer_do_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The peer's environment is this one, where transformers.Trainer is there, too.
    python = python_of(tmp_path, "transformers")
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(processes, "subprocess", forked_subprocess)
    monkeypatch.setattr(compare, "QUIET", 2.0)  # losses are compared, not speeds: others may have the machine
    results = tmp_path / "results.jsonl"
    more = ["--setting", "1x2", "--only", "lit_ft,bare,trainer_best,torchtune", "--environments", str(tmp_path)]
    options = parse(options_for(tmp_path, *more, "--results", str(results)))
    comparison = Comparison(prepare(options.folder, options.model, options.data, options.rows), options)
    comparison.run("1x2")
    runs = {run["contestant"]: run for run in map(json.loads, results.read_text().splitlines())}
    assert list(runs) == ["matrix_peak", "lit_ft", "bare", "trainer_best", "torchtune"]
    assert runs["torchtune"]["error"].endswith("torchtune was not run")
    losses = runs["lit_ft"]["losses"]
    assert len(losses) == 16
    assert runs["bare"]["losses"] == losses
    torch.testing.assert_close(torch.tensor(runs["trainer_best"]["losses"]), torch.tensor(losses), rtol=0, atol=0.005)
    # What is in the file is not run again.
    monkeypatch.setattr(compare, "run_contestant", None)
    monkeypatch.setattr(compare, "run_peak", None)
    again = Comparison(comparison.work, options)
    again.run("1x2")
    assert again.table("1x2") == comparison.table("1x2")


def test_fused_lora_beside_peft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fused_lora.main(["--model", "tiny", "--data", DATA, "--rows", "32", "--folder", str(tmp_path)])
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [line[1:3] for line in lines] == [
        [targets, way] for targets in ("q_proj, v_proj", "all-linear") for way in ("PEFT", "fused_lora")
    ]
    assert all(float(line[4].replace(",", "")) > 0 for line in lines)
    assert lines[0][5] == "1.00x (1.00 to 1.00)"


def test_a_process_waits_for_the_file_of_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job("model", "rows", micro_batch_size=1, accumulate=2, device="cpu", max_length=384, options={"bf16": True})
    part, path = tmp_path / "job.part", tmp_path / "job.json"
    part.write_text(json.dumps(asdict(job)))
    monkeypatch.setattr("sys.argv", ["peer", str(path)])
    threading.Timer(0.1, lambda: part.rename(path)).start()
    assert Job(**asked()) == job
    path.unlink()
    parents = iter([1, 1, 2])  # the process that was to write it ends meanwhile
    monkeypatch.setattr("os.getppid", lambda: next(parents))
    with pytest.raises(SystemExit, match=f"nothing was asked: {path}"):
        asked()

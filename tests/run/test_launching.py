"""Runs that others start: two nodes, torchrun, SLURM; what becomes of a run when one rank raises, dies or hangs."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
import torch.distributed as dist
from command_line import ENVIRONMENT, assert_same_run, here, losses, recipe
from forked_commands import ForkedCommand, session_members, wait_until
from lightning.pytorch.strategies import DDPStrategy
from ranks import free_port
from shared_fixtures import make_rows, make_tokenizer

from lit_ft import RecipeError, TextDataModule
from lit_ft.commands.bandwidth import Measured, describe_steps
from lit_ft.run.launching import check_world_size, explain_distributed_error

pytestmark = pytest.mark.processes
TESTS = str(Path(__file__).parents[1])
FSDP = ["--trainer.strategy", '{"class_path": "lit_ft.strategies.FSDPStrategy"}']
DDP = ["--trainer.strategy", "ddp"]


class Started:
    """Processes in sessions of their own, which write to files: one that outlives its run shows, and holds nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, list[ForkedCommand]()

    def start(self, *arguments: str, network: str | None = None, module: str = "lit_ft", **environment: str) -> None:
        """``python -m MODULE ARGUMENTS``, forked, in a network namespace where one is named."""
        with self._file().open("wb") as out:
            options = self._options(out, environment)
            self.processes.append(ForkedCommand(arguments, network=network, module=module, **options))

    def _file(self) -> Path:
        return self.folder / f"output-{len(self.processes)}"

    def _options(self, out: IO[bytes], environment: dict[str, str]) -> dict[str, Any]:
        path = os.pathsep.join([TESTS, *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
        environment = {**ENVIRONMENT, "PYTHONPATH": path, "LIT_FT_ALLOW_CODE": "trouble", **environment}
        return {"cwd": self.folder, "env": environment, "stdout": out, "stderr": out, "start_new_session": True}

    def running(self) -> bool:
        """Whether any process that was started here goes on; those that it has started may go on without it."""
        return any(process.poll() is None for process in self.processes)

    def alive(self) -> list[int]:
        return [member for process in self.processes for member in session_members(process.pid)]

    def wait(self, seconds: float) -> str:
        """Until all have ended, those that they started included; returns what they wrote."""
        deadline = time.monotonic() + seconds
        while self.running() or self.alive():
            assert time.monotonic() < deadline, f"still there: {self.alive()}\n{self.output()}"
            time.sleep(0.1)
        return self.output()

    def output(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("output-*")))

    def succeed(self, seconds: float = 150) -> str:
        output = self.wait(seconds)
        assert [process.wait() for process in self.processes] == [0] * len(self.processes), output
        return output

    def kill(self) -> None:
        for member in self.alive():
            os.kill(member, signal.SIGKILL)
        for process in self.processes:
            process.wait()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    processes = Started(tmp_path)
    yield processes
    processes.kill()


def six_steps(folder: Path, model_folder: str) -> list[str]:
    """``fit``, six steps of eight samples in two epochs; after each, a checkpoint."""
    data = folder / "rows.json"
    data.write_text(json.dumps(make_rows(21), ensure_ascii=False), encoding="utf-8")
    return [*recipe(folder, model_folder, str(data), max_epochs=2), "--lr_scheduler", "null"]


@pytest.fixture
def arguments(tmp_path: Path, model_folder: str) -> list[str]:
    return six_steps(tmp_path, model_folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folder: str) -> Path:
    """The same in one process."""
    folder = tmp_path_factory.mktemp("whole")
    accumulate = ["--trainer.accumulate_grad_batches", "4"]
    with pytest.MonkeyPatch.context() as patch:
        here(patch, *six_steps(folder, model_folder), *accumulate, "--run_dir", str(folder / "run"))
    return folder / "run"


def only_run(folder: Path) -> Path:
    """The folder that the run has made: there is one, and nothing in it was written twice."""
    (run,) = (folder / "checkpoints" / "runs" / "recipe").iterdir()
    assert {path.name for path in run.iterdir()} - {"config-until-step-3.yaml"} == {  # where resumed otherwise
        ".lock",
        "adapter",
        "checkpoints",
        "config.yaml",
        "environment.json",
        "finished.json",
        "first_batch.json",
        "metrics.csv",
        "report.html",
        "tensorboard",
    }
    assert len(list((run / "checkpoints").iterdir())) == 2  # the newest epoch's and last.ckpt
    rows = (run / "metrics.csv").read_text().splitlines()
    assert len(rows) == len(set(rows))
    return run


# --- two nodes -----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def nodes() -> Iterator[tuple[str, list[str | None], dict[str, str]]]:
    """The first node's address, the network namespace of each of two nodes, and their environment.

    Two network namespaces joined by a virtual cable where the system allows it, else both on loopback.
    """
    names = [f"lit-ft-{os.getpid()}-{i}" for i in (0, 1)]
    setup = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add wire netns {names[0]} type veth peer name wire netns {names[1]}",
        *(f"ip -n {name} link set {device} up" for name in names for device in ("lo", "wire")),
        *(f"ip -n {name} address add 10.77.0.{i + 1}/24 dev wire" for i, name in enumerate(names)),
    ]
    try:
        made = all(subprocess.run(command.split(), capture_output=True).returncode == 0 for command in setup)
    except FileNotFoundError:
        made = False
    print(f"two nodes are two {'network namespaces' if made else 'launchers on loopback'}")
    if made:
        yield "10.77.0.1", [*names], {"GLOO_SOCKET_IFNAME": "wire"}
    else:
        yield "127.0.0.1", [None, None], {}
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize(
    ("strategy", "each"),
    [
        pytest.param(DDP, 1, id="ddp-2x1"),
        pytest.param(FSDP, 2, id="fsdp-2x2", marks=pytest.mark.slow),
        pytest.param(DDP, 2, id="ddp-2x2", marks=pytest.mark.slow),
        pytest.param(FSDP, 1, id="fsdp-2x1", marks=pytest.mark.slow),
    ],
)
def test_two_nodes_equal_one_process(
    tmp_path: Path, started: Started, arguments: list[str], whole: Path, nodes: Any, strategy: list[str], each: int
) -> None:
    address, networks, environment = nodes
    counts = {"num_nodes": 2, "devices": each, "accumulate_grad_batches": 2 // each}
    options = [*strategy, *(text for name, value in counts.items() for text in (f"--trainer.{name}", str(value)))]

    def run(*more: str) -> None:
        port = str(free_port())
        for rank, network in enumerate(networks):
            place = {"MASTER_ADDR": address, "MASTER_PORT": port, "NODE_RANK": str(rank)}
            time.sleep(1.1 * rank)  # each node's clock gives the folder another name
            started.start(*arguments, *options, *more, network=network, **environment, **place)
        started.succeed()

    if each == 1:  # in two parts
        run("--trainer.max_epochs", "1")
        assert len(losses(only_run(tmp_path))) == 3
        run("--ckpt_path", "last")
    else:
        run()
    assert_same_run(only_run(tmp_path), whole, 1e-5)


# --- launchers -----------------------------------------------------------------------------------


def test_torchrun_equals_one_process(tmp_path: Path, started: Started, arguments: list[str], whole: Path) -> None:
    options = [*DDP, "--trainer.devices", "2", "--trainer.accumulate_grad_batches", "2"]
    processes = ["--nproc-per-node", "2", "--master-port", str(free_port())]
    started.start(*processes, "-m", "lit_ft", *arguments, *options, module="torch.distributed.run")
    started.succeed()
    assert_same_run(only_run(tmp_path), whole, 1e-5)


def slurm(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What ``srun --ntasks-per-node=RANKS`` gives a task on one node."""
    variables = {
        "NTASKS": ranks, "NTASKS_PER_NODE": ranks, "NNODES": 1, "PROCID": rank, "LOCALID": rank, "NODEID": 0,
        "JOB_ID": 15000 + port % 10000, "JOB_NAME": "fit", "NODELIST": "127.0.0.1", "STEP_NODELIST": "127.0.0.1",
    }  # fmt: skip
    return {f"SLURM_{name}": str(value) for name, value in variables.items()} | {"MASTER_PORT": str(port)}


def test_slurm_equals_one_process(tmp_path: Path, started: Started, arguments: list[str], whole: Path) -> None:
    options = [*DDP, "--trainer.devices", "2", "--trainer.accumulate_grad_batches", "2"]
    port = free_port()
    for rank in range(2):
        time.sleep(1.1 * rank)
        started.start(*arguments, *options, **slurm(rank, 2, port))
    started.succeed()
    assert_same_run(only_run(tmp_path), whole, 1e-5)


@pytest.mark.parametrize("launcher", ["torchrun", "slurm"])
def test_as_many_processes_as_the_recipe_wants(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], tmp_path: Path, launcher: str
) -> None:
    elastic = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in (elastic if launcher == "torchrun" else slurm(0, 2, 1)).items():
        monkeypatch.setenv(name, value)
    here(monkeypatch, *arguments, "--run_dir", str(tmp_path / "run"), code=2)
    errors = capsys.readouterr().err
    assert "lit_ft: rank 0: error: 2 processes were started" in errors
    assert "devices x num_nodes = 1; set devices" in errors
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("shared", "restarts"), [("True", "2"), ("False", "2"), ("True", "0")])
def test_restarts_in_a_store_with_old_addresses_are_told(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, shared: str, restarts: str
) -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    variables |= {"TORCHELASTIC_USE_AGENT_STORE": shared, "TORCHELASTIC_MAX_RESTARTS": restarts}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    check_world_size(2, 1)
    told = [
        str(warning.message) for warning in recwarn if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(warning.message)
    ]
    assert len(told) == (shared == "True" and restarts == "2")


@pytest.mark.parametrize(
    ("variables", "devices", "refused"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1, "WORLD_SIZE=2 says that 2 processes work together"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 2, "RANK=1 says that this is one of several processes"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, 2, "OMPI_COMM_WORLD_SIZE=4 says that 4 processes work together"),
        ({"LOCAL_RANK": "1"}, 1, "LOCAL_RANK=1 says that this is one of several processes, .* unset LOCAL_RANK"),
        ({"LOCAL_RANK": "0"}, 1, None),
        ({"RANK": "0", "WORLD_SIZE": "2"}, 2, None),
        ({"RANK": "x", "WORLD_SIZE": ""}, 1, None),
    ],
    ids=["one-device", "as-many-devices", "mpi", "left-over-rank", "left-over-rank-0", "left-over", "no-numbers"],
)
def test_processes_of_another_launcher_do_not_train_alone(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], devices: int, refused: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with nullcontext() if refused is None else pytest.raises(RecipeError, match=refused):
        check_world_size(devices, 1)


@pytest.mark.parametrize("run_dir", [[], ["--run_dir", "run"]], ids=["chosen", "named"])
def test_nodes_that_cannot_meet(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], tmp_path: Path, run_dir: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GROUP_RANK", "0")
    here(monkeypatch, *arguments, *run_dir, "--trainer.num_nodes", "2", code=2)
    assert "error: num_nodes=2 needs MASTER_ADDR, MASTER_PORT, not set here; set NODE_RANK" in capsys.readouterr().err
    assert not list(tmp_path.glob("run*"))


def test_a_signal_ends_the_wait_for_the_other_nodes(tmp_path: Path, started: Started, arguments: list[str]) -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    started.start(*arguments, "--trainer.num_nodes", "2", "--run_dir", str(tmp_path / "run"), **place)
    wait_until(lambda: _listens(int(place["MASTER_PORT"])))
    os.kill(started.processes[0].pid, signal.SIGTERM)
    assert "stopped by SIGTERM" in started.wait(20)


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_plan_needs_no_second_node(capsys: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    here(monkeypatch, "plan", *arguments[1:], "--num_nodes", "2")
    assert "each of 2 ranks" in capsys.readouterr().out


def test_more_ranks_than_samples(write_rows: Any) -> None:
    data = TextDataModule(write_rows(count=3))
    for ranks in (3, 4):
        strategy = DDPStrategy(parallel_devices=[torch.device("cpu")] * ranks)
        module = SimpleNamespace(tokenizer=make_tokenizer())
        trainer = SimpleNamespace(
            lightning_module=module, strategy=strategy, val_check_interval=1.0, limit_val_batches=1.0, callbacks=[]
        )
        data.trainer = trainer  # type: ignore[assignment]
        if ranks == 3:
            data.setup("fit")
    with pytest.raises(RecipeError, match="4 data-parallel ranks cannot share 3 training samples"):
        data.setup("fit")


# --- a rank that fails ---------------------------------------------------------------------------


def trouble(
    started: Started, tmp_path: Path, arguments: list[str], kind: str, *options: str, by_hand: bool = False
) -> str:
    """Two ranks, of which one does harm in the fifth step; returns what they wrote within 30 seconds of it."""
    mark = tmp_path / "mark"
    harm = [
        "--trainer.callbacks+=trouble.Trouble",
        f"--trainer.callbacks.kind={kind}",
        f"--trainer.callbacks.mark={mark}",
    ]
    counts = ["--trainer.devices", "2", "--trainer.accumulate_grad_batches", "2", "--run_dir", str(tmp_path / "run")]
    port = free_port()
    for place in [slurm(rank, 2, port) for rank in range(2)] if by_hand else [{}]:
        started.start(*arguments, *counts, *options, *harm, **place)
    deadline = time.monotonic() + 120
    while not mark.exists():
        assert time.monotonic() < deadline, started.output()
        assert started.running(), started.output()
        time.sleep(0.05)
    output = started.wait(30)
    assert all(process.wait() != 0 for process in started.processes)
    return output


def test_a_rank_that_raises_is_named_first(tmp_path: Path, started: Started, arguments: list[str]) -> None:
    output = trouble(started, tmp_path, arguments, "raise", *DDP)
    first, *others = re.findall(r"^(?:lit_ft: )?(rank \d.*)$", output, re.MULTILINE)
    assert first == "rank 1: failed: ValueError: the row is bad"
    assert 'trouble.py", line' in output
    # Lightning's observer may kill the rank that started the other before it can say more.
    assert all(line.startswith(("rank 0 stops: rank 1 failed: ValueError", "rank 0: another rank")) for line in others)


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_a_killed_rank_leaves_a_run_that_goes_on(
    tmp_path: Path,
    started: Started,
    arguments: list[str],
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: list[str],
) -> None:
    output = trouble(started, tmp_path, arguments, "kill", *strategy)
    assert re.search("rank 0 stops: rank 1 gives no sign of life|rank: 1.*terminated with code -9", output), output
    run = tmp_path / "run"
    assert max(losses(run)) >= 3  # the fourth step is in no checkpoint
    options = ["--trainer.accumulate_grad_batches", "4", "--run_dir", str(run), "--ckpt_path", "last"]
    here(monkeypatch, *arguments, *options)
    assert_same_run(run, whole, 1e-5)


def test_a_hung_rank_ends_the_run_after_the_timeout(tmp_path: Path, started: Started, arguments: list[str]) -> None:
    options = ["--trainer.strategy", "DDPStrategy", "--trainer.strategy.timeout", "0:00:10"]
    # Started at the same time: a launcher's start of the other counts as waiting too.
    output = trouble(started, tmp_path, arguments, "hang", *options, by_hand=True)
    assert re.search(r"rank 0: another rank has not come in time \(Timed out .*strategy.timeout", output), output
    assert "rank 1 stops: rank 0 " in output


@pytest.mark.parametrize(
    "size",
    ["tensor_parallel_size", pytest.param("pipeline_parallel_size", marks=pytest.mark.slow)],
)
def test_a_stopped_rank_of_a_split_model_ends_the_run_within_the_timeout(
    tmp_path: Path, started: Started, arguments: list[str], size: str
) -> None:
    options = ["--trainer.strategy", "lit_ft.strategies.ModelParallelStrategy", f"--trainer.strategy.{size}", "2"]
    output = trouble(started, tmp_path, arguments, "stop", *options, "--trainer.strategy.timeout", "0:00:12")
    assert time.time() - (tmp_path / "mark").stat().st_mtime < 12, output
    assert re.search(r"^rank 0 stops: rank 1 gives no sign of life for \d s: killed, stopped, or", output, re.M), output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed_zero2"])
def test_the_timeout_is_an_option(capsys: Any, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    recipes = Path(TESTS).parent / "recipes"
    configs = [str(recipes / "quickstart.yaml"), "--config", str(recipes / "strategies" / f"{strategy}.yaml")]
    here(monkeypatch, "fit", "--config", *configs, "--trainer.strategy.timeout", "0:00:30", "--print_config")
    assert re.search(r"^ +timeout: '?0:00:30'?$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:1", "another rank has ended"),
        ("[/pytorch/gloo/transport/tcp/buf.cc:7] Timed out waiting 5000ms for recv", "not come in time (Timed out"),
        (
            "TCPStore: Timed out after 61 seconds waiting for clients. 1/2 clients joined.",
            "have not found one another",
        ),
        ("mat1 and mat2 shapes cannot be multiplied", None),
        ("the file of gloomy tales is closed", None),
    ],
)
def test_whose_fault(text: str, said: str | None) -> None:
    found = explain_distributed_error(RuntimeError(text))
    assert found is None if said is None else said in (found or "")
    assert explain_distributed_error(ValueError(text)) is None


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(dist.DistNetworkError) as raised:
            dist.TCPStore("127.0.0.1", port, world_size=2, is_master=True)
    assert f"MASTER_PORT={port} is in use on this machine" in (explain_distributed_error(raised.value) or "")


# --- bandwidth -----------------------------------------------------------------------------------


def test_bandwidth_of_two_processes(started: Started) -> None:
    started.start("bandwidth", "--sizes_mib", "[1,2]", "--repeats", "3", "--parameters", "1e9")
    output = started.succeed()
    rows = re.findall(r"^ +([12]) (all-reduce|all-gather|reduce-scatter) +([\d.]+) +([\d.]+) +([\d.]+)$", output, re.M)
    assert len(rows) == 6
    for mib, name, milliseconds, algbw, busbw in rows:
        assert float(algbw) == pytest.approx(int(mib) * 2**20 / float(milliseconds) / 1e6, rel=2e-2)
        # Of two ranks each sends half of the tensor, twice to reduce it to all.
        assert float(busbw) == pytest.approx(float(algbw) * (1 if name == "all-reduce" else 0.5), abs=2e-3)
    assert "1,000,000,000 parameters of 2 bytes" in output


def test_seconds_of_communication() -> None:
    measured = {
        "all-reduce": Measured(1, 10e9, 0),
        "all-gather": Measured(1, 20e9, 0),
        "reduce-scatter": Measured(1, 4e9, 0),
    }
    # 14 GB: 1.4 s reduced; 2 x 0.7 s gathered and 3.5 s scattered.
    said = describe_steps(measured, 7e9, 2)
    assert "for 1.4 s with DDP" in said
    assert "4.9 s with ZeRO-3" in said

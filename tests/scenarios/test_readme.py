"""README and README.zh-CN: each command runs as printed, and each option and file that they name exists.

The commands run one after the other in a copy of the checkout whose data sets have a few rows, whose embedded model has
two layers, and in which the names of hub models are folders with that model.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from command_line import ENVIRONMENT
from forked_commands import run_forked
from model_folders import shallow

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
READMES = ("README.md", "README.zh-CN.md")
TEXT = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in READMES}
PROGRAMS = ("python", "python3", "pip", "make", "tensorboard", "hf", "torchrun")
ELSEWHERE = {
    "python3 -m venv .venv": "makes an environment: test_what_is_installed_is_here",
    "pip install -e . -e ./callbacks": "needs a package index: test_what_is_installed_is_here",
    "make quickstart": "installs: its lines are printed by test_make_targets",
    "make test": "runs this test: its lines are printed by test_make_targets",
    "python -m lit_ft chat RUN --compare": "asks in a terminal, or reads questions from a pipe, and here is neither",
    "python -m lit_ft serve RUN": "serves until it is stopped: tests/commands/inference/test_serve.py",
    "python -m lit_ft parity RUN --url http://127.0.0.1:8000": "asks that server: test_server_parity.py",
    "python -m lit_ft board": "serves until it is stopped: tests/board/test_board_page.py",
    "tensorboard --logdir checkpoints/runs": "serves until it is stopped: test_what_is_installed_is_here",
}
"""Commands that are not run here, and why."""
INSTEAD = {
    # They would train for minutes.
    "--vary optimizer.lr=1e-3,3e-3 --vary model.peft.r=8,16": "--vary optimizer.lr=1e-3 --vary model.peft.r=8",
    "--trials 20": "--trials 1",
    # Its run would be the newest of qwen.yaml, which a later command resumes on other data.
    "--trainer.max_epochs 1": "--trainer.max_epochs 1 --run_dir MINE",
    # RUN is a run of another recipe.
    "--run_dir RUN --resume auto": "--run_dir NEW --resume auto",
}
"""Parts of commands, and what they are run with."""


def commands(text: str) -> list[str]:
    """Commands of the indented blocks of a page, without comments."""
    blocks = re.sub(r"\\\n\s+", "", "\n".join(re.findall(r"^ {4}(\S.*|  +\S.*)$", text, re.MULTILINE)))
    lines = [re.split(r"\s{2,}#", line)[0].strip() for line in blocks.splitlines()]
    return [line for line in lines if line.split()[0] in PROGRAMS and not line.startswith("next:")]


def test_both_readmes_have_the_same_commands() -> None:
    assert len(commands(TEXT["README.md"])) >= 20
    assert commands(TEXT["README.zh-CN.md"]) == commands(TEXT["README.md"])


def test_commands_that_are_not_run_are_there() -> None:
    printed = "\n".join(commands(TEXT["README.md"]))
    assert [one for one in (*ELSEWHERE, *INSTEAD) if one not in printed] == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkout with little data, and the files that stand for a user's own."""
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(REPOSITORY / "recipes", root / "recipes")
    for name, rows in (("train", 16), ("val", 4)):
        path = root / "recipes" / "data" / f"quickstart_{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8"))[:rows]), encoding="utf-8")
    embedded = root / "checkpoints" / "tiny-qwen2"
    shallow(REPOSITORY / "checkpoints" / "tiny-qwen2", embedded, layers=2)
    config = embedded / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 512', '"max_position_embeddings": 32768'))
    for model in ("Qwen/Qwen2.5-0.5B-Instruct", "models/Qwen2.5-0.5B-Instruct"):
        shutil.copytree(embedded, root / model)
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}"} for number in range(20)]
    for name, count in (("huanhuan.json", 4), ("rows.json", 20), ("new.json", 1)):
        (root / name).write_text(json.dumps(rows[:count]))
    (root / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[4:8]))
    mine, sources, *_ = re.findall(r"```yaml\n(.*?)```", TEXT["README.md"], re.DOTALL)
    (root / "mine.yaml").write_text(mine)
    (root / "sources.yaml").write_text(sources)
    return root


def run(checkout: Path, command: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of lit_ft in the copy."""
    environment = {**ENVIRONMENT, "LIT_FT_CACHE": str(checkout / "cache")}
    return run_forked(*shlex.split(command)[3:], env=environment, cwd=checkout)


def test_each_command_runs_as_printed(checkout: Path) -> None:
    best = {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": {"monitor": "val/loss"}}
    (checkout / "best.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks+": [best]}}))
    recipe = "--config recipes/qwen.yaml --config mine.yaml --config best.yaml --trainer.max_epochs 1"
    done = run(checkout, f"python -m lit_ft fit {recipe} --model.max_new_tokens 8 --run_dir RUN")
    assert done.returncode == 0, done.stderr
    for command in commands(TEXT["README.md"]):
        if any(command.startswith(one) for one in ELSEWHERE):
            continue
        for printed, instead in INSTEAD.items():
            command = command.replace(printed, instead)
        done = run(checkout, command)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert {path.name for path in (checkout / "RUN").iterdir()} >= {"predictions.jsonl", "report.html", "adapter"}
    assert (checkout / "answers.jsonl").read_text().count("\n") == 1
    assert (checkout / "my-model" / "config.json").is_file()
    assert (checkout / "NEW" / "finished.json").is_file()


def test_the_example_of_several_sources_is_checked(checkout: Path) -> None:
    command = "python -m lit_ft check --config recipes/qwen.yaml --config sources.yaml --data.path null"
    done = run(checkout, command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "train: tools" in done.stdout


@pytest.fixture(scope="module")
def help_of_all_commands() -> str:
    from lit_ft.cli import COMMANDS, help_text

    return help_text() + "".join(run_forked(name, "--help", env=ENVIRONMENT).stdout for name in COMMANDS)


FOREIGN = {"--local-dir": "hf", "--local_dir": "modelscope"}
"""Options of other programs."""


@pytest.mark.parametrize("readme", READMES)
def test_each_option_exists(readme: str, help_of_all_commands: str) -> None:
    code = re.findall(r"`[^`\n]+`", TEXT[readme])  # the commands are run
    options = {option for part in code for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", part)}
    assert len(options) > 20
    known = set(re.findall(r"--[a-z][\w.-]*", help_of_all_commands))
    assert sorted(options - known - set(FOREIGN)) == []


@pytest.mark.parametrize("readme", READMES)
def test_each_file_exists(readme: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", TEXT[readme])
    text = re.sub(r"\(https?:[^)]+\)", "", TEXT[readme])
    named = re.findall(r"\b(?:recipes|docs|benchmarks|callbacks|tests)/[\w./-]*\w", text)
    assert len(links) > 20
    assert [name for name in {*links, *named} if not (REPOSITORY / name).exists()] == []


def test_make_targets() -> None:
    for target in re.findall(r"make [\w-]+", "\n".join(commands(TEXT["README.md"]))):
        printed = subprocess.run([*target.split(), "-n"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        assert "-m lit_ft fit --config recipes/quickstart.yaml" in printed.stdout or "pytest" in printed.stdout


def test_what_is_installed_is_here() -> None:
    assert (REPOSITORY / "pyproject.toml").is_file()
    assert (REPOSITORY / "callbacks" / "pyproject.toml").is_file()
    extras = re.findall(r"pip install -e '\.\[(\w+)\]'", TEXT["README.md"])
    project = (REPOSITORY / "pyproject.toml").read_text()
    assert extras
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras)
    program = [sys.executable, "-m", "tensorboard.main", "--version"]
    assert re.match(r"\d", subprocess.run(program, capture_output=True, text=True, check=True).stdout)

"""Recipe files and the order of the command line."""

from pathlib import Path

import pytest
from command_line import recipe
from jsonargparse import Namespace

from lit_ft.cli import main
from lit_ft.recipe.files import check_files, expand_home, in_order


def test_options_override_files_wherever_they_stand(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model_folder: str
) -> None:
    given = recipe(tmp_path, model_folder, "rows.json")
    for arguments in (["fit", "--data.max_length", "33", *given[1:]], [*given, "--data.max_length", "33"]):
        with pytest.raises(SystemExit):
            main([*arguments, "--print_config"])
        assert "max_length: 33" in capsys.readouterr().out


def test_files_are_first_and_negative_numbers_stay_with_their_option() -> None:
    assert in_order(["fit", "--a.b", "-1e-3", "--config", "x", "-c=y", "--c", "-5", "--d=-1", "-.5", "--config"]) == [
        *("fit", "--config", "x", "-c=y", "--config"),
        *("--a.b=-1e-3", "--c=-5", "--d=-1", "-.5"),
    ]
    assert in_order([]) == []


@pytest.mark.parametrize(
    "text",
    [
        "a: &b {c: 1}\nd: *b\ne: *b\n",  # the same node twice is no repeated key
        "base: &base {x: 1}\none: {<<: *base, y: 2}\n",
        "a: {path: x}\nb: {path: y}\n",
        "a: [{path: x}, {path: y}]\n",
    ],
)
def test_good_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(text)
    check_files(["fit", "--config", str(tmp_path / "good.yaml")])


def test_a_file_that_refers_to_itself_ends(tmp_path: Path) -> None:
    (tmp_path / "loop.yaml").write_text("a: &a [*a]\n")
    with pytest.raises(ValueError, match="refers to itself"):
        check_files([f"--config={tmp_path / 'loop.yaml'}"])


def test_the_home_folder_in_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = Namespace(path="~/a.json", sources=[{"path": "~/b"}], system="a ~/c")
    options = Namespace(run_dir="~/runs", data=data, n=3)
    expand_home(options)
    assert options == Namespace(
        run_dir="/home/me/runs",
        data=Namespace(path="/home/me/a.json", sources=[{"path": "/home/me/b"}], system="a ~/c"),
        n=3,
    )

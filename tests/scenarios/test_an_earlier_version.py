"""Compatibility with a run folder that was written before modules moved into folders, and copied since.

``tests/earlier_run`` is the run of commit b9870f1: six steps, of which the checkpoint holds three.
"""

import shutil
from pathlib import Path

import pytest
from command_line import clean_environment, here, losses  # noqa: F401 (a fixture)
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
LOSSES = {2: 4.00864839553833, 3: 4.15442419052124, 4: 4.119855880737305, 5: 4.008518695831299}
"""Logged by that commit for the last steps, on a CPU; a resumed run logs the step of its checkpoint again."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(ROOT)  # paths of the recipe are relative to it
    return Path(shutil.copytree(ROOT / "tests" / "earlier_run", tmp_path / "run"))


@pytest.mark.slow
def test_it_resumes_with_the_same_losses(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = str(run / "checkpoints" / "step=3.ckpt")
    here(monkeypatch, "fit", "--config", str(run / "config.yaml"), "--ckpt_path", checkpoint)
    assert losses(run) == pytest.approx(LOSSES, rel=1e-4)


def test_its_checkpoint_is_exported(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, out = str(run / "checkpoints" / "step=3.ckpt"), tmp_path / "adapter"
    here(monkeypatch, "export", "--run", str(run), "--checkpoint", checkpoint, "--out", str(out))
    adapter = load_file(out / "adapter_model.safetensors")
    assert sum("lora_A" in name for name in adapter) == len(adapter) / 2 > 0
    assert any(tensor.any() for name, tensor in adapter.items() if "lora_B" in name)  # zero before training

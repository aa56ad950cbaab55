"""Hugging Face -> Megatron -> Hugging Face, for each family, format and kind of layout."""

import importlib.util
from pathlib import Path

import pytest
import torch
from architectures import save_model
from safetensors.torch import load_file

from lit_ft.megatron.conversion import open_checkpoint, to_hugging_face, to_megatron
from lit_ft.megatron.families import FAMILIES
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.names import Format, LayerSpec, Naming

HAS_CORE = importlib.util.find_spec("megatron") is not None
needs_core = pytest.mark.skipif(not HAS_CORE, reason="needs megatron-core (extra megatron)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of tiny models, by family."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_model(name, folder / name) for name in FAMILIES}


def naming(format: Format, spec: LayerSpec = "te", grouped: bool = False) -> Naming:
    return Naming(format, spec, has_experts=False, grouped=grouped)


TWO_BY_TWO = Layout(tensor_parallel=2, pipeline_parallel=2)
CASES = [
    ("llama", naming("torch_dist"), Layout(first_stage_layers=1, pipeline_parallel=2)),
    ("llama", naming("torch", "local"), Layout(2, 2, first_stage_layers=1)),
    ("mistral", naming("torch_dist", "local"), TWO_BY_TWO),
    ("mistral", naming("torch"), Layout(pipeline_parallel=3, last_stage_layers=2)),
    ("qwen2", naming("torch_dist"), TWO_BY_TWO),
    ("qwen2", naming("torch"), Layout(2, 2, virtual_pipeline=2)),
    ("qwen3", naming("torch_dist"), Layout(vocabulary_multiple=100)),
    ("qwen3", naming("torch"), TWO_BY_TWO),
    ("mixtral", naming("torch_dist"), TWO_BY_TWO),
    ("mixtral", naming("torch", "local"), Layout(2, 1, 2)),
    ("qwen3_moe", naming("torch_dist", "local"), Layout(expert_parallel=4)),
    ("qwen3_moe", naming("torch", grouped=True), Layout(1, 2, 2)),
]
IDS = [f"{family}-{names.format}" for family, names, _ in CASES]


@pytest.mark.parametrize(("family", "names", "layout"), CASES, ids=IDS)
def test_every_bit_comes_back(
    models: dict[str, str], tmp_path: Path, family: str, names: Naming, layout: Layout
) -> None:
    to_megatron(models[family], tmp_path / "ckpt", layout, names, "reduced")
    to_hugging_face(tmp_path / "ckpt", models[family], tmp_path / "back", "reduced")
    first, last = (load_file(folder / "model.safetensors") for folder in (Path(models[family]), tmp_path / "back"))
    assert first.keys() == last.keys()
    assert all(first[name].dtype == last[name].dtype and torch.equal(first[name], last[name]) for name in first)


@needs_core
@pytest.mark.processes
@pytest.mark.parametrize(("family", "names", "layout"), CASES, ids=IDS)
def test_megatron_core_computes_the_same_logits(
    models: dict[str, str], tmp_path: Path, family: str, names: Naming, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_ft.megatron.logits.TOLERANCE", 1e-5)
    to_megatron(models[family], tmp_path / "ckpt", layout, names, "megatron")
    assert open_checkpoint(tmp_path / "ckpt").rows % layout.tensor_parallel == 0

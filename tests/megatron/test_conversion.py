"""Hugging Face -> Megatron -> Hugging Face, for each family, format and kind of layout."""

import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
import torch
from architectures import save_model
from ranks import on_ranks
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoModelForCausalLM

from lit_ft.errors import RecipeError
from lit_ft.internals.megatron_core import on_cpu
from lit_ft.megatron.arguments import check_arguments, saved_arguments
from lit_ft.megatron.checks import core_model
from lit_ft.megatron.checks.core_model import CoreCheckpoint
from lit_ft.megatron.checks.logits import check_logits
from lit_ft.megatron.conversion import ARGUMENTS, open_checkpoint, to_hugging_face, to_megatron
from lit_ft.megatron.families import FAMILIES, Family
from lit_ft.megatron.formats.hugging_face import HuggingFaceWeights
from lit_ft.megatron.formats.legacy import FILE
from lit_ft.megatron.formats.names import Format, LayerSpec, Naming
from lit_ft.megatron.formats.source import TRACKER, checkpoint_folder
from lit_ft.megatron.layout import Layout, Rank
from lit_ft.megatron.shape import ModelShape
from lit_ft.model.loading import load_config

needs_core = pytest.mark.skipif(not core_model.is_installed(), reason="needs megatron-core (extra megatron)")


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


@pytest.fixture(scope="module", params=CASES, ids=IDS)
def converted(
    request: pytest.FixtureRequest, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """Folder of a model, and that of the checkpoint made of it."""
    family, names, layout = request.param
    out = tmp_path_factory.mktemp("checkpoints") / family
    to_megatron(models[family], out, layout, names, "reduced")
    return models[family], out


@pytest.mark.slow
def test_every_bit_comes_back(converted: tuple[str, Path], tmp_path: Path) -> None:
    model, checkpoint = converted
    to_hugging_face(checkpoint, model, tmp_path / "back", "reduced")
    first, last = (load_file(folder / "model.safetensors") for folder in (Path(model), tmp_path / "back"))
    assert first.keys() == last.keys()
    assert all(first[name].dtype == last[name].dtype and torch.equal(first[name], last[name]) for name in first)


def swapped(family: Family, name: str) -> Family:
    """Table in which two tensors are exchanged: every bit still comes back."""
    if name == "parts":
        exchange = {fc1: replace(fc1, parts=fc1.parts[::-1]) for fc1 in family.layer if fc1.join == "stacked"}
    else:
        query, key = (
            weight for weight in family.layer if "_layernorm" in weight.megatron and "self_att" in weight.megatron
        )
        exchange = {query: replace(query, parts=key.parts), key: replace(key, parts=query.parts)}
    return replace(family, layer=tuple(exchange.get(weight, weight) for weight in family.layer))


@pytest.mark.parametrize("name", ["parts", "norms"])
def test_an_error_in_a_table_is_found(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(FAMILIES, "qwen3", swapped(FAMILIES["qwen3"], name))
    with pytest.raises(RecipeError, match="logits of a model of its first and last layer"):
        to_megatron(models["qwen3"], tmp_path / "ckpt", TWO_BY_TWO, naming("torch"), "reduced")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_window_of_any_length_is_converted_and_compared(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixtral's, which is longer than the sequence of the comparison."""
    AutoModelForCausalLM.from_pretrained(models["mixtral"], sliding_window=4096).save_pretrained(tmp_path / "model")
    arguments = (str(tmp_path / "model"), tmp_path / "ckpt", Layout(), naming("torch_dist"), "reduced")
    to_megatron(*arguments)
    assert "--window-size 4095,0\n" in (tmp_path / "ckpt" / ARGUMENTS).read_text()
    shutil.rmtree(tmp_path / "ckpt")
    of = ModelShape.of
    monkeypatch.setattr(ModelShape, "of", lambda *given: replace(of(*given), window=None))
    with pytest.raises(RecipeError, match="logits of a model of its first and last layer"):
        to_megatron(*arguments)


@pytest.mark.parametrize("recorded", [None, "7,0", (7, 0), [15, 0]])
def test_a_window_is_that_of_the_model(models: dict[str, str], recorded: object) -> None:
    """As Megatron records it, and as it is written here; the model's has 16 tokens."""
    shape = ModelShape.of(load_config(models["mistral"]), "x")
    if recorded == [15, 0]:
        check_arguments(Namespace(window_size=recorded), shape, "ckpt", "like")
        check_arguments(Namespace(), shape, "ckpt", "like")  # not recorded
        return
    with pytest.raises(RecipeError, match=r"window_size=(None|7,0) there, and 15,0 by --like like; name the model"):
        check_arguments(Namespace(window_size=recorded), shape, "ckpt", "like")


@needs_core
@pytest.mark.processes
def test_megatron_core_computes_the_same_logits(converted: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model, checkpoint = converted
    monkeypatch.setattr("lit_ft.megatron.checks.logits.TOLERANCE", 1e-5)
    source, shape = open_checkpoint(checkpoint), ModelShape.of(load_config(model), model)
    report = check_logits(HuggingFaceWeights(Path(model)), source, checkpoint_folder(checkpoint), shape, "megatron")
    print(report)  # pytest -rP shows the figures of docs/megatron.md
    assert report.startswith("logits of Megatron-Core's model")


def write_by_core(folder: Path, shape: ModelShape, layout: Layout, names: Naming) -> None:
    """Let Megatron-Core draw and save a model on its ranks."""
    from megatron.core import dist_checkpointing, parallel_state

    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    arguments = saved_arguments(shape, layout, names, torch.float32)
    with on_cpu(), torch.no_grad():
        torch.manual_seed(5)
        modules = core_model.build(shape, layout, layout.padded(shape.vocabulary), initialize=True)
        rank = Rank(
            parallel_state.get_tensor_model_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            parallel_state.get_expert_model_parallel_rank(),
        )
        for module in modules:
            _perturb(module, rank)
        common = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7}
        if names.format == "torch":
            states = {f"model{i}" if len(modules) > 1 else "model": one.state_dict() for i, one in enumerate(modules)}
            (folder / layout.folder_of(rank)).mkdir(parents=True)
            torch.save({**common, **states}, folder / layout.folder_of(rank) / FILE)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            dist_checkpointing.save({**common, "model": modules[0].sharded_state_dict()}, str(folder))
    distributed.barrier()
    distributed.destroy_process_group()


def _perturb(module: torch.nn.Module, rank: Rank) -> None:
    """Make norms, biases and experts differ, which Megatron-Core draws alike."""
    layers = {name: layer.layer_number for name, layer in module.named_modules() if hasattr(layer, "layer_number")}
    for name, weight in module.named_parameters():
        layer = next((number for prefix, number in layers.items() if name.startswith(f"{prefix}.")), 0)
        if weight.ndim == 1 or "experts" in name:
            is_split = "bias" in name or "experts" in name
            own = (layer, name.split("layers.")[-1].partition(".")[2] or name, *(rank[::2] if is_split else ()))
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(crc32(repr(own).encode())))
            weight += 0.1 * noise


@needs_core
@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "names", "layout"),
    [
        ("qwen3", naming("torch_dist", "local"), TWO_BY_TWO),
        ("mixtral", naming("torch_dist", "local"), Layout(1, 2, 2)),
        ("qwen2", naming("torch", "local"), Layout(2, 2, virtual_pipeline=2)),
    ],
    ids=["qwen3-torch_dist", "mixtral-torch_dist", "qwen2-torch"],
)
def test_checkpoint_of_megatron_core_comes_in(
    models: dict[str, str], tmp_path: Path, family: str, names: Naming, layout: Layout
) -> None:
    import megatron.core.models.gpt  # noqa: F401  # before the ranks are forked

    shape = ModelShape.of(load_config(models[family]), family)
    folder = tmp_path / "ckpt" / "iter_0000007"
    on_ranks(
        layout.tensor_parallel * layout.pipeline_parallel * layout.expert_parallel,
        write_by_core,
        folder,
        shape,
        layout,
        names,
    )
    (tmp_path / "ckpt" / TRACKER).write_text("7")
    to_hugging_face(tmp_path / "ckpt", models[family], tmp_path / "model", "reduced")
    ids = torch.arange(2, 34)[None]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    got = core_model.logits(CoreCheckpoint(folder, shape, layout, layout.padded(shape.vocabulary)), ids)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, got, atol=1e-5, rtol=0)

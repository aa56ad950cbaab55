"""``convert model`` on the command line: errors in one line, resumed conversions, runs and adapters."""

import json
import pickle
import resource
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from command_line import here, recipe, run
from lit_callbacks.export.manifest import verify_manifest
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from lit_ft.cli import main
from lit_ft.megatron import conversion
from lit_ft.megatron.formats import legacy, torch_dist
from lit_ft.megatron.formats.hugging_face import HuggingFaceWeights
from lit_ft.megatron.formats.names import Naming
from lit_ft.megatron.formats.safe_pickle import load
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.shape import LLAMA3_ROPE

LEGACY = Naming("torch", "te", has_experts=False, grouped=False)
LLAMA_3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, **LLAMA3_ROPE}


@pytest.fixture(scope="module")
def checkpoint(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of four ranks in the legacy format."""
    out = tmp_path_factory.mktemp("legacy") / "ckpt"
    conversion.to_megatron(model_folder, out, Layout(2, 2), LEGACY, "reduced")
    return out


def changed(model_folder: str, to: Path, **config: Any) -> str:
    """Copy of a model with other values in config.json."""
    shutil.copytree(model_folder, to)
    text = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**text, **config}))
    return str(to)


def to_megatron(capsys: Any, path: object, out: object, *options: str, code: int = 2) -> str:
    command = ("convert", "model", "--from", "hf", "--to", "megatron", str(path), "--out", str(out))
    return run(capsys, *command, *options, code=code)


def to_hf(capsys: Any, path: object, like: object, out: object, *options: str, code: int = 2) -> str:
    command = ("convert", "model", "--from", "megatron", "--to", "hf", str(path), "--like", str(like))
    return run(capsys, *command, "--out", str(out), *options, code=code)


def assert_line(said: str, *parts: str) -> None:
    assert said.count("\n") == 1, said
    assert said.startswith("lit_ft: error: "), said
    assert all(part in said for part in parts), said


@pytest.mark.slow
def test_there_and_back_again(capsys: Any, caplog: pytest.LogCaptureFixture, model_folder: str, tmp_path: Path) -> None:
    caplog.set_level("INFO", "lightning.pytorch")
    to_megatron(capsys, model_folder, tmp_path / "ckpt", "--pipeline_parallel", "2", "--verify", "reduced", code=0)
    assert "every bit comes back from it" in caplog.text
    lines = (tmp_path / "ckpt" / conversion.ARGUMENTS).read_text().splitlines()
    assert {"--num-layers 2", "--add-qkv-bias", "--norm-epsilon 1e-06", "--ckpt-format torch_dist"} <= set(lines)
    to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back", code=0)
    assert f"every bit of {tmp_path / 'ckpt'} comes back from it" in caplog.text
    files = {path.name for path in Path(model_folder).iterdir()}
    assert {path.name for path in (tmp_path / "back").iterdir()} == files | {"manifest.json"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--tensor_parallel", "4"), ("tensor_parallel=4", "num_key_value_heads=2")),
        (("--pipeline_parallel", "3"), ("2 layers", "pipeline_parallel=3")),
        (("--expert_parallel", "2"), ("expert_parallel=2", "models with experts")),
        (("--pipeline_parallel", "2", "--virtual_pipeline", "2"), ("virtual_pipeline=2", "[1, 1]")),
        (("--virtual_pipeline", "2"), ("pipeline_parallel > 1",)),
        (("--like", "x"), ("like='x'", "--to hf")),
        (("--tensor_parallel", "0"), ("tensor_parallel=0", "at least 1")),
        (("--adapter", "merged"), ("adapter=merged is for a run's folder", "leave it out")),
        (("--optimizer_state", "true"), ("optimizer_state=true is for a run's folder",)),
    ],
)
def test_sizes_that_do_not_divide(
    capsys: Any, model_folder: str, tmp_path: Path, options: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    assert_line(to_megatron(capsys, model_folder, tmp_path / "ckpt", *options), *parts)
    assert not (tmp_path / "ckpt").exists()


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"model_type": "gpt_neox"}, ("'gpt_neox'", "llama, mistral, qwen2, qwen3, mixtral, qwen3_moe")),
        ({"vocab_size": 200}, ("tokenizer has", "vocab_size=200")),
        ({"hidden_act": "gelu"}, ("hidden_act='gelu'", "'silu'")),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.7}}, ("rope_theta=10000.7", "whole number")),
        ({"intermediate_size": 128}, ("mlp.gate_proj.weight", "(96, 48)", "(128, 48)")),
        ({"num_hidden_layers": 1, "layer_types": None}, ("model.layers.1.", "would be lost")),
    ],
)
def test_models_that_are_refused(
    capsys: Any, model_folder: str, tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...]
) -> None:
    folder = changed(model_folder, tmp_path / "model", **config)
    assert_line(to_megatron(capsys, folder, tmp_path / "ckpt"), *parts)


def test_an_untied_head_of_a_tied_model(capsys: Any, model_folder: str, tmp_path: Path) -> None:
    folder = Path(changed(model_folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    assert_line(to_megatron(capsys, folder, tmp_path / "ckpt"), "lm_head.weight", "tie_word_embeddings")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"intermediate_size": 128}, ("ffn_hidden_size=96", "128")),
        ({"num_hidden_layers": 4, "layer_types": None}, ("num_layers=2", "4 by --like")),
        ({"rms_norm_eps": 1e-5}, ("norm_epsilon=1e-06", "1e-05")),
        ({"rope_parameters": LLAMA_3}, ("use_rope_scaling=False there, and True by --like",)),
        ({"vocab_size": 600}, ("embedding.word_embeddings.weight", "(512, 48)", "600 rows")),
    ],
)
def test_a_checkpoint_of_other_sizes(
    capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path, config: dict[str, Any], parts: tuple[str, ...]
) -> None:
    like = changed(model_folder, tmp_path / "like", **config)
    assert_line(to_hf(capsys, checkpoint, like, tmp_path / "back"), *parts)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("format", "torch_dist"),
        ("layer_spec", "local"),
        ("moe_grouped_gemm", "false"),
        ("adapter", "apart"),
        ("optimizer_state", "false"),
    ],
)
def test_options_of_a_megatron_checkpoint_for_a_hugging_face_folder(
    capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path, option: str, value: str
) -> None:
    said = to_hf(capsys, checkpoint, model_folder, tmp_path / "back", f"--{option}", value)
    assert_line(said, f"{option}={value} is for --to megatron", "leave it out")
    assert not (tmp_path / "back").exists()


def test_checkpoints_that_are_incomplete(capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "ckpt")
    missing = tmp_path / "ckpt" / "release" / "mp_rank_01_001" / legacy.FILE
    missing.unlink()
    assert_line(to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back"), str(missing), "1 of 4 rank files")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("12")
    assert_line(to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back"), "iter_0000012, which is not there")
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").unlink()
    assert_line(to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back"), "is no Megatron checkpoint")


def test_weights_that_would_be_lost(capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "ckpt")
    file = tmp_path / "ckpt" / "release" / "mp_rank_00_000" / legacy.FILE
    content = load(file)
    extra = {**content, "model": {**content["model"], "decoder.layers.0.mlp.shared.weight": torch.ones(2)}}
    file.unlink()  # its tensors are mapped into memory
    torch.save(extra, file)
    said = to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back")
    assert_line(said, "1 weights", "decoder.layers.0.mlp.shared.weight", "would be lost")


class Touch:
    """Object whose pickle creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_code_in_a_pickle_is_refused_by_name(capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "ckpt")
    torch.save(
        {"args": Namespace(), "model": Touch(tmp_path / "touched")},
        tmp_path / "ckpt/release/mp_rank_00_000" / legacy.FILE,
    )
    assert_line(to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back"), "names code", "(builtins.getattr)")
    assert not (tmp_path / "touched").exists()


def test_a_plain_pickle_is_no_checkpoint(capsys: Any, model_folder: str, checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "ckpt")
    file = tmp_path / "ckpt/release/mp_rank_00_000" / legacy.FILE
    file.write_bytes(pickle.dumps(Touch(tmp_path / "touched")))
    assert_line(to_hf(capsys, tmp_path / "ckpt", model_folder, tmp_path / "back"), str(file), "no checkpoint")
    assert not (tmp_path / "touched").exists()


def test_states_of_megatrons_classes_are_passed_over(tmp_path: Path) -> None:
    import numpy as np

    torch.save({"args": Namespace(a=1), "rng_state": [{"np_rng_state": np.random.get_state()}]}, tmp_path / "file.pt")
    assert load(tmp_path / "file.pt")["args"] == Namespace(a=1)


def test_an_interrupted_conversion_continues(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, count = HuggingFaceWeights.read, 0

    def limited(self: HuggingFaceWeights, *arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count > 30:
            raise KeyboardInterrupt
        return read(self, *arguments)

    monkeypatch.setattr(HuggingFaceWeights, "read", limited)
    with pytest.raises(KeyboardInterrupt):
        conversion.to_megatron(model_folder, tmp_path / "ckpt", Layout(2, 2), LEGACY, "reduced")
    assert not (tmp_path / "ckpt").exists()
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob(legacy.FILE)}
    assert 0 < len(written) < 4
    monkeypatch.setattr(HuggingFaceWeights, "read", read)
    conversion.to_megatron(model_folder, tmp_path / "ckpt", Layout(2, 2), LEGACY, "reduced")
    unfinished = tmp_path / ".ckpt.unfinished"
    assert {tmp_path / "ckpt" / path.relative_to(unfinished): time for path, time in written.items()}.items() <= {
        path: path.stat().st_mtime_ns for path in tmp_path.rglob(legacy.FILE)
    }.items()


def test_an_index_is_whole_or_not_there(model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each layer is read as the chunk that it is, without a search among those of all layers."""

    def killed(_: object, file: IO[bytes]) -> None:
        file.write(b"\x80")
        file.flush()
        raise KeyboardInterrupt

    arguments = (model_folder, tmp_path / "ckpt", Layout(), replace(LEGACY, format="torch_dist"), "reduced")
    monkeypatch.setattr(torch_dist, "pickle", SimpleNamespace(dump=killed))
    with pytest.raises(KeyboardInterrupt):
        conversion.to_megatron(*arguments)
    monkeypatch.undo()
    searched = []

    def search(name: str, tensor: Any, chunks: Any) -> Any:
        searched.append(len(tensor.chunks))
        return create_read_items_for_chunk_list(name, tensor, chunks)

    monkeypatch.setattr(torch_dist, "create_read_items_for_chunk_list", search)
    conversion.to_megatron(*arguments)
    assert set(searched) == {1}
    assert not list((tmp_path / "ckpt" / "release").glob("*.partial"))


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_a_full_disk_is_one_line_and_the_conversion_continues(
    capsys: Any, model_folder: str, tmp_path: Path, format: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # what the kernel does at a quota
    try:
        said = to_megatron(capsys, model_folder, tmp_path / "ckpt", "--format", format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert_line(said, f"{str(tmp_path / 'ckpt')!r} could not be written: File too large; make room, or write elsewhere")
    assert not (tmp_path / "ckpt").exists()
    to_megatron(capsys, model_folder, tmp_path / "ckpt", "--format", format, "--verify", "reduced", code=0)


def test_a_written_folder_is_not_replaced(capsys: Any, model_folder: str, checkpoint: Path) -> None:
    assert_line(to_megatron(capsys, model_folder, checkpoint), "exists; name a new folder")


def test_a_damaged_result_is_discarded(
    capsys: Any, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join = conversion.torch_dist.join_parts

    def damaging(folder: Path, *arguments: Any) -> None:
        join(folder, *arguments)
        file = folder / "__1_0.distcp"
        content = bytearray(file.read_bytes())
        weight = load_file(Path(model_folder) / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
        place = content.index(weight.numpy().tobytes()[:64])
        content[place] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(conversion.torch_dist, "join_parts", damaging)
    said = to_megatron(capsys, model_folder, tmp_path / "ckpt")
    assert_line(said, "model.layers.0.mlp.down_proj.weight is not the same")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["merged", "apart"])
def test_adapter_of_a_run(
    monkeypatch: pytest.MonkeyPatch,
    model_folder: str,
    write_rows: Callable[..., str],
    tmp_path: Path,
    adapter: str,
) -> None:
    run_dir = tmp_path / "run"
    options = ("--run_dir", str(run_dir), "--trainer.max_steps", "1")
    here(monkeypatch, *recipe(tmp_path, model_folder, write_rows()), *options)
    command = ("convert", "model", "--from", "hf", "--to", "megatron", str(run_dir), "--out", str(tmp_path / "ckpt"))
    options = ("--adapter", adapter, "--verify", "reduced")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "check_logits", interrupt)
        here(patch, *command, *options, code=130)
    # The model that is merged from a run is not there for the next process.
    assert (tmp_path / ".ckpt.unfinished").exists() == (adapter == "apart")
    here(monkeypatch, *command, *options)
    assert not verify_manifest(tmp_path / "ckpt")
    conversion.to_hugging_face(tmp_path / "ckpt", model_folder, tmp_path / "back", "reduced")
    base, back = (load_file(folder / "model.safetensors") for folder in (Path(model_folder), tmp_path / "back"))
    changed = {name for name in base if not torch.equal(base[name], back[name])}
    trained = {f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qv"}
    assert changed == (trained if adapter == "merged" else set())
    assert (tmp_path / "ckpt" / "adapter" / "adapter_model.safetensors").is_file() == (adapter == "apart")


@pytest.mark.slow
def test_an_adapter_apart_needs_the_config_of_its_base(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, model_folder: str, write_rows: Callable[..., str], tmp_path: Path
) -> None:
    overrides = '{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}'
    options = ("--run_dir", str(tmp_path / "run"), "--trainer.max_steps", "1", "--model.config_overrides", overrides)
    here(monkeypatch, *recipe(tmp_path, model_folder, write_rows()), *options)
    said = to_megatron(capsys, tmp_path / "run", tmp_path / "ckpt", "--adapter", "apart")
    assert f"the run was trained with model.config_overrides={overrides}" in said
    assert not (tmp_path / "ckpt").exists()


def interrupt(*_: object) -> None:
    """Check of logits that the user interrupts."""
    raise KeyboardInterrupt


def test_a_run_on_a_quantized_base_is_merged_by_export(capsys: Any, model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit):
        main([*recipe(tmp_path, model_folder, None), "--config", "recipes/tuning/qlora_nf4.yaml", "--print_config"])
    (tmp_path / "run" / "config.yaml").write_text(capsys.readouterr().out)
    said = to_megatron(capsys, tmp_path / "run", tmp_path / "ckpt")
    assert_line(said, f"`export --run {tmp_path / 'run'} --merge --quantized-base dequantize --out FOLDER`")


@pytest.mark.slow
def test_an_adapter_that_is_not_there_leaves_no_folder(capsys: Any, model_folder: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(SystemExit):
        main([*recipe(tmp_path, model_folder, None), "--print_config"])
    (tmp_path / "run" / "config.yaml").write_text(capsys.readouterr().out)
    assert "there is no checkpoint in" in to_megatron(capsys, tmp_path / "run", tmp_path / "ckpt", "--adapter", "apart")
    for adapter in ("apart", "merged"):  # said before there is anything to read
        options = ("--adapter", adapter, "--tensor_parallel", "4")
        assert "num_key_value_heads=2" in to_megatron(capsys, tmp_path / "run", tmp_path / "ckpt", *options)
    assert "run' exists; name a new folder" in to_megatron(capsys, tmp_path / "run", tmp_path / "run")
    assert {path.name for path in tmp_path.iterdir()} == {"run", "recipe.yaml"}

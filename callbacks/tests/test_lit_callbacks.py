"""The callbacks on a plain Lightning module: nothing of lit_ft is imported here."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lit_callbacks import AdapterMerger, GracefulStop, LossLedger, SpikeGuard, StopRequested, ThroughputMonitor
from torch import nn
from torch.utils.data import DataLoader

pytestmark = pytest.mark.slow


class Plain(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.layer(batch["input_ids"].float()).mean()

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(count: int = 8) -> DataLoader:
    return DataLoader([{"input_ids": torch.ones(4)}] * count, batch_size=1)


def trainer(tmp_path: Path, **options: Any) -> Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    return Trainer(**{**quiet, "default_root_dir": tmp_path, "max_epochs": 1, **options})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_graceful_stop_between_optimizer_steps(tmp_path: Path, number: signal.Signals) -> None:
    class Signalled(Plain):
        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            if batch_idx == 2:
                os.kill(os.getpid(), number)
            return super().training_step(batch, batch_idx)

    before = signal.getsignal(number)
    run = trainer(tmp_path, callbacks=[GracefulStop()], accumulate_grad_batches=2, enable_checkpointing=False)
    with pytest.raises(StopRequested) as stop:
        run.fit(Signalled(), loader())
    assert stop.value.exit_code == 128 + number
    assert torch.load(stop.value.checkpoint, weights_only=True)["global_step"] == 2
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda: LossLedger(write_every_n_steps=0),
        lambda: LossLedger(top=-1),
        lambda: ThroughputMonitor(window=0),
        lambda: ThroughputMonitor(skip_steps=-1),
        lambda: SpikeGuard(threshold=float("nan")),
    ],
)
def test_numbers_out_of_range(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


def test_signals_are_given_back_after_a_whole_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    trainer(tmp_path, callbacks=[GracefulStop()], enable_checkpointing=False).fit(Plain(), loader())
    assert signal.getsignal(signal.SIGINT) == before


def test_outside_the_main_thread_training_goes_on(tmp_path: Path) -> None:
    run = trainer(tmp_path, callbacks=[GracefulStop()], enable_checkpointing=False)
    with pytest.warns(UserWarning, match="GracefulStop sees no signals"), ThreadPoolExecutor() as pool:
        pool.submit(run.fit, Plain(), loader()).result()
    assert run.global_step == 8


class Wrapped(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        ids = batch["input_ids"].long()
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def llama(**options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes, **options))


def test_adapter_and_merged_model_give_the_trained_models_logits(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = tmp_path / "base"
    llama().save_pretrained(base)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    module = Wrapped(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, loader())

    ids = torch.randint(0, 64, (2, 9))
    wanted = module.model.eval()(input_ids=ids).logits
    adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(adapter.eval()(input_ids=ids).logits, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(merged.eval()(input_ids=ids).logits, wanted, atol=1e-5, rtol=1e-5)
    assert not (wanted - AutoModelForCausalLM.from_pretrained(base)(input_ids=ids).logits).abs().max() < 0.1
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_full_fine_tuning_writes_the_model_and_no_adapter(tmp_path: Path) -> None:
    module = Wrapped(llama())
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, loader())
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    assert not (tmp_path / "adapter").exists()


def test_a_method_that_cannot_be_merged_leaves_nothing_behind(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from lit_callbacks.export.adapter_merger import save_merged

    model = peft.get_peft_model(llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ValueError, match="PROMPT_TUNING adds no weights that could be merged"):
        save_merged(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def lora(base: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_a_merge_says_how_exact_it_is(tmp_path: Path, dtype: Any, caplog: pytest.LogCaptureFixture) -> None:
    from lit_callbacks.export.adapter_merger import save_merged

    caplog.set_level("INFO", "lightning.pytorch")
    save_merged(lora(llama()), tmp_path / "merged", dtype=dtype)
    (line,) = [record.getMessage() for record in caplog.records if "merge verified" in record.getMessage()]
    difference = float(re.search(r"differ by (\S+) at most", line).group(1))  # type: ignore[union-attr]
    assert (difference < 1e-5) is (dtype is None)


def test_a_merge_that_went_wrong_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lit_callbacks.export.adapter_merger import save_merged
    from lit_callbacks.export.merge_check import MergeFailed

    peft = pytest.importorskip("peft")
    model = lora(llama())
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", lambda self, safe_merge: self.unload())
    with pytest.raises(MergeFailed, match="the merged files are wrong: .* lacks what was trained"):
        save_merged(model, tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_a_merge_that_loses_one_layer_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where the logits of a few prompts tell nothing of a small change of one layer."""
    from lit_callbacks.export.adapter_merger import save_merged
    from lit_callbacks.export.merge_check import MergeFailed

    peft = pytest.importorskip("peft")
    model, lost = lora(llama()).to(torch.bfloat16), "model.layers.0.self_attn.q_proj"
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.05)
    save_merged(model, tmp_path / "whole")
    untrained = model.get_parameter(f"base_model.model.{lost}.base_layer.weight").detach()

    def losing(self: Any, **options: Any) -> Any:
        merged = merge(self, **options)
        merged.get_parameter(f"{lost}.weight").data.copy_(untrained)
        return merged

    merge = peft.LoraModel.merge_and_unload
    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", losing)
    with pytest.raises(MergeFailed, match=f"wrong: {lost}.weight lacks what was trained; nothing was written"):
        save_merged(model, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def _lose(tensors: dict[str, Any]) -> None:
    del tensors["model.norm.weight"]


def _break(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def _cut(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:0]


def _shorten(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:16]


def _add(tensors: dict[str, Any]) -> None:
    tensors["model.norm.bias"] = torch.zeros(32)


def _cast(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose, "model.norm.weight is missing"),
        (_break, "model.norm.weight holds values that are not finite"),
        (_cut, r"model.norm.weight is empty, \(0,\)"),
        (_shorten, "do not load|size mismatch"),
        (_add, "model.norm.bias is not in LlamaForCausalLM"),
        (_cast, "model.norm.weight is torch.float16, not torch.float32"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_files_that_are_wrong_are_found(tmp_path: Path, damage: Any, message: str, tied: bool) -> None:
    from lit_callbacks.export.merge_check import Layout, MergeFailed, read_back
    from safetensors.torch import load_file, save_file

    model = llama(tie_word_embeddings=tied)
    layout = Layout.of(model).saved_as(model)
    model.save_pretrained(tmp_path)
    read_back(tmp_path, layout)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MergeFailed, match=message):
        read_back(tmp_path, layout)


def test_a_tied_head_that_the_files_part_is_found(tmp_path: Path) -> None:
    """transformers#45127: the config ties what the files hold twice."""
    from lit_callbacks.export.merge_check import Layout, MergeFailed, read_back
    from safetensors.torch import load_file, save_file

    model = llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(MergeFailed, match="the config ties them to one"):
        read_back(tmp_path, Layout.of(model).saved_as(model))


def test_resized_embeddings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files fit the config that was written with them, and not the base."""
    from lit_callbacks.export.adapter_merger import save_merged
    from lit_callbacks.export.merge_check import MergeFailed

    peft = pytest.importorskip("peft")
    unload = peft.LoraModel.merge_and_unload

    def resized(self: Any, safe_merge: bool) -> Any:
        merged = unload(self, safe_merge=safe_merge)
        merged.resize_token_embeddings(60)
        return merged

    monkeypatch.setattr(peft.LoraModel, "merge_and_unload", resized)
    with pytest.raises(MergeFailed, match=r"lm_head.weight is \(60, 32\), in the base \(64, 32\)"):
        save_merged(lora(llama()), tmp_path / "merged")
    assert list(tmp_path.iterdir()) == []


def test_experts_that_files_name_in_another_way(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from lit_callbacks.export.adapter_merger import save_merged

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    config = transformers.Qwen2MoeConfig(vocab_size=64, num_key_value_heads=2, **sizes, **experts)
    model = transformers.Qwen2MoeForCausalLM(config)
    for name, change in (("full", lambda model: model), ("lora", lora)):
        save_merged(change(model), tmp_path / name)
        assert "mlp.experts.3.up_proj" in (tmp_path / name / "model.safetensors").read_bytes()[:20_000].decode("latin1")


EMBEDDINGS: dict[str, dict[str, Any]] = {
    "trainable tokens": {"trainable_token_indices": [3, 4]},
    "embeddings, tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "embeddings": {"modules_to_save": ["embed_tokens"]},
    "both": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "LoRA of the head": {"target_modules": ["q_proj", "lm_head"]},
    "LoRA of the embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "LoRA of both": {"target_modules": ["embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_embeddings_that_train_under_a_tied_head(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    """transformers#45127: the merged model is read back, and is tied exactly where training left it so."""
    peft = pytest.importorskip("peft")
    from lit_callbacks.export.adapter_merger import save_adapter, save_merged
    from transformers import AutoModelForCausalLM

    caplog.set_level("INFO", "lightning.pytorch")
    base = tmp_path / "base"
    llama(tie_word_embeddings=True, initializer_range=0.2).save_pretrained(base)
    config = peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **EMBEDDINGS[case]})
    module = Wrapped(peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config))
    trainer(tmp_path, enable_checkpointing=False).fit(module, loader())
    save_adapter(module.model, tmp_path / "adapter")
    save_merged(module.model, tmp_path / "merged")
    ids = torch.arange(64)[None]
    wanted = module.model.eval()(input_ids=ids).logits
    adapter = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(adapter(input_ids=ids).logits, wanted, atol=1e-6, rtol=1e-6)
    # Summed in another order; how far apart that is depends on the CPU. The merge's own bound is 1e-4 of the largest.
    torch.testing.assert_close(merged(input_ids=ids).logits, wanted, atol=1e-4, rtol=1e-5)
    is_tied = merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    assert is_tied is merged.config.tie_word_embeddings is (case in ("trainable tokens", "embeddings, tied"))
    assert ("training has parted them" in caplog.text) is not is_tied


def test_other_things_in_the_folder_are_not_replaced(tmp_path: Path) -> None:
    from lit_callbacks.export.adapter_merger import save_merged

    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "diary.txt").write_text("dear")
    with pytest.raises(ValueError, match=r"holds other things than a model \(diary.txt\), which would be lost"):
        save_merged(llama(), tmp_path / "letters")
    assert (tmp_path / "letters" / "diary.txt").read_text() == "dear"


def test_a_merge_that_is_killed_leaves_the_earlier_folder_or_the_new_one(tmp_path: Path) -> None:
    """SIGKILL at six moments spread over a merge that replaces an earlier one."""
    pytest.importorskip("peft")
    from lit_callbacks.export.adapter_merger import save_merged
    from lit_callbacks.export.atomic_folder import put_back
    from lit_callbacks.export.manifest import verify_manifest
    from tqdm import tqdm

    folder, model = tmp_path / "merged", lora(llama())
    save_merged(model, folder)  # the first one imports much
    start = time.monotonic()
    save_merged(model, folder)
    seconds = time.monotonic() - start
    for moment in range(1, 7):
        if (process := os.fork()) == 0:
            tqdm.set_lock(threading.RLock())  # its own is shared with this process, and a kill would leave it taken
            save_merged(model, folder)
            os._exit(0)
        time.sleep(seconds * moment / 6)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        put_back(folder)
        assert not verify_manifest(folder)
    save_merged(model, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["merged"]


def test_texts_go_into_the_folders_in_place_of_templates(tmp_path: Path) -> None:
    module = Wrapped(lora(llama()))
    merger = AdapterMerger(tmp_path / "a", tmp_path / "m", texts=lambda kind, _, __: {"README.md": f"# {kind}"})
    trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, loader())
    assert (tmp_path / "a" / "README.md").read_text() == "# adapter"
    assert (tmp_path / "m" / "README.md").read_text() == "# merged"
    assert not list(tmp_path.rglob("*.bin"))


def test_a_module_writes_its_adapter_in_its_own_way(tmp_path: Path) -> None:
    class Own(Wrapped):
        def save_adapter(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")

    merger = AdapterMerger(tmp_path / "adapter")
    trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(Own(lora(llama())), loader())
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"adapter_config.json", "manifest.json"}


def test_a_module_without_a_model() -> None:
    from lit_callbacks.export.adapter_merger import find_model

    with pytest.raises(ValueError, match="Plain holds no peft.PeftModel"):
        find_model(Plain())

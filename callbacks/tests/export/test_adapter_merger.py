"""AdapterMerger before the end: every n steps, at each best checkpoint, keeping the last."""

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lit_callbacks import AdapterMerger, ThroughputMonitor
from lit_callbacks.export.merging import find_models, save_merged, unsplit
from lit_callbacks.internals.bitsandbytes_internals import without_faults
from plain_modules import VOCABULARY, make_trainer, texts
from ranks import on_ranks

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


def base() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes))


class Adapted(LightningModule):
    """LoRA on a tiny Llama; its validation loss is what the test says, one after the other."""

    def __init__(self, config: Any, losses: tuple[float, ...] = ()) -> None:
        super().__init__()
        self.model, self.losses = peft.get_peft_model(base(), config), list(losses)
        self.steps: list[dict[str, torch.Tensor]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append({n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad})

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None: ...

    def on_validation_epoch_end(self) -> None:
        self.log("val/loss", self.losses.pop(0))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1.0)


def lora() -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2, init_lora_weights=False)


def adapter_of(folder: Path) -> dict[str, torch.Tensor]:
    model = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def assert_same(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    saved = adapter_of(folder)
    assert saved.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(saved[name], weight), name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith(("adapter", "merged", ".")))


def test_the_time_of_writing_is_no_part_of_a_step(tmp_path: Path) -> None:
    def slow_texts(*_: Any) -> dict[str, str]:
        time.sleep(0.5)
        return {}

    merger = AdapterMerger(tmp_path / "adapter", texts=slow_texts, every_n_steps=1)
    monitor = ThroughputMonitor()
    trainer = make_trainer(tmp_path, callbacks=[merger, monitor], enable_checkpointing=False, max_steps=4)
    trainer.fit(Adapted(lora()), texts())
    assert monitor.summary["step_seconds/callbacks"] < 0.2
    assert monitor.summary["step_seconds"] < 0.4


def test_every_n_steps_the_last_are_kept(tmp_path: Path) -> None:
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged", every_n_steps=2, keep_last=2)
    module = Adapted(lora())
    make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, texts())
    wanted = ["adapter", "adapter-step-6", "adapter-step-8", "merged", "merged-step-6", "merged-step-8"]
    assert names(tmp_path) == wanted
    assert_same(tmp_path / "adapter-step-6", module.steps[5])
    assert_same(tmp_path / "adapter", module.steps[7])
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged-step-6")
    by_hand = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter-step-6").merge_and_unload()
    for one, other in zip(merged.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class Own(Adapted):
    """Writes what it trains itself, in a file of its own kind."""

    def save_adapter(self, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        folder.mkdir()
        torch.save(self.steps[-1:], folder / "weights.pt")


def test_the_last_are_kept_of_what_a_module_writes_itself(tmp_path: Path) -> None:
    module = Own(lora())
    module.model = torch.nn.Linear(1, 1)  # neither of peft nor of transformers
    module.training_step = lambda batch, batch_idx: module.model(torch.ones(1)).sum()  # type: ignore[method-assign]
    merger = AdapterMerger(tmp_path / "adapter", every_n_steps=2, keep_last=2)
    make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, texts())
    assert names(tmp_path) == ["adapter", "adapter-step-6", "adapter-step-8"]


def test_writing_on_the_way_changes_no_bit_of_the_run(tmp_path: Path) -> None:
    """Dropout draws from the generator that what is written may draw from too: examples on a model card, say."""
    runs = []
    for every in (None, 1):
        module = Adapted(lora())
        card = lambda *_: {"README.md": f"an example: {torch.rand(1)}"}  # noqa: E731
        merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged", card, every_n_steps=every)
        torch.manual_seed(1)
        make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, texts())
        runs.append(module.steps[-1])
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("options", [{}, {"save_weights_only": True}, {"filename": "best"}])
def test_each_best_checkpoint_has_its_adapter(tmp_path: Path, options: dict[str, Any]) -> None:
    best = ModelCheckpoint(tmp_path / "saved", monitor="val/loss", save_top_k=1, **options)
    merger = AdapterMerger(tmp_path / "adapter", on_best=True, keep_last=5)
    module = Adapted(lora(), losses=(3.0, 2.0, 2.5, 1.0))
    trainer = make_trainer(tmp_path, callbacks=[merger, best], val_check_interval=2, num_sanity_val_steps=0)
    trainer.fit(module, texts(), texts(2))
    assert names(tmp_path) == ["adapter", "adapter-best-step-2", "adapter-best-step-4", "adapter-best-step-8"]
    for step in (2, 4, 8):
        assert_same(tmp_path / f"adapter-best-step-{step}", module.steps[step - 1])


def test_without_a_monitored_checkpoint_there_is_no_best_one_which_is_said(tmp_path: Path) -> None:
    merger = AdapterMerger(tmp_path / "adapter", on_best=True)
    with pytest.warns(UserWarning, match="writes nothing on the way: no ModelCheckpoint has a monitor"):
        make_trainer(tmp_path, callbacks=[merger, ModelCheckpoint(tmp_path)], max_steps=1).fit(Adapted(lora()), texts())


def test_prompt_learning_is_refused_before_training(tmp_path: Path) -> None:
    module = Adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(ValueError, match="PROMPT_TUNING adds no weights that could be merged"):
        make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, texts())
    assert module.steps == []


class Classifier(LightningModule):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        raise AssertionError("refused before")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def sequence_classifier() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))


def seq2seq() -> Any:
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 1, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, **sizes))


@pytest.mark.parametrize(
    ("make", "target", "name"),
    [
        (sequence_classifier, "query", "BertForSequenceClassification"),
        (seq2seq, "q", "T5ForConditionalGeneration"),
        (lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)), "0", "Sequential"),
    ],
)
def test_what_is_no_causal_model_is_refused_before_training(tmp_path: Path, make: Any, target: str, name: str) -> None:
    module = Classifier(peft.get_peft_model(make(), peft.LoraConfig(target_modules=[target])))
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(ValueError, match=f"scores of one that scores texts, and {name} is neither; leave merged_dir"):
        make_trainer(tmp_path, callbacks=[merger]).fit(module, texts())


def test_adapters_without_a_peft_model_are_refused_before_training(tmp_path: Path) -> None:
    module = Classifier(peft.inject_adapter_in_model(lora(), base()))
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(ValueError, match="LlamaForCausalLM has adapters that no peft.PeftModel holds"):
        make_trainer(tmp_path, callbacks=[merger]).fit(module, texts())


def test_a_merge_into_a_quantized_base_is_refused_with_what_works(tmp_path: Path) -> None:
    module = Adapted(lora())
    module.model.get_base_model().is_quantized = True
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(
        ValueError, match=r"the base is quantized.* leave merged_dir out.* by lit_callbacks\.merging\.save_merged"
    ):
        make_trainer(tmp_path, callbacks=[merger]).fit(module, texts())


def test_an_adapter_with_a_name_is_where_peft_reads_it(tmp_path: Path) -> None:
    module = Adapted(lora())
    module.model = peft.get_peft_model(base(), lora(), "student")
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    make_trainer(tmp_path, callbacks=[merger], max_steps=2).fit(module, texts())
    trained = {name.replace(".student.", ".default."): weight for name, weight in module.steps[-1].items()}
    assert_same(tmp_path / "adapter", trained)
    assert not (tmp_path / "adapter" / "student").exists()
    whole = unsplit(module.model, keep=True)
    assert {n: p for n, p in whole.named_parameters() if "lora_" in n}.keys() == module.steps[-1].keys()
    for name, weight in module.steps[-1].items():
        assert torch.equal(whole.get_parameter(name), weight), name


def test_an_adapter_with_a_name_is_merged_into_a_quantized_base(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    base().save_pretrained(tmp_path / "base")
    in_4_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=in_4_bits)
    model = peft.get_peft_model(quantized, lora(), "student").eval()
    save_merged(model, tmp_path / "merged", quantized_base="dequantize")
    ids = torch.arange(6)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    without_faults(model)
    torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


class Distilled(Adapted):
    """With another model before the one that is trained."""

    def __init__(self, other: Any, model: Any) -> None:
        super().__init__(lora())
        del self.model
        self.other, self.model = other, model


def test_a_frozen_model_is_passed_over(tmp_path: Path) -> None:
    """As a teacher in full fine-tuning, or a reward model with an adapter of its own."""
    module = Distilled(base().requires_grad_(False), base())
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    make_trainer(tmp_path, callbacks=[merger], max_steps=2).fit(module, texts())
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, weight in module.model.named_parameters():
        assert torch.equal(saved.get_parameter(name), weight), name
    adapted = Distilled(*(peft.get_peft_model(base(), lora()) for _ in range(2)))
    adapted.other.requires_grad_(False)
    assert find_models(adapted) == {"model": adapted.model}


def test_a_second_model_that_is_trained_is_named(tmp_path: Path) -> None:
    module = Distilled(base(), base())
    merger = AdapterMerger(tmp_path / "adapter")
    with pytest.warns(
        UserWarning, match="writes 'other', and not 'model', which is trained too; save it in on_train_end of"
    ):
        make_trainer(tmp_path, callbacks=[merger], max_steps=1).fit(module, texts())


def test_a_tokenizer_of_another_library_is_not_written_which_is_said(tmp_path: Path) -> None:
    module = Adapted(lora())
    module.tokenizer = object()
    merger = AdapterMerger(tmp_path / "adapter", tmp_path / "merged")
    with pytest.warns(UserWarning, match="AdapterMerger writes no tokenizer: object has no method save_pretrained"):
        make_trainer(tmp_path, callbacks=[merger], max_steps=1).fit(module, texts())
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_it_can_be_pickled_for_processes_that_are_spawned(tmp_path: Path) -> None:
    assert pickle.loads(pickle.dumps(AdapterMerger(tmp_path / "adapter"))).adapter_dir == tmp_path / "adapter"


def test_a_folder_on_the_way_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "adapter-step-4").mkdir()
    (tmp_path / "adapter-step-4" / "diary.txt").write_text("dear")
    merger = AdapterMerger(tmp_path / "adapter", every_n_steps=4, keep_last=1)
    trainer = make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False)
    with pytest.warns(UserWarning, match=r"step 4 is not written: .*holds other things than a model \(diary.txt\)"):
        trainer.fit(Adapted(lora()), texts())
    assert names(tmp_path) == ["adapter", "adapter-step-4", "adapter-step-8"]
    assert (tmp_path / "adapter-step-4" / "diary.txt").exists()


def test_a_folder_in_one_that_is_missing_is_made(tmp_path: Path) -> None:
    """Where nothing else is written there, and the module makes its own folder only."""
    merger = AdapterMerger(tmp_path / "out" / "run" / "adapter")
    make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False, max_steps=1).fit(Own(lora()), texts())
    assert names(tmp_path / "out" / "run") == ["adapter"]


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("diary.txt/adapter", "diary.txt' is no folder that this user may write to; name another one"),
        ("letters", r"letters' holds other things than a model \(old.txt\), which would be lost; name a new folder"),
    ],
)
def test_a_final_folder_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, folder: str, said: str
) -> None:
    (tmp_path / "diary.txt").write_text("dear")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "old.txt").write_text("dear")
    module = Adapted(lora())
    with pytest.raises(ValueError, match=said):
        make_trainer(tmp_path, callbacks=[AdapterMerger(tmp_path / folder)]).fit(module, texts())
    assert not module.steps


def test_a_trial_of_a_few_batches_replaces_no_model(tmp_path: Path) -> None:
    def fit(**options: Any) -> None:
        make_trainer(tmp_path, callbacks=[AdapterMerger(tmp_path / "adapter")], **options).fit(Own(lora()), texts())

    fit(fast_dev_run=True)  # where there is none, it tries to write one
    written = list((tmp_path / "adapter").iterdir())
    fit()
    trained = [path.read_bytes() for path in written]
    with pytest.warns(UserWarning, match="AdapterMerger keeps .*adapter: a fast_dev_run replaces no model"):
        fit(fast_dev_run=True)
    assert [path.read_bytes() for path in written] == trained


def test_one_folder_for_both_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the merged model would replace the adapter"):
        AdapterMerger(tmp_path / "model", tmp_path / "more" / ".." / "model")


@pytest.mark.parametrize("wrong", [{"every_n_steps": 0}, {"keep_last": 0}])
def test_numbers_below_one_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="=0 must be at least 1"):
        AdapterMerger(tmp_path / "adapter", **wrong)  # type: ignore[arg-type]


class TwoSets(torch.optim.SGD):
    """Answers with the average of its steps, as schedule-free optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)
        self.param_groups[0]["train_mode"] = True
        self.average: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.average = [p.detach() * 0.1 for p in self.param_groups[0]["params"]]
        return loss

    def _swap(self) -> None:
        for parameter, other in zip(self.param_groups[0]["params"], self.average, strict=True):
            held = parameter.detach().clone()
            parameter.data.copy_(other)
            other.copy_(held)

    def eval(self) -> None:
        self.param_groups[0]["train_mode"] = False
        self._swap()

    def train(self) -> None:
        self.param_groups[0]["train_mode"] = True
        self._swap()


def test_the_weights_that_answer_are_written(tmp_path: Path) -> None:
    class Averaged(Adapted):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return TwoSets([p for p in self.parameters() if p.requires_grad])

    module = Averaged(lora())
    merger = AdapterMerger(tmp_path / "adapter", every_n_steps=3)
    make_trainer(tmp_path, callbacks=[merger], enable_checkpointing=False).fit(module, texts())
    assert_same(tmp_path / "adapter-step-3", {name: weight * 0.1 for name, weight in module.steps[2].items()})
    assert_same(tmp_path / "adapter", module.steps[7])


def sharded(folder: Path, strategy: str) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Sharded(Adapted):
        def configure_model(self) -> None:
            if strategy == "fsdp2":
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def on_train_batch_end(self, *_: Any) -> None: ...

    class Look(Callback):
        """A pass without gradients leaves FSDP2's weights whole."""

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            with torch.no_grad():
                module.model(input_ids=torch.ones(1, 4, dtype=torch.long))

    class Last(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            from lit_callbacks.distributed.gather import full_weights

            if trainer.global_step == 4:
                self.weights = full_weights(module.model, lambda _, p: p.requires_grad)

    chosen: Any = ModelParallelStrategy(2, 1) if strategy == "fsdp2" else strategy
    merger = AdapterMerger(folder / "adapter", folder / "merged", every_n_steps=4)
    trainer = make_trainer(
        folder,
        callbacks=[last := Last(), Look(), merger],
        strategy=chosen,
        devices=2,
        enable_checkpointing=False,
        max_steps=5,
    )
    trainer.fit(Sharded(lora()), texts(32))
    return last.weights


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_on_the_way_from_two_ranks(tmp_path: Path, strategy: str) -> None:
    weights, _ = on_ranks(2, sharded, tmp_path, strategy, timeout=90)
    assert names(tmp_path) == ["adapter", "adapter-step-4", "merged", "merged-step-4"]
    assert_same(tmp_path / "adapter-step-4", weights)
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged-step-4")


def fit_where_rank_0_cannot_write(folder: Path, fails: str) -> tuple[int, str]:
    """Steps of a rank, and what it says at the end, of a model to which each rank would write its part."""
    from lightning.pytorch.strategies import DDPStrategy

    class Parts(DDPStrategy):
        def save_pretrained(self, model: Any, path: Path | None = None) -> None:
            path = self.broadcast(path)
            if self.is_global_zero and fails != "weights":
                model.save_pretrained(path)
            self.barrier()

    class Full(Adapted):
        def __init__(self) -> None:
            super().__init__(lora())
            self.model = base()

        def on_train_batch_end(self, *_: Any) -> None: ...

    def card(*_: Any) -> dict[str, str]:
        if fails == "card":
            raise ValueError("no card")
        return {}

    merger = AdapterMerger(folder / "adapter", folder / "merged", card, every_n_steps=1)
    options = {"devices": 2, "max_steps": 3, "enable_checkpointing": False}
    trainer = make_trainer(folder, callbacks=[merger], strategy=Parts(), **options)
    with pytest.raises((ValueError, OSError)) as caught:
        trainer.fit(Full(), texts(32))
    return trainer.global_step, str(caught.value)


@pytest.mark.processes
@pytest.mark.parametrize(("fails", "error"), [("card", "no card"), ("weights", "No such file")])
def test_what_rank_0_alone_cannot_write_is_the_same_on_all_ranks(tmp_path: Path, fails: str, error: str) -> None:
    """The others waited within the write, of which rank 0 had said on the way that there is none."""
    said = on_ranks(2, fit_where_rank_0_cannot_write, tmp_path, fails, timeout=60)
    assert said[0] == said[1]
    assert said[0][0] == 3
    assert error in said[0][1]

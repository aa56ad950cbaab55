import copy
import json
import math
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from model_folders import shallow
from peft import EvaConfig, LNTuningConfig, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig
from shared_fixtures import make_tokenizer
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, get_cosine_schedule_with_warmup

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import check_fit, trainable_shapes
from lit_ft.checkpointing.storage.sharded import merge_optimizer_states
from lit_ft.errors import NotFinite
from lit_ft.model.attention.packed_attention import _ends
from lit_ft.packed_batch import pack_samples
from lit_ft.training.optimizers.configure import configure_optimizers
from lit_ft.training.spec import batches_for_init


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **options})


def built(model_folder: str, **options: Any) -> CausalLM:
    module = CausalLM(model_folder, **options)
    module.configure_model()
    return module


def test_frozen_weights_get_neither_gradient_nor_optimizer_state(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    module = CausalLM(model_folder, peft=lora())
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, TextDataModule(write_rows()))
    trained = module.trainable_parameters()
    assert all("lora_" in name for name in trained)
    assert len(trainer.optimizers[0].state) == len(trained) == 8
    assert all(p.grad is None for name, p in module.named_parameters() if name not in trained)


@pytest.mark.slow
def test_trained_weights_without_a_gradient_are_named(
    make_trainer: Any, write_rows: Any, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """The compressor of DeepSeek-V4, which short samples do not reach."""
    folder = tmp_path / "deepseek"
    tiny_config("deepseek_v4").save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    rows = [{"prompt": "red", "completion": "book"}] * 4
    for targets, named in ((["q_a_proj", "compressor.kv_proj"], True), (["q_a_proj"], False)):
        recwarn.clear()
        module = CausalLM(str(folder), init="random", peft=lora(target_modules=targets))
        make_trainer(max_steps=2).fit(module, TextDataModule(write_rows(rows)))
        said = [str(one.message) for one in recwarn if "the first step changes" in str(one.message)]
        assert len(said) == named
        assert all("kv_proj.lora_A.default.weight" in line for line in said)


def test_a_run_whose_loss_does_not_depend_on_what_trains_is_refused(
    make_trainer: Any, write_rows: Any, tmp_path: Path
) -> None:
    """The indexer of DeepSeek-V3.2 chooses tokens, and a choice has no gradient."""
    tiny_config("deepseek_v32").save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    norms = LNTuningConfig(target_modules=["k_norm"])
    with pytest.raises(
        RecipeError, match=r"does not depend on any of the \d+ weights that train \(.*k_norm.*; choose other"
    ):
        make_trainer(max_steps=1).fit(
            CausalLM(str(tmp_path), init="random", peft=norms), TextDataModule(write_rows(), micro_batch_size=2)
        )


def test_logged_values_are_moved_once(
    make_trainer: Any, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning would search each one for tensors at each ``log``."""
    moved: list[str] = []
    monkeypatch.setattr(_ResultMetric, "to", lambda metric, *_: moved.append(metric.meta.name))
    trainer = make_trainer(max_steps=3)
    trainer.fit(CausalLM(model_folder, peft=lora()), TextDataModule(write_rows()))
    assert len(moved) == len(set(moved)) == 5
    (loss,) = (value for value in trainer.fit_loop.epoch_loop._results.values() if value.meta.name == "train/loss")
    loss.to(torch.device("meta"))
    assert moved[5:] == ["train/loss"]


@pytest.mark.slow
def test_dtypes(model_folder: str) -> None:
    module = built(model_folder, dtype="bfloat16", peft=lora())
    assert module.base_model.dtype == torch.bfloat16
    assert {p.dtype for p in module.trainable_parameters().values()} == {torch.float32}
    module = built(model_folder, dtype="bfloat16", peft=lora(), adapter_dtype="auto")
    assert {p.dtype for p in module.trainable_parameters().values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
def test_precisions_train_and_keep_rotary_frequencies_exact(
    make_trainer: Any, model_folder: str, write_rows: Any, precision: str
) -> None:
    module = CausalLM(model_folder, peft=lora(), dtype="bfloat16")
    before = built(model_folder).base_model.model.rotary_emb.inv_freq.clone()
    make_trainer(max_steps=2, precision=precision).fit(module, TextDataModule(write_rows()))
    assert torch.equal(module.base_model.model.rotary_emb.inv_freq, before)
    assert all(p.isfinite().all() for p in module.trainable_parameters().values())


def test_random_weights_are_a_function_of_the_seed(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(seed: str) -> torch.Tensor:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        torch.rand(int(seed))  # what was drawn before must not matter
        return built(model_folder, init="random", peft=lora()).model.state_dict()  # type: ignore[union-attr]

    first, again, other = weights("5"), weights("5"), weights("6")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["base_model.model.lm_head.weight"], other["base_model.model.lm_head.weight"])


def test_validation_metrics_are_means_over_all_tokens(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    data = TextDataModule(write_rows(count=3), val_path=write_rows(count=11, name="val.json"), micro_batch_size=2)
    module = CausalLM(model_folder)
    got = make_trainer().validate(module, data, verbose=False)[0]
    samples = data.splits["val"]
    reference = AutoModelForCausalLM.from_pretrained(model_folder)
    total, right = 0.0, 0
    for i in range(len(samples)):
        ids, labels = (torch.from_numpy(part).long() for part in samples[i])
        logits = reference(input_ids=ids[None]).logits[0, :-1]
        keep = labels[1:] != -100
        total += float(torch.nn.functional.cross_entropy(logits[keep], labels[1:][keep], reduction="sum"))
        right += int((logits[keep].argmax(-1) == labels[1:][keep]).sum())
    tokens = int(samples.supervised.sum())
    assert got["val/loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert got["val/perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    assert got["val/token_accuracy"] == pytest.approx(right / tokens)


def test_nan_is_not_left_out_of_the_loss(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    class Poison(Callback):
        def on_train_start(self, trainer: Any, pl_module: CausalLM) -> None:
            pl_module.base_model.model.norm.weight.data[0] = float("nan")

    trainer = make_trainer(max_steps=1, callbacks=[Poison()])
    with pytest.raises(NotFinite, match="step 1: train/loss is nan; no checkpoint is from before it"):
        trainer.fit(CausalLM(model_folder), TextDataModule(write_rows()))


def test_logged_gradient_norm_and_clipping_agree(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    class Norms(Callback):
        clipped = 0.0

        def on_before_zero_grad(self, trainer: Any, pl_module: CausalLM, optimizer: Any) -> None:
            grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
            if grads:
                self.clipped = float(torch.cat([g.flatten() for g in grads]).norm())

    def norms(**options: Any) -> tuple[float, float]:
        seen = Norms()
        trainer = make_trainer(max_steps=1, callbacks=[seen], **options)
        module = CausalLM(model_folder)
        trainer.fit(module, TextDataModule(write_rows(), shuffle=False))
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return float(trainer.callback_metrics["train/grad_norm"]), float(torch.cat([g.flatten() for g in grads]).norm())

    logged, left = norms()
    assert logged == pytest.approx(left, rel=1e-5)
    assert logged > 0.5
    logged_clipped, left_clipped = norms(gradient_clip_val=0.5)
    assert logged_clipped == pytest.approx(logged, rel=1e-5)
    assert left_clipped == pytest.approx(0.5, rel=1e-4)


def test_neftune_noise_is_bounded_by_each_samples_length(model_folder: str) -> None:
    module = built(model_folder, neftune_alpha=5.0)
    lengths = [4, 16]
    row = pack_samples([(torch.arange(3, 3 + n).numpy(), torch.arange(3, 3 + n).numpy()) for n in lengths])
    embedding = module.base_model.get_input_embeddings()
    clean = torch.nn.functional.embedding(row["input_ids"], embedding.weight)
    module._packed.segment_lengths = lengths
    noise = (embedding(row["input_ids"]) - clean).abs()[0].split(lengths)
    for part, length in zip(noise, lengths, strict=True):
        bound = 5.0 / math.sqrt(length * 48)
        assert 0.8 * bound < float(part.max()) <= bound + 1e-6
    module.eval()
    assert torch.equal(embedding(row["input_ids"]), clean)


def test_neftune_is_refused_where_a_model_embeds_more_tokens_than_there_are(tmp_path: Path) -> None:
    tiny_config("big_bird", pad_token_id=0).save_pretrained(tmp_path)  # fills a sample up to whole blocks
    make_tokenizer().save_pretrained(tmp_path)
    module = CausalLM(str(tmp_path), init="random", neftune_alpha=5.0)
    module.configure_model()
    ids = np.arange(5, 106)
    with pytest.raises(RecipeError, match="model.neftune_alpha=5.0: this architecture embeds 104 tokens .* with 101,"):
        module.train()(pack_samples([(ids, ids)]))


def test_neftune_goes_with_a_prefix_which_each_sample_has_alone(model_folder: str) -> None:
    module = CausalLM(model_folder, peft=PrefixTuningConfig(num_virtual_tokens=3), neftune_alpha=5.0)
    module.configure_model()
    batch = pack_samples([(np.arange(length), np.arange(length)) for length in (9, 4)])
    quiet = module.eval()(batch).loss_sum
    assert not torch.equal(module.train()(batch).loss_sum, quiet)


def test_a_padded_batch_of_someone_elses_data_trains(make_trainer: Any, model_folder: str) -> None:
    class Padded(LightningDataModule):
        def train_dataloader(self) -> Any:
            ids = torch.randint(3, 300, (8, 12))
            rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids]
            return DataLoader(rows, batch_size=4)

    trainer = make_trainer(max_steps=2)
    trainer.fit(CausalLM(model_folder), Padded())
    assert trainer.global_step == 2
    assert math.isfinite(trainer.callback_metrics["train/loss"])


def padded(ids: torch.Tensor) -> Any:
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return DataLoader(rows, batch_size=4)


@pytest.mark.parametrize(("name", "value"), [("input_ids", 10**6), ("labels", 10**6), ("labels", -1)])
def test_ids_beyond_the_vocabulary_are_named(make_trainer: Any, model_folder: str, name: str, value: int) -> None:
    ids = torch.randint(3, 300, (4, 12))
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    rows[2][name] = torch.full((12,), value)
    with pytest.raises(RecipeError, match=f"data: {name} of a batch reach from {value} to {value}, and the model has"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder), DataLoader(rows, batch_size=4))


def test_a_call_with_a_padded_batch(model_folder: str) -> None:
    module, ids = CausalLM(model_folder), torch.randint(3, 300, (2, 6))
    with pytest.raises(RecipeError, match="has no weights yet"):
        module({"input_ids": ids, "labels": ids})
    module.configure_model()
    with pytest.raises(RecipeError, match="a batch has no 'labels' .it has 'input_ids', 'attention_mask'."):
        module({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    assert len(module({"input_ids": ids, "labels": ids}).per_token) == 2 * 5


def test_a_fit_does_not_go_on_from_weights_alone(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    path, data = tmp_path / "weights.ckpt", write_rows()
    trainer = make_trainer(max_steps=1)
    trainer.fit(CausalLM(model_folder), TextDataModule(data))
    trainer.save_checkpoint(path, weights_only=True)
    with pytest.raises(RecipeError, match="holds weights alone .* no optimizer's state, .*load_state_dict"):
        make_trainer(max_steps=2).fit(CausalLM(model_folder), TextDataModule(data), ckpt_path=str(path))
    begun = CausalLM(model_folder)
    begun.load_state_dict(torch.load(path)["state_dict"], strict=False)
    make_trainer(max_steps=1).fit(begun, TextDataModule(data))


def test_a_wrong_name_in_a_partial_is_refused_at_once(model_folder: str) -> None:
    with pytest.raises(RecipeError, match="optimizer: AdamW has no 'lrr'; did you mean 'lr'"):
        CausalLM(model_folder, optimizer=partial(torch.optim.AdamW, lrr=1))


def test_a_validation_before_the_fit_and_copies_after_it(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    """Metrics that `validate` has reset belong to no inference mode; a copy computes by its own head."""
    module, data = CausalLM(model_folder, dtype="float32"), TextDataModule(write_rows(), val_path=write_rows())
    make_trainer().validate(module, data, verbose=False)
    make_trainer(max_steps=2).fit(module, data)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        make_trainer(max_steps=2).fit(copied, TextDataModule(write_rows(), val_path=write_rows()))
        same = built(model_folder, dtype="float32")
        same.load_state_dict(copied.state_dict())
        values = [make_trainer().validate(one, data, verbose=False)[0]["val/loss"] for one in (copied, same, module)]
        assert values[0] == values[1] != values[2]
    pickle.loads(pickle.dumps(data))


def test_training_after_a_validation_of_the_same_samples_computes_the_same(
    make_trainer: Any, folder_of: Callable[[str], str], write_rows: Any
) -> None:
    """Attention with sinks saves the boundaries of samples for its backward pass; a validation has made them before."""
    rows, losses = write_rows(count=3), []
    for is_validated in (True, False):
        _ends.cache_clear()
        module = CausalLM(folder_of("gpt_oss"), optimizer=partial(torch.optim.SGD, lr=0.1))
        data = TextDataModule(rows, val_path=rows, micro_batch_size=3, shuffle=False)
        trainer = make_trainer(max_steps=2, log_every_n_steps=1)
        if is_validated:
            trainer.validate(module, data, verbose=False)
        trainer.fit(module, data)
        losses.append(float(trainer.callback_metrics["train/loss"]))
    assert losses[0] == losses[1]


def test_a_warm_up_in_steps_that_is_stepped_by_epochs_is_named(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    warm_up = partial(get_cosine_schedule_with_warmup, num_warmup_steps=2, num_training_steps=6)
    with pytest.warns(match="LambdaLR steps once per epoch and begins with a learning rate of 0: the first epoch"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder, lr_scheduler=warm_up), TextDataModule(write_rows()))


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ddp_notebook", "ddp_spawn"])
def test_processes_that_lightning_starts_give_their_weights_and_numbers_back(
    make_trainer: Any, model_folder: str, write_rows: Any, strategy: str
) -> None:
    runs: dict[str, tuple[dict[str, torch.Tensor], float]] = {}
    for name, size, options in (("auto", 2, {}), (strategy, 1, {"strategy": strategy, "devices": 2})):
        module = CausalLM(model_folder, dtype="float32", peft=lora(), optimizer=partial(torch.optim.SGD, lr=0.1))
        trainer = make_trainer(max_steps=1, **options)
        trainer.fit(module, TextDataModule(write_rows(), micro_batch_size=size))
        runs[name] = module.trainable_parameters(), float(trainer.callback_metrics["train/loss"])
    (weights, loss), (others, other_loss) = runs.values()
    assert other_loss == pytest.approx(loss, abs=1e-5)
    assert weights.keys() == others.keys()
    assert any(weight.any() for name, weight in others.items() if "lora_B" in name)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-6, rtol=1e-5)


def test_an_init_that_looks_at_data_is_refused_where_it_would_be_lost(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    module = CausalLM(model_folder, peft=lora(init_lora_weights="eva", eva_config=EvaConfig()))
    trainer = make_trainer(max_steps=1, strategy=DDPStrategy(start_method="fork"))
    with pytest.raises(RecipeError, match="'eva' looks at training data, and what it finds is lost with the processes"):
        batches_for_init(trainer, 1, module.check(), "eva")


def test_a_model_that_was_assigned_and_one_that_is_frozen_are_refused(
    make_trainer: Any, model_folder: str, write_rows: Any
) -> None:
    assigned = CausalLM(model_folder)
    assigned.model = AutoModelForCausalLM.from_pretrained(model_folder)
    frozen = built(model_folder)
    frozen.freeze()
    for module, match in ((assigned, "is a Qwen2ForCausalLM that was assigned"), (frozen, "no weight of the model")):
        with pytest.raises(RecipeError, match=match):
            make_trainer(max_steps=1).fit(module, TextDataModule(write_rows()))


def test_answers_need_weights_and_questions(make_trainer: Any, model_folder: str) -> None:
    module = CausalLM(model_folder)
    with pytest.raises(RecipeError, match=r"no weights yet: a Trainer reads them, or model.configure_model\(\)"):
        module.answer(["red"], max_new_tokens=1)
    with pytest.raises(RecipeError, match=r"predict takes batches of questions, .* model.answer\(prompts"):
        make_trainer().predict(module, DataLoader(["red", "book"]))


def test_an_own_loss_of_another_type_is_refused(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    class Summed(CausalLM):
        def token_loss(self, hidden: Any, batch: Any) -> Any:
            return hidden.sum()

    with pytest.raises(RecipeError, match="token_loss has returned a Tensor, and a lit_ft.packed_batch.TokenLoss"):
        make_trainer(max_steps=1).fit(Summed(model_folder), TextDataModule(write_rows()))


def test_a_fit_without_the_command_line_refuses_what_would_begin_with_other_numbers(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    def refused(match: str, module: CausalLM) -> None:
        with pytest.raises(RecipeError, match=match):
            make_trainer(max_steps=1).fit(module, TextDataModule(write_rows()))

    subtracts = lora(init_lora_weights="olora", target_modules=["lm_head"])
    refused("lm_head .* shares its weight with another module", CausalLM(model_folder, peft=subtracts))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    built(model_folder, peft=lora()).save_adapter(adapter)
    fewer = shallow(Path(model_folder), tmp_path / "fewer", layers=1)
    refused("was trained on .* has other weights", CausalLM(fewer, adapter=str(adapter)))
    (adapter / "base.json").unlink()  # as PEFT writes it
    refused("layers.1.self_attn.q_proj.lora_A.weight is .* and missing here", CausalLM(fewer, adapter=str(adapter)))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_rows": 0}, "model.init_rows=0 must be 1 or more"),
        ({"init_rows": 5}, "model.init_rows=5 has no effect without"),
        ({"max_new_tokens": 0}, "model.max_new_tokens=0 must be 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options: Any, match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        CausalLM("any", peft=lora(), **options)


def test_samples_beyond_the_models_positions_are_refused(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    def refused(match: str, data: LightningDataModule | DataLoader[Any]) -> None:
        with pytest.raises(RecipeError, match=match):
            make_trainer(max_steps=1).fit(CausalLM(short, init="random", peft=lora()), data)

    short = str(tmp_path / "short")
    shutil.copytree(model_folder, short)
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    rows = write_rows()
    refused(r"the longest sample of \d+ tokens is beyond the 12 positions of model.pretrained=", TextDataModule(rows))
    streamed = TextDataModule(rows, max_length=64, streaming=True)
    refused("data.max_length of 64 tokens is beyond the 12 positions", streamed)
    ids = torch.arange(3, 16)
    own = DataLoader([{"input_ids": ids, "labels": ids}])
    refused("a sample of 13 tokens is beyond the 12 positions of the model; .*or let the loader give shorter", own)


def test_a_batch_without_supervised_tokens_is_named(make_trainer: Any, model_folder: str) -> None:
    ids = torch.arange(3, 9)
    loader = DataLoader([{"input_ids": ids, "labels": torch.full_like(ids, -100)}])
    module = CausalLM(model_folder, peft=lora())
    with pytest.warns(UserWarning, match="^a batch of this loader has no supervised token, and trains nothing: its"):
        make_trainer(max_steps=1).fit(module, loader)


def test_a_shorter_last_step_of_a_loader_that_counts_no_tokens_is_a_mean_too(
    make_trainer: Any, model_folder: str, recwarn: pytest.WarningsRecorder
) -> None:
    ids = torch.arange(3, 27).reshape(3, 8)
    norms = []
    for rows, accumulate in ((3, 2), (1, 1)):  # the third row alone is the second step, and the only one
        trainer = make_trainer(max_epochs=1, accumulate_grad_batches=accumulate, log_every_n_steps=1)
        module = CausalLM(model_folder, optimizer=partial(torch.optim.SGD, lr=0.0))
        trainer.fit(module, DataLoader([{"input_ids": row, "labels": row} for row in ids[-rows:]]))
        norms.append(float(trainer.callback_metrics["train/grad_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    said = (
        "gradients are those of the mean of micro-batch means, while train/loss is the mean over the tokens of the step"
    )
    assert any(f"{said}. lit_ft" in str(warning.message) for warning in recwarn)


def test_virtual_tokens_take_positions_of_the_model(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    rows = write_rows()
    tokens = TextDataModule(rows)
    tokens.load(CausalLM(model_folder).tokenizer, "fit")
    longest = tokens.splits.longest_sample
    shutil.copytree(model_folder, tmp_path / "short")
    config = json.loads((tmp_path / "short" / "config.json").read_text())
    (tmp_path / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest + 8}))

    def fit(virtual: int, data: LightningDataModule | DataLoader[Any]) -> None:
        peft = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
        make_trainer(max_steps=1).fit(CausalLM(str(tmp_path / "short"), init="random", peft=peft), data)

    said = f"of {longest} tokens and 9 virtual tokens is beyond the {longest + 8} positions"
    fit(8, TextDataModule(rows))
    with pytest.raises(RecipeError, match=f"the longest sample {said} .* or set data.max_length={longest - 1}$"):
        fit(9, TextDataModule(rows))
    ids = torch.arange(3, 3 + longest)
    with pytest.raises(RecipeError, match=f"a sample {said}"):
        fit(9, DataLoader([{"input_ids": ids, "labels": ids}]))


def test_checkpoints_hold_what_trains_and_nothing_else(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    checkpoint = ModelCheckpoint(tmp_path, save_last=True)
    module = CausalLM(model_folder, peft=lora())
    make_trainer(max_steps=1, callbacks=[checkpoint], enable_checkpointing=True).fit(
        module, TextDataModule(write_rows())
    )
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert set(saved) == set(module.trainable_parameters())
    other, data, trainer = (
        CausalLM(model_folder, peft=lora(r=8)),
        TextDataModule(write_rows()),
        make_trainer(max_steps=2),
    )
    with pytest.raises(RecipeError, match="the checkpoint does not fit the model: .* \\(4, 48\\) of the checkpoint"):
        trainer.fit(other, data, ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_checkpoint_of_tied_embeddings_fits(model_folder: str) -> None:
    module = built(model_folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert "model.lm_head.weight" in shapes
    check_fit(shapes, trainable_shapes(module))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"peft": lora(target_modules=["q_prj", "v_proj"])}, r"\['q_prj'\] match nothing .*'down_proj', 'gate_proj'"),
    ({"peft": lora(target_modules=r".*\.nothing")}, r"match nothing in Qwen2ForCausalLM; its linear layers are"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_target_modules_that_match_nothing(model_folder: str, options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        CausalLM(model_folder, **options).check()


def test_a_quantized_base_trains_through_a_validation(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    """An eval pass repacks 4-bit weights on some CPUs; training after it must see the same base."""
    from transformers import BitsAndBytesConfig

    def losses(**options: Any) -> float:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
        module = CausalLM(model_folder, peft=lora(), quantization=config)
        trainer = make_trainer(max_steps=4, **options)
        trainer.fit(module, TextDataModule(write_rows(), val_path=write_rows(name="val.json"), shuffle=False))
        return float(trainer.callback_metrics["train/loss"])

    assert losses(val_check_interval=1) == pytest.approx(losses(limit_val_batches=0), abs=1e-6)


def test_a_quantized_model_needs_a_method(model_folder: str) -> None:
    from transformers import BitsAndBytesConfig

    with pytest.raises(RecipeError, match="quantized weights cannot be trained"):
        CausalLM(model_folder, quantization=BitsAndBytesConfig(load_in_4bit=True))


def test_folders_that_hold_no_model(tmp_path: Path, model_folder: str) -> None:
    with pytest.raises(RecipeError, match="is a folder without config.json"):
        CausalLM(str(tmp_path)).check()
    with pytest.raises(RecipeError, match="does not exist; name a model folder"):
        CausalLM("./nowhere").check()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(model_folder) / name).read_bytes())
    with pytest.raises(RecipeError, match="has no weights that load.*--model.init random"):
        built(str(tmp_path))
    assert isinstance(built(str(tmp_path), init="random", peft=lora()).model, PeftModel)


def test_a_hub_id_that_cannot_be_reached() -> None:
    with pytest.raises(RecipeError, match="cannot be had from the hub .*hf download .*quickstart"):
        CausalLM("nobody/no-such-model-here").check()


def test_only_the_weights_that_patterns_name_train(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    module = CausalLM(model_folder, trainable=[r"layers\.1\.", r"^model\.norm\."])
    before = {name: p.clone() for name, p in CausalLM(model_folder).check().named_parameters()}
    make_trainer(max_steps=2).fit(module, TextDataModule(write_rows()))
    named = {name for name in before if "layers.1." in name or name == "model.norm.weight"}
    assert {name.removeprefix("model.") for name in module.trainable_parameters()} == named
    assert module.spec.tuning.method == "selected weights"
    assert all(p.grad is None for name, p in module.named_parameters() if not p.requires_grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"trainable": ["layers.9."]},
            "model.trainable: 'layers.9.' is found in no weight's name; names are like model",
        ),
        ({"trainable": ["("]}, "model.trainable: '\\(' is no regular expression"),
        ({"lr_factors": {"lora_B": 16}}, "model.lr_factors: 'lora_B' is found in no weight's name"),
        ({"lr_factors": {"embed": -1.0}}, "model.lr_factors: embed: -1 must be a number of 0 or more"),
        ({"lr_factors": {"embed": math.nan}}, "model.lr_factors: embed: nan must be"),
        ({"trainable": []}, "model.trainable is empty, so that nothing trains"),
        ({"max_new_tokens": 0}, "model.max_new_tokens=0 must be 1 or more"),
        ({"init_rows": 5}, "model.init_rows=5 has no effect without init_lora_weights of eva, corda, lora_ga"),
        (
            {"adapter_dtype": "auto"},
            "model.adapter_dtype=auto has no effect without model.peft or model.adapter",
        ),
        ({"no_weight_decay": ["norms"]}, "model.no_weight_decay: 'norms' is found in no weight's name"),
        ({"trainable": ["norm"], "peft": LoraConfig()}, "layers that train beside the adapter"),
    ],
)
def test_patterns_that_make_no_sense(model_folder: str, options: Any, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        CausalLM(model_folder, **options).check()


@pytest.mark.parametrize("options", [{"lr_factors": {"q_proj": 2.0, "v_proj": 2.0}}, {"no_weight_decay": ["v_proj"]}])
def test_groups_that_are_alike_are_several_in_a_checkpoint_too(model_folder: str, options: Any) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    made = configure_optimizers(module, partial(torch.optim.SGD, lr=0.1), **options)
    assert isinstance(made, torch.optim.SGD)
    state, names = made.state_dict(), {id(p): name for name, p in module.named_parameters()}
    in_order = [names[id(p)] for group in made.param_groups for p in group["params"]]
    joined, _ = merge_optimizer_states([(state, in_order)], list(names.values()))
    assert [len(group["params"]) for group in joined["param_groups"]] == [len(g["params"]) for g in made.param_groups]


def test_weight_decay_by_pattern(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    """As transformers' Trainer leaves norms and biases alone."""
    optimizer = partial(torch.optim.SGD, lr=0.01, weight_decay=0.5)
    after = []
    for patterns in ([], ["norm|bias"]):
        module = CausalLM(model_folder, dtype="float32", no_weight_decay=patterns, optimizer=optimizer)
        trainer = make_trainer(max_steps=1)
        trainer.fit(module, TextDataModule(write_rows(), micro_batch_size=8))
        after.append(dict(module.trainable_parameters()))
    start = CausalLM(model_folder, dtype="float32")
    decay = Trainer.get_decay_parameter_names(None, start.check())  # type: ignore[arg-type]  # it needs no Trainer
    start.configure_model()
    for name, at_first in start.trainable_parameters().items():
        expected = torch.zeros(()) if name.removeprefix("model.") in decay else 0.01 * 0.5 * at_first
        torch.testing.assert_close(after[1][name] - after[0][name], expected.expand_as(at_first), atol=1e-6, rtol=1e-4)
    assert 0 < len(decay) < len(after[0])


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (partial(torch.optim.Rprop), "model.no_weight_decay: Rprop has no option weight_decay; leave no_weight_decay"),
        (partial(torch.optim.Adam), "model.no_weight_decay has no effect: the optimizer's weight_decay is 0"),
    ],
)
def test_weights_that_would_not_decay_anyway(model_folder: str, optimizer: Any, message: str) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    with pytest.raises(RecipeError, match=message) if "no option" in message else pytest.warns(match=message):
        configure_optimizers(module, optimizer, no_weight_decay=["norm"])


def test_learning_rates_by_pattern(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    options: dict[str, Any] = {
        "peft": lora(init_lora_weights=False),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    }
    changes = []
    for factors in ({}, {"lora_B": 16.0, r"layers\.0\.": 0.0}):
        module = CausalLM(model_folder, lr_factors=factors, **options)
        data = TextDataModule(write_rows(), micro_batch_size=8)
        trainer = make_trainer(max_steps=1)
        trainer.fit(module, data)
        rates = [0.01, *(0.01 * factor for factor in factors.values())]
        assert [group["lr"] for group in trainer.optimizers[0].param_groups] == rates
        changes.append({name: p.detach().clone() for name, p in module.trainable_parameters().items()})
    start = CausalLM(model_folder, **options)
    start.configure_model()
    for name, at_first in start.trainable_parameters().items():
        plain, scaled = (after[name] - at_first for after in changes)
        factor = 16.0 if "lora_B" in name else 0.0 if "layers.0." in name else 1.0
        torch.testing.assert_close(scaled, factor * plain, atol=1e-6, rtol=1e-4)
    with pytest.raises(RecipeError, match="model.lr_factors: 'lora_C' is found in no weight's name"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder, lr_factors={"lora_C": 2.0}, **options), data)

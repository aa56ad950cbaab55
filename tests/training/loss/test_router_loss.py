"""The router's auxiliary loss is transformers' own, averaged over the micro-batches of an optimizer step."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import save_model
from lightning.pytorch import Callback
from lit_callbacks.distributed.gather import full_weights
from peft import PromptTuningConfig
from ranks import on_ranks
from transformers import AutoModelForCausalLM

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

MODELS = ("mixtral", "qwen3_moe", "gpt_oss")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


class Steps(Callback):
    def __init__(self) -> None:
        self.logged: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.fit_loop._should_accumulate():
            return
        metrics = trainer.callback_metrics
        self.logged.append((float(metrics["train/loss"]), float(metrics["train/router_aux_loss"])))


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("architecture", MODELS)
def test_one_padded_sample_has_the_loss_and_gradients_of_transformers(
    make_trainer: Any, tmp_path: Path, architecture: str, checkpointing: bool
) -> None:
    folder = save_model(architecture, tmp_path)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 380, (1, 24), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    result = reference(**batch, output_router_logits=True)
    result.loss.backward()
    coefficient = reference.config.router_aux_loss_coef
    module = CausalLM(folder, router_aux_loss="config", gradient_checkpointing=checkpointing, optimizer=sgd)
    steps = Steps()
    gradients: dict[str, torch.Tensor] = {}

    class Keep(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            gradients.update(
                {n: p.grad.clone() for n, p in pl_module.base_model.named_parameters() if p.grad is not None}
            )

    trainer = make_trainer(max_steps=1, callbacks=[steps, Keep()])
    trainer.fit(module, torch.utils.data.DataLoader([batch], batch_size=None))
    ((loss, auxiliary),) = steps.logged
    assert auxiliary == pytest.approx(float(result.aux_loss), rel=1e-5)
    assert loss + coefficient * auxiliary == pytest.approx(float(result.loss), rel=1e-5)
    routers = [name for name in gradients if name.endswith(("gate.weight", "router.weight"))]
    assert routers
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-3, msg=name)


def fit(
    make_trainer: Any, folder: str, data: str, strategy: str | None = None, **options: Any
) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    os.environ |= {"PL_GLOBAL_SEED": "3", "DS_ACCELERATOR": "cpu"}
    how: Any = {} if strategy is None else {"strategy": STRATEGIES[strategy](), "devices": 2}
    steps = Steps()
    trainer = make_trainer(max_steps=3, callbacks=[steps], use_distributed_sampler=False, **how)
    module = CausalLM(folder, optimizer=sgd, **{"router_aux_loss": 0.5, **options})
    per_rank = 2 if strategy is None else 1
    trainer.fit(module, TextDataModule(data, micro_batch_size=per_rank, join_micro_batches=False))
    return steps.logged, {} if strategy == "zero2" else full_weights(module, lambda _, p: p.requires_grad)


STRATEGIES: dict[str, Any] = {"ddp": lambda: "ddp", "fsdp": FSDPStrategy, "zero2": lambda: DeepSpeedStrategy(stage=2)}


@pytest.mark.processes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_average_as_micro_batches_do(make_trainer: Any, tmp_path: Path, write_rows: Any, strategy: str) -> None:
    folder, data = save_model("mixtral", tmp_path / "model"), write_rows(count=12)
    os.environ["PL_GLOBAL_SEED"] = "3"
    steps = Steps()
    trainer = make_trainer(max_steps=3, callbacks=[steps], accumulate_grad_batches=2, use_distributed_sampler=False)
    module = CausalLM(folder, optimizer=sgd, router_aux_loss=0.5)
    trainer.fit(module, TextDataModule(data, micro_batch_size=1, join_micro_batches=False))
    accumulated = steps.logged
    weights = full_weights(module, lambda _, p: p.requires_grad)
    for logged, found in on_ranks(2, fit, make_trainer, folder, data, strategy, timeout=100):
        for got, wanted in zip(logged, accumulated, strict=True):
            assert got == pytest.approx(wanted, rel=1e-5)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-5, rtol=1e-4, msg=name)


def test_where_the_config_asks_for_it_and_it_is_off_a_line_says_so(
    make_trainer: Any, tmp_path: Path, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_model("mixtral", tmp_path)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "output_router_logits": True}))
    caplog.set_level("INFO", "lightning.pytorch")
    with_it, _ = fit(make_trainer, folder, write_rows())
    assert "which is left out" not in caplog.text
    assert all(auxiliary > 1.9 for _, auxiliary in with_it)  # top 2 of 4 experts: 2 where they are equally busy
    CausalLM(folder).configure_model()
    assert "router auxiliary loss (output_router_logits, router_aux_loss_coef=0.001), which is left out" in caplog.text


def test_what_is_refused(model_folder: str, tmp_path: Path, make_trainer: Any) -> None:
    with pytest.raises(RecipeError, match="computes no such loss for Qwen2ForCausalLM"):
        CausalLM(model_folder, router_aux_loss=0.1).check()
    with pytest.raises(RecipeError, match=r"model\.compile fuses"):
        CausalLM(model_folder, router_aux_loss=0.1, compile=True)
    with pytest.raises(RecipeError, match=r"model\.router_aux_loss=0\.1 with PromptTuningConfig, whose virtual tokens"):
        CausalLM(model_folder, peft=PromptTuningConfig(num_virtual_tokens=2), router_aux_loss=0.1)
    module = CausalLM(save_model("mixtral", tmp_path), router_aux_loss="config")
    trainer = make_trainer(devices=2, strategy=ModelParallelStrategy(pipeline_parallel_size=2))
    with pytest.raises(RecipeError, match="router_aux_loss=config needs the router's choices for all tokens"):
        trainer.strategy.check_model(module, module.check())
    zero = make_trainer(devices=2, strategy=DeepSpeedStrategy(stage=3))
    with pytest.raises(RecipeError, match=r"router_aux_loss=config and trainer\.strategy stage=3"):
        zero.strategy.check(zero, module)

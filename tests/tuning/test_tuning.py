"""Every tuning method of PEFT: trains as PEFT itself computes it, saves, reloads in plain PEFT, merges."""

import copy
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lit_callbacks import SpikeGuard
from lit_callbacks.distributed.gather import full_weights
from lit_callbacks.export.adapter_merger import save_merged
from peft.utils.integrations import dequantize_module_weight
from ranks import LiveRanks
from safetensors.torch import load_file
from shared_fixtures import make_rows, make_tokenizer, silent_trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel
from tuning_methods import CAUSAL, LAYERS, METHODS, ON_QUANTIZED_ONLY, works

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.checkpointing.storage.checkpoint_io import saved_value
from lit_ft.cli import main
from lit_ft.model.files import deferred_cast
from lit_ft.packed_batch import pack_samples
from lit_ft.strategies import FSDPStrategy, ModelParallelStrategy
from lit_ft.tuning import lora_init, method_hooks

pytestmark = pytest.mark.slow

DRAWS_NOISE = ("PVeRA",)
"""While training, and other noise on other ranks."""
NEED_DATA = ("CorDA", "LoRA-GA", "EVA")
"""Their init reads training data."""


@dataclass(frozen=True)
class Trained:
    """A method's fit of four steps on one process."""

    module: CausalLM
    halfway: dict[str, torch.Tensor]
    """Weights after two steps."""
    weights: dict[str, torch.Tensor]
    """Weights after four steps."""
    checkpoint: Path
    """Saved after two steps, by the run that went on."""


class SaveHalfway(Callback):
    """Saves a checkpoint after two of four steps, as ``every_n_train_steps`` does, and keeps the weights."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and not self.weights:
            trainer.save_checkpoint(self.path)
            self.weights = weights_of(pl_module)


def weights_of(module: CausalLM) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.trainable_parameters().items()}


def fitted(
    make_trainer: Any, model_folder: str, data: str, method: str, ckpt_path: Any = None, **options: Any
) -> tuple[CausalLM, Any]:
    """A module after some steps of four packed rows each, and its trainer.

    Args:
        make_trainer: function that makes a trainer.
        model_folder: folder of the base model.
        data: path of the rows.
        method: name of the tuning method.
        ckpt_path: checkpoint to resume from.
        options: options of the trainer, and ``micro_batch_size``.
    """
    os.environ["PL_GLOBAL_SEED"] = "3"
    module = CausalLM(model_folder, peft=METHODS[method], optimizer=adamw)
    rows = TextDataModule(data, packing=128, max_length=96, micro_batch_size=options.pop("micro_batch_size", 2))
    trainer = make_trainer(use_distributed_sampler=False, **options)
    trainer.fit(module, rows, ckpt_path=ckpt_path)
    return module, trainer


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-2, eps=1e-4)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    path.write_text(json.dumps(make_rows(24), ensure_ascii=False), encoding="utf-8")
    return str(path)


ALONE = {"accumulate_grad_batches": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def train_once(tmp_path_factory: pytest.TempPathFactory, model_folder: str, rows: str) -> Callable[[str], Trained]:
    """Function that trains a method on one process; each is trained once."""
    found: dict[str, Trained] = {}

    def train(method: str) -> Trained:
        if method not in found:
            seed_everything(7, verbose=False)
            folder = tmp_path_factory.mktemp("trained")
            save = SaveHalfway(folder / "halfway.ckpt")
            make_trainer = partial(silent_trainer, default_root_dir=folder, callbacks=[save])
            module, _ = fitted(make_trainer, model_folder, rows, method, **ALONE)
            os.environ.pop("PL_GLOBAL_SEED", None)
            found[method] = Trained(module, save.weights, weights_of(module), save.path)
        return found[method]

    return train


GROUPS = [list(METHODS)[::2], list(METHODS)[1::2]]
"""Methods whose tests one worker of ``pytest -n`` runs, as they compare with the same fits."""


def group_of(method: str) -> pytest.MarkDecorator:
    return pytest.mark.xdist_group(f"methods, {int(method in GROUPS[1])}")


EACH = [pytest.param(method, marks=group_of(method)) for method in METHODS]


@pytest.fixture(params=EACH)
def trained(request: pytest.FixtureRequest, train_once: Callable[[str], Trained]) -> tuple[str, CausalLM]:
    """A method's name and a module that was trained on packed batches for four steps."""
    return request.param, train_once(request.param).module.eval()


def samples() -> list[torch.Tensor]:
    """Of three texts, two begin alike, so that a packed batch of them computes these tokens once."""
    texts = ("a book under the cup is red", "a book under the lamp was blue and green", "红 书")
    return [torch.tensor(ids) for ids in make_tokenizer()(list(texts))["input_ids"]]


def test_a_packed_row_is_what_peft_computes_sample_by_sample(trained: Any, model_folder: str, tmp_path: Path) -> None:
    name, module = trained
    module.save_adapter(tmp_path / "adapter")
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    wanted, untrained = [], []
    with torch.no_grad():
        for ids in samples():
            for model, losses in ((plain.eval(), wanted), (base, untrained)):
                logits = model(input_ids=ids[None]).logits[0, -len(ids) :]
                losses.append(cross_entropy(logits[:-1], ids[1:], reduction="none"))
        got = module(pack_samples([(ids.numpy(), ids.numpy()) for ids in samples()])).per_token
    torch.testing.assert_close(got, torch.cat(wanted), atol=2e-5, rtol=1e-5, msg=name)
    assert (got - torch.cat(untrained)).abs().max() > 1e-3  # it has learned something
    if not lora_init.changes_base(METHODS[name]):  # what `evaluate` gives as the base's loss
        with torch.no_grad(), module.model.disable_adapter():
            got = module(pack_samples([(ids.numpy(), ids.numpy()) for ids in samples()])).per_token
        torch.testing.assert_close(got, torch.cat(untrained), atol=2e-5, rtol=1e-5, msg=name)


def test_merged_or_refused(trained: Any, tmp_path: Path) -> None:
    name, module = trained
    if not works(name, "merge"):
        with pytest.raises(ValueError, match="adds no weights that could be merged|are not linear"):
            save_merged(module.model, tmp_path / "merged")
        return
    save_merged(module.model, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        wanted = module(pack_samples([(ids.numpy(), ids.numpy()) for ids in samples()])).per_token
        logits = [(merged(input_ids=ids[None]).logits[0], ids) for ids in samples()]
    got = torch.cat([cross_entropy(part[:-1], ids[1:], reduction="none") for part, ids in logits])
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-5, msg=name)
    module.base_model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for part, ids in logits:
            trained_logits = module.base_model(input_ids=ids[None]).logits[0]
            assert (part - trained_logits).abs().max() <= 1e-5 * trained_logits.abs().max(), name


def steps_of(method: str) -> int:
    """Optimizer steps to compare: the second uses the optimizer's state; AdaLoRA lowers its ranks in four."""
    return 4 if method == "AdaLoRA" else 2


@pytest.mark.parametrize("method", EACH)
def test_a_resumed_run_is_the_run(
    make_trainer: Any, model_folder: str, rows: str, train_once: Callable[[str], Trained], method: str
) -> None:
    whole = train_once(method)
    resumed = weights_of(fitted(make_trainer, model_folder, rows, method, whole.checkpoint, **ALONE)[0])
    assert resumed.keys() == whole.weights.keys()
    assert any(not torch.equal(whole.halfway[name], weight) for name, weight in resumed.items())
    for name, weight in whole.weights.items():
        assert torch.equal(resumed[name], weight), name


def on_copies(make_trainer: Any, model_folder: str, data: str, method: str) -> dict[str, torch.Tensor]:
    options = {"strategy": "ddp", "devices": 2, "max_steps": steps_of(method)}
    module, trainer = fitted(make_trainer, model_folder, data, method, **options)
    trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")
    return weights_of(module)


def in_shards(make_trainer: Any, model_folder: str, data: str, method: str) -> dict[str, torch.Tensor]:
    options = {"strategy": FSDPStrategy(), "devices": 2, "max_steps": steps_of(method)}
    return full_weights(fitted(make_trainer, model_folder, data, method, **options)[0], lambda _, p: p.requires_grad)


def in_parts(make_trainer: Any, model_folder: str, data: str, method: str, *, kind: str) -> dict[str, torch.Tensor]:
    """A method's weights, whole on rank 0.

    A pipeline takes the four rows of a step as two micro-batches, and an init reads so many micro-batches of data.
    """
    passes = 2 if kind == "pipeline" or method in NEED_DATA else 1
    strategy = ModelParallelStrategy(**{f"{kind}_parallel_size": 2})
    options = {"strategy": strategy, "devices": 2, "max_steps": steps_of(method), "accumulate_grad_batches": passes}
    module, trainer = fitted(make_trainer, model_folder, data, method, micro_batch_size=4 // passes, **options)
    return strategy.full_weights(module, lambda _, p: p.requires_grad, keep=trainer.global_rank == 0)


WAYS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "ddp": on_copies,
    "fsdp": in_shards,
    **{kind: partial(in_parts, kind=kind) for kind in ("tensor", "pipeline", "context")},
}
"""Ways to train on two ranks; all but DDP are situations of the table."""


def runs(method: str, way: str) -> bool:
    return way == "ddp" or works(method, way)


ON_RANKS = [(method, way) for method in METHODS for way in WAYS if runs(method, way)]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "way"), [pytest.param(*case, marks=group_of(case[0]), id=", ".join(case)) for case in ON_RANKS]
)
def test_two_ranks_equal_one_process(
    make_trainer: Any, model_folder: str, rows: str, train_once: Any, live_ranks: LiveRanks, method: str, way: str
) -> None:
    found, other = live_ranks(2, WAYS[way], make_trainer, model_folder, rows, method)
    one = train_once(method).weights if steps_of(method) == 4 else train_once(method).halfway
    assert found.keys() >= one.keys()
    # Products of small factors: with RandLoRA, Adam makes 4e-4 of the rounding of another split on one process.
    atol = 5e-3 if method == "RandLoRA" else 1e-4
    for name, weight in one.items():
        if method not in DRAWS_NOISE:
            torch.testing.assert_close(found[name], weight, atol=atol, rtol=1e-3, msg=f"{method}: {name}")
        if way in ("ddp", "fsdp"):
            assert torch.equal(found[name], other[name]), name


def test_each_way_is_compared_with_one_process() -> None:
    assert {way for _, way in ON_RANKS} == set(WAYS)
    assert {method for method, _ in ON_RANKS} == set(METHODS)


@pytest.mark.parametrize("method", ["prompt tuning", "P-tuning", "prefix tuning"])
def test_virtual_tokens_answer_and_keep_samples_apart(
    make_trainer: Any, model_folder: str, write_rows: Any, method: str
) -> None:
    module = CausalLM(model_folder, peft=METHODS[method])
    make_trainer(max_steps=1).fit(module, TextDataModule(write_rows(), micro_batch_size=3))
    assert len(module.answer(["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"], 3)) == 1
    first, second, third = (ids.numpy() for ids in samples())
    with torch.no_grad():
        one = module.eval()(pack_samples([(first, first), (second, second)])).per_token[len(first) - 1 :]
        other = module(pack_samples([(third, third), (second, second)])).per_token[len(third) - 1 :]
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["prompt tuning", "P-tuning", "prefix tuning"])
def test_virtual_tokens_are_switched_off_in_each_answer(model_folder: str, method: str) -> None:
    module, base = CausalLM(model_folder, peft=METHODS[method]), CausalLM(model_folder)
    for one in (module, base):
        one.configure_model()
    prompts = ["<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"]
    (wanted,) = base.eval().answer(prompts, 8)
    with module.eval().model.disable_adapter():
        answers = [module.answer(prompts, 8)[0] for _ in range(3)]
    assert answers == [wanted] * 3
    assert module.answer(prompts, 8) != [wanted]


NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


def train(make_trainer: Any, module: CausalLM, path: str, max_steps: int = 2) -> None:
    make_trainer(max_steps=max_steps).fit(module, TextDataModule(path, packing=128, max_length=96))
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in module.trainable_parameters().values())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.parametrize("method", METHODS)
def test_it_trains_in_bf16_with_gradient_checkpointing(
    make_trainer: Any, model_folder: str, write_rows: Any, method: str
) -> None:
    def module(checkpoints: bool) -> CausalLM:
        options: Any = {"dtype": "bfloat16", "gradient_checkpointing": checkpoints}
        return CausalLM(model_folder, peft=METHODS[method], optimizer=sgd, **options)

    if is_prefix := method == "prefix tuning":
        with pytest.raises(RecipeError, match="PREFIX_TUNING does not work with gradient checkpointing"):
            train(make_trainer, module(True), write_rows())
    train(make_trainer, module(not is_prefix), write_rows())


@pytest.mark.parametrize("method", [name for name in (*METHODS, *ON_QUANTIZED_ONLY) if works(name, "bitsandbytes")])
def test_on_a_quantized_base_it_computes_what_it_does_on_the_dequantized_one(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path, method: str
) -> None:
    config = (METHODS | ON_QUANTIZED_ONLY)[method]
    module = CausalLM(model_folder, peft=config, optimizer=sgd, quantization=NF4)
    train(make_trainer, module, write_rows())
    module.save_adapter(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=NF4, device_map={"": "cpu"})
    plain = peft.PeftModel.from_pretrained(base.dequantize(), tmp_path / "adapter").eval()
    row = pack_samples([(ids.numpy(), ids.numpy()) for ids in samples()])
    with torch.no_grad():
        got = module.eval()(row).per_token
        logits = [(plain(input_ids=ids[None]).logits[0, -len(ids) :], ids) for ids in samples()]
    wanted = torch.cat([cross_entropy(part[:-1], ids[1:], reduction="none") for part, ids in logits])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4, msg=method)


def test_loftq_starts_nearer_to_the_unquantized_model(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    wanted = base.model.layers[0].self_attn.q_proj.weight
    left: dict[str, float] = {}
    for name, config in {"LoftQ": ON_QUANTIZED_ONLY["LoftQ"], "LoRA": METHODS["LoRA"]}.items():
        module = CausalLM(model_folder, peft=config, optimizer=partial(torch.optim.SGD, lr=0.0), quantization=NF4)
        make_trainer(max_steps=1).fit(module, TextDataModule(write_rows()))
        layer = module.base_model.model.layers[0].self_attn.q_proj
        weight = dequantize_module_weight(layer.base_layer) + layer.get_delta_weight("default")
        left[name] = float((weight - wanted).norm())
    # Four of 48 directions hold a good part of the error of rounding, and the best four are taken.
    assert left["LoftQ"] < 0.9 * left["LoRA"]


@pytest.mark.parametrize(("bias", "targets"), [("all", ["q_proj"]), ("lora_only", ["down_proj"])])
def test_biases_that_are_not_there_are_refused(tmp_path: Path, model_folder: str, bias: Any, targets: Any) -> None:
    if bias == "all":  # Qwen2 has biases in its attention
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path)
        tiny_config("llama").save_pretrained(tmp_path)
        model_folder = str(tmp_path)
    with pytest.raises(RecipeError, match=f"bias={bias} trains nothing: no layer of .* has a bias; set it to none"):
        CausalLM(model_folder, init="random", peft=peft.LoraConfig(bias=bias, target_modules=targets)).check()


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, "set model.quantization"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "leave one out"),
        ({"init_lora_weights": "eva", "eva_config": peft.EvaConfig(tau=1.0)}, "still move after 50 passes"),
    ],
)
def test_inits_that_would_not_train_right_are_refused(
    make_trainer: Any, model_folder: str, write_rows: Any, options: dict[str, Any], match: str
) -> None:
    config = peft.LoraConfig(r=4, **LAYERS, **CAUSAL, **options)
    with pytest.raises(RecipeError, match=match):
        make_trainer(max_steps=1).fit(CausalLM(model_folder, peft=config), TextDataModule(write_rows(count=4)))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize(
    ("architecture", "target", "why"),
    [
        ("tied qwen2", "lm_head", r"lm_head \(Linear\) shares its weight with another module"),
        ("tied qwen2", "embed_tokens", r"model\.embed_tokens \(Embedding\) is no linear layer"),
        ("gpt2", "attn.c_proj", r"transformer\.h\.0\.attn\.c_proj \(Conv1D\) is no linear layer"),
    ],
)
def test_an_init_whose_product_cannot_be_taken_from_one_linear_layer_is_refused(
    tmp_path: Path, init: Any, architecture: str, target: str, why: str
) -> None:
    folder = "checkpoints/tiny-qwen2"
    if architecture == "gpt2":
        AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
        GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1)).save_pretrained(folder := str(tmp_path))
    config = peft.LoraConfig(r=4, init_lora_weights=init, target_modules=[target], **CAUSAL)
    with pytest.raises(RecipeError, match=f"init_lora_weights='{init}' subtracts its first product .*{why}; leave it"):
        CausalLM(folder, peft=config).check()
    config.init_lora_weights = True
    CausalLM(folder, peft=config).check()


def test_loftq_leaves_layers_that_are_not_quantized_with_an_adapter_that_trains(model_folder: str) -> None:
    config = copy.copy(ON_QUANTIZED_ONLY["LoftQ"])
    config.target_modules = ["q_proj", "embed_tokens", "lm_head"]
    module = CausalLM(model_folder, peft=config, quantization=NF4)
    module.configure_model()
    factors = {name: bool(weight.any()) for name, weight in module.trainable_parameters().items()}
    assert all(is_set for name, is_set in factors.items() if "q_proj" in name)
    for layer in ("lm_head", "embed_tokens"):
        assert sorted(is_set for name, is_set in factors.items() if layer in name) == [False, True], layer


def test_adalora_lowers_ranks_and_adds_its_term_once_a_step(
    make_trainer: Any, model_folder: str, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    config = peft.AdaLoraConfig(init_r=6, target_r=3, tinit=1, tfinal=2, total_step=6, **LAYERS, **CAUSAL)
    weights, terms = [], []
    for accumulate in (1, 2):
        module = CausalLM(model_folder, peft=config, optimizer=sgd)
        trainer = make_trainer(max_steps=6, accumulate_grad_batches=accumulate, log_every_n_steps=1)
        data = TextDataModule(write_rows(count=48), micro_batch_size=8 // accumulate)
        trainer.fit(module, data)
        weights.append(module.trainable_parameters())
        terms.append(float(trainer.callback_metrics["train/regularization"]))
        kept = [sum(mask) for mask in module.model.active_peft_config.rank_pattern.values()]
        assert sum(kept) == 3 * 4  # two layers, two projections each
        gone = sum(int((p == 0).sum()) for name, p in weights[-1].items() if "lora_E" in name)
        assert gone == 3 * 4
    assert terms[0] == pytest.approx(terms[1], rel=1e-5)
    assert terms[0] > 0
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-5, rtol=1e-4, msg=name)


IN_OTHER_DTYPES = {
    "modules to save": peft.LoraConfig(r=4, modules_to_save=["norm"], **LAYERS, **CAUSAL),
    "embeddings": peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], **CAUSAL),
}


@pytest.mark.parametrize("adapter_dtype", ["float32", "auto"])
@pytest.mark.parametrize(("of_files", "dtype"), [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_base_that_is_cast_later_gets_the_adapter_of_one_that_is_cast_at_once(
    model_folder: str, tmp_path: Path, of_files: str, dtype: Any, adapter_dtype: Any
) -> None:
    folder = model_in(model_folder, tmp_path, of_files)

    def built(config: peft.PeftConfig, added: list[str]) -> dict[str, torch.Tensor]:
        module = CausalLM(folder, peft=config, dtype=dtype, adapter_dtype=adapter_dtype, added_tokens=added)
        module.configure_model()
        deferred_cast.cast(module)
        return dict(module.named_parameters())

    is_usual = (of_files, adapter_dtype) == ("bfloat16", "float32")
    wanted = METHODS if is_usual else ("LoRA", "LN tuning", "LLaMA-Adapter", "trainable tokens", "P-tuning")
    names = [name for name in wanted if name not in NEED_DATA and works(name, "fsdp")]
    cases = {name: (METHODS[name], []) for name in names} | {name: (c, []) for name, c in IN_OTHER_DTYPES.items()}
    for name, (config, added) in {**cases, "added tokens": (METHODS["LoRA"], ["<a>", "<b>"])}.items():
        at_once = built(config, added)
        with deferred_cast.casting_later():
            later = built(config, added)
        assert later.keys() == at_once.keys()
        for weight, tensor in at_once.items():
            assert later[weight].dtype == tensor.dtype, (name, weight)
            assert torch.equal(later[weight], tensor), (name, weight)


def model_in(model_folder: str, tmp_path: Path, dtype: str) -> str:
    """The model with its files in a dtype."""
    folder = tmp_path / "base"
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


class PoisonGradients(Callback):
    """Makes the gradients of one optimizer step infinite, as fp16 does."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 2:
            for parameter in pl_module.trainable_parameters().values():
                parameter.grad.fill_(float("inf"))


def adalora(model_folder: str) -> CausalLM:
    config = peft.AdaLoraConfig(init_r=6, target_r=3, tinit=1, tfinal=2, total_step=6, **LAYERS, **CAUSAL)
    return CausalLM(model_folder, peft=config, optimizer=sgd)


def test_adalora_goes_on_after_a_step_that_spike_guard_skipped(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    module, guard = adalora(model_folder), SpikeGuard(folder=tmp_path)
    trainer = make_trainer(max_steps=6, callbacks=[PoisonGradients(), guard])
    trainer.fit(module, TextDataModule(write_rows(count=48)))
    assert guard.skipped_steps == 1
    assert all(p.isfinite().all() for p in module.trainable_parameters().values())
    assert sum(map(sum, module.model.active_peft_config.rank_pattern.values())) == 3 * 4


def test_adalora_takes_no_importance_from_infinite_gradients(model_folder: str) -> None:
    module = adalora(model_folder)
    module.configure_model()
    for parameter in module.trainable_parameters().values():
        parameter.grad = torch.ones_like(parameter)
    method_hooks.after_optimizer_step(module.model, 1)
    next(iter(module.trainable_parameters().values())).grad.fill_(float("inf"))  # a scaler skips such a step
    method_hooks.after_optimizer_step(module.model, 2)
    importance = module.model.base_model.rankallocator.exp_avg_ipt.values()
    assert all(of_weight.isfinite().all() for of_weight in importance)


def test_adalora_goes_on_where_the_model_was_moved_after_its_checkpoint_was_read(
    model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning reads a checkpoint into host memory, then moves the model to a GPU."""
    model = CausalLM(model_folder, peft=METHODS["AdaLoRA"]).check()
    weights = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    read = {name: torch.zeros(weight.shape) for name, weight in weights.items()}
    method_hooks.load_state(model, {"rank_pattern": None, "ipt": read, "exp_avg_ipt": read, "exp_avg_unc": read})
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    monkeypatch.setattr(method_hooks, "_has_finite_gradients", lambda _: True)  # tensors without memory have no values
    method_hooks.after_optimizer_step(model, 1)
    moved = model.base_model.rankallocator.exp_avg_ipt.values()
    assert {value.device.type for value in moved} == {"meta"}


def test_adalora_says_that_its_schedule_is_not_the_runs(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    config = peft.AdaLoraConfig(init_r=6, target_r=3, total_step=100, **LAYERS, **CAUSAL)
    with pytest.warns(UserWarning, match="total_step=100, but the run has 2 optimizer steps"):
        make_trainer(max_steps=2).fit(CausalLM(model_folder, peft=config), TextDataModule(write_rows()))
    with pytest.raises(RecipeError, match="from init_r=4 to target_r=8"):
        CausalLM(model_folder, peft=peft.AdaLoraConfig(init_r=4, target_r=8, total_step=9, **CAUSAL)).check()


EVA = peft.LoraConfig(r=4, init_lora_weights="eva", eva_config=peft.EvaConfig(rho=3.0), target_modules="all-linear")


def test_eva_deals_ranks_out_and_the_run_goes_on_without_looking_again(
    make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path
) -> None:
    data = write_rows()
    module = CausalLM(model_folder, peft=EVA, optimizer=sgd)
    trainer = make_trainer(max_steps=1)
    trainer.fit(module, TextDataModule(data))
    trainer.save_checkpoint(tmp_path / "eva.ckpt")
    ranks = {tuple(p.shape) for name, p in module.trainable_parameters().items() if "lora_A" in name}
    assert len(ranks) > 1
    again = CausalLM(model_folder, peft=EVA, optimizer=sgd)
    again.start = saved_value(str(tmp_path / "eva.ckpt"), "adapter_start")
    again._rows_for_init = lambda base: pytest.fail("looked at the data again")  # type: ignore[method-assign]
    make_trainer(max_steps=1).fit(again, TextDataModule(data), ckpt_path=tmp_path / "eva.ckpt")
    for name, weight in module.trainable_parameters().items():
        assert torch.equal(again.trainable_parameters()[name], weight), name


@pytest.mark.parametrize("method", ["EVA", "CorDA"])
def test_what_an_init_found_is_there_where_there_is_no_training_data(
    tmp_path: Path, model_folder: str, write_rows: Any, method: str
) -> None:
    recipe, run_dir = tmp_path / "recipe.yaml", tmp_path / "run"
    config = {
        "EVA": "{init_lora_weights: eva, eva_config: {class_path: peft.EvaConfig, init_args: {rho: 3.0}}, r: 4}",
        "CorDA": "{init_lora_weights: corda, corda_config: {corda_method: kpm, verbose: false}, r: 4}",
    }[method]
    recipe.write_text(
        f"model: {{pretrained: {model_folder}, peft: {{class_path: peft.LoraConfig, init_args: {config}}}}}"
    )
    options = ["--config", str(recipe), "--run_dir", str(run_dir), "--trainer.accelerator", "cpu"]
    lit_ft("fit", *options, "--data.path", write_rows(), "--trainer.max_steps", "2", "--trainer.max_epochs", "1")
    checkpoint = str(run_dir / "checkpoints" / "last.ckpt")
    lit_ft("validate", *options, "--data.val_path", write_rows(), "--ckpt_path", checkpoint)
    lit_ft("export", "--run", str(run_dir), "--out", str(tmp_path / "exported"))
    written, exported = (
        load_file(folder / "adapter_model.safetensors") for folder in (run_dir / "adapter", tmp_path / "exported")
    )
    assert written.keys() == exported.keys()
    assert all(torch.equal(written[name], exported[name]) for name in written)


def lit_ft(*arguments: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 0


def test_an_init_that_looks_at_data_needs_data_that_shows_rows(make_trainer: Any, model_folder: str) -> None:
    batch = {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]}
    with pytest.raises(RecipeError, match=r"data that hands out first_batches\(count\)"):
        make_trainer(max_steps=1).fit(CausalLM(model_folder, peft=METHODS["EVA"]), DataLoader([batch], batch_size=None))


PACKED: dict[str, dict[str, Any]] = {
    "NF4": {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16},
    "INT8": {"load_in_8bit": True},
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("method", ["AdaLoRA", "DoRA", "HiRA", "IA3", "OFT", "PVeRA", "RandLoRA", "RoAd", "SHiRA"])
def test_on_a_quantized_base_in_bf16_it_trains_as_in_float32(
    make_trainer: Any, model_folder: str, write_rows: Any, method: str, packed: str
) -> None:
    row = pack_samples([(ids.numpy(), ids.numpy()) for ids in samples()])
    # RandLoRA's gradients are 40 times those of the others: larger steps would make much of each rounding.
    optimizer = partial(torch.optim.SGD, lr=1e-4 if method == "RandLoRA" else 1e-3)
    losses = []
    for dtype in ("bfloat16", "float32"):
        options: Any = {"dtype": dtype, "quantization": BitsAndBytesConfig(**PACKED[packed])}
        module = CausalLM(model_folder, peft=METHODS[method], optimizer=optimizer, **options)
        train(make_trainer, module, write_rows())
        with torch.no_grad():
            losses.append(float(module.eval()(row).per_token.mean()))
    assert losses[0] == pytest.approx(losses[1], abs=0.08)  # roundings of bf16

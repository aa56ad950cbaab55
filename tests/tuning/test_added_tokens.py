"""Tokens that a recipe adds: they train, and leave in adapters and merged models that plain PEFT and transformers read.

transformers#45127 and unsloth#9331: on a model whose head is tied to its embeddings, merged models lost what the new
rows had learned.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lit_callbacks.export.adapter_merger import save_adapter, save_merged
from model_folders import untied
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from lit_ft import CausalLM, RecipeError, TextDataModule
from lit_ft.packed_batch import pack_samples

pytestmark = pytest.mark.slow

NEW = ["<think>", "</think>"]
MANY = [f"<new_{number}>" for number in range(80)]
"""More than the model's spare rows."""
ROWS = [{"instruction": f"the cup {MANY[0]} is", "output": f"<think> red {MANY[79]} </think>"}] * 6
LORA = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def train(make_trainer: Any, module: CausalLM, path: str, **options: Any) -> CausalLM:
    make_trainer(max_steps=4, **options).fit(module, TextDataModule(path, packing=128, max_length=96))
    return module.eval()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3)


def logits(model: Any, rows: int) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(rows)[None]).logits[0]


@pytest.fixture(params=["tied", "untied"])
def base(request: pytest.FixtureRequest, model_folder: str, tmp_path: Path) -> str:
    return model_folder if request.param == "tied" else untied(model_folder, tmp_path / "untied")


METHODS = {
    "LoRA": LORA,
    "LoRA with tokens of its own": peft.LoraConfig(**{**LORA.to_dict(), "trainable_token_indices": [7, 8]}),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[7], task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tokens", [NEW, NEW + MANY], ids=["spare rows", "resized"])
def test_added_tokens_train_and_leave_whole(
    make_trainer: Any, base: str, write_rows: Any, tmp_path: Path, method: str, tokens: list[str]
) -> None:
    module = CausalLM(
        base, added_tokens=tokens[:1], added_special_tokens=tokens[1:], peft=METHODS[method], optimizer=sgd
    )
    train(make_trainer, module, write_rows(ROWS))
    untrained, count = AutoModelForCausalLM.from_pretrained(base), len(module.tokenizer)
    rows = max(count, untrained.get_input_embeddings().num_embeddings)
    module.base_model.set_attn_implementation("sdpa")
    wanted = logits(module.model, rows)

    save_adapter(module.model, tmp_path / "adapter", module.tokenizer, write=module.save_adapter)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        assert all("base_layer" not in name for name in file.keys())  # noqa: SIM118
    plain = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "adapter")
    assert len(tokenizer) == count
    if count > plain.get_input_embeddings().num_embeddings:
        plain.resize_token_embeddings(count)
    plain = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(plain, rows), wanted, atol=1e-6, rtol=1e-6)

    save_merged(module.model, tmp_path / "merged", module.tokenizer)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged, rows) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert merged.config.vocab_size == rows
    embedding, head = merged.get_input_embeddings().weight, merged.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) is untrained.config.tie_word_embeddings
    assert merged.config.tie_word_embeddings is untrained.config.tie_word_embeddings
    ids = tokenizer.convert_tokens_to_ids(NEW)
    if rows == untrained.config.vocab_size:  # where the rows were there before, both sides have learned
        for side in ("get_input_embeddings", "get_output_embeddings"):
            before, after = (getattr(model, side)().weight[ids] for model in (untrained, merged))
            assert ((before - after).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("in_full", [False, True], ids=["rows", "whole embeddings"])
@pytest.mark.parametrize("tokens", [[], NEW, NEW + MANY], ids=["none", "spare rows", "resized"])
def test_an_adapter_whose_product_was_subtracted_holds_its_own_embeddings_alone(
    base: str, tmp_path: Path, in_full: bool, tokens: list[str]
) -> None:
    untrained = AutoModelForCausalLM.from_pretrained(base)
    is_tied = untrained.config.tie_word_embeddings
    sides = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    whole = {"modules_to_save": sides, "ensure_weight_tying": is_tied} if in_full else {}
    method = peft.LoraConfig(**{**LORA.to_dict(), "init_lora_weights": "pissa", **whole})
    module = CausalLM(base, added_tokens=tokens, peft=method)
    module.configure_model()
    with torch.no_grad():
        for weight in module.trainable_parameters().values():
            weight += 0.02 * torch.randn_like(weight)
    module.base_model.set_attn_implementation("sdpa")
    module.save_adapter(tmp_path)
    with safe_open(tmp_path / "adapter_model.safetensors", "pt") as file:
        held = {name for name in file.keys() if "lora_" not in name}  # noqa: SIM118
    assert len(held) == (2 if in_full else len(sides) if tokens else 0)
    assert all("base_layer" not in name for name in held)
    rows = max(len(module.tokenizer), untrained.get_input_embeddings().num_embeddings)
    untrained.resize_token_embeddings(rows)
    plain = peft.PeftModel.from_pretrained(untrained, tmp_path)
    torch.testing.assert_close(logits(plain, rows), logits(module.model, rows), atol=1e-4, rtol=1e-4)


def test_added_rows_get_the_gradients_that_transformers_computes(model_folder: str) -> None:
    module = CausalLM(model_folder, added_tokens=NEW + MANY, peft=LORA, attn_implementation="sdpa")
    module.configure_model()
    ids = module.tokenizer("the <think> cup </think> <new_79> is red", return_tensors="pt")["input_ids"][0]
    result = module(pack_samples([(ids.numpy(), ids.numpy())]))
    result.loss_sum.backward()
    got = {name: p.grad.clone() for name, p in module.trainable_parameters().items() if p.grad is not None}
    module.zero_grad()
    loss = module.model(input_ids=ids[None], labels=ids[None]).loss * (len(ids) - 1)
    loss.backward()
    torch.testing.assert_close(result.loss_sum, loss)
    assert any("trainable_tokens_delta" in name for name in got)
    for name, parameter in module.trainable_parameters().items():
        torch.testing.assert_close(got[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_new_rows_are_a_function_of_the_seed_and_lie_near_the_others(model_folder: str, monkeypatch: Any) -> None:
    def rows(seed: str) -> torch.Tensor:
        monkeypatch.setenv("PL_GLOBAL_SEED", seed)
        module = CausalLM(model_folder, added_tokens=MANY)
        module.configure_model()
        return module.base_model.get_input_embeddings().weight.detach()

    one, same, other = rows("1"), rows("1"), rows("2")
    assert torch.equal(one, same)
    assert not torch.equal(one[384:], other[384:])
    torch.testing.assert_close(one[384:].mean(0), one[:384].mean(0), atol=1e-2, rtol=0)


def test_full_fine_tuning_with_added_tokens_resumes(
    make_trainer: Any, base: str, write_rows: Any, tmp_path: Path
) -> None:
    module = CausalLM(base, added_tokens=MANY, optimizer=sgd)
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, TextDataModule(write_rows(ROWS)))
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    again = CausalLM(base, added_tokens=MANY, optimizer=sgd)
    make_trainer(max_steps=2).fit(again, TextDataModule(write_rows(ROWS)), ckpt_path=tmp_path / "two.ckpt")
    for (name, one), (_, two) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, two), name
    save_merged(module.model, tmp_path / "merged", module.tokenizer)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == len(module.tokenizer)


def test_a_quantized_base_grows_too(make_trainer: Any, model_folder: str, write_rows: Any, tmp_path: Path) -> None:
    from transformers import BitsAndBytesConfig

    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    module = CausalLM(model_folder, added_tokens=MANY, peft=LORA, quantization=nf4, optimizer=sgd)
    train(make_trainer, module, write_rows(ROWS))
    save_merged(module.model, tmp_path / "merged", module.tokenizer, quantized_base="dequantize")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").config.vocab_size == len(module.tokenizer)


def whole(**options: Any) -> peft.LoraConfig:
    return peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **options)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "twice": ({"added_tokens": ["<a>", "<a>"]}, "model.added_tokens: '<a>' is given twice"),
    "empty": ({"added_special_tokens": [""]}, "model.added_special_tokens: '' is empty"),
    "known": ({"added_tokens": ["<|im_end|>"]}, r"'<\|im_end\|>' is a token of .* already \(id \d+\)"),
    "IA3": (
        {"peft": peft.IA3Config(task_type="CAUSAL_LM")},
        r"IA3 trains no rows of the embeddings \(model.added_tokens\); take peft.LoraConfig",
    ),
    "prompt tuning": ({"peft": peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")}, "PROMPT_TUNING"),
    "one side": ({"peft": whole(modules_to_save=["embed_tokens"])}, "embed_tokens without the other side"),
    "frozen": ({"trainable": ["layers.1."]}, "model.trainable freezes model.embed_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(model_folder: str, case: str) -> None:
    options, message = REFUSED[case]
    with pytest.raises(RecipeError, match=message):
        CausalLM(model_folder, **{"added_tokens": NEW, **options}).check()


def test_both_sides_in_full_train_added_tokens_too(model_folder: str) -> None:
    for options in (
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
    ):
        CausalLM(model_folder, added_tokens=NEW, peft=whole(**options)).check()


def test_lora_of_tied_embeddings_by_views_is_refused(model_folder: str) -> None:
    config = peft.LoraConfig(target_modules=["embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(RecipeError, match="shares LoRA's factors by views"):
        CausalLM(model_folder, peft=config).check()


@pytest.mark.parametrize("rows", [[7, 8], {"lm_head": [7, 8]}])
def test_embeddings_that_train_in_full_and_by_rows_are_refused(model_folder: str, rows: Any) -> None:
    """PEFT notices it in the first forward pass only, or, of a tied head, not at all."""
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], trainable_token_indices=rows)
    with pytest.raises(RecipeError, match="modules_to_save trains all rows of embed_tokens, .* leave one of the two"):
        CausalLM(model_folder, peft=config).check()


def test_a_tokenizer_with_more_tokens_than_the_model(model_folder: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_tokens(MANY)
    tokenizer.save_pretrained(tmp_path)
    shutil.copy(Path(model_folder) / "config.json", tmp_path)
    with pytest.raises(RecipeError, match=r"has 400 tokens, the model 384 embeddings; .* new tokens in model.added"):
        CausalLM(model_folder, tokenizer=str(tmp_path)).check()


def test_the_adapter_says_which_rows(make_trainer: Any, model_folder: str, tmp_path: Path) -> None:
    module = CausalLM(model_folder, added_tokens=NEW, peft=LORA)
    module.configure_model()
    module.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["trainable_token_indices"] == module.spec.base.added_ids
    assert LORA.trainable_token_indices is None

"""Answers are greedy, end where the chat template ends a turn, and begin as the model was trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lit_callbacks import ForgettingProbe, SampleGenerations
from lit_callbacks.output.step_lines import read_lines
from lit_callbacks.report.report_data import VALIDATION_ANSWERS
from lit_callbacks.widest_float import widest_float
from model_families import save_family
from peft import PrefixTuningConfig, PromptEncoderConfig, PromptLearningConfig, PromptTuningConfig
from shared_fixtures import make_tokenizer
from tokenizers.processors import TemplateProcessing
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, ExactMatch, RecipeError, TextDataModule
from lit_ft.model import generation, render_limits
from lit_ft.model.generation import GeneratedAnswer, Sampling, SeededDraw, closing_tokens, dense_attention, stop_ids
from lit_ft.model.isolation import architectures
from lit_ft.training.answering import AnswerOptions

pytestmark = pytest.mark.slow


@pytest.fixture
def other_end(model_folder: str, tmp_path: Path) -> str:
    """A base model that ends a text with ``<|endoftext|>``, and whose chat template ends a turn with ``<|im_end|>``."""
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    end = {"eos_token_id": tokenizer.eos_token_id}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **end}))
    return str(folder)


def test_an_answer_ends_where_the_template_ends_a_turn(
    make_trainer: Any,
    other_end: str,
    write_rows: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [{"instruction": "the red book", "output": "blue cup"}, {"instruction": "a lamp", "output": "书"}]
    data = TextDataModule(write_rows(rows), val_path=write_rows(rows, "val.json"))
    module = CausalLM(other_end, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    trainer = make_trainer(max_epochs=25, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(module, data)
    prompts = [row["prompt"] for row in data.splits.prompts("val")]
    assert module.answer(prompts, 20) == ["blue cup", "书"]
    answers = module.ended_answers(prompts, 20)
    assert [one[:2] for one in answers] == [("blue cup", "stop"), ("书", "stop")]
    assert all(one.ids[-1] == module.tokenizer.convert_tokens_to_ids("<|im_end|>") for one in answers)
    options = AnswerOptions(at_once=1)
    assert module.ended_answers(prompts, 20, options) == answers
    assert [answer.finish_reason for answer in module.ended_answers(prompts, 1)] == ["length", "length"]
    with monkeypatch.context() as patch:  # another's way to answer
        patch.setattr(module, "answer", lambda prompts, _: ["own"] * len(prompts))
        assert module.ended_answers(prompts, 1) == [GeneratedAnswer("own", None)] * 2
    scores: list[float] = []
    log: Any = type("Log", (), {"log_metrics": lambda self, metrics, step: scores.extend(metrics.values())})()
    trainer._loggers = [log]
    ExactMatch().on_train_end(trainer, module)
    assert scores == [1.0]
    lines = read_lines(Path(trainer.default_root_dir) / VALIDATION_ANSWERS)
    assert [(line["question"], line["expected"], line["answer"], line["is_right"]) for line in lines] == [
        ("the red book", "blue cup", "blue cup", True),
        ("a lamp", "书", "书", True),
    ]
    assert [line["finish_reason"] for line in lines] == ["stop", "stop"]
    caplog.clear()
    with caplog.at_level("INFO", "lightning.pytorch"):
        ExactMatch(max_new_tokens=1, samples=0).on_train_end(trainer, module)
    assert caplog.messages == [
        "val/exact_match after training: 50.0% of 2 held-out answers; 2 of them cut at max_new_tokens=1"
    ]


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"batch_size": 0}, {"samples": -1}])
def test_exact_match_of_numbers_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(RecipeError, match="must be 1 or more, and samples="):
        ExactMatch(**options)


def test_exact_match_of_data_without_a_conversation(make_trainer: Any, model_folder: str, write_rows: Any) -> None:
    text = write_rows([{"text": "the red book"}], "text.json")
    trainer = make_trainer(max_steps=1, callbacks=[ExactMatch()])
    with pytest.raises(
        RecipeError, match="ExactMatch compares with known answers, and no row of the val data is a prompt"
    ):
        trainer.fit(CausalLM(model_folder), TextDataModule(write_rows(), val_path=text))


def test_exact_match_of_bare_texts_with_prompts(
    make_trainer: Any, model_folder: str, write_rows: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rows = [{"prompt": "the red", "completion": " book"}, {"prompt": "a", "completion": " lamp"}, {"text": "a cup"}]
    data = TextDataModule(write_rows(rows[:2]), val_path=write_rows(rows[:2], "val.json"))
    trainer = make_trainer(max_steps=1, callbacks=[ExactMatch(max_new_tokens=2)])
    trainer.fit(CausalLM(model_folder), data)
    assert data.splits.prompts("val")[0] == {"prompt": "the red", "question": "the red", "expected": " book"}
    assert "of 2 held-out answers" in caplog.text


@pytest.mark.parametrize(
    ("family", "written"),
    [("gpt_oss", "<|channel|>final<|message|>{}"), ("qwen3", "<think>\n\n</think>\n\n{}")],
)
def test_an_answer_is_compared_with_all_that_the_template_writes_for_it(
    family: str, written: str, make_trainer: Any, tmp_path: Path, write_rows: Any
) -> None:
    rows = [{"instruction": "the red book", "output": "blue cup"}, {"instruction": "a lamp", "output": "书"}]
    data = TextDataModule(write_rows(rows), val_path=write_rows(rows, "val.json"), max_length=512)
    module = CausalLM(
        save_family(family, tmp_path / family), optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)
    )
    trainer = make_trainer(max_epochs=40, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(module, data)
    ExactMatch().on_train_start(trainer, module)  # of a resumed run, which measures at its end alone
    Path(data.splits.sources["val"][0].path).unlink()
    ExactMatch().on_train_end(trainer, module)
    lines = read_lines(Path(trainer.default_root_dir) / VALIDATION_ANSWERS)
    expected = [written.format(row["output"]) for row in rows]
    assert [(line["expected"], line["answer"]) for line in lines] == list(zip(expected, expected, strict=True))
    assert all(line["is_right"] for line in lines)


def test_ends_of_an_answer(other_end: str) -> None:
    module = CausalLM(other_end)
    module.configure_model()
    vocabulary = module.tokenizer.get_vocab()
    assert stop_ids(module.base_model, module.tokenizer) == [vocabulary["<|endoftext|>"], vocabulary["<|im_end|>"]]
    module.base_model.generation_config.eos_token_id = [5, 6]
    assert stop_ids(module.base_model, module.tokenizer)[:2] == [5, 6]
    tokenizer = make_tokenizer()
    body = (
        "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %} END<|im_end|><|endoftext|>\n{% endif %}"
    )
    tokenizer.chat_template = body.replace(" END", "") + "{% endfor %}"
    assert closing_tokens(tokenizer) == ["<|im_end|>", "<|endoftext|>"]
    tokenizer.chat_template = (
        body + "{% endfor %}"
    )  # the turn ends with text: what comes behind it is no end of its own
    assert closing_tokens(tokenizer) == []
    tokenizer.chat_template = "{{ raise_exception('no') }}"
    assert closing_tokens(tokenizer) == []


def test_greedy_means_greedy(model_folder: str, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer("the red book is", return_tensors="pt")["input_ids"]
    wanted = ids
    for _ in range(12):
        wanted = torch.cat([wanted, model(wanted).logits[:, -1:].argmax(-1)], 1)
    asked_for = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "suppress_tokens": wanted[0, -12:].tolist()}
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **asked_for, "do_sample": True, "temperature": 0.7}))
    module = CausalLM(str(folder))
    module.configure_model()
    given = module.base_model.generation_config
    text = tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)
    assert module.answer(["the red book is"], 12) == [text]
    assert module.base_model.generation_config is given
    assert given.repetition_penalty == 9.0


def with_bos(folder: Path) -> str:
    """Let a folder's tokenizer open raw text with ``<|im_start|>``."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    opening = ("<|im_start|>", tokenizer.bos_token_id)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[opening])
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("config", [PromptTuningConfig, PromptEncoderConfig, PrefixTuningConfig])
def test_answers_with_virtual_tokens_are_those_of_one_pass_over_all_tokens(
    model_folder: str, config: type[PromptLearningConfig]
) -> None:
    module = CausalLM(model_folder, peft=config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    module.configure_model()
    prompts, expected = ["the red book", "a lamp under the green cup"], []
    for prompt in prompts:
        ids = module.tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        prompt_length = ids.shape[1]
        for _ in range(8):
            with torch.no_grad(), dense_attention(module.base_model):
                logits = module.model.eval()(input_ids=ids, use_cache=False).logits[:, -1:]
            ids = torch.cat([ids, logits.argmax(-1)], 1)
        expected.append(module.tokenizer.decode(ids[0, prompt_length:], skip_special_tokens=True))
    assert module.answer(prompts, 8) == expected


def test_a_raw_prompt_begins_as_raw_text_does_in_training(
    make_trainer: Any, model_folder: str, tmp_path: Path, write_rows: Any
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(model_folder, folder)
    module = CausalLM(with_bos(folder))
    texts = ["the red book is", "<|im_start|>the red book is"]
    trainer = make_trainer(max_steps=1, callbacks=[SampleGenerations(texts, max_new_tokens=5)])
    data = TextDataModule(write_rows([{"text": texts[0]}]))
    trainer.fit(module, data)
    assert data.splits["train"][0][0][0] == module.tokenizer.bos_token_id
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [line["prompt"] for line in lines] == texts * 2
    assert lines[2]["answer"] == lines[3]["answer"] == module.answer(texts[1:], 5)[0]
    assert module.answer(texts[:1], 5)[0] != lines[2]["answer"]


def test_a_template_without_an_end_ends_the_samples_and_not_the_run(
    make_trainer: Any, model_folder: str, write_rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render_limits, "SECONDS", 0.2)
    module = CausalLM(model_folder)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    module.tokenizer.chat_template = f"{{% if messages[0].content == 'now' %}}{loops}{{% endif %}}{plain}"
    assert module.render_prompt([{"role": "user", "content": "x"}]) == "x"
    trainer = make_trainer(max_steps=1, callbacks=[SampleGenerations(["now"], chat=True)])
    with pytest.warns(UserWarning, match=r"stops asking \(RecipeError: the chat template of .* takes over 0.2 seconds"):
        trainer.fit(module, TextDataModule(write_rows([{"text": "a book"}])))
    assert trainer.global_step == 1


def test_forgetting_is_measured_in_fp32_under_half_precision(
    make_trainer: Any, model_folder: str, tmp_path: Path, write_rows: Any
) -> None:
    texts = [f"the red book {'is under the lamp ' * n}" for n in range(1, 12)]
    module, probe = CausalLM(model_folder), ForgettingProbe(texts)
    make_trainer(max_steps=1, precision="bf16-true", callbacks=[probe]).fit(module, TextDataModule(write_rows()))
    loss, tokens = module.text_loss(texts)
    last = json.loads((tmp_path / "forgetting.jsonl").read_text().splitlines()[-1])
    assert last["tokens"] == tokens > 256
    assert last["loss"] == pytest.approx(float(loss) / tokens, rel=1e-6)
    with pytest.raises(RecipeError, match="the text '' has no token, so that it has no loss"):
        module.text_loss(["a", ""])


def test_draws_follow_the_probabilities() -> None:
    """Of 20,000 draws, each token has its share within four standard deviations; excluded tokens have none."""
    logits = torch.tensor([0.3, 1.1, -0.7, 0.0, 0.9])
    rows, sampling = 20_000, Sampling(temperature=0.8, top_k=4, seed=1)
    processors = sampling.processors(sampling.generators(range(rows)))
    drawn = processors(torch.zeros(rows, 1, dtype=torch.long), logits.repeat(rows, 1)).argmax(-1)
    expected = (logits / 0.8).masked_fill(torch.tensor([False, False, True, False, False]), -torch.inf).softmax(-1)
    share = torch.bincount(drawn, minlength=5) / rows
    assert share[2] == 0
    assert ((share - expected).abs() <= 4 * (expected * (1 - expected) / rows).sqrt()).all()


class AtTheEnd(np.random.Generator):
    """Generator that draws the largest number below 1, which float32 rounds to 1."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def random(self, *_: Any, **__: Any) -> Any:
        return 1 - 2**-53


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_the_largest_number_draws_no_excluded_token(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(generation, "widest_float", lambda _: widest_float(torch.device(device)))
    scores = torch.tensor([[0.3, 1.1, -torch.inf, 0.9, -torch.inf]]).repeat(40, 1)
    scores[:, 0] += torch.linspace(-3, 3, 40)  # totals that round to other numbers
    drawn = SeededDraw([AtTheEnd()] * 40)(torch.zeros(40, 1, dtype=torch.long), scores).argmax(-1)
    assert drawn.tolist() == [3] * 40


class NoFp64(TorchDispatchMode):
    """Device without fp64, as MPS is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float64:
            raise TypeError(f"{func} gives float64")
        return result


def test_a_device_without_fp64_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, sampling = torch.randn(50, 300), Sampling(temperature=1.0, seed=2)
    ids = torch.zeros(50, 1, dtype=torch.long)
    drawn = sampling.processors(sampling.generators(range(50)))(ids, scores).argmax(-1)
    monkeypatch.setattr(generation, "widest_float", lambda device: widest_float(torch.device("mps")))
    with NoFp64():
        same = sampling.processors(sampling.generators(range(50)))(ids, scores).argmax(-1)
    assert same.tolist() == drawn.tolist()


def test_a_model_trains_on_where_an_answer_has_failed(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = CausalLM(model_folder)
    module.configure_model()
    module.train()
    monkeypatch.setattr(module.base_model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        module.answer(["a question"], 4)
    assert all(part.training for part in module.base_model.modules())


@pytest.mark.parametrize("name", ["recurrent_gemma", "rwkv"])
def test_answers_do_not_depend_on_prompts_beside(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding before a prompt changes what these models answer."""
    tiny_config(name, initializer_range=0.3).save_pretrained(tmp_path / name)
    make_tokenizer().save_pretrained(tmp_path / name)
    torch.manual_seed(0)  # with others its answers repeat one token, with or without padding
    module = CausalLM(str(tmp_path / name), init="random")
    module.configure_model()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    prompts = ["a red book and a blue cup on the table", "lamp", "the red book is blue", "cups"]
    alone = [module.answer([prompt], 8)[0] for prompt in prompts]
    assert module.answer(prompts, 8) == alone
    monkeypatch.setattr(architectures, "reads_padding", lambda _: False)
    assert module.answer(prompts, 8) != alone


@pytest.mark.parametrize("config", [None, PromptTuningConfig])
def test_answers_end_at_the_last_learned_position(config: type[PromptLearningConfig] | None, tmp_path: Path) -> None:
    virtual = 0 if config is None else 4
    tiny_config("gpt2", n_positions=16 + virtual, initializer_range=0.3).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    peft = config and config(task_type="CAUSAL_LM", num_virtual_tokens=virtual)
    module = CausalLM(str(tmp_path), init="random", peft=peft)
    module.configure_model()
    prompts = ["a red book and a blue cup", "lamp", "the red book and a blue cup", "cups"]
    lengths = [len(module.tokenizer(prompt)["input_ids"]) for prompt in prompts]
    assert max(lengths) < 16 < max(lengths) + 12, "some end at a position, some at max_new_tokens"
    assert min(lengths) + 12 < 16
    with pytest.warns(UserWarning, match="end at the last of the model's (16|20) positions .* max_new_tokens=12$"):
        alone = [module.ended_answers([prompt], 12)[0] for prompt in prompts]
    assert module.ended_answers(prompts, 12) == alone
    assert {answer.finish_reason for answer in alone} == {"length"}
    with pytest.raises(RecipeError, match=r"a prompt of \d+ tokens leaves none of the (16|20) positions"):
        module.answer(["a lamp under the green cup", "the red book and a blue cup " * 4], 12)

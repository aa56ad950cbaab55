"""Workload of every contestant: one model folder and one list of tokenized rows."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

SHAPES: dict[str, dict[str, int]] = {
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    "0.1b": {
        "hidden_size": 512,
        "intermediate_size": 1792,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 32_000,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
    },
}
"""Model shapes: those of Qwen/Qwen2.5-7B and 0.5B, a smaller one for machines with less memory, and one for tests."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


MAX_LENGTH = 384
"""Length limit of a row in tokens, as in recipes/qwen.yaml."""


class Work(NamedTuple):
    """Files of the workload, which every contestant can read."""

    model: Path
    """Folder with random weights in bf16 and a tokenizer."""
    rows: Path
    """JSON list of rows with ``input_ids`` and ``labels``."""
    lengths: list[tuple[int, int]]
    """Tokens and supervised tokens of each row."""
    layer_weights: int
    """Elements of the linear layers, without adapters and output head."""
    head_weights: int


def prepare(folder: Path, shape: str, data: str, rows: int, device: str = "cpu") -> Work:
    """Write a model with random weights, unless it exists, and the first rows of a data set, tokenized.

    Args:
        folder: folder for all files.
        shape: key of ``SHAPES``.
        data: alpaca-style JSON file.
        rows: number of rows of the file.
        device: device that the weights are drawn on.
    """
    from lit_ft import TextDataModule
    from lit_ft.model.loading import load_tokenizer

    source = json.loads(Path(data).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / f"{shape}-{Path(data).stem}"
    write_model(model, SHAPES[shape], texts_of(source), device)
    chosen, tokens = (folder / f"{model.name}-{rows}{kind}.json" for kind in ("", "-tokens"))
    chosen.write_text(json.dumps(source[:rows], ensure_ascii=False), encoding="utf-8")
    module = TextDataModule(str(chosen), max_length=MAX_LENGTH)
    module.load(load_tokenizer(str(model)))
    samples = module.splits["train"]
    pairs = [samples[i] for i in range(len(samples))]
    tokens.write_text(json.dumps([{"input_ids": ids.tolist(), "labels": labels.tolist()} for ids, labels in pairs]))
    # The first token of a sample is not predicted.
    lengths = [(len(ids), int((labels[1:] != -100).sum())) for ids, labels in pairs]
    return Work(model, tokens, lengths, layer_weights(SHAPES[shape]), head_weights(SHAPES[shape]))


def texts_of(rows: list[dict[str, str]]) -> list[str]:
    """All texts of alpaca-style rows."""
    return [str(row.get(column) or "") for row in rows for column in ("instruction", "input", "output")]


def linear_shapes(shape: dict[str, int]) -> list[tuple[int, int]]:
    """Shape ``(out, in)`` of each linear layer of a decoder layer."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    of_keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    attention = [(hidden, hidden), (of_keys, hidden), (of_keys, hidden), (hidden, hidden)]
    return [*attention, (inner, hidden), (inner, hidden), (hidden, inner)]


def layer_weights(shape: dict[str, int]) -> int:
    """Number of elements of the linear weights of all decoder layers."""
    return shape["num_hidden_layers"] * sum(out * of for out, of in linear_shapes(shape))


def head_weights(shape: dict[str, int]) -> int:
    """Number of elements of the output head."""
    return shape["vocab_size"] * shape["hidden_size"]


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """Train a byte-level BPE tokenizer on texts, with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def write_random_rows(model: Path, rows: int, tokens: int) -> Path:
    """Write rows of random ids, all supervised, as ``lit_ft`` and its peers read them; returns the file's path.

    Args:
        model: folder of a model; ids are its tokenizer's, which are fewer than the model's.
        rows: number of rows.
        tokens: tokens of each row.
    """
    from lit_ft.model.loading import load_tokenizer

    vocabulary = len(load_tokenizer(str(model)))
    draw = random.Random(0)
    ids = [[draw.randrange(vocabulary) for _ in range(tokens)] for _ in range(rows)]
    path = model.parent / f"{model.name}-{rows}x{tokens}.json"
    path.write_text(json.dumps([{"input_ids": row, "labels": row} for row in ids]), encoding="utf-8")
    return path


def write_model(folder: Path, shape: dict[str, int], texts: list[str], device: str = "cpu") -> None:
    """Write a model with random weights in bf16, and a tokenizer trained on the texts, unless they exist.

    Args:
        folder: folder of the model.
        shape: config values of the model, as in ``SHAPES``.
        texts: training texts of the tokenizer.
        device: device that the weights are drawn on; drawing 7 billion takes minutes on a CPU.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    if (folder / "config.json").is_file():
        return
    tokenizer = train_tokenizer(texts, vocab_size=min(16_000, shape["vocab_size"]))
    torch.manual_seed(0)
    config = Qwen2Config(
        **{"tie_word_embeddings": True, **shape},
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    tokenizer.save_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()  # for the contestants

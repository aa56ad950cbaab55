"""The work that every contestant does: one model folder, one list of tokenised rows."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
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
}
"""Shapes of public configs: Qwen/Qwen2.5-0.5B, and a smaller one for machines without the memory."""

LORA = {
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
"""As recipes/qwen.yaml has it, without the dropout: with it, no two losses could be compared."""

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Work:
    """What a contestant is given, as JSON."""

    model: str
    """Folder with random weights in bf16 and a tokenizer."""
    data: str
    """Alpaca-style JSON."""
    micro_batch_size: int
    accumulate: int
    max_length: int = 384

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimiser step."""
        return self.micro_batch_size * self.accumulate

    def to_json(self) -> str:
        """For a command line."""
        return json.dumps(asdict(self))


def prepare(folder: Path, shape: str, data: str, rows: int) -> tuple[str, str]:
    """Write model and rows, unless they are there; returns the model's folder and the rows' file."""
    source = json.loads(Path(data).read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    chosen = folder / f"{Path(data).stem}-{rows}.json"
    chosen.write_text(json.dumps(source[:rows], ensure_ascii=False), encoding="utf-8")
    model = folder / f"{shape}-{Path(data).stem}"
    if not (model / "model.safetensors").is_file():
        texts = [str(row.get(column) or "") for row in source for column in ("instruction", "input", "output")]
        _write_model(model, SHAPES[shape], texts)
    return str(model), str(chosen)


def train_tokenizer(texts: list[str], vocab_size: int) -> Any:
    """A byte-level BPE of the texts, with ChatML."""
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


def _write_model(folder: Path, shape: dict[str, Any], texts: list[str]) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = train_tokenizer(texts, vocab_size=16_000)
    torch.manual_seed(0)
    config = Qwen2Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

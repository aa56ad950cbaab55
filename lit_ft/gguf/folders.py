"""Folders with GGUF files, written atomically and verified: a merged model, or a LoRA adapter and perhaps its base."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lit_callbacks.export.atomic_folder import write_atomically
from lit_callbacks.export.merging import save_merged
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from lit_ft.export.folder_texts import generation_texts
from lit_ft.gguf import WeightType
from lit_ft.gguf.architectures import Family, family_of
from lit_ft.gguf.hyperparameters import context_length
from lit_ft.gguf.llama_server import has_llama
from lit_ft.gguf.ollama import modelfile, ollama_name
from lit_ft.gguf.verification import check_tensors, check_with_llama, tolerance_of
from lit_ft.gguf.vocabulary import special_tokens_of, vocabulary_of
from lit_ft.gguf.weights import ModelWeights
from lit_ft.gguf.writing import AdapterWeights, TokenizerEntries, write_adapter, write_model

MODEL, BASE, ADAPTER = "model-{}.gguf", "base-{}.gguf", "adapter.gguf"
"""Names of the files; with the type of the weights."""

MERGED_DTYPES: dict[WeightType, torch.dtype | None] = {
    "f32": torch.float32,
    "f16": torch.float32,
    "bf16": torch.bfloat16,
    "q8_0": None,
}
"""Dtype that an adapter is merged in, so that weights are rounded once; before Q8_0, that of the base. What llama.cpp
is compared with computes in it too: float16 would round more than llama.cpp does, and overflow in Gemma."""

_BY_DTYPE: dict[torch.dtype, WeightType] = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def check_convertible(skeleton: PreTrainedModel, tokenizer: Tokenizer) -> None:
    """Refuse a model that has no GGUF form, before its weights are read.

    Args:
        skeleton: base model without weights.
        tokenizer: its tokenizer.

    Raises:
        RecipeError: the architecture or the tokenizer has no form in GGUF.
    """
    family = family_of(type(skeleton).__name__, skeleton.config)
    vocabulary_of(tokenizer, max(skeleton.config.vocab_size, len(tokenizer)), family.tokenizer_with_bytes)


@dataclass(frozen=True)
class HuggingFaceModel:
    """A Hugging Face folder that is converted."""

    folder: Path
    tokenizer: Tokenizer

    @cached_property
    def config(self) -> PretrainedConfig:
        """Config of the model."""
        return AutoConfig.from_pretrained(self.folder)

    @cached_property
    def family(self) -> Family:
        """Family of the model."""
        return family_of(self.config.architectures[0], self.config)

    @cached_property
    def ends(self) -> list[int]:
        """Tokens that end an answer; the tokenizer's own first."""
        given = GenerationConfig.from_pretrained(self.folder).eos_token_id
        return special_tokens_of(self.tokenizer, [given] if isinstance(given, int) else list(given or [])).ends

    def write(self, path: Path, name: str, weight_type: WeightType) -> None:
        """Write a GGUF file, and compare its tensors with the folder's."""
        weights = ModelWeights(self.folder, self.config, self.family, weight_type)
        entries = TokenizerEntries(
            vocabulary_of(self.tokenizer, self.config.vocab_size, self.family.tokenizer_with_bytes),
            special_tokens_of(self.tokenizer, self.ends),
            self.tokenizer.chat_template,
        )
        if (positions := context_length(self.config, self.family.has_windows)) < self.config.max_position_embeddings:
            rank_zero_warn(
                f"the model has a sliding window of {positions:,} tokens, which llama.cpp does not compute for it; the "
                f"GGUF file states {positions:,} positions, up to which there is no difference"
            )
        write_model(path, name, weights, entries)
        count = check_tensors(path, weights)
        rank_zero_info(f"{path.name}: {count} tensors read back; they differ by rounding alone")

    def load(self, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The model with its weights, in evaluation mode; in the dtype of its files unless another one is given."""
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=dtype or "auto").eval()

    def check(
        self,
        path: Path,
        weight_type: WeightType,
        reference: Callable[[], PreTrainedModel | PeftModel],
        lora: Path | None = None,
    ) -> None:
        """Let llama.cpp read the files where it is installed, and say what was compared."""
        if has_llama():
            tolerance = tolerance_of(weight_type, self.family)
            report = check_with_llama(path, reference(), self.tokenizer, self.ends, tolerance, lora)
            rank_zero_info(f"GGUF verified: {report}")
        else:
            rank_zero_warn(
                "GGUF: tensors were compared, and llama.cpp was not run: the package xllamacpp is not installed; "
                "pip install -e '.[llama]' to compare log-probabilities and tokens of texts too"
            )


def write_merged_folder(
    folder: Path,
    name: str,
    write_merged: Callable[[Path, torch.dtype | None], object],
    tokenizer: Tokenizer,
    weight_type: WeightType,
) -> None:
    """Write a folder with the GGUF file of a merged model, a Modelfile and a README.

    Args:
        folder: path of the folder; an earlier one is replaced.
        name: name of the model.
        write_merged: function that writes the merged model as a Hugging Face folder, in a dtype (None: its own), and
            verifies it; the folder is removed at the end.
        tokenizer: its tokenizer.
        weight_type: type of the weights in the file.

    Raises:
        MergeFailed: the file is not the model; nothing is written.
        RecipeError: the model has no form in GGUF.
    """
    file = MODEL.format(weight_type)

    def write(temporary: Path) -> None:
        model = HuggingFaceModel(temporary / "merged", tokenizer)
        write_merged(model.folder, MERGED_DTYPES[weight_type])
        model.write(temporary / file, name, weight_type)
        model.check(temporary / file, weight_type, model.load)
        shutil.rmtree(model.folder)
        _write_texts(temporary, name, model, file, None)

    write_atomically(folder, write, None)


def write_adapter_folder(
    folder: Path,
    name: str,
    save_peft: Callable[[Path], object],
    build_base: Callable[[], PreTrainedModel],
    tokenizer: Tokenizer,
    weight_type: WeightType | None,
) -> None:
    """Write a folder with the GGUF file of a LoRA adapter, a Modelfile and a README.

    Args:
        folder: path of the folder; an earlier one is replaced.
        name: name of the adapter.
        save_peft: function that writes the adapter as PEFT does; its folder is removed at the end.
        build_base: function that builds the base model with its weights, not quantized.
        tokenizer: tokenizer of both.
        weight_type: type of the base model's GGUF file that is written beside the adapter's; None writes one in the
            base's dtype for the comparison by llama.cpp, where that is installed, and removes it.

    Raises:
        MergeFailed: the files are not the model; nothing is written.
        RecipeError: the base model or the adapter has no form in GGUF.
    """

    def write(temporary: Path) -> None:
        peft, model = temporary / "peft", HuggingFaceModel(temporary / "base", tokenizer)
        save_peft(peft)
        base = build_base().eval()
        base_type = weight_type or _BY_DTYPE[base.dtype]
        save_merged(base, model.folder, tokenizer, texts=generation_texts(base, tokenizer), text_only=True)
        del base  # the comparison reads it anew, in the precision of the file
        base_file, adapter_file = temporary / BASE.format(base_type), temporary / ADAPTER
        if weight_type is not None or has_llama():
            model.write(base_file, "base", base_type)
        weights = AdapterWeights(peft, model.config, model.family)
        write_adapter(adapter_file, name, weights)
        count = check_tensors(adapter_file, weights)
        rank_zero_info(f"{ADAPTER}: {count} tensors read back; they differ by rounding alone")

        def reference() -> PeftModel:
            return PeftModel.from_pretrained(model.load(MERGED_DTYPES[base_type]), peft).eval()

        model.check(base_file, base_type, reference, adapter_file)
        if weight_type is None:
            base_file.unlink(missing_ok=True)
        _write_texts(temporary, name, model, None if weight_type is None else base_file.name, ADAPTER)
        for source in (model.folder, peft):
            shutil.rmtree(source)

    write_atomically(folder, write, None)


def _write_texts(folder: Path, name: str, model: HuggingFaceModel, file: str | None, adapter: str | None) -> None:
    text = modelfile(file, adapter, model.tokenizer, model.ends)
    (folder / "Modelfile").write_text(text, encoding="utf-8")
    if "TEMPLATE is left out" in text:
        rank_zero_warn(
            "Modelfile: TEMPLATE is left out, because the chat template is none that lit_ft has in Go's language; "
            "llama-server reads the template in the GGUF file itself"
        )
    options = f"-m {file or 'base.gguf'}" + (f" --lora {adapter}" if adapter else "")
    lines = (
        *(f"# {name}", "", "With llama.cpp:", "", f"    llama-server {options} --jinja", ""),
        *("With Ollama (not run when this was written):", "", f"    ollama create {ollama_name(name)} -f Modelfile"),
        f"    ollama run {ollama_name(name)}",
    )
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")

"""Ends of answers that a frozen head cannot write, as those of the chat template in Llama 3's base models."""

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.model.architecture import Architecture
from lit_ft.model.generation import closing_tokens

_ZERO = 1e-10
"""A row of the head with no larger weight gives a logit of zero, in any dtype."""


def warn(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn where the chat template ends answers with a token whose row of the frozen head is zero.

    Its logit is zero, whatever an adapter changes in the layers before.

    Args:
        model: base model, with the adapter's layers in it.
        tokenizer: its tokenizer, with the chat template of the training.
    """
    head = model.get_output_embeddings()
    if head is None or any(parameter.requires_grad for parameter in head.parameters()):
        return
    weight, ends = head.weight, closing_tokens(tokenizer)
    if weight.is_meta or weight.ndim != 2 or not weight.is_floating_point():  # not there yet, sharded, or packed
        return
    rows = {token: row for token in ends if (row := tokenizer.convert_tokens_to_ids(token)) < len(weight)}
    if zero := {token: row for token, row in rows.items() if weight[row].abs().max() < _ZERO}:
        rank_zero_warn(
            f"answers end with {', '.join(zero)} in the chat template, for which the head of {model.name_or_path!r} is "
            "zero and stays frozen, so that they will hardly end; train its row (peft.LoraConfig: "
            f"trainable_token_indices: {_both_sides(model, list(zero.values()))}), or take the model's chat version"
        )


def _both_sides(model: PreTrainedModel, rows: list[int]) -> str:
    """Value of ``trainable_token_indices`` by which rows of the embeddings and of the head train."""
    if Architecture.of(model.config).is_tied:
        return str(rows)
    sides = (model.get_input_embeddings(), model.get_output_embeddings())
    names = [name.rpartition(".")[2] for name, module in model.named_modules() if module in sides]
    return f"{{{', '.join(f'{name}: {rows}' for name in names)}}}"

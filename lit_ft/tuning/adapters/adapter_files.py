"""Files of an adapter, as ``PeftModel.from_pretrained`` reads them."""

from collections.abc import Callable
from pathlib import Path

from peft import PeftModel
from torch import Tensor, nn

from lit_ft.errors import NotFinite
from lit_ft.model.files.finite_weights import not_finite
from lit_ft.tuning import lora_init
from lit_ft.tuning.lora_init import LoraInitState


def save(
    model: PeftModel,
    skeleton: Callable[[], nn.Module],
    start: LoraInitState | None,
    has_own_embeddings: bool,
    folder: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write an adapter for the base as it is published.

    Args:
        model: model with the adapter, or this rank's layers of it.
        skeleton: function that builds the full model without weights.
        start: state of the adapter's init.
        has_own_embeddings: whether the adapter holds embeddings of added tokens, beside the base's.
        folder: path of the adapter's folder.
        state_dict: the weights that train, and buffers of modules that PEFT saves whole, by their names in ``model``;
            None takes them from there.

    Raises:
        NotFinite: a weight is not finite.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if (bad := next(not_finite(trained if state_dict is None else state_dict), None)) is not None:
        raise NotFinite(f"{bad} is not finite: the adapter is not written to {folder}")
    whole, has_prompts = model, model.active_peft_config.is_prompt_learning
    if state_dict is not None and (has_prompts or not state_dict.keys() <= model.state_dict().keys()):
        # PEFT looks at layers, some of which may be on other ranks, and computes virtual tokens from what a rank holds.
        whole = skeleton()
        if has_prompts:
            assert isinstance(whole, PeftModel)
            _give_prompts(whole, model, state_dict)
    if start is not None and start["taken"]:
        lora_init.save_as_plain_lora(whole, start, has_own_embeddings, folder, state_dict)
    else:
        # PEFT would write the full embeddings because they have grown.
        whole.save_pretrained(
            folder, state_dict=state_dict, save_embedding_layers=False if has_own_embeddings else "auto"
        )


def _give_prompts(whole: PeftModel, model: PeftModel, state_dict: dict[str, Tensor]) -> None:
    """Give a model without weights those of its virtual tokens, which PEFT computes anew to save them."""
    for name, encoder in whole.prompt_encoder.items():
        start = f"prompt_encoder.{name}."
        own = {key.removeprefix(start): value for key, value in state_dict.items() if key.startswith(start)}
        encoder.load_state_dict(own, assign=True)
        whole.prompt_tokens[name] = model.prompt_tokens[name]

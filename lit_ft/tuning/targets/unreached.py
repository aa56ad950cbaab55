"""Parts of a model that get no gradient from text: they stay as they are, whatever the recipe trains.

DDP ends a run whose trained weights get no gradient, and a weight decay would change them under some strategies only.
"""

from collections.abc import Iterable

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lit_ft.errors import RecipeError

_WHY = {
    "indexer": "chooses tokens, and a choice has no gradient",
    "pooler": "is beside the language model's head",
    **dict.fromkeys(
        ("encoder_attn", "encoder_attn_layer_norm"), "attends to an encoder, which text alone does not run"
    ),
    **dict.fromkeys(
        ("embed_tokens_extend", "image_encoder", "visual_projection", "vision_embed_tokens"), "reads images or sound"
    ),
    **dict.fromkeys(
        ("expert_bias", "e_score_correction_bias"), "helps to choose experts, and a choice has no gradient"
    ),
    "z_L_init": "is a constant",
}
"""Names of modules and weights, of all causal LMs of transformers 5.24 whose packed batches were compared."""
ARCHITECTURES = frozenset(
    """
    afmoe axk2 big_bird deepseek_v32 deepseek_v4 dots3_note dots3_note_text ernie4_5_moe fuyu git glm_moe_dsa hrm_text
    hy_v4 laguna phi4_multimodal qwen4_exp qwen4_exp_text whisper
    """.split()
)
"""Architectures that have some of them. transformers freezes single weights itself, until it reads them from files."""


def names_within(names: Iterable[str]) -> dict[str, str]:
    """Names of modules or weights that are part of an unreached module, and that module's last name."""
    parts = ((name, next((part for part in name.split(".") if part in _WHY), None)) for name in names)
    return {name: part for name, part in parts if part is not None}


def describe(parts: Iterable[str]) -> str:
    """Text on unreached modules, from their last names: what they are and why they get no gradient."""
    return "; ".join(f"{part}, which {_WHY[part]}" for part in sorted(set(parts)))


def freeze(model: nn.Module) -> None:
    """Freeze the weights that would train but get no gradient, with a line.

    Raises:
        RecipeError: no other weights would train.
    """
    trains = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unreached = names_within(trains)
    if not unreached:
        return
    if unreached.keys() == trains.keys():
        raise RecipeError(
            f"model.trainable names weights alone that get no gradient: {describe(unreached.values())}; name others"
        )
    for name in unreached:
        trains[name].requires_grad_(False)
    rank_zero_info(f"{len(unreached)} weights are frozen, as they get no gradient: {describe(unreached.values())}")

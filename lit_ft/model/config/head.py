"""What a base model computes from its final hidden states: logits of tokens, or the score of a text."""

from typing import Literal

from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from lit_ft.errors import RecipeError

Head = Literal["logits", "score"]
CLASSES = {"logits": AutoModelForCausalLM, "score": AutoModelForSequenceClassification}
"""Class of transformers that reads a model, by its head."""


def with_head(config: PretrainedConfig, head: Head) -> PretrainedConfig:
    """Config of a model that scores texts, where that is asked for; changed in place.

    Raises:
        RecipeError: transformers has no such model of the architecture, or it has been trained for several labels.
    """
    name, kinds = f"model.pretrained={config.name_or_path!r}", config.architectures or []
    is_classifier = bool(kinds) and all("SequenceClassification" in kind for kind in kinds)
    if head == "logits" and is_classifier:
        raise RecipeError(
            f"{name} is a {kinds[0]}, which scores texts and has no head for tokens; name a causal language model. "
            "lit_ft.RewardLM trains a reward model, lit_ft.RewardModel takes its scores"
        )
    if head == "logits":
        return config
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise RecipeError(
            f"{name}: transformers has no model of {config.model_type} that scores texts "
            "(AutoModelForSequenceClassification); take another architecture, e.g. qwen3, llama, mistral or gemma3_text"
        )
    if is_classifier and config.num_labels != 1:
        raise RecipeError(
            f"{name} tells apart {config.num_labels} labels, and a reward model has one score; name a causal language "
            "model, or a reward model"
        )
    config.num_labels = 1
    return config

"""The text part of multimodal models (images, sound): such a model is trained as its text part."""

from lit_callbacks.export.base_files import BaseFiles
from lit_callbacks.internals.transformers_internals import read_the_text_part
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel


def config_of_text(config: PretrainedConfig) -> PretrainedConfig:
    """Config of the text part of a model that transformers has a class of its own for; else the same config.

    It is the model's ``text_config``, changed in place.
    """
    if "text_config" not in config.sub_configs or _is_text_alone(config):
        return config
    text = config.get_text_config()
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    read_the_text_part(text.model_type)
    text.tie_word_embeddings, text.name_or_path = config.tie_word_embeddings, config.name_or_path
    text.dtype = text.dtype or config.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def _is_text_alone(config: PretrainedConfig) -> bool:
    """Whether a causal LM with sub-configs is no part of a larger model, e.g. one that drafts tokens for another."""
    own = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return own is not None and own.config_class is type(config) and "ConditionalGeneration" not in own.__name__


def text_class(pretrained: str) -> str | None:
    """Name of the class that reads a checkpoint's text part, where ``AutoModelForCausalLM`` reads all of it."""
    config = AutoConfig.from_pretrained(pretrained, trust_remote_code=False)
    if (text := config_of_text(config)) is config:
        return None
    of_text = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    return None if MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) is of_text else of_text.__name__


def describe_unused(files: BaseFiles | None, model: PreTrainedModel) -> str:
    """Sentence on what a model's files hold that the model does not use; empty if it uses all of it."""
    if files is None or not (unused := files.unused_parts(model)):
        return ""
    return (
        f"{len(unused):,} of {len(files.tensors):,} tensors not used in training{files.summary(unused)}; a merged "
        "model takes them over as they are"
    )

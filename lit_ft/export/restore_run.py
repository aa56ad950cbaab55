"""Reconstruction of a run's module and data from its recipe and a checkpoint."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.checkpointing.storage.checkpoint_io import AnyCheckpointIO
from lit_ft.data.text.chat_template import set_chat_template
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import LIBRARY_ERRORS, RecipeError, base_may_have_moved
from lit_ft.export.model_card import Recipe
from lit_ft.model.files.fingerprint import check_same_base
from lit_ft.model.spec import ModelSpec
from lit_ft.recipe.parse_errors import unwrap_class_error
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import RunFolder
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.spec import TrainingSpec


def module_of(run: RunFolder) -> CausalLM:
    """Build a run's module, without weights.

    Raises:
        RecipeError: the module is not a ``CausalLM``, or its base model is not there.
    """
    advice = f"run this in the folder of the training, or write its present place into {run.config}"
    with base_may_have_moved(advice):
        return _module_of(run.recipe())


def _module_of(config: Recipe) -> CausalLM:
    if config["seed_everything"] is not False:
        os.environ["PL_GLOBAL_SEED"] = str(config["seed_everything"])  # random base weights are drawn again
    set_parsing_settings(subclasses_enabled=[QuantizationConfigMixin])
    parser = RecipeParser()
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    parsed = parser.parse_object({"model": config["model"]})
    try:
        module = parser.instantiate_classes(parsed).model
    except LIBRARY_ERRORS as error:
        raise unwrap_class_error(error) from error
    if not isinstance(module, CausalLM):
        raise RecipeError(f"the run's model is a {type(module).__name__}; export writes lit_ft.CausalLM runs")
    data = config["data"].get("init_args", {})
    set_chat_template(module.tokenizer, data.get("chat_template"), data.get("template_options"))
    return module


def restore(
    module: CausalLM, checkpoint: Path, base_of: Callable[[TrainingSpec], ModelSpec] = lambda spec: spec.base
) -> None:
    """Build the model of a run's module, and load the weights of a checkpoint.

    Args:
        module: as ``module_of`` gives it.
        checkpoint: .ckpt file.
        base_of: gives the base model, which may be one that is loaded already.

    Raises:
        RecipeError: the checkpoint does not fit the module, or the base model has changed.
    """
    state = AnyCheckpointIO().load_checkpoint(checkpoint, map_location="cpu", weights_only=True)
    check_same_base(state.get("base"), module.base_fingerprint, f"the checkpoint {str(checkpoint)!r}")
    module.start = state.get("adapter_start")
    module.spec = replace(module.spec, base=base_of(module.spec))
    module.configure_model()
    module.on_load_checkpoint(state)
    module.load_state_dict(state["state_dict"], strict=False)


def data_of(data: Mapping[str, object], command: str) -> TextDataModule:
    """Build a run's data module, without its rows.

    Args:
        data: class and options, as in the run's ``config.yaml``.
        command: command that reads it.

    Raises:
        RecipeError: the data module is not a ``TextDataModule``, or an option is wrong.
    """
    parser = RecipeParser()
    parser.add_subclass_arguments(LightningDataModule, "data", required=True)
    module = parser.instantiate_classes(parser.parse_object({"data": data})).data
    if not isinstance(module, TextDataModule):
        raise RecipeError(f"the run's data is a {type(module).__name__}; {command} reads lit_ft.TextDataModule")
    return module

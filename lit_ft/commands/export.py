"""``export``: a run's checkpoint as a Hugging Face folder."""

import os
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.adapter_merger import is_peft, save_adapter, save_merged
from transformers.utils.quantization_config import QuantizationConfigMixin

from lit_ft.causal_lm import CausalLM
from lit_ft.commands.recipe_parser import RecipeParser
from lit_ft.data.templates import set_chat_template
from lit_ft.errors import RecipeError
from lit_ft.reporting import show_progress_on_terminals_only
from lit_ft.run_folder import RunFolder


def run(arguments: list[str]) -> None:
    """Parse and export."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft export", description=(export.__doc__ or "").split("\n")[0])
    parser.add_function_arguments(export, as_group=False, skip={"merge"})
    parser.add_argument("--merge", action="store_true", help=_MERGE)
    export(**parser.parse_args(arguments[1:]).as_dict())


_MERGE = "Merge the adapter into the base model; full fine-tuning needs it too."


def export(
    run: str,
    out: str | None = None,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    checkpoint: str = "last",
) -> None:
    """Write a run's adapter, or its merged model, as a folder that Hugging Face tools load.

    Args:
        run: the run's folder.
        out: where to write; RUN/adapter or RUN/merged by default.
        merge: merge the adapter into the base model; full fine-tuning needs it too.
        dtype: of the merged weights; the base's by default.
        checkpoint: a .ckpt file of the run; last is its newest.
    """
    folder = RunFolder(Path(run))
    if not folder.config.is_file():
        raise RecipeError(
            f"run={run!r} holds no config.yaml; name the folder of a run, e.g. checkpoints/runs/quickstart/..."
        )
    config = yaml.safe_load(folder.config.read_text(encoding="utf-8"))
    file = folder.last_checkpoint() if checkpoint == "last" else Path(checkpoint)
    if not file.is_file():
        raise RecipeError(f"checkpoint={checkpoint!r} does not exist; those of the run are in {folder.checkpoints}")
    module = rebuild(config, file)
    model: Any = module.model
    if dtype is not None and not merge:
        raise RecipeError(f"dtype={dtype} is for merged weights; add --merge, or leave it out for the adapter")
    try:
        if merge:
            destination = Path(out) if out else folder.merged
            save_merged(model, destination, module.tokenizer, getattr(torch, dtype) if dtype else None)
        elif is_peft(model):
            destination = Path(out) if out else folder.adapter
            save_adapter(model, destination, module.tokenizer)
        else:
            raise RecipeError("the run trained all weights, so there is no adapter; add --merge for the model")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    rank_zero_info(f"{file} -> {destination}")


def rebuild(config: dict[str, Any], checkpoint: Path) -> CausalLM:
    """A run's module with the weights of one of its checkpoints.

    Args:
        config: the run's ``config.yaml``.
        checkpoint: a .ckpt file.

    Raises:
        RecipeError: the module is another class, or the checkpoint does not fit it.
    """
    if config["seed_everything"] is not False:
        os.environ["PL_GLOBAL_SEED"] = str(config["seed_everything"])  # random base weights are drawn again
    set_parsing_settings(subclasses_enabled=[QuantizationConfigMixin])
    parser = RecipeParser()
    parser.add_subclass_arguments(LightningModule, "model", required=True)
    module = parser.instantiate_classes(parser.parse_object({"model": config["model"]})).model
    if not isinstance(module, CausalLM):
        raise RecipeError(f"the run's model is a {type(module).__name__}; export writes lit_ft.CausalLM runs")
    set_chat_template(module.tokenizer, config["data"].get("init_args", {}).get("chat_template"))
    module.configure_model()
    state = torch.load(checkpoint, map_location="cpu", weights_only=True)
    module.on_load_checkpoint(state)
    module.load_state_dict(state["state_dict"], strict=False)
    return module

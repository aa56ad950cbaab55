"""Weights that are given to a module before it has built its model."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from peft import PeftModel
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError


class GivenWeightsModule(LightningModule):
    """LightningModule that builds its model for weights that are loaded into it."""

    model: PreTrainedModel | PeftModel | None

    def setup(self, stage: str) -> None:
        """Refuse a model that was assigned to the attribute ``model``, which nothing has prepared for packed batches.

        Raises:
            RecipeError: there is one.
        """
        super().setup(stage)
        if self.model is not None and not hasattr(self, "_packed"):
            raise RecipeError(
                f"CausalLM.model is a {type(self.model).__name__} that was assigned; CausalLM reads its model itself: "
                "write yours by its save_pretrained(FOLDER), with its tokenizer, and name the folder as pretrained"
            )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load weights; those of processes that Lightning has started (`ddp_notebook`) come back to an empty module."""
        if self.model is None and any(name.startswith("model.") for name in state_dict):
            self.configure_model()
        return super().load_state_dict(state_dict, *args, **kwargs)

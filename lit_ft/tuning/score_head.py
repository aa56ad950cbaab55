"""Training of the head that scores texts, which trains in full beside an adapter."""

from lit_callbacks.protocols import HasScore
from peft import PeftConfig
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn


def let_peft_train(peft: PeftConfig) -> None:
    """Set the task by which peft trains and saves the head beside an adapter; the config is changed in place.

    For this task peft adds the names of heads to ``modules_to_save``, also that of another architecture's. A saved
    adapter has them already, so they are left out here.
    """
    names = [name for name in peft.to_dict()["modules_to_save"] or () if name not in ("classifier", "score")]
    vars(peft)["modules_to_save"] = names or None
    peft.task_type = "SEQ_CLS"


def keep_in_float32(model: HasScore) -> None:
    """Keep the head that trains beside an adapter in float32, in which no step is lost, in a model of any dtype."""
    assert isinstance(model.score, ModulesToSaveWrapper)
    for head in model.score.modules_to_save.values():
        head.float().register_forward_pre_hook(_in_own_dtype)


def _in_own_dtype(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (inputs[0].to(next(head.parameters()).dtype),)

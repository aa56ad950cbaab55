"""Options of a tuning method under which the same weights compute something else, e.g. LoRA's ``lora_alpha``.

Checkpoints record them: names and shapes of the weights do not tell that such an option has changed.
"""

import json
import re
from collections.abc import Mapping

from peft import PeftModel
from torch import nn

from lit_ft.errors import RecipeError

Options = Mapping[str, object]
"""Values of options by name, as JSON has them."""

_DECISIVE = re.compile(
    r"alpha|rslora|^scaling$"  # factors
    r"|seed|prng_key"  # of projections, masks and places that are drawn again, not saved
    r"|token_indices|^feedforward_modules$|^fan_in_fan_out$|^layer_replication$"  # places
    r"|^coft$|^eps$|cayley|^apply_GS$|^variant$|^group_size$|^topk$|idwt|^wavelet_family$|^act_fn$"  # formulas
)
"""Names of the options. Others change names or shapes of weights, or how they are initialized or trained."""


def options_of(model: nn.Module | None) -> Options:
    """Options of a model's adapter that a checkpoint must hold; none of a model without an adapter."""
    if not isinstance(model, PeftModel):
        return {}
    given = model.active_peft_config.to_dict()
    decisive = {name: given[name] for name in sorted(given) if _DECISIVE.search(name)}
    options: Options = json.loads(json.dumps(decisive, default=sorted))  # PEFT has sets where recipes have lists
    return options


def check_same(model: nn.Module | None, saved: Options) -> None:
    """Refuse a checkpoint whose weights were trained under other options; versions of PEFT only add some.

    Raises:
        RecipeError: an option has another value.
    """
    own = options_of(model)
    if changed := [name for name in saved if name in own and own[name] != saved[name]]:
        was, now = (", ".join(f"{name}={one[name]!r}" for name in changed) for one in (saved, own))
        raise RecipeError(
            f"the checkpoint's adapter was trained with {was}, and model.peft has {now}, under which the same weights "
            "compute something else; resume with the peft that wrote it"
        )

"""Quantised bases: which tuning methods work on them."""

from peft import PeftConfig

from lit_ft.errors import RecipeError


def check_quantisable(peft: PeftConfig) -> None:
    """Refuse methods that do not compute on a quantised base what they do on the dequantised one.

    Raises:
        RecipeError: it names a method that does.
    """
    method, init = peft.peft_type.value, getattr(peft, "init_lora_weights", True)
    if method not in _ON_QUANTISED:
        why = f"{method} works on the base's own weights, which are packed"
    elif isinstance(init, str) and init.startswith(_CHANGING_THE_BASE):
        why = f"init_lora_weights={init!r} changes the base's weights, which would be rounded again"
    else:
        return
    raise RecipeError(
        f"model.peft: {why} when model.quantization is set; take peft.LoraConfig with its default init, or leave "
        "model.quantization out"
    )


_ON_QUANTISED = {
    *("LORA", "IA3", "OFT", "BOFT", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "LN_TUNING", "MISS", "RANDLORA", "VBLORA"),
    *("HIRA", "ROAD", "SHIRA", "BEFT", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
}
"""Methods that were compared on an NF4 base and on the same base dequantised (tests/test_methods.py)."""
_CHANGING_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

"""Quantised bases: which tuning methods work on them."""

from peft import PeftConfig

from lit_ft.errors import RecipeError


def check_quantisable(peft: PeftConfig) -> None:
    """Refuse methods that do not compute on a quantised base what they do on the dequantised one.

    Raises:
        RecipeError: it names a method that does.
    """
    if (method := peft.peft_type.value) not in _ON_QUANTISED:
        raise RecipeError(
            f"model.peft: {method} works on the base's own weights, which are packed when model.quantization is set; "
            "take peft.LoraConfig, or leave model.quantization out"
        )


_ON_QUANTISED = {
    *("LORA", "IA3", "OFT", "BOFT", "VERA", "PVERA", "FOURIERFT", "WAVEFT", "LN_TUNING", "MISS", "RANDLORA", "VBLORA"),
    *("HIRA", "ROAD", "SHIRA", "BEFT", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"),
}
"""Methods that were compared on an NF4 base and on the same base dequantised (tests/test_methods.py)."""

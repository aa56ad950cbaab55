"""Messages of a real parser about values, shortened."""

from typing import Literal

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from lit_ft.recipe.value_errors import reasons

PARSER = ArgumentParser(exit_on_error=False)
PARSER.add_argument("--whole", type=int | None)
PARSER.add_argument("--number", type=float)
PARSER.add_argument("--either", type=int | float | None)
PARSER.add_argument("--dtype", type=Literal["auto", "float32", "bfloat16"])
PARSER.add_argument("--precision", type=Literal[16, 32] | Literal["16-mixed", "32-true"] | Literal["16"] | None)
PARSER.add_argument("--switch", type=bool | Literal["selective"])
PARSER.add_argument("--seed", type=bool | int)
PARSER.add_argument("--names", type=list[str] | None)
PARSER.add_argument("--columns", type=dict[str, str] | None)
PARSER.add_argument("--betas", type=tuple[float, float])
PARSER.add_argument("--merge", type=bool)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("whole", "2k", "'2k' is no whole number; write 2000"),
        ("whole", "512.0", "'512.0' is no whole number; write 512"),
        ("whole", "1e3", "'1e3' is no whole number; write 1000"),
        ("whole", "512.5", "'512.5' is no whole number"),
        ("whole", "auto", "'auto' is no whole number"),
        ("seed", "abc", "'abc' is no whole number"),
        ("number", "10%", "'10%' is no number; write 0.1"),
        ("number", "2.5 %", "'2.5 %' is no number; write 0.025"),
        ("number", "0,0001", "'0,0001' is no number; write 0.0001"),
        ("number", "nan", "'nan' is no number"),
        ("either", "none", "'none' is no number"),
        ("dtype", "bf16", "'bf16' is none of auto, float32, bfloat16; did you mean bfloat16?"),
        ("dtype", "bfloat61", "'bfloat61' is none of auto, float32, bfloat16; did you mean bfloat16?"),
        ("dtype", "BFloat16", "'BFloat16' is none of auto, float32, bfloat16; did you mean bfloat16?"),
        ("dtype", "x", "'x' is none of auto, float32, bfloat16"),
        ("precision", "fp16", "'fp16' is none of 16-mixed, 32-true, 16; did you mean 16-mixed?"),
        ("whole", "{a: 1}", "{'a': 1} is no whole number"),
        ("names", "q_proj", "'q_proj' is no list; write one: [q_proj]"),
        ("columns", "[a, b]", "['a', 'b'] is no mapping; give names and values: {name: value}"),
        ("columns", "rope", "'rope' is no mapping; give names and values: {name: value}"),
        ("betas", "0.9,0.95", "'0.9,0.95' is no list; write one: [0.9,0.95]"),
        ("merge", "yes please", "'yes please' is neither true nor false"),
        ("switch", "ture", "'ture' is none of selective, true, false; did you mean true?"),
    ],
)
def test_a_value_and_what_was_meant(option: str, value: str, said: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        PARSER.parse_args([f"--{option}={value}"])
    assert reasons(str(refused.value)).removeprefix(f'Parser key "{option}": ') == said

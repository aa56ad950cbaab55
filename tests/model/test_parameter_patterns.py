from transformers.distributed.parallel_utils import replace_layer_number_by_wildcard

from lit_ft.model.parameter_patterns import layers_by_wildcard

NAMES = {
    "model.layers.3.mlp": "model.layers.*.mlp",
    "model.layers.12.mlp.experts.0": "model.layers.*.mlp.experts.*",
    "model.layers.7": "model.layers.*",
    "lm_head": "lm_head",
}


def test_names_as_plans_write_them() -> None:
    assert {name: layers_by_wildcard(name) for name in NAMES} == NAMES


def test_it_is_what_transformers_does() -> None:
    assert {name: replace_layer_number_by_wildcard(name) for name in NAMES} == NAMES

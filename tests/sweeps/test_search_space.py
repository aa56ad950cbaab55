"""Values of ``--vary`` and their combinations."""

from lit_ft.sweeps.search_space import Range, Variation, combinations, parse_variations, probes


def test_values_are_yaml_and_ranges_have_two_dots() -> None:
    parsed = parse_variations([
        "model.peft.target_modules=[q_proj, v_proj],all-linear",
        "optimizer.lr=1e-5..1e-3",
        "model.peft.r=4..64",
        "model.neftune_alpha=null,5",
        "data.path=../a.json,../b.json",
        "config=a.yaml,b.yaml",
    ])  # fmt: skip
    assert parsed == [
        Variation("model.peft.target_modules", ('["q_proj", "v_proj"]', "all-linear")),
        Variation("optimizer.lr", Range(1e-5, 1e-3)),
        Variation("model.peft.r", Range(4, 64)),
        Variation("model.neftune_alpha", ("null", "5")),
        Variation("data.path", ("../a.json", "../b.json")),
        Variation("config", ("a.yaml", "b.yaml")),
    ]
    assert Range(1e-5, 1e-3).is_logarithmic
    assert not Range(0.0, 0.1).is_logarithmic
    assert not Range(1, 5).is_logarithmic


def test_a_grid_has_each_combination_and_probes_have_each_value() -> None:
    variations = parse_variations(["a=1,2", "b=x,y"])
    wanted = [("1", "x"), ("1", "y"), ("2", "x"), ("2", "y")]
    assert [tuple(values.values()) for values in combinations(variations)] == wanted
    assert [tuple(values.values()) for values in probes(variations)] == [("1", "x"), ("2", "x"), ("1", "y")]

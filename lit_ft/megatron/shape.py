"""Sizes and options of a model, from its Hugging Face config, as far as Megatron can express them."""

from dataclasses import dataclass

from transformers import PretrainedConfig

from lit_ft.errors import RecipeError
from lit_ft.megatron.families import FAMILIES, Family, Key, Part, model_keys
from lit_ft.model.architecture import Architecture


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model that has a table, and the options that change what it computes."""

    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    """Number of key-value heads."""
    head_dim: int
    vocabulary: int
    positions: int
    norm_epsilon: float
    rotary_base: float
    rope_factor: float | None
    """Factor of Llama 3's scaled rotary frequencies; None without scaling."""
    window: int | None
    """Number of tokens that a token attends to, itself included; None for all before it."""
    is_tied: bool
    experts: int
    """Number of experts in a layer; 0 in dense models."""
    experts_per_token: int
    normalizes_experts: bool
    """Whether the probabilities of a token's experts are scaled to sum to 1."""

    @property
    def family(self) -> Family:
        """Table of the model's weights."""
        return FAMILIES[self.model_type]

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by their names in the tables."""
        return {
            "hidden": self.hidden,
            "ffn": self.ffn,
            "expert_ffn": self.ffn,
            "queries": self.heads * self.head_dim,
            "keys": self.groups * self.head_dim,
            "head": self.head_dim,
            "experts": self.experts,
            "vocabulary": self.vocabulary,
        }

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """Shape of a Hugging Face tensor."""
        sizes = self.sizes
        return tuple(sizes[name] for name in part.sizes)

    def all_keys(self) -> list[Key]:
        """All weights of the model."""
        return list(model_keys(self.family, self.layers, self.experts, self.is_tied))

    @classmethod
    def of(cls, config: PretrainedConfig, where: str) -> "ModelShape":
        """Sizes of a config.

        Args:
            config: config of a model.
            where: name of its folder, for messages.

        Raises:
            RecipeError: the architecture has no table, or an option of the config has no counterpart in Megatron.
        """
        if config.model_type not in FAMILIES:
            raise RecipeError(
                f"{where}: model_type={config.model_type!r} has no table of Megatron's weights; those with one are "
                f"{', '.join(FAMILIES)}"
            )
        options = config.to_dict()
        _check_options(options, where)
        rope = options["rope_parameters"]
        known = Architecture.of(config)
        experts = options.get("num_local_experts") or options.get("num_experts") or 0
        has_experts = FAMILIES[config.model_type].has_experts
        return cls(
            model_type=config.model_type,
            layers=options["num_hidden_layers"],
            hidden=options["hidden_size"],
            ffn=options.get("moe_intermediate_size") or options["intermediate_size"],
            heads=options["num_attention_heads"],
            groups=known.kv_heads,
            head_dim=known.head_dim,
            vocabulary=options["vocab_size"],
            positions=options["max_position_embeddings"],
            norm_epsilon=options["rms_norm_eps"],
            rotary_base=rope["rope_theta"],
            rope_factor=rope["factor"] if rope["rope_type"] == "llama3" else None,
            window=options.get("sliding_window") if config.model_type in ("mistral", "mixtral") else None,
            is_tied=known.is_tied,
            experts=experts if has_experts else 0,
            experts_per_token=known.experts_per_token if has_experts else 1,
            normalizes_experts=options.get("norm_topk_prob", True),
        )


LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Constants of Llama 3's scaled rotary frequencies that Megatron has in its code (``rope_utils``)."""


def _check_options(options: dict[str, object], where: str) -> None:
    """Refuse options of a config that change what the model computes and that Megatron's arguments cannot express."""
    rope = options["rope_parameters"]
    assert isinstance(rope, dict)
    expected = {
        "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
    }
    given = {name: options[name] for name in expected if options.get(name) not in (None, expected[name])}
    if rope["rope_type"] not in ("default", "llama3"):
        given["rope_type"], expected["rope_type"] = rope["rope_type"], "default or llama3"
    if rope["rope_type"] == "llama3":
        given |= {name: rope[name] for name, value in LLAMA3_ROPE.items() if rope[name] != value}
        expected |= LLAMA3_ROPE
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        given["partial_rotary_factor"], expected["partial_rotary_factor"] = rope["partial_rotary_factor"], 1.0
    theta = rope["rope_theta"]
    if theta != int(theta):
        given["rope_theta"], expected["rope_theta"] = theta, "a whole number"
    for name, value in given.items():
        raise RecipeError(
            f"{where}: config.json: {name}={value!r} is not {expected[name]!r}, and Megatron's model would compute "
            "other values; convert a model without it"
        )

"""Names of weights in Megatron's files, which depend on the format and on the layer specification.

The tables use the names of the local specification. Transformer Engine's fuses norms with the layer that follows them.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

LayerSpec = Literal["te", "local"]
"""Megatron's layer specification: ``--transformer-impl transformer_engine`` or ``local``."""
Format = Literal["torch_dist", "torch"]
"""Megatron's ``--ckpt-format``; ``torch`` is the legacy format."""

_FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Norms by their names in the local specification, and where they are fused."""
_LINEAR = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2))\.weight\d*")


@dataclass(frozen=True)
class Naming:
    """Names of a checkpoint that is written."""

    format: Format
    spec: LayerSpec
    has_experts: bool
    grouped: bool
    """Whether a rank's experts are one module (``--moe-grouped-gemm``)."""

    def within_layer(self, name: str, expert: int | None) -> str:
        """Name of a weight within its layer; in ``torch_dist`` without the number of the expert.

        Args:
            name: name in the table.
            expert: number of the expert on its rank; None if the weight is not an expert's.
        """
        for own, fused in _FUSED.items():
            if name.startswith(own) and self._fuses(own):
                return name.replace(own, fused)
        if expert is None:
            return name
        if self.format == "torch_dist":
            return name.replace("experts.{expert}", "experts.experts")
        if self.grouped:
            return f"{name.replace('.{expert}', '')}{expert}"
        return name.replace("{expert}", f"local_experts.{expert}")

    def _fuses(self, norm: str) -> bool:
        """Whether a norm is fused: in ``torch_dist`` both specifications write the fused names.

        The norm before experts is fused in names of the local specification alone (megatron-core 0.16.1).
        """
        if norm == "pre_mlp_layernorm." and self.has_experts:
            return self.format == "torch_dist" and self.spec == "local"
        return self.format == "torch_dist" or self.spec == "te"


def extra_state(name: str) -> str | None:
    """Name of Transformer Engine's state of a linear layer, which is loaded with its weight; None if it has none."""
    match = _LINEAR.fullmatch(name)
    return f"{match[1]}._extra_state" if match else None


class Location(NamedTuple):
    """Weight that a name in a file stands for."""

    name: str
    """Name in the table: ``{expert}`` for the number of an expert."""
    layer: int | None
    """Number of the layer in its module, None if the name has none."""
    expert: int | None
    """Number of the expert in its module, None if the name has none."""


_IN_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.*)")
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<rest>.*)"),
    re.compile(r"mlp\.experts\.experts\.(?:(?P<expert>\d+)\.)?(?P<rest>.*)"),
    re.compile(r"mlp\.experts\.(?P<rest>linear_fc\d\.weight)(?P<expert>\d+)"),
)


def parse(name: str) -> Location:
    """Translate a name in a file, of any format and specification."""
    match = _IN_LAYER.fullmatch(name.removeprefix("module."))
    if match is None:
        return Location(name.removeprefix("module."), None, None)
    layer, rest = int(match[1]) if match[1] else None, match[2]
    for own, fused in _FUSED.items():
        rest = rest.replace(fused, own)
    for pattern in _EXPERT_NAMES:
        if of_expert := pattern.fullmatch(rest):
            expert = int(of_expert["expert"]) if of_expert["expert"] else None
            return Location(f"mlp.experts.{{expert}}.{of_expert['rest']}", layer, expert)
    return Location(rest, layer, None)

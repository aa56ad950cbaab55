"""Bottleneck adapters (Houlsby et al. 2019, arXiv:1902.00751) as a PEFT method, which PEFT itself does not have.

A small two-layer network is added to the output of each target layer: ``y + s up(act(down(y)))``. With
``target_modules: [o_proj, down_proj]`` these are the outputs of attention and feed-forward block (Houlsby); with
``[down_proj]``, of the feed-forward block alone (Pfeiffer et al. 2021, arXiv:2005.00247).

Importing this module registers the method with PEFT, so that ``PeftModel.from_pretrained`` reads its adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn
from transformers.activations import ACT2FN

from lit_ft.model.quantization import LinearLayer


class _Type(str, Enum):  # noqa: UP042  # as PEFT's own
    """PEFT type outside PEFT's enumeration, which cannot be extended."""

    BOTTLENECK = "BOTTLENECK"


BOTTLENECK = _Type.BOTTLENECK


@dataclass
class BottleneckConfig(PeftConfig):
    """Bottleneck adapters after linear layers."""

    target_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Layers after which adapters sit, e.g. [o_proj, down_proj]."}
    )
    exclude_modules: list[str] | str | None = field(default=None, metadata={"help": "Layers to leave out."})
    bottleneck_size: int = field(default=64, metadata={"help": "Width of the hidden layer."})
    activation: str = field(default="gelu", metadata={"help": "Non-linearity, by its name in transformers."})
    scaling: float = field(default=1.0, metadata={"help": "Factor on the adapter's output."})
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Layers that train in full."})
    init_weights: bool = field(default=True, metadata={"help": "Start as the identity."})

    def __post_init__(self) -> None:
        """Set the PEFT type.

        Raises:
            ValueError: ``bottleneck_size`` or ``activation`` is invalid.
        """
        super().__post_init__()
        self.peft_type = BOTTLENECK
        if self.bottleneck_size < 1:
            raise ValueError(f"bottleneck_size={self.bottleneck_size} must be at least 1")
        if self.activation not in ACT2FN:
            raise ValueError(f"activation={self.activation!r} is none of {', '.join(sorted(ACT2FN))}")


class BottleneckLayer(nn.Module, BaseTunerLayer):
    """Linear layer followed by adapters."""

    adapter_layer_names = ("bottleneck_down", "bottleneck_up")
    other_param_names = ()
    # Attributes of BaseTunerLayer, which has no type hints.
    get_base_layer: Callable[[], nn.Linear]
    set_adapter: Callable[..., None]
    active_adapters: list[str]
    disable_adapters: bool
    _move_adapter_to_device_of_base_layer: Callable[[str], None]

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: BottleneckConfig) -> None:
        """Wrap ``base_layer``, whose outputs have ``out_features``."""
        super().__init__()
        self.base_layer = base_layer
        self.bottleneck_down, self.bottleneck_up = nn.ModuleDict(), nn.ModuleDict()
        self.configs: dict[str, BottleneckConfig] = {}
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: BottleneckConfig) -> None:
        """Add an adapter; its last layer is initialized with zeros, so that it starts as the identity."""
        width = self.get_base_layer().out_features
        down, up = nn.Linear(width, config.bottleneck_size), nn.Linear(config.bottleneck_size, width)
        if config.init_weights:
            nn.init.normal_(down.weight, std=1e-2)  # Houlsby et al., section 2.1
            for zero in (down.bias, up.weight, up.bias):
                nn.init.zeros_(zero)
        self.bottleneck_down[adapter_name], self.bottleneck_up[adapter_name] = down, up
        self.configs[adapter_name] = config
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Compute the layer's output ``(..., out_features)`` with its active adapters."""
        y = self.base_layer(x, *args, **kwargs)
        for name in [] if self.disable_adapters else self.active_adapters:
            if name in self.bottleneck_down:
                config, down, up = self.configs[name], self.bottleneck_down[name], self.bottleneck_up[name]
                hidden = ACT2FN[config.activation](down(y.to(down.weight.dtype)))
                y = y + (config.scaling * up(hidden)).to(y.dtype)
        return y

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse to merge.

        Raises:
            ValueError: always, because an activation lies between the adapter's layers.
        """
        raise ValueError(
            "BOTTLENECK adapters are not linear and cannot be merged into the base; use the adapter as it is"
        )

    def unmerge(self) -> None:
        """Do nothing, because adapters are never merged."""


class BottleneckModel(BaseTuner):
    """Tuner that adds bottleneck adapters to a model."""

    prefix = "bottleneck_"
    tuner_layer_cls = BottleneckLayer
    target_module_mapping: ClassVar = {
        kind: ["o_proj", "down_proj"] for kind in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3")
    }

    def _create_and_replace(
        self,
        peft_config: BottleneckConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **_: object,
    ) -> None:
        if isinstance(target, BottleneckLayer):
            target.update_layer(adapter_name, peft_config)
            return
        if not isinstance(target, LinearLayer) or not isinstance(getattr(target, "weight", None), torch.Tensor):
            raise ValueError(f"{current_key} is a {type(target).__name__}; adapters sit after linear layers")
        self._replace_module(parent, target_name, BottleneckLayer(target, adapter_name, peft_config), target)


PEFT_TYPE_TO_CONFIG_MAPPING[BOTTLENECK] = BottleneckConfig
PEFT_TYPE_TO_TUNER_MAPPING[BOTTLENECK] = BottleneckModel
PEFT_TYPE_TO_PREFIX_MAPPING[BOTTLENECK] = "bottleneck_"

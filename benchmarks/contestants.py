"""Contestants: lit_ft, a plain training loop, and the peers with their default and their best settings."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple


class Contestant(NamedTuple):
    """A trainer and its settings."""

    key: str
    """Name for ``--only``."""
    name: str
    """Name in the table."""
    runner: str
    """Module of ``benchmarks.peers`` that runs it."""
    environment: str | None
    """Name of its environment in ``benchmarks.peers.environments``; None is the environment of the comparison."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options of the runner."""
    joins_samples: bool = False
    """Whether it packs samples itself, so that its steps have other samples than the job's."""


def contestants(device: str, row_tokens: int, attention: str = "sdpa") -> list[Contestant]:
    """All contestants for a device.

    Args:
        device: ``cpu`` or ``cuda``; the best settings differ.
        row_tokens: length limit of a packed sequence in tokens, about the tokens of an optimizer step.
        attention: attention function of transformers for the peers' best settings on CUDA. ``sdpa`` needs no package
            and takes cuDNN's kernel on Hopper; ``flash_attention_2`` needs one, or a kernel from the hub.
    """
    is_cuda = device == "cuda"
    flash = {"attn_implementation": attention} if is_cuda else {}
    liger = {"use_liger_kernel": True} if is_cuda else {}
    compiled = {"arguments": ["--model.compile=true"]}
    return [
        Contestant("lit_ft", "lit_ft", "lit_ft_command", None),
        Contestant("lit_ft_compiled", "lit_ft, compiled", "lit_ft_command", None, compiled),
        Contestant("bare", "bare loop, without Lightning", "bare_loop", None),
        Contestant("trainer", "transformers.Trainer + PEFT, bf16=True", "transformers_trainer", "transformers"),
        Contestant(
            "trainer_bf16",
            "transformers.Trainer + PEFT, bf16 weights",
            "transformers_trainer",
            "transformers",
            {"weights": "bfloat16", "bf16": False},
        ),
        Contestant(
            "trainer_best",
            "transformers.Trainer + PEFT, bf16 weights, padding-free" + f", {attention}, Liger" * is_cuda,
            "transformers_trainer",
            "transformers",
            {"weights": "bfloat16", "bf16": False, "padding_free": True, **flash, **liger},
        ),
        Contestant("trl", "TRL SFTTrainer, padded", "trl_sft", "trl"),
        Contestant(
            "trl_packed",
            "TRL SFTTrainer, packed",
            "trl_sft",
            "trl",
            {"packing": True, "max_length": row_tokens, "per_device_train_batch_size": 1},
            joins_samples=True,
        ),
        Contestant(
            "trl_best",
            "TRL SFTTrainer, bf16 weights, padding-free, no checkpointing" + f", {attention}, Liger" * is_cuda,
            "trl_sft",
            "trl",
            {
                "weights": "bfloat16",
                "padding_free": True,
                "max_length": None,
                "gradient_checkpointing": False,
                **flash,
                **liger,
            },
        ),
        Contestant("litgpt", "LitGPT finetune_lora, bf16-true", "litgpt_lora", "litgpt"),
        Contestant("llamafactory", "LLaMA-Factory", "llamafactory_sft", "llamafactory"),
        Contestant(
            "llamafactory_best",
            "LLaMA-Factory, no checkpointing" + ", Liger" * is_cuda,
            "llamafactory_sft",
            "llamafactory",
            {"disable_gradient_checkpointing": True, "enable_liger_kernel": is_cuda},
        ),
        Contestant(
            "torchtune",
            "torchtune lora_finetune_single_device" + ", logits in one piece" * (not is_cuda),
            "torchtune_lora",
            "torchtune",
            # Its default, a chunked loss, takes minutes per step on a CPU.
            {} if is_cuda else {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}},
        ),
    ]

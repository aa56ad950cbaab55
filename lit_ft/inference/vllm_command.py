"""The ``vllm serve`` command that serves the same models as ``serve``, for large loads."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from peft import LoraConfig, PeftModel
from transformers import PretrainedConfig

from lit_ft.export.adapter_folders import adapter_folder
from lit_ft.inference.opening import BASE, OpenedModel
from lit_ft.model.spec import ModelSpec
from lit_ft.run.folder import RunFolder

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for --max-lora-rank."""


def vllm_command(opened: Mapping[str, OpenedModel], paths: Mapping[str, str]) -> str:
    """Commands that serve the same models, with the exports that they need first.

    Args:
        opened: models by name, the shared base among them.
        paths: path of each model but the base, as it was given to ``serve``.
    """
    adapted = {name: model.model for name, model in opened.items() if isinstance(model.model, PeftModel)}
    whole = [path for name, path in paths.items() if name not in adapted]
    commands = [_of_adapters(opened, paths, adapted)] if adapted else []
    return " ; ".join([*commands, *_of_whole_models(whole)])


def _of_whole_models(paths: Sequence[str]) -> list[str]:
    """Commands for models that are no adapters, each in a server of its own."""
    runs = [path for path in paths if RunFolder(Path(path)).config.is_file()]
    served = [f"{path.rstrip('/')}/merged" if path in runs else path for path in paths]
    return [
        *(f"python -m lit_ft export --run {shlex.quote(path)} --merge" for path in runs),
        *(f"vllm serve {shlex.quote(folder)}" for folder in served),
    ]


def _of_adapters(opened: Mapping[str, OpenedModel], paths: Mapping[str, str], adapted: Mapping[str, PeftModel]) -> str:
    """Command that serves all adapters over their base, or what to do where vLLM does not."""
    folders = {name: adapter_folder(Path(paths[name])) for name in adapted}
    for name, model in adapted.items():
        if reason := _unsupported(model):
            option = "--run" if folders[name] is None else "--adapter"
            return (
                f"vLLM does not take the adapter of {name} ({reason}); merge it: python -m lit_ft export {option} "
                f"{shlex.quote(paths[name])} --merge --out {name}-merged ; vllm serve {name}-merged"
            )
    templates = {name: opened[name].tokenizer.chat_template for name in adapted}
    if len({str(template) for template in templates.values()}) > 1:
        return (
            f"vLLM renders all conversations by one chat template, and those of {', '.join(templates)} differ; serve "
            "each alone, and the line has its template"
        )
    rank = max(_rank(model) for model in adapted.values())
    places = {name: folder or Path(paths[name]) / "adapter" for name, folder in folders.items()}
    modules = [f"{name}={place}" for name, place in places.items()]
    base = opened[BASE] if BASE in opened else next(iter(opened.values()))
    command = ["vllm", "serve", base.pretrained, "--served-model-name", BASE, "--enable-lora"]
    if overrides := _config_overrides(base):
        command += ["--hf-overrides", json.dumps(overrides)]
    name, template = next(iter(templates.items()))
    if template != ModelSpec(base.pretrained, base.pretrained).tokenizer.chat_template:  # with defaults of its own, too
        command += ["--chat-template", str(places[name] / "chat_template.jinja")]
    command += ["--max-lora-rank", str(min(one for one in _RANKS if one >= rank)), "--lora-modules", *modules]
    missing = [path for name, path in paths.items() if name in folders and folders[name] is None]
    before = "".join(f"python -m lit_ft export --run {shlex.quote(path)} ; " for path in missing)
    return before + shlex.join(command)


def _config_overrides(base: OpenedModel) -> dict[str, object]:
    """Values of a base's config that are not those of its config.json, complete, by their names there."""
    if not base.config_overrides:
        return {}
    config, names = base.base.config, [*base.config_overrides, "max_position_embeddings"]  # scaling changes these too
    values = config.to_dict()
    read = {name: values[name] for name in names if name in values}
    of_file, _ = PretrainedConfig.get_config_dict(base.pretrained)
    return {"text_config": read} if isinstance(of_file.get("text_config"), dict) else read


def _unsupported(model: PeftModel) -> str | None:
    """Reason why vLLM does not take an adapter; None if it does."""
    config = next(iter(model.peft_config.values()))
    if not isinstance(config, LoraConfig):
        return f"the method is {config.peft_type.value}, not LORA"
    if _rank(model) > _RANKS[-1]:
        return f"rank {_rank(model)} is over {_RANKS[-1]}"
    options = {
        "modules_to_save": config.modules_to_save,
        "trainable_token_indices": config.trainable_token_indices,
        "target_parameters": config.target_parameters,
        "rank_pattern": config.rank_pattern,  # vLLM scales all layers by lora_alpha / r, without a word
        "alpha_pattern": config.alpha_pattern,
        "use_dora": config.use_dora,
        "bias": config.bias != "none",
        "lora_bias": config.lora_bias,
        "kasa_config": config.kasa_config,
        "use_bdlora": config.use_bdlora,
    }
    return next((name for name, is_set in options.items() if is_set), None)


def _rank(model: PeftModel) -> int:
    config = next(iter(model.peft_config.values()))
    return max([config.r, *config.rank_pattern.values()]) if isinstance(config, LoraConfig) else 0

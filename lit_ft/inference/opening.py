"""A model that answers, opened from a run, an adapter's folder, a model's folder or a hub id."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate, set_chat_template
from lit_ft.errors import RecipeError
from lit_ft.export.adapter_folders import Adapter, base_of, check_unchanged, load_adapters, make_room
from lit_ft.export.restore_run import rebuild
from lit_ft.model import loading
from lit_ft.model.spec import ModelSpec
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.tuning.lora_init import LoraInitState


@dataclass(frozen=True)
class OpenedModel:
    """A model with weights in evaluation mode, its tokenizer and its chat template."""

    model: PreTrainedModel | PeftModel
    base: PreTrainedModel
    """Hugging Face model inside PEFT's wrapper, or the model itself."""
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    name: str
    """What was opened, for a line of output."""
    init_state: LoraInitState | None = None
    """State of an adapter's init that has changed the base's weights in memory."""

    @property
    def pretrained(self) -> str:
        """Folder or hub id of the base model."""
        return str(self.base.config.name_or_path)

    def check_adapter(self) -> None:
        """Refuse a model whose adapter cannot be switched off.

        Raises:
            RecipeError: it has no adapter, or its adapter's init has changed the base.
        """
        if not isinstance(self.model, PeftModel):
            raise RecipeError(
                f"{self.name} has no adapter to switch off; compare with its base by `chat` on each of the two"
            )
        if self.init_state is not None and self.init_state["taken"]:
            raise RecipeError(
                f"{self.name}: the adapter's init has changed the base's weights in memory, so the base alone is not "
                "there; export the adapter, and open its folder"
            )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Context in which the base model answers alone; no second copy of it is needed."""
        self.check_adapter()
        assert isinstance(self.model, PeftModel)
        with self.model.disable_adapter():
            yield


def open_model(
    path: str, ckpt_path: str = LAST, base: str | None = None, chat_template: str | None = None
) -> OpenedModel:
    """Open a model for answers.

    Args:
        path: folder of a run, of an adapter or of a model, or a hub id.
        ckpt_path: checkpoint of a run: ``last``, ``best`` or a path.
        base: base model of an adapter's folder; None takes the one that it records.
        chat_template: in place of the tokenizer's, or of the run's; as ``data.chat_template``.

    Raises:
        RecipeError: there is no such model, it has no chat template, or its files do not fit each other.
    """
    folder = Path(path).expanduser()
    is_run = RunFolder(folder).config.is_file()
    if base is not None and (is_run or not _has_adapter(folder)):
        raise RecipeError(f"base={base!r} is for an adapter's folder, and {path!r} is none; leave it out")
    if ckpt_path != LAST and not is_run:
        raise RecipeError(
            f"ckpt_path={ckpt_path!r} chooses a checkpoint of a run, and {path!r} is no run; leave it out"
        )
    if is_run:
        return _open_run(RunFolder(folder), ckpt_path, chat_template)
    if _has_adapter(folder):
        return _open_adapter(Adapter.parse(str(folder)), base, chat_template)
    spec = ModelSpec(path, path)
    spec.skeleton()
    return _opened(spec.build("sdpa"), spec, path, chat_template)


def _has_adapter(folder: Path) -> bool:
    return any((one / "adapter_config.json").is_file() for one in (folder, folder / "adapter"))


def _open_run(run: RunFolder, ckpt_path: str, chat_template: str | None) -> OpenedModel:
    file, recipe = run.chosen_checkpoint(ckpt_path), run.recipe()
    module = rebuild(recipe, file)
    assert module.model is not None
    data = recipe["data"].get("init_args", {})
    options = data.get("template_options")
    return _opened(module.model, module.spec.base, str(file), chat_template, options, module.start)


def _open_adapter(adapter: Adapter, named: str | None, chat_template: str | None) -> OpenedModel:
    spec = base_of(adapter, named)
    check_unchanged(Path(spec.pretrained).expanduser())
    skeleton = loading.skeleton(spec.pretrained)
    make_room(skeleton, spec.tokenizer)
    adapter.check(skeleton, spec.fingerprint())
    base = spec.build("sdpa")
    make_room(base, spec.tokenizer)
    return _opened(load_adapters(base, [adapter]), spec, str(adapter.folder), chat_template)


def _opened(
    model: PreTrainedModel | PeftModel,
    spec: ModelSpec,
    name: str,
    chat_template: str | None,
    options: dict[str, object] | None = None,
    init_state: LoraInitState | None = None,
) -> OpenedModel:
    set_chat_template(spec.tokenizer, chat_template)
    template = ChatTemplate(spec.tokenizer, options)
    if torch.accelerator.is_available() and not spec.is_quantized:
        model.to(torch.accelerator.current_accelerator())
    model.eval()
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    return OpenedModel(model, base, spec.tokenizer, template, name, init_state)

"""A model that answers, opened from a run, an adapter's folder, a model's folder or a hub id."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.data.text.chat_template import ChatTemplate, set_chat_template
from lit_ft.errors import RecipeError, option_called
from lit_ft.export.adapter_folders import (
    Adapter,
    about_base,
    adapter_folder,
    base_of,
    check_base_config,
    check_unchanged,
    load_adapters,
    resize_to_tokenizer,
)
from lit_ft.export.model_card import Recipe
from lit_ft.export.restore_run import module_of, restore
from lit_ft.model import loading
from lit_ft.model.config.overrides import Overrides
from lit_ft.model.generation import dense_implementation
from lit_ft.model.spec import ModelSpec
from lit_ft.run.folder import LAST, RunFolder
from lit_ft.training.spec import TrainingSpec
from lit_ft.tuning.lora_init import LoraInitState, changes_base, init_of


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
    untrained: ModelSpec | None = None
    """Base model of a run, as it was before training."""
    config_overrides: Overrides | None = None
    """Values in place of those of the base's config.json."""
    has_template: bool = True
    """False where the tokenizer has no chat template, and ``plain`` stands in for it."""

    @property
    def pretrained(self) -> str:
        """Folder or hub id of the base model."""
        return str(self.base.config.name_or_path)

    @property
    def is_adapted(self) -> bool:
        """Whether the model has an adapter."""
        return isinstance(self.model, PeftModel)

    @property
    def can_switch_off(self) -> bool:
        """Whether the base model answers once the adapter is switched off."""
        if not isinstance(self.model, PeftModel) or self._init_has_changed_base:
            return False
        return not changes_base(self.model.active_peft_config)

    @property
    def _init_has_changed_base(self) -> bool:
        return self.init_state is not None and bool(self.init_state["taken"])

    def check_adapter(self) -> None:
        """Refuse a model whose adapter cannot be switched off.

        Raises:
            RecipeError: it has no adapter, or its adapter's init has changed the base.
        """
        if not isinstance(self.model, PeftModel):
            raise RecipeError(
                f"{self.name} has no adapter to switch off; compare with its base by `chat` on each of the two"
            )
        if self.can_switch_off:
            return
        if self._init_has_changed_base:
            raise RecipeError(
                f"{self.name}: the adapter's init has changed the base's weights in memory, so the base alone is not "
                "there; export the adapter, and open its folder"
            )
        raise RecipeError(
            f"{self.name}: the adapter changes the base's weights in memory, so the base alone is not there; compare "
            "with its base by `chat` on each of the two"
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Context in which the base model answers alone; no second copy of it is needed."""
        self.check_adapter()
        assert isinstance(self.model, PeftModel)
        with self.model.disable_adapter():
            yield


class SharedBase:
    """A base model that several adapters share: its weights are read once, each adapter has modules of its own."""

    def __init__(self) -> None:
        self._first: ModelSpec | None = None
        self._loaded: PreTrainedModel | None = None

    def of_run(self, spec: TrainingSpec) -> ModelSpec:
        """Base model of a run: the shared one, unless the run trains or changes the base's own weights."""
        peft = spec.tuning.peft
        has_own_weights = peft is None or changes_base(peft) or init_of(peft).startswith("loftq")
        return spec.base if has_own_weights else self.of(spec.base)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Base model that builds on the shared weights, which the first one reads.

        Raises:
            RecipeError: it is another base than the first one, or in another form.
        """
        if self._first is None:
            # The copies differ in their tokens, so the shared model has none added.
            self._first, self._loaded = spec, replace(spec, added_tokens=(), added_special_tokens=()).build()
        first = self._first
        forms = [
            (one.fingerprint(), one.dtype, str(one.quantization), one.config_overrides or None) for one in (first, spec)
        ]
        if forms[0] != forms[1]:
            raise RecipeError(
                f"{spec.pretrained!r} and {first.pretrained!r} are not the same base in the same form (dtype "
                f"{spec.dtype} and {first.dtype}, model.quantization {_method(spec)} and {_method(first)}, "
                "model.config_overrides "
                f"{json.dumps(spec.config_overrides)} and {json.dumps(first.config_overrides)}); models that are "
                "opened together share one base; start a server for each"
            )
        return replace(spec, loaded=self._loaded)

    def alone(self, like: OpenedModel) -> OpenedModel | None:
        """The shared base without any adapter, with the tokenizer and template of a model; None if none is shared."""
        if self._first is None:
            return None
        base = self.of(self._first).build(loading.DENSE)
        _place(base, self._first.is_quantized)
        overrides = self._first.config_overrides
        return OpenedModel(
            base, base, like.tokenizer, like.template, self._first.pretrained, config_overrides=overrides
        )


def open_together(
    paths: Sequence[str], ckpt_path: str = LAST, base: str | None = None, chat_template: str | None = None
) -> dict[str, OpenedModel]:
    """Open several models for answers at once; adapters share one base, which is ``base`` among them.

    Args:
        paths: folders of runs, adapters or models, or hub ids; as ``open_model``.
        ckpt_path: checkpoint of the runs: ``last`` or ``best``, or a path where there is one run.
        base: base model of adapters' folders; None takes the one that each records.
        chat_template: as ``open_model``.

    Returns:
        The models by name: the last part of a path, a run's for its ``adapter`` folder.

    Raises:
        RecipeError: one cannot be opened, two have the same name, or the adapters' bases differ.
    """
    shared, opened = SharedBase(), dict[str, OpenedModel]()
    for path in paths:
        folder = Path(path).expanduser().resolve()
        name = folder.parent.name if folder.name == "adapter" else folder.name
        if name in opened or name == BASE:
            raise RecipeError(f"{path!r} would be served as {name!r}, which is taken; rename its folder")
        opened[name] = open_model(path, ckpt_path, base, chat_template, shared)
    alone = shared.alone(next(iter(opened.values())))
    return ({} if alone is None else {BASE: alone}) | opened


BASE = "base"
"""Name of the shared base among models that are opened together."""


def open_model(
    path: str,
    ckpt_path: str = LAST,
    base: str | None = None,
    chat_template: str | None = None,
    shared: SharedBase | None = None,
    needs_template: bool = True,
) -> OpenedModel:
    """Open a model for answers.

    Args:
        path: folder of a run, of an adapter or of a model, or a hub id.
        ckpt_path: checkpoint of a run: ``last``, ``best`` or a path.
        base: base model of an adapter's folder; None takes the one that it records.
        chat_template: in place of the tokenizer's, or of the run's; as ``data.chat_template``.
        shared: base whose weights the adapter shares with others; None reads them for this one.
        needs_template: whether a tokenizer without a chat template is refused; otherwise ``plain`` stands in for it.

    Raises:
        RecipeError: there is no such model, it has no chat template, or its files do not fit each other.
    """
    folder = Path(path).expanduser()
    is_run = RunFolder(folder).config.is_file()
    adapter = None if is_run else adapter_folder(folder)
    if base is not None and adapter is None:
        raise RecipeError(f"base={base!r} is for an adapter's folder, and {path!r} is none; leave it out")
    if ckpt_path != LAST and not is_run:
        raise RecipeError(
            f"ckpt_path={ckpt_path!r} chooses a checkpoint of a run, and {path!r} is no run; leave it out"
        )
    chosen = _TemplateChoice(chat_template, needs_template)
    if is_run:
        return _open_run(RunFolder(folder), ckpt_path, chosen, shared)
    if adapter is not None:
        return _open_adapter(Adapter(adapter), base, chosen, shared)
    with _model_at(path) as spec:
        spec.skeleton()
        return _opened(spec.build(loading.DENSE), spec, path, chosen)


def base_opener(opened: OpenedModel) -> Callable[[], OpenedModel] | None:
    """Function that reads the base model of a run anew, without keeping ``opened`` alive; None unless it is a run.

    For runs whose base is not in memory: those that train all weights, or whose init has changed the base.
    """
    if opened.untrained is None:
        return None
    spec = replace(opened.untrained, loaded=None)
    tokenizer, template, has_template = opened.tokenizer, opened.template, opened.has_template

    def open_base() -> OpenedModel:
        model = spec.build(loading.DENSE)
        _place(model, spec.is_quantized)
        return OpenedModel(model, model, tokenizer, template, spec.pretrained, has_template=has_template)

    return open_base


def open_tokenizer(
    path: str, chat_template: str | None, base: str | None = None
) -> tuple[PreTrainedTokenizerBase, ChatTemplate | None]:
    """Tokenizer and chat template of what ``open_model`` opens, without weights; None for a tokenizer without template.

    Raises:
        RecipeError: there is no such model.
    """
    folder, options = Path(path).expanduser(), None
    if RunFolder(folder).config.is_file():
        tokenizer = module_of(RunFolder(folder)).tokenizer
        options = RunFolder(folder).recipe()["data"].get("init_args", {}).get("template_options")
    elif (adapter := adapter_folder(folder)) is not None:
        tokenizer = base_of(Adapter(adapter), base).tokenizer
    else:
        with _model_at(path) as spec:
            tokenizer = spec.tokenizer
    set_chat_template(tokenizer, chat_template)
    return tokenizer, ChatTemplate(tokenizer, options) if tokenizer.chat_template else None


@contextmanager
def _model_at(path: str) -> Iterator[ModelSpec]:
    """Context in which errors about a model's folder or hub id name the path that was given."""
    if (run := RunFolder.of_checkpoint(Path(path).expanduser())) is not None:
        raise RecipeError(f"path={path!r} is a checkpoint; give its run, {str(run.root)!r}, and --ckpt_path {path}")
    run = RunFolder(Path(path).expanduser().parent)
    if not Path(path).expanduser().exists() and run.config.is_file():
        raise RecipeError(
            f"path={path!r}: the run has not written it yet; its newest checkpoint is {run.chosen_checkpoint(LAST)}, "
            f"which opens by the run's folder {str(run.root)!r}"
        )
    with option_called("model.pretrained", "path"):
        yield ModelSpec(path, path)


@dataclass(frozen=True)
class _TemplateChoice:
    """Chat template in place of the tokenizer's own or the run's, and what is done where there is none."""

    given: str | None
    is_needed: bool

    def set_on(self, tokenizer: PreTrainedTokenizerBase, of_run: str | None) -> bool:
        """Set the template of a tokenizer; returns whether it has one, other than the stand-in."""
        set_chat_template(tokenizer, self.given or of_run)
        has_template = bool(tokenizer.chat_template)
        if not has_template and not self.is_needed:
            set_chat_template(tokenizer, "plain")
        return has_template


def _open_run(run: RunFolder, ckpt_path: str, chosen: _TemplateChoice, shared: SharedBase | None) -> OpenedModel:
    file, module = run.chosen_checkpoint(ckpt_path), module_of(run)
    _refuse_scores(module.spec.base, str(run.root))
    restore(module, file, *([] if shared is None else [shared.of_run]))
    assert module.model is not None
    data = run.recipe()["data"].get("init_args", {})
    opened = _opened(module.model, module.spec.base, str(file), chosen, data)
    return replace(opened, init_state=module.start, untrained=module.spec.base)


def _open_adapter(
    adapter: Adapter, named: str | None, chosen: _TemplateChoice, shared: SharedBase | None
) -> OpenedModel:
    spec = base_of(adapter, named)
    _refuse_scores(spec, str(adapter.folder))
    with about_base(adapter, named):
        check_base_config(spec, [adapter])
        check_unchanged(Path(spec.pretrained).expanduser())
        adapter.check(spec)
        sharing = shared if not changes_base(adapter.config) else None
        base = (spec if sharing is None else sharing.of(spec)).build(loading.DENSE)
    resize_to_tokenizer(base, spec.tokenizer)
    return _opened(load_adapters(base, [adapter]), spec, str(adapter.folder), chosen)


def _refuse_scores(spec: ModelSpec, name: str) -> None:
    if spec.head == "score":
        raise RecipeError(
            f"{name!r} is a reward model, which scores texts and writes none; its scores are those of "
            "lit_ft.RewardModel (docs/preferences.md)"
        )


def _opened(
    model: PreTrainedModel | PeftModel, spec: ModelSpec, name: str, chosen: _TemplateChoice, data: Recipe | None = None
) -> OpenedModel:
    """Model, ready for answers; ``data`` has the run's options of its data."""
    data = data or {}
    has_template = chosen.set_on(spec.tokenizer, data.get("chat_template"))
    template = ChatTemplate(spec.tokenizer, data.get("template_options"))
    _place(model, spec.is_quantized)
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel)
    base.set_attn_implementation(dense_implementation(base))  # a run's model is set to packed batches
    return OpenedModel(
        *(model, base, spec.tokenizer, template, name),
        config_overrides=spec.config_overrides,
        has_template=has_template,
    )


def _method(spec: ModelSpec) -> str:
    return spec.form().quantization or "none"


def _place(model: PreTrainedModel | PeftModel, is_quantized: bool) -> None:
    """Move a model to the accelerator, in evaluation mode; a quantized one is there already."""
    # Tensors that models share stay shared: only their data moves.
    if torch.accelerator.is_available() and not is_quantized:
        model.to(torch.accelerator.current_accelerator())
    model.eval()

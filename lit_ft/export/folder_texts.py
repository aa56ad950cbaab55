"""Text files of an exported folder: the model card, and ``generation_config.json`` with the stop tokens."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lit_callbacks.export.adapter_merger import Kind, Texts
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.bounded_yaml import load_yaml
from lit_ft.checkpointing.selection import candidates, position_of
from lit_ft.data.text.chat_template import ChatTemplate
from lit_ft.data.text_data import TextDataModule
from lit_ft.errors import RecipeError
from lit_ft.export.model_card import Card
from lit_ft.model.files.fingerprint import BaseForm
from lit_ft.model.files.text_part import text_class
from lit_ft.model.generation import end_of_call
from lit_ft.model.spec import ModelSpec
from lit_ft.process import datamodule_of
from lit_ft.protocols import LearnsFromTeacher, LearnsPreferences, SamplesAnswers
from lit_ft.run.folder import RUNS, RunFolder
from lit_ft.run.state import finished_step
from lit_ft.training.causal_lm import CausalLM
from lit_ft.training.loggers import read_rows, rows_before


def texts_of(run: RunFolder) -> Texts:
    """Function that gives ``AdapterMerger`` the text files to write beside the weights at the end of a run."""

    def texts(kind: Kind, trainer: Trainer, module: LightningModule) -> Mapping[str, str]:
        if not isinstance(module, CausalLM):
            return {}
        for logger in trainer.loggers:
            logger.save()  # metrics.csv has all that was logged
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        data = datamodule_of(trainer)
        return run_texts(kind, run, module, logged, samples_of(data) if isinstance(data, TextDataModule) else {})

    return texts


def run_texts(
    kind: Kind,
    run: RunFolder,
    module: CausalLM,
    logged: Mapping[str, float],
    samples: Mapping[str, int],
    checkpoint: Path | None = None,
) -> dict[str, str]:
    """Text files for the exported folder of a run, by file name.

    Args:
        kind: kind of the folder, adapter or merged.
        run: folder of the run, with its recipe and metrics.
        module: trained module.
        logged: metrics to use where the run has no metrics.csv.
        samples: number of training samples by source.
        checkpoint: checkpoint whose weights the folder has, of whose step the card gives the metrics; None is the end
            of the run.
    """
    recipe = load_yaml(run.config.read_text(encoding="utf-8")) if run.config.is_file() else {}
    spec, base, form = module.spec, module.base_fingerprint, module.spec.base.form()
    added = [*spec.base.added_tokens, *spec.base.added_special_tokens]
    notes = notes_on_loss(module)
    notes += [f"Tokens added: {', '.join(f'`{token}`' for token in added)}."] if added else []
    if kind == "adapter":
        notes += notes_on_base(form)
    card = Card(
        kind=kind,
        title=" ".join(run.root.parts[-2:]) if RUNS in run.root.parents else run.root.name,  # recipe and time
        base=spec.base.pretrained,
        commit=base["commit"] if base else None,
        method=spec.tuning.method,
        notes=notes,
        dtype=dtype_to_name(form),
        grows=has_more_tokens(module.tokenizer, spec.base),
        text_class=text_class(spec.base.pretrained),
        scores=spec.base.head == "score",
        samples=samples,
        sample_kind="pair" if isinstance(module, LearnsPreferences) and not module.takes_unpaired else "sample",
        metrics=_results(_last_of(run.root / "metrics.csv", checkpoint) or logged),
        recipe=recipe,
    )
    texts = {"README.md": str(card)}
    if kind == "merged":
        texts |= generation_texts(module.base_model, module.tokenizer)
    return texts


def notes_on_loss(module: CausalLM) -> list[str]:
    """What a model card says of the loss, where it is not the mean cross-entropy of answers."""
    if isinstance(module, LearnsPreferences):
        return [f"Trained on {module.describe_objective()}."]
    if isinstance(module, LearnsFromTeacher):
        return [f"Trained on {module.describe_objective()}."]
    if isinstance(module, SamplesAnswers):
        reads = not module.row_needs.may_lack_answers
        compared = "; the answers of the data are what rewards compare with" if reads else ""
        return [f"Trained on {module.describe_policy()}{compared}."]
    if (weights := module.spec.token_weights) is not None:
        return [f"Trained with tokens weighted in the loss by `{weights!r}`."]
    return []


def notes_on_base(form: BaseForm) -> list[str]:
    """What an adapter's model card says of the form in which its base was read for training."""
    notes = []
    if form.config_overrides:
        notes.append(f"Load the base with these values of its config: `{json.dumps(form.config_overrides)}`.")
    if form.quantization:
        notes.append(f"In training the base was quantized by {form.quantization}; here it is loaded unquantized.")
    return notes


def dtype_to_name(form: BaseForm) -> str | None:
    """Dtype that loading a base must name, as it is not that of its files."""
    return None if form.dtype == "auto" else form.dtype


def has_more_tokens(tokenizer: PreTrainedTokenizerBase, base: ModelSpec) -> bool:
    """Whether a tokenizer has more tokens than a base has embeddings."""
    return len(tokenizer) > int(base.config.get_text_config().vocab_size)


def generation_texts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """``generation_config.json`` that also stops where a turn ends; empty if the model's own already does.

    Inference engines stop only at the ids in this file: without the template's token an answer, or the turn of a tool
    call, would not end.
    """
    if not model.can_generate():
        return {}
    try:
        end = ChatTemplate(tokenizer).end_of_turn if tokenizer.chat_template else ""
    except RecipeError:  # a template that cannot render a plain answer has no end-of-turn token
        end = ""
    given = model.generation_config.eos_token_id
    stops = [given] if isinstance(given, int) else list(given or [])
    ends = dict.fromkeys([end] * bool(end) + end_of_call(tokenizer))
    new = {token: tokenizer.get_vocab()[token] for token in ends if tokenizer.get_vocab()[token] not in stops}
    if not new:
        return {}
    config = copy.deepcopy(model.generation_config)
    config.eos_token_id = [*stops, *new.values()]
    reason = f"so that {' or '.join(new)} ends an answer"
    rank_zero_info(f"generation_config.json: eos_token_id {given} -> {config.eos_token_id}, {reason}")
    return {"generation_config.json": config.to_json_string()}


def samples_of(data: TextDataModule) -> dict[str, int]:
    """Number of training samples by source; empty for streamed data."""
    if "train" not in data.splits:
        return {}
    samples, sources = data.splits["train"], data.splits.sources["train"]
    counts = np.bincount(samples.source, minlength=len(sources))
    return {source.title: int(count) for source, count in zip(sources, counts, strict=True)}


def describe_step(run: RunFolder, checkpoint: Path, max_steps: int) -> list[str]:
    """Messages about the optimizer step of a checkpoint, and about newer checkpoints and later logged steps of its run.

    Args:
        run: folder of the run.
        checkpoint: checkpoint of the run.
        max_steps: optimizer steps of the recipe; -1 where epochs or time end the run.
    """
    position = position_of(checkpoint)
    if position is None:
        return [f"{checkpoint} does not say at which step it was written"]
    last = max(_steps_logged(run.root / "metrics.csv"), position.global_step)
    total = finished_step(run.finished) or max(max_steps, 0)
    of_total = f" of {total:,}" if total else "; the run has not finished"
    lines = [f"{checkpoint} is step {position.global_step:,}{of_total}"]
    newer = [one for one in candidates(run.checkpoints)[0] if one.position[:3] > position[:3]]
    if newer:
        step = newer[0].position.global_step
        lines.append(f"a newer checkpoint is {newer[0].path}, of step {step:,}; take it with --ckpt_path")
    if last > max(position.global_step, *(one.position.global_step for one in newer), 0):
        lines.append(
            f"the run was logged up to step {last:,} (metrics.csv), of which no checkpoint is left: what is exported "
            "is not where it ended"
        )
    return lines


def _steps_logged(path: Path) -> int:
    """Number of optimizer steps up to the last logged training loss; the first step is logged as 0."""
    rows = read_rows(path) if path.is_file() else []
    return max((int(row["step"]) + 1 for row in rows if "train/loss" in row), default=0)


def _last_of(path: Path, checkpoint: Path | None) -> dict[str, float]:
    """Last value of each column of a CSV file, up to the step of a checkpoint; empty without the file."""
    if not path.is_file():
        return {}
    rows = read_rows(path)
    if checkpoint is not None and (position := position_of(checkpoint)) is not None:
        rows, _ = rows_before(position.global_step, None, rows)
    return {name: float(value) for row in rows for name, value in row.items()}


def _results(metrics: Mapping[str, float]) -> dict[str, float]:
    prefixes = ("train/loss", "train/cross_entropy", "train/token_accuracy", "val/", "test/")
    return {name: value for name, value in sorted(metrics.items()) if name.startswith(prefixes)}

"""Model card of an exported folder: base model, training data, results, recipe and versions."""

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from lit_callbacks.output.quantities import as_count, as_number
from lit_callbacks.report.run_report import installed_versions

Recipe = Mapping[str, Any]
"""Resolved recipe: sections and options by key."""

_SECTIONS = ("seed_everything", "model", "data", "optimizer", "lr_scheduler", "trainer")
_OF_THE_TRAINER = (
    *("accelerator", "devices", "num_nodes", "strategy", "precision", "max_epochs", "max_steps"),
    *("limit_train_batches", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
)
"""Trainer options that decide the weights; others are left out, as a logger may hold an access key, for example."""
_SECRET = re.compile(r"(^|_)(token|secret|password|api_?key|access_?key|credentials?)$")
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*://"
_URL = re.compile(rf"{_SCHEME}(?:(?!::{_SCHEME})\S)+")
"""A URL in a text; of a chain, as of fsspec (``zip://rows.json::https://...``), each one."""
_PACKAGES = ("torch", "lightning", "transformers", "peft", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Content of a model card."""

    kind: Literal["adapter", "merged"]
    title: str
    base: str
    """Hub id or folder of the base model."""
    commit: str | None = None
    """Commit of the base model on the hub."""
    method: str = "all weights"
    """PEFT method; "all weights" or "selected weights" without one."""
    notes: Sequence[str] = ()
    """Lines on how the folder was made."""
    dtype: str | None = None
    """Dtype that the base of an adapter was read in for training, if not that of its files."""
    grows: bool = False
    """Whether the base has too few embeddings for the adapter's tokens."""
    text_class: str | None = None
    """Class of transformers for the base's text part, where ``AutoModelForCausalLM`` reads a larger model."""
    scores: bool = False
    """Whether it is a reward model, with a score in place of logits."""
    samples: Mapping[str, int] = field(default_factory=dict)
    """Number of training samples by source, where known."""
    sample_kind: Literal["sample", "pair"] = "sample"
    """What a sample is: a pair of answers in preference tuning, unless its objective takes single ones too."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics at the end of the run."""
    recipe: Recipe = field(default_factory=dict)
    """Resolved recipe."""

    @property
    def _trains_base(self) -> bool:
        return self.method in ("all weights", "selected weights")

    def __str__(self) -> str:
        """Text of the card, with the front matter that the hub reads."""
        parts = [self._front_matter(), f"# {self.title}", self._opening(), *self._sections()]
        return "\n\n".join(parts) + "\n"

    def _front_matter(self) -> str:
        data = [path for path in _data_paths(self.recipe) if _is_hub_id(path)]
        fields: dict[str, object] = {
            "base_model": self.base if _is_hub_id(self.base) else None,
            "library_name": "peft" if self.kind == "adapter" else "transformers",
            "pipeline_tag": "text-classification" if self.scores else "text-generation",
            "tags": ["lit_ft", *([] if self._trains_base else [self.method.lower()])],
            "datasets": data,
        }
        return f"---\n{_yaml({name: value for name, value in fields.items() if value})}\n---"

    def _opening(self) -> str:
        revision = f" (revision {self.commit})" if self.commit else ""
        what = {
            "adapter": f"A {self.method} adapter for `{self.base}`{revision}.",
            "merged": f"`{self.base}`{revision}, {self.method} trained"
            + ("." if self._trains_base else " and merged."),
        }[self.kind]
        return "\n\n".join([what, *self.notes, f"```python\n{self._usage()}\n```"])

    def _usage(self) -> str:
        tokenizer = [f"from transformers import {self._class}, AutoTokenizer", ""]
        tokenizer.append('tokenizer = AutoTokenizer.from_pretrained("THIS FOLDER")')
        if self.kind == "merged":
            return "\n".join([*tokenizer, f'model = {self._class}.from_pretrained("THIS FOLDER")'])
        grow = ["model.resize_token_embeddings(len(tokenizer))  # the adapter brings the rows of added tokens"]
        lines = [*tokenizer, *self._usage_of_base(), *(grow * self.grows)]
        return "\n".join(
            ["from peft import PeftModel", *lines, 'model = PeftModel.from_pretrained(model, "THIS FOLDER")']
        )

    @property
    def _class(self) -> str:
        return "AutoModelForSequenceClassification" if self.scores else "AutoModelForCausalLM"

    def _usage_of_base(self) -> list[str]:
        dtype = f', dtype="{self.dtype}"' if self.dtype else ""
        if self.text_class is None:
            labels = ", num_labels=1" if self.scores else ""
            return [f'model = {self._class}.from_pretrained("{self.base}"{labels}{dtype})']
        return [
            f"from transformers import AutoConfig, {self.text_class}  # the adapter is for the base's text part",
            f'config = AutoConfig.from_pretrained("{self.base}").get_text_config()',
            r'names = {r"^language_model\.(.+)": r"\1", r"^model\.language_model\.(.+)": r"model.\1"}',
            f'model = {self.text_class}.from_pretrained("{self.base}", config=config, key_mapping=names{dtype})',
        ]

    def _sections(self) -> list[str]:
        sections = []
        if paths := _data_paths(self.recipe):
            counted = [f"- `{name}`: {as_count(count, self.sample_kind)}" for name, count in self.samples.items()]
            sections.append("## Data\n\n" + "\n".join(counted or [f"- `{path}`" for path in paths]))
        if self.metrics:
            rows = [f"| {name} | {as_number(value)} |" for name, value in self.metrics.items()]
            sections.append("\n".join(["## Results", "", "| metric, at the end | value |", "|---|---|", *rows]))
        if self.recipe:
            sections.append(f"## Recipe\n\n```yaml\n{_yaml(_publishable(self.recipe))}\n```")
        sections.append(f"## Made with\n\n{', '.join(f'{name} {number}' for name, number in versions().items())}")
        return sections


def versions() -> dict[str, str]:
    """Versions of Python, lit_ft and the packages that training uses."""
    numbers = installed_versions(("lit-ft", *_PACKAGES))
    return {"python": platform.python_version(), **{name.replace("-", "_"): number for name, number in numbers.items()}}


def _publishable(recipe: Recipe) -> dict[str, object]:
    """Sections of the recipe that decide the weights, without unset values and secrets."""
    kept = {name: recipe[name] for name in _SECTIONS if recipe.get(name) is not None}
    if isinstance(kept.get("trainer"), Mapping):
        kept["trainer"] = {key: value for key, value in kept["trainer"].items() if key in _OF_THE_TRAINER}
    return _clean_section(kept)


def _clean_section(options: Recipe) -> dict[str, object]:
    kept = {key: "(left out)" if _SECRET.search(str(key)) and part else _clean(part) for key, part in options.items()}
    return {key: part for key, part in kept.items() if part is not None and part != {} and part != []}


def _clean(value: object) -> object:
    if isinstance(value, Mapping):
        return _clean_section(value)
    if isinstance(value, list):
        return [_clean(part) for part in value]
    return _without_login(value) if isinstance(value, str) else value


def _without_login(text: str) -> str:
    """Text whose URLs have no user, password, query or fragment: signatures of object storage are in the query."""
    return _URL.sub(lambda url: _place(url[0]), text)


def _place(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return "(left out)"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _data_paths(recipe: Recipe) -> list[str]:
    options = (recipe.get("data") or {}).get("init_args") or {}
    sources = [source.get("path") for source in options.get("sources") or [] if isinstance(source, Mapping)]
    return [_without_login(str(path)) for path in [options.get("path"), *sources] if path]


def _is_hub_id(name: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", name)) and not Path(name).exists()


def _yaml(value: Mapping[str, object]) -> str:
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=120).strip()

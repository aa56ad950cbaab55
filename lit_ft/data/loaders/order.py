"""Fingerprint of the order of training samples: saved with a run's position, compared when the run is resumed.

Ranks, micro-batches, worker processes, caches and file names do not change the order, so they are not part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash  # comes with datasets

from lit_ft.data.loaders.mixing import Mixing
from lit_ft.data.text.sources import Source
from lit_ft.data.tokens.preparation import Preparation
from lit_ft.data.tokens.samples import Samples, TokenArrays

ARRAY_BLOCK, FILE_BLOCK = 2**22, 2**16
"""Bytes per hashed block, of token arrays and of files that are read while training."""
ARRAY_BLOCKS, FILE_BLOCKS = 256, 4
"""Number of blocks that are hashed, evenly spread over larger content; smaller content is hashed in full."""

Facts = dict[str, str]
"""Values as text, by the name of the option or source."""


@dataclass(frozen=True)
class Order:
    """Fingerprint of the order of samples, and the settings that explain it."""

    decides: Facts
    """Values that decide the order: runs with equal values train on the same samples in the same order."""
    explains: Facts
    """Settings that explain why samples differ; ignored where the samples are the same."""

    def saved(self) -> dict[str, Facts]:
        """Plain values for a checkpoint."""
        return {"decides": self.decides, "explains": self.explains}

    def changes_since(self, saved: dict[str, Facts]) -> list[str]:
        """Differences to a saved order, each with both values; empty where the order is the same."""
        changes = _differences(saved["decides"], self.decides)
        return changes + _differences(saved["explains"], self.explains) if changes else []


def _differences(then: Facts, now: Facts) -> list[str]:
    names = sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name))
    return [f"{name} was {then.get(name, 'not there')} and is {now.get(name, 'not there')}" for name in names]


def order_of_samples(samples: Samples, preparation: Preparation, mixing: Mixing, **options: object) -> Order:
    """Order of samples that were tokenized before training; ``options`` are all that decide it, e.g. the seed."""
    split = xxhash.xxh3_64()
    for array in (samples.source, samples.index):
        split.update(_bytes_of(array))
    decides = _options({**options, "data.mixing": (mixing.strategy, mixing.weights)})
    decides |= {f"source {number}": _describe(part) for number, part in enumerate(samples.parts, 1)}
    if samples.of_one_beginning is not None:
        decides["answers of a conversation"] = "one after the other"
    decides["samples that train"] = f"{len(samples):,} ({split.hexdigest()})"
    return Order(decides, _options(_settings(preparation)))


def fingerprint_of(samples: Samples) -> str:
    """Fingerprint of samples in their order."""
    digest = xxhash.xxh3_64()
    for array in (samples.source, samples.index):
        digest.update(_bytes_of(array))
    return f"{len(samples)} {digest.hexdigest()} {' '.join(map(_describe, samples.parts))}"


def order_of_stream(sources: Sequence[Source], preparation: Preparation, mixing: Mixing, **options: object) -> Order:
    """Order of rows that are streamed; the settings that turn rows into samples are part of it."""
    decides = _options({**options, **_settings(preparation), "data.mixing": (mixing.strategy, mixing.weights)})
    for number, source in enumerate(sources, 1):
        reading = (source.format, source.columns, source.system, source.max_rows, source.split, source.subset)
        decides[f"source {number}"] = f"{_files(source)}, read as {(*reading, source.document)}"
    return Order(decides, {})


def _options(values: dict[str, object]) -> Facts:
    return {name: "null" if value is None else str(value) for name, value in values.items()}


def _settings(preparation: Preparation) -> dict[str, object]:
    tokenizer = preparation.tokenizer
    content = (
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        sorted(tokenizer.special_tokens_map.items()),
    )
    names = ("system", "supervise", "max_length", "overlong", "template_options", "on_bad_row")
    return {
        **{f"data.{name}": getattr(preparation, name) for name in names},
        "tokenizer and chat template": xxhash.xxh3_64_hexdigest(repr(content).encode("utf-8", "surrogatepass")),
    }


def _describe(part: TokenArrays) -> str:
    digest = xxhash.xxh3_64()
    arrays = [part.lengths, part.supervised, part.ids, *([] if part.labels is part.ids else [part.labels])]
    arrays += [] if part.chosen is None else [part.chosen]
    for array in arrays:
        _update(digest, _bytes_of(array), ARRAY_BLOCK, ARRAY_BLOCKS)
    return f"{len(part):,} samples, {int(part.lengths.sum()):,} tokens ({digest.hexdigest()})"


def _files(source: Source) -> str:
    if source.is_on_hub:
        return repr(source.path)
    digest, size = xxhash.xxh3_64(), 0
    for file in source.content():
        content = _bytes_of(np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8))
        _update(digest, content, FILE_BLOCK, FILE_BLOCKS)
        size += len(content)
    return f"{size:,} bytes ({digest.hexdigest()})"


def _bytes_of(array: np.ndarray) -> memoryview:
    flat = np.ascontiguousarray(array)
    return flat.data.cast("B") if flat.size else memoryview(b"")


def _update(digest: xxhash.xxh3_64, content: memoryview, block: int, blocks: int) -> None:
    if len(content) <= block * blocks:
        digest.update(content)
        return
    for start in np.linspace(0, len(content) - block, blocks).astype(int).tolist():
        digest.update(content[start : start + block])

"""Weights of a Hugging Face folder as Megatron's, and back, by the table of the family."""

import torch
from torch import Tensor

from lit_ft.errors import RecipeError
from lit_ft.megatron.families import HEAD, Key, Part
from lit_ft.megatron.formats.hugging_face import TensorInfo, Weights
from lit_ft.megatron.formats.source import MegatronSource
from lit_ft.megatron.joins import join, separate
from lit_ft.megatron.layout import Layout
from lit_ft.megatron.shape import ModelShape


class AsMegatron:
    """Megatron's weights, made of those of a Hugging Face folder."""

    def __init__(self, weights: Weights, shape: ModelShape, layout: Layout) -> None:
        """Check that the folder has exactly the weights of the table.

        Raises:
            RecipeError: a weight is missing, has another shape, or is not in the table.
        """
        self._weights, self.shape, self.layout = weights, shape, layout
        expected = {
            key.hugging_face(part): shape.shape_of(part) for key in shape.all_keys() for part in key.weight.parts
        }
        where = str(weights.folder)
        for name, required in expected.items():
            if (shape_in_file := weights.shapes.get(name)) != required:
                difference = f"is {shape_in_file}" if shape_in_file else "is missing"
                raise RecipeError(
                    f"{where}: {name} {difference}, and {required} by config.json; download the model again"
                )
        left_over = sorted(weights.shapes.keys() - expected.keys() - self._derived())
        if left_over:
            raise RecipeError(
                f"{where}: {len(left_over)} weights are not in the table of {shape.model_type} and would be lost, the "
                f"first of them {left_over[0]}; a model with them cannot be converted"
            )

    def _derived(self) -> set[str]:
        """Names in the folder that say nothing new: rotary frequencies, and the head of a tied model.

        Raises:
            RecipeError: the head is not the embedding.
        """
        derived = {name for name in self._weights.shapes if name.endswith("rotary_emb.inv_freq")}
        if self.shape.is_tied and (head := HEAD.parts[0].name) in self._weights.shapes:
            if not torch.equal(self._weights.read(head), self._weights.read("model.embed_tokens.weight")):
                raise RecipeError(
                    f"{self._weights.folder}: {head} is not the embedding, and tie_word_embeddings is true; correct "
                    "config.json"
                )
            derived.add(head)
        return derived

    @property
    def bytes(self) -> int:
        """Size of all weights in bytes, without padding."""
        return sum(
            torch.Size(self.shape.shape_of(part)).numel() * self.dtype(key).itemsize
            for key in self.shape.all_keys()
            for part in key.weight.parts
        )

    def dtype(self, key: Key) -> torch.dtype:
        """Dtype of a weight."""
        return self._weights.dtype(key.hugging_face(key.weight.parts[0]))

    def part(self, key: Key, rank: int, ranks: int) -> Tensor:
        """One tensor-parallel rank's part of a weight, with the rows that pad the vocabulary."""
        tensors = [self._read(key, part, rank, ranks) for part in key.weight.parts]
        return join(tensors, key.weight.join, self.shape.head_dim)

    def rows(self, key: Key, first: int, last: int) -> Tensor:
        """Rows ``first`` to ``last`` (exclusive) of a weight of the vocabulary, those that pad it left out."""
        count = self.shape.vocabulary
        return self._weights.read(key.hugging_face(key.weight.parts[0]), 0, min(first, count), min(last, count))

    def _read(self, key: Key, part: Part, rank: int, ranks: int) -> Tensor:
        name, split, shape = key.hugging_face(part), key.weight.split, self.shape.shape_of(part)
        if split is None:
            return self._weights.read(name)
        size = self.layout.padded(shape[0]) if key.weight.is_padded else shape[split]
        first, last = rank * size // ranks, (rank + 1) * size // ranks
        tensor = self._weights.read(name, split, min(first, shape[split]), min(last, shape[split]))
        padding = last - first - tensor.shape[split]
        return tensor if not padding else torch.cat([tensor, tensor.new_zeros(padding, *shape[1:])])


class AsHuggingFace:
    """Hugging Face's weights, made of those of a Megatron checkpoint."""

    def __init__(self, source: MegatronSource, shape: ModelShape, where: str, like: str) -> None:
        """Check that the checkpoint has exactly the weights of the table.

        Args:
            source: checkpoint.
            shape: sizes of the model.
            where: name of the checkpoint, for messages.
            like: name of the model that gives the sizes, for messages.

        Raises:
            RecipeError: weights are missing, or are not in the table.
        """
        self._source, self._shape, self._where, self._like = source, shape, where, like
        self._keys = {
            key.hugging_face(part): (key, i) for key in shape.all_keys() for i, part in enumerate(key.weight.parts)
        }
        self._last: tuple[Key, list[Tensor]] | None = None
        expected = {key.megatron for key in shape.all_keys()}
        found = source.names()
        if missing := sorted(expected - found):
            raise RecipeError(
                f"{where}: {len(missing)} of {len(expected)} weights that --like {like} has missing, the first of "
                f"them {missing[0]}; name the model that the checkpoint was made of"
            )
        left_over = sorted(found - expected - ({HEAD.megatron} if shape.is_tied else set()))
        if left_over:
            raise RecipeError(
                f"{where}: {len(left_over)} weights are not among those of --like {like} and would be lost, the first "
                f"of them {left_over[0]}; name the model that the checkpoint was made of"
            )
        if shape.is_tied and HEAD.megatron in found and not self._head_is_embedding():
            raise RecipeError(
                f"{where}: the output layer is not the embedding, and --like {like} ties them; name a model that does "
                "not"
            )

    def _head_is_embedding(self) -> bool:
        head, embedding = self._source.parts(Key(HEAD)), self._source.parts(self._shape.all_keys()[0])
        return len(head) == len(embedding) and all(map(torch.equal, head, embedding))

    def tensors(self) -> list[TensorInfo]:
        """Tensors of the model's files, in order."""
        return [
            TensorInfo(name, self._shape.shape_of(key.weight.parts[i]), self._source.dtype(key))
            for name, (key, i) in self._keys.items()
        ]

    def read(self, name: str) -> Tensor:
        """A tensor by its Hugging Face name.

        Raises:
            RecipeError: it has another size than in the model of ``--like``, or differs between ranks.
        """
        key, number = self._keys[name]
        if self._last is None or self._last[0] != key:
            self._last = key, self._separate(key)
        return self._last[1][number]

    def _separate(self, key: Key) -> list[Tensor]:
        weight, shape = key.weight, self._shape
        parts = self._source.parts(key)
        if weight.split is None:
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise RecipeError(f"{self._where}: {key.megatron} differs between ranks; copy the files again")
            parts = parts[:1]
        sizes = [shape.shape_of(part) for part in weight.parts]
        rows = sum(size[0] for size in sizes)
        joined = list(parts[0].shape)
        if weight.split is not None:
            joined[weight.split] *= len(parts)
        has_size = joined[0] >= rows if weight.is_padded else joined[0] == rows
        if not has_size or tuple(joined[1:]) != sizes[0][1:]:
            rule = f"{rows} rows (vocab_size) or more" if weight.is_padded else str((rows, *sizes[0][1:]))
            raise RecipeError(
                f"{self._where}: {key.megatron} is {tuple(joined)}, and by --like {self._like} it has {rule}; name the "
                "model that the checkpoint was made of"
            )
        separated = [separate(part, weight.join, shape.head_dim, shape.heads // shape.groups) for part in parts]
        by_tensor = zip(*separated, strict=True)
        whole = [torch.cat(pieces, weight.split or 0) if len(pieces) > 1 else pieces[0] for pieces in by_tensor]
        return [tensor[: size[0]] for tensor, size in zip(whole, sizes, strict=True)]

"""The model whose probabilities another one learns: read once in a run, never trained, in no checkpoint."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lit_ft.errors import RecipeError, option_called
from lit_ft.model import quantization
from lit_ft.model.config.positions import check_positions
from lit_ft.model.files import deferred_cast
from lit_ft.model.loading import decoder_layers
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch
from lit_ft.training.loss.packed_forward import PackedForward
from lit_ft.training.spec import prepare_for_packed_batches


class Teacher:
    """Frozen causal language model beside the one that trains."""

    def __init__(self, spec: ModelSpec, is_sharded: bool = False) -> None:
        """Say which model; weights are read by ``load``.

        Args:
            spec: the model.
            is_sharded: whether all ranks of the run share its layers; otherwise each of them holds it whole.

        Raises:
            RecipeError: it is to be quantized in a way that does not work.
        """
        self.spec, self.is_sharded = spec, is_sharded
        if spec.quantization is not None:
            with option_called("model.quantization", "model.teacher_quantization"):
                quantization.check_method(spec.quantization)
        self._forward: PackedForward | None = None
        self._device: torch.device | None = None
        self._tokens = 0

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Find what is wrong before weights are read.

        Args:
            tokenizer: tokenizer of the model that learns.

        Raises:
            RecipeError: config, weight files or tokenizer do not fit.
        """
        with option_called("model.pretrained", "model.teacher"):
            self.spec.skeleton()
            if self.is_sharded and self.spec.is_quantized:
                raise RecipeError(
                    f"model.shard_teacher=true with a quantized teacher ({self.spec.pretrained!r}): packed weights are "
                    "not sharded; set it to false, or leave model.teacher_quantization out"
                )
            self._tokens = shared_tokens(tokenizer, self.spec.tokenizer, self.spec.pretrained)

    def weight_bytes(self, ranks: int) -> int:
        """Bytes of its weights on each of some ranks, as if they were not quantized."""
        with option_called("model.pretrained", "model.teacher"):
            model = self.spec.skeleton()
        layers, whole = (_bytes_of(parts) for parts in (decoder_layers(model), [model]))
        return whole - layers + layers // ranks if self.is_sharded else whole

    def check_length(self, what: str, length: int | None) -> None:
        """Refuse samples of more tokens than the teacher has positions."""
        with option_called("model.pretrained", "model.teacher"):
            config = self.spec.config
        shorten = "set data.max_length lower"
        check_positions(config, length, what, f"model.teacher={self.spec.pretrained!r}", shorten, is_fixed=True)

    @torch.inference_mode(False)  # a fit may follow an evaluation, and writes what FSDP has allocated in it
    def load(self, device: torch.device) -> None:
        """Read the weights, unless they are on the device."""
        if self._device == device:
            return
        self.free()
        with option_called("model.pretrained", "model.teacher"), torch.random.fork_rng(devices=[]):
            shards = self.is_sharded and dist.is_initialized()
            with deferred_cast.casting_later() if shards else nullcontext():
                model = self.spec.build()
        prepare_for_packed_batches(model)
        model.requires_grad_(False).eval()
        count, where = sum(p.numel() for p in model.parameters()), "whole on each rank"
        if shards:
            where = f"its layers shared by {_shard(model, device)} ranks"
        model.to(device)
        rank_zero_info(f"teacher: {self.spec.pretrained}, {count:,} parameters, {where}")
        self._forward, self._device = PackedForward(model), device

    def free(self) -> None:
        """Give the memory of the weights back; the next ``load`` reads them again."""
        if self._forward is not None:
            self._forward = self._device = None
            gc.collect()  # modules and their hooks refer to each other

    @torch.inference_mode(False)  # which enables gradients
    @torch.no_grad()
    def hidden_states(self, batch: PackedBatch) -> Tensor:
        """Final hidden states that predict a batch's n targets, ``(n, H)``; a collective where ranks share layers."""
        assert self._forward is not None, "the teacher is loaded"
        if not batch["segment_lengths"] or not (self.is_sharded or batch["targets"].numel()):
            return torch.zeros(0, self.spec.config.get_text_config().hidden_size, device=batch["targets"].device)
        with torch.autocast(batch["targets"].device.type, enabled=False):
            return self._forward.hidden_states(batch)[0].index_select(0, batch["predict_at"])

    @torch.inference_mode(False)
    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens that both models have, ``(n, V)``, from final hidden states ``(n, H)``."""
        assert self._forward is not None, "the teacher is loaded"
        with torch.autocast(hidden.device.type, enabled=False):
            return self._forward.head(hidden)[:, : self._tokens]


def _bytes_of(modules: Sequence[nn.Module]) -> int:
    weights = (weight for module in modules for weight in module.parameters())
    return sum(weight.numel() * weight.element_size() for weight in weights)


def _shard(model: PreTrainedModel, device: torch.device) -> int:
    """Shard a model's decoder layers over all ranks, in place; embeddings and head stay whole. Returns their number."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in decoder_layers(model):
        deferred_cast.cast(layer)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    deferred_cast.cast(model)
    return mesh.size()


def shared_tokens(student: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, name: str) -> int:
    """Number of ids, from 0 on, that the student's tokenizer has tokens for; the teacher's has the same there.

    Args:
        student: tokenizer of the model that learns.
        teacher: tokenizer of the one that it learns from.
        name: the teacher, for the message.

    Raises:
        RecipeError: a token of the student is another one for the teacher, or none.
    """
    own, others = student.get_vocab(), teacher.get_vocab()
    if differing := [(index, token) for token, index in own.items() if others.get(token) != index]:
        index, token = min(differing)
        there = "none there" if token not in others else f"{others[token]} there"
        raise RecipeError(
            f"model.teacher={name!r} has another tokenizer: {len(differing):,} of {len(own):,} tokens of the student "
            f"have another id or none there, e.g. {token!r}: {index} here, {there}. Probabilities are compared "
            "token by token; take a teacher of the same family, and leave out model.added_tokens that it lacks, or "
            "train with lit_ft.CausalLM on answers of the teacher, which predict writes"
        )
    return max(own.values()) + 1

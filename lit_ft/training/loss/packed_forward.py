"""Forward pass of a causal LM over a packed batch, in two halves: hidden states, and the loss of supervised tokens."""

from collections.abc import Mapping
from typing import cast

import torch
from lit_callbacks.distributed.host_copy import queued_copy
from lit_callbacks.protocols import HasScore
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.internals.peft import virtual_tokens_of
from lit_ft.internals.transformers import attention_implementation
from lit_ft.model import loading
from lit_ft.model.activations import offload as activation_offload
from lit_ft.model.architecture import Decoder
from lit_ft.model.attention.packed_attention import AttendsInChunks
from lit_ft.model.attention.repeated import repeated
from lit_ft.model.attention.segments import Segments, segments_of
from lit_ft.model.compiled_layers import uses_inductor
from lit_ft.model.config.positions import check_positions
from lit_ft.model.isolation import lengths as current_lengths
from lit_ft.model.isolation.lengths import SharedTokens, samples_of
from lit_ft.model.isolation.token_mixers import other_than_attention
from lit_ft.model.rotary_embedding import depends_on_length
from lit_ft.packed_batch import PackedBatch, TokenLoss, as_packed_batch, pad_to_multiple
from lit_ft.training.loss import router_loss
from lit_ft.training.loss.cuda_graphs import DecoderGraphs, check_attention
from lit_ft.training.loss.token_cross_entropy import (
    LossOf,
    LossOfLogits,
    negative_score,
    token_cross_entropy,
    tokens_per_chunk,
)
from lit_ft.training.loss.token_weights import TokenWeights
from lit_ft.training.metrics import StageMetrics
from lit_ft.tuning import prompt_learning


def base_model_of(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Hugging Face model inside PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def shares_tokens(model: PreTrainedModel | PeftModel) -> bool:
    """Whether tokens that samples of a packed batch have in common can be computed once for all of them.

    Packed attention gathers their keys and values. What mixes tokens in another way must see each sample: other layers,
    frequencies that depend on the length, and prompts that train.
    """
    base = base_model_of(model)
    return (
        attention_implementation(base.config) == loading.PACKED
        and not other_than_attention(base)
        and not any(isinstance(part, AttendsInChunks) or depends_on_length(part) for part in base.modules())
        and prompt_learning.method_of(model) is None
    )


class PackedForward:
    """Forward pass of a model over packed batches; samples of a batch do not influence each other.

    Its options are those of ``CausalLM``.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        activation_offload: bool = False,
        router_aux_loss: router_loss.RouterAuxLoss = None,
        compiled: bool | str = False,
        pad_rows_to: int | None = None,
        cuda_graphs: bool = False,
    ) -> None:
        self.pad_rows_to = pad_rows_to
        self.fuses_loss = uses_inductor(compiled)
        self.model, self.base = model, base_model_of(model)
        self.head = loading.head_of(self.base)
        self.offload = activation_offload
        self.router_coefficient = router_loss.coefficient(self.base, router_aux_loss)
        self.router_loss: Tensor | None = None
        """The router's auxiliary loss of the last batch, a scalar without its coefficient."""
        self.segment_lengths: list[int] = []
        """Lengths of the samples of the last batch."""
        self.computed_tokens, self.padding_tokens = 0, 0
        self.shares_tokens = shares_tokens(model) and not (compiled or cuda_graphs)
        """Whether tokens that samples have in common can be computed once."""
        self.takes_boundaries = bool(compiled) or cuda_graphs
        """Whether layers are given the boundaries of samples as a tensor, not the list of their lengths."""
        self.graphs: DecoderGraphs | None = None
        if cuda_graphs:
            check_attention(attention_implementation(self.base.config))
            self.graphs = DecoderGraphs(self._layers, model)

    def __call__(self, batch: PackedBatch) -> TokenLoss:
        """Summed loss and number of right predictions over the batch's supervised tokens."""
        return self.token_loss(self.hidden_states(batch), batch)

    def as_packed_batch(self, batch: PackedBatch | Mapping[str, Tensor]) -> PackedBatch:
        """Pack a padded batch, which no data module of ours has checked; return a packed one unchanged.

        Raises:
            RecipeError: it lacks ids or labels, an id is outside of the vocabulary, or a sample has more tokens than
                the model has positions.
        """
        packed = as_packed_batch(batch, self.base.config.get_text_config().vocab_size)
        if packed is not batch:
            longest = max(packed["segment_lengths"], default=0)
            virtual, shorten = virtual_tokens_of(self.model), "let the loader give shorter samples"
            check_positions(self.base.config, longest, "a sample", "the model", shorten, virtual)
        return packed

    def hidden_states(self, batch: PackedBatch, decoder: Decoder | None = None) -> Tensor:
        """Final hidden states of a batch's tokens, ``(1, T, H)``, and of the tokens that pad it.

        Args:
            batch: packed batch of T tokens.
            decoder: in place of the base model's, where a strategy has only a part of its layers here.
        """
        batch = self._padded(batch)
        shared = self._shared_tokens(batch, decoder)
        self.segment_lengths = lengths = batch["segment_lengths"] if shared is None else shared.own_lengths
        ids, positions = batch["input_ids"], batch["position_ids"]
        if shared is not None:
            ids, positions = ids.index_select(1, shared.computed), positions.index_select(1, shared.computed)
        decoder = decoder or loading.decoder_of(self.base)
        if self.offload:
            decoder = activation_offload.keeping_on_host(decoder)
        with_virtual = prompt_learning.virtual_lengths(self.model, lengths)
        options: dict[str, object] = {}
        if attention_implementation(self.base.config) == loading.PACKED:
            if self.takes_boundaries:  # without the list, for each length of which torch 2.11 compiles again
                is_padded = self.pad_rows_to is not None
                options["segments"] = segments_of(with_virtual, ids.device, has_few_shapes=is_padded)
            else:
                options["segment_lengths"] = with_virtual
        with samples_of(with_virtual, shared):
            if prompt_learning.method_of(self.model) is not None:
                return prompt_learning.hidden_states(self.model, decoder, batch, **options)
            if self.graphs is not None and self.model.training and torch.is_grad_enabled():
                return self.graphs(ids, positions, cast(Segments, options["segments"]))
            reads_router = bool(self.router_coefficient) and self.model.training
            options |= {"output_router_logits": True} if reads_router else {}
            output = decoder(input_ids=ids, position_ids=positions, use_cache=False, **options)
        if reads_router and shared is not None:
            output.router_logits = tuple(repeated(one, shared.places, one.ndim - 2) for one in output.router_logits)
        self.router_loss = router_loss.router_loss(self.base, output) if reads_router else None
        hidden: Tensor = output.last_hidden_state
        return hidden if shared is None else repeated(hidden, shared.places, 1)

    def _shared_tokens(self, batch: PackedBatch, decoder: Decoder | None) -> SharedTokens | None:
        """First tokens that samples of a batch have in common, where the model can compute them once."""
        prefixes, device = batch.get("shared_prefixes"), batch["input_ids"].device
        if prefixes is None:
            return None
        prefixes.is_used = decoder is None and self.shares_tokens
        if not prefixes.is_used:
            return None
        computed, places = (queued_copy(torch.from_numpy(one), device) for one in (prefixes.computed, prefixes.places))
        return SharedTokens(prefixes.lengths, prefixes.own_lengths, computed, places)

    def _layers(self, ids: Tensor, positions: Tensor, segments: Segments) -> Tensor:
        decoder = loading.decoder_of(self.base)
        hidden: Tensor = decoder(
            input_ids=ids, position_ids=positions, use_cache=False, segments=segments
        ).last_hidden_state
        return hidden

    def _padded(self, batch: PackedBatch) -> PackedBatch:
        """The batch with a last sample that predicts nothing, if its number of tokens would be one of many."""
        if self.pad_rows_to is None:
            return batch
        padded = pad_to_multiple(batch, self.pad_rows_to)
        tokens, computed = batch["input_ids"].numel(), padded["input_ids"].numel()
        if self.model.training:
            self.computed_tokens += computed
            self.padding_tokens += computed - tokens
        return padded

    def take_padding_share(self) -> float | None:
        """Part of the computed tokens of training, since the last call, that is padding; None where rows have none."""
        if self.pad_rows_to is None:
            return None
        share = self.padding_tokens / max(self.computed_tokens, 1)
        self.computed_tokens, self.padding_tokens = 0, 0
        return share

    def token_loss(
        self, hidden: Tensor, batch: PackedBatch, loss_of: LossOf | LossOfLogits | TokenWeights | Tensor | None = None
    ) -> TokenLoss:
        """Summed loss and number of right predictions, from a batch's final hidden states ``(1, T, H)``.

        ``loss_of`` is a loss of the tokens' cross-entropy in place of its sum, or factors on it, or takes its place.
        """
        head = loading.head_layer(self.base)
        return token_cross_entropy(
            hidden[0].index_select(0, batch["predict_at"]),  # an index in brackets sorts in its backward pass on CUDA
            self.head,
            batch["targets"],
            chunk_tokens=tokens_per_chunk(head.weight.shape[0], hidden.device.type),
            head_parameters=loading.head_parameters(self.base),
            is_compiled=self.fuses_loss,
            loss_of=loss_of,
            from_logits=negative_score if isinstance(self.base, HasScore) else None,
        )

    def take_router_loss(self, tokens: int, metrics: StageMetrics) -> Tensor | float:
        """The router's loss of the last batch times its coefficient, weighted by tokens as the mean over them is."""
        loss, self.router_loss = self.router_loss, None
        if loss is None:
            return 0.0
        metrics.add_router_loss(loss, tokens)
        return self.router_coefficient * tokens * loss

    def add_embedding_noise(self, alpha: float) -> None:
        """Add uniform noise to input embeddings during training (NEFTune, Jain et al. 2023, arXiv:2310.05914).

        Args:
            alpha: bound of the noise times the square root of the number of embedding values of a sample.
        """

        def with_noise(embedding: nn.Module, _: object, output: Tensor) -> Tensor:
            if not embedding.training:
                return output
            # A prefix is put before one sample at a time. On the host, which would wait for a GPU to repeat by them.
            computed, tokens = current_lengths.current(), output.shape[1]
            lengths = torch.tensor(computed if sum(computed) == tokens else self.segment_lengths)
            if (total := int(lengths.sum())) != tokens:
                raise RecipeError(
                    f"model.neftune_alpha={alpha}: this architecture embeds {tokens} tokens of a batch with {total}, "
                    "and noise depends on the lengths of samples; leave it out"
                )
            of_sample = alpha / (lengths * output.shape[-1]).sqrt()  # as the paper has it
            of_token = queued_copy(of_sample.repeat_interleave(lengths), output.device)
            bound = of_token[None, :, None].to(output.dtype)
            return output + torch.empty_like(output).uniform_(-1, 1) * bound

        self.shares_tokens = False
        self.base.get_input_embeddings().register_forward_hook(with_noise)

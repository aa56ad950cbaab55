"""Description of the part of a model that trains: an adapter, weights selected by name, or all weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from peft import PeftConfig, PeftModel
from transformers import PreTrainedModel

from lit_ft.errors import RecipeError
from lit_ft.model import quantization
from lit_ft.model.files import deferred_cast
from lit_ft.model.files.fingerprint import Fingerprint
from lit_ft.model.loading import DENSE
from lit_ft.model.spec import ModelSpec
from lit_ft.packed_batch import PackedBatch, TokenLoss
from lit_ft.tuning import added_tokens, compatibility, lora_init, prompt_learning, wrapping
from lit_ft.tuning.adapters import given_adapter
from lit_ft.tuning.lora_init import LoraInitState
from lit_ft.tuning.targets import unreached


@dataclass(frozen=True)
class TuningSpec:
    """Tuning method of a recipe."""

    peft: PeftConfig | None = None
    """Config of the adapter; None without one."""
    adapter_dtype: Literal["float32", "auto"] = "float32"
    trainable: Sequence[str] | None = None
    """Regular expressions for the names of the weights that train; None trains all, unless there is an adapter."""
    given: Path | None = None
    """Folder of an adapter of the config ``peft``, whose weights training begins with."""

    @classmethod
    def of(
        cls,
        peft: PeftConfig | None,
        adapter_dtype: Literal["float32", "auto"],
        trainable: Sequence[str] | None,
        adapter: str | None,
    ) -> "TuningSpec":
        """Method of a recipe's options; an adapter's folder has its config.

        Raises:
            RecipeError: both a config and an adapter are given, or a dtype and none, or the folder holds no adapter.
        """
        lora_init.set_defaults(peft)
        if adapter is None:
            if peft is None and adapter_dtype != cls.adapter_dtype:
                raise RecipeError(
                    f"model.adapter_dtype={adapter_dtype} has no effect without model.peft or model.adapter; leave it "
                    "out"
                )
            return cls(peft, adapter_dtype, trainable)
        if peft is not None:
            raise RecipeError(f"model.adapter={adapter!r} has a config of its own; set model.peft to null")
        folder = Path(adapter).expanduser()
        return cls(given_adapter.config_of(folder), adapter_dtype, trainable, folder)

    @property
    def method(self) -> str:
        """Name of the method, for users."""
        if self.peft is not None:
            return str(self.peft.peft_type.value)
        return "all weights" if self.trainable is None else "selected weights"

    def trains_everything(self, base: ModelSpec) -> bool:
        """Whether all weights train, so that a checkpoint holds the full model."""
        is_full = self.peft is None and self.trainable is None
        return is_full and base.config.model_type not in unreached.ARCHITECTURES

    @property
    def fits_some_bases(self) -> bool:
        """Whether ``wrap_skeleton`` refuses bases on which training would begin with other numbers, in silence.

        An adapter that is given belongs to one base, and an init may not be able to subtract its product.
        """
        return self.given is not None or lora_init.subtracts_product(self.peft)

    def check_base(self, base: ModelSpec) -> None:
        """Refuse a base model whose files are quantized in a way that the method cannot train on.

        Raises:
            RecipeError: the two do not fit.
        """
        if base.init == "random":
            return
        config = base.config
        quantization.check_stored(base.pretrained, config, base.quantization, self.peft)
        if (method := quantization.packed_method(config)) is not None:
            compatibility.check_quantized(self.peft, method)

    def check_tokens(self, base: ModelSpec) -> None:
        """Compare the tokens that were added for a given adapter with those of the run.

        Raises:
            RecipeError: one whose row the adapter trained is missing, or has another id.
        """
        if self.given is not None and self.peft is not None:
            given_adapter.check_tokens(self.given, self.peft, base)

    def attention(self, requested: str) -> str:
        """Attention function to use where the recipe requests ``requested``."""
        is_prefix = self.peft is not None and self.peft.peft_type.value == prompt_learning.PREFIX
        return DENSE if requested == "auto" and is_prefix else requested  # packed attention reads no prefix

    def wrap_skeleton(
        self,
        skeleton: PreTrainedModel,
        added_ids: Sequence[int],
        start: LoraInitState | None,
        base: Fingerprint | None = None,
    ) -> PreTrainedModel | PeftModel:
        """Apply the method to a model without weights; ``base`` is compared with that of a given adapter.

        Raises:
            RecipeError: the method does not fit the model.
        """
        if self.peft is not None:
            wrapping.give_values(skeleton, self.peft)
        wrapped = self._wrap(skeleton, added_ids, self._without_init(start))
        if self.peft is not None:
            lora_init.check_layers(wrapped, self.peft)
        if self.given is not None:
            given_adapter.check(self.given, _peft_model(wrapped), base)
        return wrapped

    def adapt(
        self,
        base: PreTrainedModel,
        spec: ModelSpec,
        start: LoraInitState | None,
        batches: Callable[[PreTrainedModel, str], Sequence[PackedBatch]],
        forward: Callable[[PackedBatch], TokenLoss],
    ) -> tuple[PreTrainedModel | PeftModel, LoraInitState | None]:
        """Apply the method to a model with weights, and run the adapter's init.

        Args:
            base: model, changed in place.
            spec: description of the model.
            start: init state of an earlier run, which is restored; None in a new run.
            batches: function from the model and the name of an init to the training data that the init reads.
            forward: function that runs the model on a packed batch.
        """
        ids = spec.added_ids
        if self.peft is None or not lora_init.needs_init(self.peft):
            wrapped = self._wrap(base, ids, self.peft)
            if self.given is not None:
                given_adapter.load(self.given, _peft_model(wrapped))
            return wrapped, start
        deferred_cast.cast(base)  # the init reads full weights, and may change them
        if start is not None:
            return lora_init.restore(_peft_model(self._wrap(base, ids, self._without_init(start))), start), start
        init = lora_init.init_of(self.peft)
        return lora_init.run_lora_init(
            base,
            self.peft,
            wrap=lambda peft: _peft_model(self._wrap(base, ids, peft)),
            batches=batches(base, init) if init in lora_init.FROM_DATA else [],
            forward=forward,
            unquantized=spec.build_unquantized,
        )

    def _without_init(self, start: LoraInitState | None) -> PeftConfig | None:
        if self.peft is None or not lora_init.needs_init(self.peft):
            return self.peft
        return lora_init.with_default_init(self.peft, start)

    def _wrap(
        self, base: PreTrainedModel, added_ids: Sequence[int], peft: PeftConfig | None
    ) -> PreTrainedModel | PeftModel:
        if peft is None:
            if self.trainable is not None:
                wrapping.freeze_all_but(base, self.trainable)
                added_tokens.check_added_rows_train(base, added_ids)
            unreached.freeze(base)
            return base
        try:
            return wrapping.add_peft(base, added_tokens.with_added_rows(peft, base, added_ids), self.adapter_dtype)
        except RecipeError:
            raise
        except ImportError as error:
            raise RecipeError(f"model.peft: {error}; install it, or take another method") from error
        except ValueError as error:
            raise RecipeError(
                f"model.peft: {error}; the linear layers of {type(base).__name__} are {wrapping.linear_layers(base)}"
            ) from error


def _peft_model(model: PreTrainedModel | PeftModel) -> PeftModel:
    assert isinstance(model, PeftModel), "the method has an adapter"
    return model

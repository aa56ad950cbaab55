"""Table of the situations in which each tuning method works, with the reasons where it does not.

``METHODS`` has one row per PEFT method, and per option of a config that changes the answer. All refusals of a method
in a situation come from it, ``python -m benchmarks.support_tables`` prints docs/methods.md from it, and tests are
parametrized by it. Options that contradict each other are refused where they are read (``check_method``,
``lora_init.check_init``, ``targets.experts``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from peft import PeftConfig
from torch import nn

from lit_ft.errors import RecipeError, first_refusal, situation
from lit_ft.tuning.lora_init import FROM_THE_BASE

_ANOTHER = "take another method, e.g. peft.LoraConfig"
_DENSE_BASE = "take plain peft.LoraConfig (init_lora_weights may be loftq or eva), or a base that is not quantized"


@dataclass(frozen=True)
class MethodSupport:
    """Situations in which a tuning method computes what PEFT computes in one process, sample by sample.

    A situation is None where the method works. Elsewhere it is the reason, as a sentence without its subject.
    """

    name: str
    """``peft_type`` of a method, or an option of its config; ``a.b`` is option b of the config in option a."""
    values: tuple[str, ...] = ()
    """Beginnings of the option's values that the row is about; empty: all values but null and false."""
    only: tuple[str, ...] = ()
    """Situations that the row is about; empty: all. It says nothing of the others."""
    packed: str | None = situation("packed batches", _ANOTHER)
    merge: str | None = situation("merge", f"leave merge out and use the adapter as it is, or {_ANOTHER}")
    combined: str | None = situation("weighted, combined", "export the adapter alone, with weight 1")
    added_tokens: str | None = situation(
        "added tokens", "take peft.LoraConfig, peft.TrainableTokensConfig, or peft: null"
    )
    bitsandbytes: str | None = situation("NF4, INT8 base", _DENSE_BASE)
    torchao: str | None = situation("torchao base", _DENSE_BASE)
    gptqmodel: str | None = situation("GPTQ, AWQ base", _DENSE_BASE)
    otherwise_quantized: str | None = situation("other quantized base", _DENSE_BASE)
    fsdp: str | None = situation("FSDP", "take ddp, or another method")
    zero: str | None = situation("ZeRO-1, ZeRO-2", "take ddp, or another method")
    zero3: str | None = situation("ZeRO-3", "take another method")
    tensor: str | None = situation(
        "TP", "take LoraConfig on linear layers of attention and MLP, or set tensor_parallel_size to 1"
    )
    pipeline: str | None = situation("PP", "set pipeline_parallel_size to 1, or take another method")
    context: str | None = situation("CP", "set context_parallel_size to 1, or take another method")

    def applies_to(self, peft: PeftConfig) -> bool:
        """Whether the row is about a config."""
        value = _value(peft, self.name)
        if self.values:
            return isinstance(value, str) and value.startswith(self.values)
        return self.name == peft.peft_type.value or bool(value)

    def subject(self, peft: PeftConfig) -> str:
        """The method or option that the row is about, with its value in a config."""
        if self.name.split(".")[0] not in vars(peft):
            return str(peft.peft_type.value)
        value = _value(peft, self.name)
        return f"{self.name}={value!r}" if isinstance(value, str | bool | list) else self.name


def _value(peft: PeftConfig, name: str) -> object:
    value: object = peft
    for option in name.split("."):
        value = value.get(option) if isinstance(value, dict) else getattr(value, option, None)
    return value


# --- reasons -----------------------------------------------------------------------------------------

_CALLS = "needs calls of its own while training, which are not made here"
_UNBUILT = "cannot be built without weights, so a recipe could not be checked before they are read (peft 0.21)"
_OWN_WEIGHTS = "works on the base's own weights, which are packed when the base is quantized"
_ROUNDED = "changes the base's weights, which would be rounded again when the base is quantized"
_NOT_ON_THIS_BASE = "was not compared on such a base with its results on the dequantized one"
_NOT_COMPARED = "was not compared with one process"
_WHOLE_WEIGHTS = "looks at whole weights, of which a tensor-parallel rank has a part"
_BETWEEN_PASSES = "looks at whole weights between passes, which no rank has"
_BETWEEN_LAYERS = "shares weights between layers, which are sharded apart"
_BY_SAMPLE = "runs sample by sample, and ranks have different numbers of samples"
_VIRTUAL = "adds virtual tokens, which pipeline, tensor and context parallelism do not know of"
_BOTH_ENDS = (
    "changes embedding and head at once, which are on different stages of a pipeline (modules_to_save trains them in "
    "full there)"
)
_AT_CREATION = "reads weights of the base when it is created, and at stage 3 no rank has them whole"
_NOT_MERGED = "adds no weights that could be merged into the base"
_NOT_COMBINED = "is not combined by PEFT (peft 0.21)"
_NO_SUM = "adds no products of matrices, which alone are combined as sums"
_NO_ROWS = "trains no rows of the embeddings"

Reasons = Mapping[str, str]


def _on_quantized(reason: str) -> Reasons:
    return dict.fromkeys(("bitsandbytes", "torchao", "gptqmodel", "otherwise_quantized"), reason)


def _on_parts(reason: str) -> Reasons:
    return dict.fromkeys(("fsdp", "tensor", "pipeline", "context"), reason)


_NOT_LORA: Reasons = {"combined": _NO_SUM, "added_tokens": _NO_ROWS}
_ADAPTER: Reasons = {**_NOT_LORA, "tensor": _NOT_COMPARED, "otherwise_quantized": _NOT_ON_THIS_BASE}
_NOT_GPTQ: Reasons = {**_ADAPTER, "gptqmodel": _NOT_ON_THIS_BASE}
_DENSE: Reasons = {**_ADAPTER, **_on_quantized(_OWN_WEIGHTS)}
_PROMPT: Reasons = {**_ADAPTER, **dict.fromkeys(("tensor", "pipeline", "context"), _VIRTUAL), "merge": _NOT_MERGED}
_TOKENS: Reasons = {
    "combined": "trains rows of the embeddings, which do not add up",
    "tensor": _NOT_COMPARED,
    "pipeline": _BOTH_ENDS,
    "zero3": _AT_CREATION,
}


def _row(
    name: str, *shared: Reasons, values: tuple[str, ...] = (), only: tuple[str, ...] = (), **own: str | None
) -> MethodSupport:
    reasons: dict[str, str | None] = {key: reason for part in [*shared, own] for key, reason in part.items()}
    return MethodSupport(name, values, only, **reasons)


# --- the table ---------------------------------------------------------------------------------------

METHODS: Sequence[MethodSupport] = (
    _row("LORA"),
    _row("use_dora", tensor=_WHOLE_WEIGHTS, combined="trains magnitudes, which do not add up"),
    _row(
        "init_lora_weights",
        _on_quantized(_ROUNDED),
        values=FROM_THE_BASE,
        combined="changes the base's weights, which another adapter builds on",
        zero3=_AT_CREATION,
    ),
    _row("init_lora_weights", values=("eva", "loftq"), zero3=_AT_CREATION),
    _row(
        "init_lora_weights",
        _on_quantized("draws in the dtype of the base's weights, which are packed when the base is quantized"),
        values=("orthogonal",),
    ),
    _row("init_lora_weights", values=("mica",), packed=_UNBUILT),
    _row(
        "kasa_config",
        _on_quantized(_ROUNDED),
        _on_parts(_BETWEEN_PASSES),
        combined=_NOT_COMBINED,
        zero3=_BETWEEN_PASSES,
    ),
    _row("velora_config", _on_quantized("does nothing for packed layers (peft 0.21)"), tensor=_WHOLE_WEIGHTS),
    _row(
        "velora_config.init_type",
        values=("batch_average",),
        packed="projects gradients on the mean of a micro-batch (set it to random)",
    ),
    _row(
        "use_bdlora",
        _on_quantized("is left out by PEFT for packed layers, which would train plain LoRA (peft 0.21)"),
        combined=_NOT_COMBINED,
        tensor=_WHOLE_WEIGHTS,
    ),
    _row(
        "target_parameters",
        dict.fromkeys(("torchao", "gptqmodel", "otherwise_quantized"), _NOT_ON_THIS_BASE),
        combined=_NOT_COMBINED,
    ),
    _row("trainable_token_indices", _TOKENS),
    _row("modules_to_save", only=("combined",), combined=_NOT_COMBINED),
    _row(
        "lora_bias", only=("combined",), combined="trains biases of factors, which PEFT leaves out of a sum (peft 0.21)"
    ),
    _row("bias", values=("all", "lora_only"), only=("combined",), combined=_NOT_COMBINED),
    _row(
        "alora_invocation_tokens", packed="has to find its tokens in each sample of a packed batch, which PEFT does not"
    ),
    _row("arrow_config", packed="routes between adapters that are there; it trains none"),
    _row("monteclora_config", packed="draws its noise ahead of time, so that a resumed run would be another one"),
    _row("LOHA", _DENSE, zero3=_AT_CREATION),
    _row("LOKR", _DENSE),
    _row(
        "ADALORA",
        _NOT_GPTQ,
        _on_parts(_BETWEEN_PASSES),
        dict.fromkeys(("zero", "zero3"), "weighs its ranks by gradients, which ZeRO has given away by then"),
    ),
    _row("IA3", _NOT_GPTQ),
    _row("OFT", _ADAPTER),
    _row("BOFT", _ADAPTER),
    _row("VERA", _ADAPTER),
    _row("PVERA", _NOT_GPTQ),
    _row("FOURIERFT", _NOT_GPTQ),
    _row("WAVEFT", _NOT_GPTQ),
    _row("LN_TUNING", _ADAPTER, zero3=_AT_CREATION),
    _row("HRA", _DENSE),
    _row("MISS", _ADAPTER),
    _row("RANDLORA", _NOT_GPTQ),
    _row("TINYLORA", _DENSE, _on_parts(_BETWEEN_LAYERS), zero3=_AT_CREATION),
    _row("UNILORA", _DENSE, _on_parts(_BETWEEN_LAYERS)),
    _row("VBLORA", _NOT_GPTQ, _on_parts(_BETWEEN_LAYERS)),
    _row("GRALORA", _DENSE),
    _row("GLORA", _DENSE),
    _row("DELORA", _DENSE, zero3=_AT_CREATION),
    _row("DEFT", _DENSE, zero3=_AT_CREATION),
    _row("HIRA", _NOT_GPTQ, torchao=_OWN_WEIGHTS),
    _row("PSOFT", _DENSE),
    _row("PEANUT", _DENSE),
    _row("ROAD", _NOT_GPTQ),
    _row("SHIRA", _NOT_GPTQ),
    _row("C3A", _DENSE),
    _row(
        "OSF",
        _DENSE,
        _on_parts("projects gradients of whole weights, and would train something else"),
        zero3=_AT_CREATION,
    ),
    _row("BEFT", _NOT_GPTQ),
    _row("SUPERTUNING", _DENSE, zero3=_AT_CREATION),
    _row("ADAMSS", _DENSE, zero3=_AT_CREATION),
    _row("use_asa", packed="freezes weights while training, which the optimizer and checkpoints know nothing of"),
    _row("BOTTLENECK", _NOT_GPTQ, merge=_NOT_MERGED),
    _row("ADAPTION_PROMPT", _NOT_GPTQ, tensor=None, merge=_NOT_MERGED),
    _row("TRAINABLE_TOKENS", _ADAPTER, _TOKENS, added_tokens=None),
    _row("PROMPT_TUNING", _PROMPT),
    _row("P_TUNING", _PROMPT),
    _row("PREFIX_TUNING", _NOT_GPTQ, _PROMPT, _on_parts(_BY_SAMPLE), zero3=_BY_SAMPLE),
    *(_row(name, packed=_CALLS) for name in ("XLORA", "POLY", "MULTITASK_PROMPT_TUNING", "CPT", "CARTRIDGE")),
    _row("SHADOW", packed="runs a second model beside the base, which packed batches pass by"),
    _row(
        "LILY",
        packed="averages its routing over all tokens of a packed batch, so that samples see each other (peft 0.21)",
    ),
    _row("FROD", packed=_UNBUILT),
)
NOT_LISTED = _row("any other", _NOT_LORA, _on_quantized(_NOT_ON_THIS_BASE), tensor=_NOT_COMPARED, zero3=_NOT_COMPARED)
_NOT_LISTED_PROMPT = _row("any other", _PROMPT, _on_quantized(_NOT_ON_THIS_BASE), zero3=_NOT_COMPARED)


# --- refusals ----------------------------------------------------------------------------------------


def rows_of(peft: PeftConfig) -> list[MethodSupport]:
    """Rows of the table that are about a config: its method's and its options'."""
    known = any(row.name == peft.peft_type.value for row in METHODS)
    other = [] if known else [_NOT_LISTED_PROMPT if peft.is_prompt_learning else NOT_LISTED]
    return other + [row for row in METHODS if row.applies_to(peft)]


def refusal(peft: PeftConfig, name: str, value: str = "", option: str = "model.peft") -> str | None:
    """Reason why a method does not work in a situation (a field of ``MethodSupport``), and the fix; None if it works.

    The message has the ``value`` that makes the situation, e.g. ``tensor_parallel_size=2``, and the method's option.
    """
    rows = rows_of(peft)
    if (first := first_refusal(rows, name)) is None:
        return None
    row, reason, fix = first
    others = {other: f"{text}, or " for other, text in _IN_PLACE_OF_ZERO3.items() if first_refusal(rows, other) is None}
    in_place = "".join(others.values()) or "take ddp, or " if name == "zero3" else ""
    return f"{option}: {row.subject(peft)} {reason}{f' ({value})' if value else ''}; {in_place}{fix}"


_IN_PLACE_OF_ZERO3 = {"zero": "set stage to 2", "fsdp": "take lit_ft.strategies.FSDPStrategy"}


def check_situation(peft: PeftConfig | None, name: str, value: str = "", option: str = "model.peft") -> None:
    """Refuse a method in a situation in which it does not work; the arguments are those of ``refusal``.

    Raises:
        RecipeError: the method or one of its options does not work; the message gives the reason and the fix.
    """
    if peft is not None and (message := refusal(peft, name, value, option)) is not None:
        raise RecipeError(message)


def check_method(peft: PeftConfig, scores_texts: bool = False) -> None:
    """Refuse methods, and options of theirs, that would not train correctly in any situation.

    Args:
        peft: config of the method.
        scores_texts: whether the model has a head that scores texts, which has to train beside the adapter.

    Raises:
        RecipeError: the method is one of them; the message gives the reason.
    """
    if peft.task_type not in (None, "CAUSAL_LM", *["SEQ_CLS"] * scores_texts):
        what = "reward models" if scores_texts else "causal language models"
        raise RecipeError(f"model.peft: task_type={peft.task_type} is not for {what}; leave it out")
    if scores_texts and ("modules_to_save" not in peft.to_dict() or peft.is_prompt_learning):
        raise RecipeError(
            f"model.peft: {type(peft).__name__} cannot train the head that scores texts beside it; take peft.LoraConfig"
        )
    if peft.inference_mode:
        raise RecipeError("model.peft: inference_mode=true, as saved adapters have it, trains nothing; leave it out")
    check_situation(peft, "packed")
    if peft.peft_type.value == "ADALORA" and peft.target_r >= peft.init_r:
        raise RecipeError(
            f"model.peft: AdaLoRA lowers ranks from init_r={peft.init_r} to target_r={peft.target_r} on average; "
            "raise init_r"
        )


def check_quantized(peft: PeftConfig | None, quantization: str) -> None:
    """Refuse methods whose results on a quantized base model differ from those on the dequantized one.

    ``quantization`` is transformers' name for it, e.g. ``gptq``.

    Raises:
        RecipeError: the method is one of them; the message names one that works.
    """
    check_situation(peft, _SITUATION_OF.get(quantization, "otherwise_quantized"), f"quantization: {quantization}")


_SITUATION_OF = {"bitsandbytes": "bitsandbytes", "torchao": "torchao", "gptq": "gptqmodel", "awq": "gptqmodel"}


def configs_in(model: nn.Module) -> Iterator[PeftConfig]:
    """Configs of the adapters in a model: of PEFT's wrappers, and of layers that PEFT has put into a plain model."""
    for part in model.modules():
        configs = getattr(part, "peft_config", None)
        yield from configs.values() if isinstance(configs, dict) else ()

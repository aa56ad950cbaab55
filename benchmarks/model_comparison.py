"""Comparison of a packed batch with its samples one by one, for an architecture at tiny size.

The reference is transformers itself: each sample is computed alone, by the model's own ``forward`` with its own masks
and positions, and plain PEFT for LoRA.
"""

import copy
import re
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.parallel_comparison import SEQUENCE, STRATEGIES, WAYS, Comparison
from benchmarks.tiny_configs import tiny_config
from benchmarks.vllm_models import VERSION, served
from lit_ft import CausalLM
from lit_ft.errors import RecipeError
from lit_ft.internals.transformers import attention_functions, enable_checkpointing
from lit_ft.model.activations import checkpointing as activation_checkpointing
from lit_ft.model.isolation import token_mixers
from lit_ft.model.isolation.architectures import REFUSED, reads_padding
from lit_ft.packed_batch import pack_samples
from lit_ft.strategies.parallel.mesh import MeshSizes, ParallelDims, RequestedSizes

TOLERANCE = 1e-5
"""Largest relative difference that is rounding."""
LENGTHS = (13, 22, 7)
SHARED = 8
"""First tokens that two samples have in common, which are computed once where the architecture allows it."""
ARCHITECTURES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""All types of models that transformers has a causal LM for."""
DRAWS_EXPERTS = frozenset({"phimoe"})
"""Architectures whose router draws experts in training, on each rank others."""


@dataclass(frozen=True)
class Results:
    """Logits ``(T, V)`` of three samples, their summed loss, and its gradients by parameter."""

    logits: Tensor
    loss: float
    gradients: Mapping[str, Tensor]

    def difference(self, reference: "Results") -> float:
        """Largest difference from a reference, relative to the largest value of the logits, loss or gradient.

        Gradients that are zero but for rounding (keys' biases) are relative to a tenth of the largest of all.
        """
        assert self.gradients.keys() == reference.gradients.keys()
        largest = max(float(gradient.abs().max()) for gradient in reference.gradients.values())
        found = [_relative(self.logits, reference.logits), abs(self.loss - reference.loss) / reference.loss]
        for name, gradient in reference.gradients.items():
            found.append(_relative(self.gradients[name], gradient, least=largest / 10))
        return max(found)


def _relative(value: Tensor, reference: Tensor, least: float = 0.0) -> float:
    return float((value - reference).abs().max()) / max(float(reference.abs().max()), least)


def samples() -> list[np.ndarray]:
    """Token ids of three samples of unequal length; the second one begins as the first."""
    generator = np.random.default_rng(0)
    first, second, third = (generator.integers(5, 400, length) for length in LENGTHS)
    return [first, np.concatenate([first[:SHARED], second[SHARED:]]), third]


class Tiny:
    """A tiny model of an architecture, as lit_ft builds it."""

    def __init__(self, config: PretrainedConfig, peft: LoraConfig | None = None, **options: Any) -> None:
        """Build the model with random weights, all of which differ from the values that they start with.

        Args:
            config: config of the model.
            peft: LoRA to train; None trains all weights.
            options: further arguments of ``lit_ft.CausalLM``.
        """
        self._folder = tempfile.TemporaryDirectory()  # until the model is collected
        folder = self._folder.name
        config.save_pretrained(folder)
        self.module = CausalLM(folder, init="random", dtype="float32", peft=copy.deepcopy(peft), **options)
        torch.manual_seed(0)
        self.module.configure_model()
        assert self.module.model is not None
        self.model = self.module.model
        self.config, self.peft = self.module.spec.base.config, peft  # of the text part, where there are others
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
        self.model.eval()  # routers draw numbers in training

    def reference(self, model: PreTrainedModel | None = None) -> PreTrainedModel | PeftModel:
        """The same model and weights as transformers and PEFT compute it.

        Args:
            model: transformers' model to give these weights, and PEFT's layers where they are trained; None builds one.
        """
        if model is None:
            parts_differ = bool(self.config.sub_configs)  # an audio encoder may have no SDPA
            attention = "sdpa" if "sdpa" in attention_functions(self.config) and not parts_differ else "eager"
            config = type(self.config).from_dict(self.config.to_dict())
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
        if self.peft is not None:
            # As lit_ft resolves all-linear: it leaves routers out.
            peft = copy.deepcopy(self.model.peft_config["default"])
            peft.base_model_name_or_path = model.name_or_path  # PEFT warns of another one
            model = get_peft_model(model, peft)
        model.load_state_dict(self.model.state_dict())
        return model.eval()

    def packed(self) -> Results:
        """Results of the samples in one packed batch."""
        self.model.zero_grad()
        batch = pack_samples([(ids, ids) for ids in samples()])
        hidden = self.module.hidden_states(batch)
        loss = self.module.token_loss(hidden, batch).loss_sum
        loss.backward()
        with torch.no_grad():
            logits = self.module._packed.head(hidden[0])
        return Results(logits, loss.item(), _gradients(self.model))


def one_by_one(model: PreTrainedModel | PeftModel) -> Results:
    """Results of the samples computed alone."""
    model.zero_grad()
    logits, total = [], torch.zeros(())
    for ids in samples():
        own = model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0]
        total = total + cross_entropy(own[:-1], torch.from_numpy(ids)[1:], reduction="sum")
        logits.append(own.detach())
    total.backward()
    return Results(torch.cat(logits), total.item(), _gradients(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {name: gradient for name, gradient in found.items() if bool(gradient.any())}


YES, NOT_RUN = "yes", "not run"


@dataclass
class Row:
    """What was found of one architecture; a value other than ``YES`` and ``NOT_RUN`` is a reason why not."""

    packed: str = NOT_RUN
    mixing: str = ""
    """How the samples of a packed batch are kept apart."""
    lora: str = NOT_RUN
    merge: str = NOT_RUN
    checkpointing: str = NOT_RUN
    compile: str = NOT_RUN
    data: str = NOT_RUN
    tensor: str = NOT_RUN
    pipeline: str = NOT_RUN
    context: str = NOT_RUN
    expert: str = NOT_RUN
    generation: str = NOT_RUN
    vllm: str = ""
    """How vLLM serves the architecture."""


HEADINGS = {
    "packed": "packed batches",
    "mixing": "samples kept apart by",
    "lora": "LoRA on all linear layers",
    "merge": "merge",
    "checkpointing": "gradient checkpointing",
    "compile": "compile",
    "data": "DDP, FSDP, ZeRO-3",
    "tensor": "TP",
    "pipeline": "PP",
    "context": "CP",
    "expert": "EP",
    "generation": "generation",
    "vllm": f"vLLM {VERSION}",
}


def compare(model_type: str, columns: frozenset[str] = frozenset(HEADINGS)) -> Row:
    """Compare an architecture with its samples one by one.

    Args:
        model_type: transformers' name of the architecture.
        columns: columns to find; the others are "not run".
    """
    row = Row(vllm=served(model_type))
    if model_type in REFUSED:
        return Row(packed=REFUSED[model_type])
    try:
        config = tiny_config(model_type)
        full = Tiny(config)
    except (RecipeError, ValueError) as error:
        return Row(packed=f"{NOT_RUN}: {str(error).split(': ', 2)[-1].split('.')[0]}")
    alone = full.reference()
    reference = one_by_one(alone)
    base = full.module.base_model
    apart = [mixer for mixer in token_mixers.mixers(base) if not token_mixers.isolates(base, mixer)]
    row.mixing = ", ".join(dict.fromkeys(type(mixer).__name__ for mixer in apart)) or "packed attention"
    packed = full.packed()
    found = packed.difference(reference)
    row.packed = _verdict(found if found <= TOLERANCE else _without_rounding(again := Tiny(config), again.reference()))
    if "checkpointing" in columns:
        row.checkpointing = _checkpointing(full, packed)
    if "lora" in columns or "merge" in columns:
        row.lora, row.merge = _lora(full, alone)
    if "compile" in columns:
        row.compile = _compiled(full, reference)
    if "generation" in columns:
        row.generation = _generation(full)
    if kinds := STRATEGIES.keys() & columns:
        comparison = Comparison(full.model)
        for kind in kinds:
            setattr(row, kind, _parallel(full, comparison, kind))
    return row


def _verdict(difference: float, tolerance: float = TOLERANCE) -> str:
    return YES if difference <= tolerance else f"differs by {difference:.0e}"


def _checkpointing(full: Tiny, reference: Results) -> str:
    try:
        enable_checkpointing(full.module.base_model, activation_checkpointing.options(True))
    except ValueError:
        return "transformers does not support it"
    for layer in full.model.modules():
        layer.training = isinstance(layer, GradientCheckpointingLayer)  # routers stay as they are
    verdict = _verdict(full.packed().difference(reference))
    full.module.base_model.gradient_checkpointing_disable()
    full.model.eval()
    return verdict


def _lora(full: Tiny, alone: PreTrainedModel) -> tuple[str, str]:
    """LoRA and its merge, compared with those of PEFT on transformers' model, which is changed in place."""
    peft = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    try:
        tiny = Tiny(full.config, peft)
        model = tiny.reference(alone)
        assert isinstance(model, PeftModel)
        reference = one_by_one(model)
    except (RecipeError, AttributeError, RuntimeError) as error:  # PEFT wraps routers and grouped linear layers
        return str(error).split("; ")[0].removeprefix("model.peft: "), NOT_RUN
    found = tiny.packed().difference(reference)
    verdict = _verdict(found if found <= TOLERANCE else _without_rounding(tiny, model))
    targets = {name.split(".lora_A")[0].rsplit(".", 1)[-1] for name in reference.gradients if ".lora_A" in name}
    # The product with a sum is rounded in another way than the sum of two products.
    of_merged = _verdict(_merge_difference(tiny, model, 10 * TOLERANCE), 10 * TOLERANCE)
    return (f"{YES}, {len(targets)}" if verdict == YES else verdict), of_merged


def _merge_difference(tiny: Tiny, model: PeftModel, tolerance: float) -> float:
    """Difference of a merge in place; where it is too large, that in double precision, which is not rounding.

    Args:
        tiny: the same model before the merge.
        model: model as transformers and PEFT compute it.
        tolerance: largest difference that is rounding.
    """
    found = _merged(model)
    if found > tolerance:
        before = _in_double_precision(tiny.reference())
        assert isinstance(before, PeftModel)
        found = _merged(before)
    return found


def _merged(model: PeftModel) -> float:
    with torch.no_grad():
        before = _logits(model)
        return _relative(_logits(model.merge_and_unload(safe_merge=True)), before)


def _logits(model: nn.Module) -> Tensor:
    return torch.cat([model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0] for ids in samples()])


def _in_double_precision(model: PreTrainedModel | PeftModel) -> PreTrainedModel | PeftModel:
    """The model, cast in place."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    base.set_experts_implementation("eager")  # torch's grouped product has no double precision
    return model.double()


def _without_rounding(tiny: Tiny, model: PreTrainedModel | PeftModel) -> float:
    """Difference in double precision, which is not rounding, of a model from the same as transformers computes it.

    Args:
        tiny: the model, cast in place.
        model: transformers' model, cast too.
    """
    for either in (tiny.model, model):
        _in_double_precision(either)
    return tiny.packed().difference(one_by_one(model))


def _compiled(full: Tiny, reference: Results) -> str:
    """Graphs are made as for ``compile: true`` and computed by torch itself, which needs no compiler."""
    torch.compiler.reset()
    tiny = Tiny(full.config, compile="eager")
    with torch.compiler.set_stance("default"):
        return _verdict(tiny.packed().difference(reference))


def _generation(full: Tiny) -> str:
    """Whether four greedy tokens with a cache are those without one, and padding before a prompt changes nothing."""
    alone, prompts = full.reference(), [one.tolist() for one in samples()]
    with torch.no_grad():
        try:
            generated = [_answer(alone, [prompt])[0][0] for prompt in prompts]
            padded = _answer(alone, prompts)[1]
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            return f"transformers' generate fails at tiny size: {' '.join(str(error).split())[:100]}"
        ids = torch.tensor(prompts[:1])
        for _ in range(4):
            following = alone(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat([ids, following], dim=1)
    if not torch.equal(generated[0], ids[0, -4:]):
        return "answers with a cache differ from those without"
    expected = torch.stack([_answer(alone, [prompt])[1][0] for prompt in prompts])
    changes = _relative(padded, expected) > 10 * TOLERANCE
    if reads_padding(full.config):
        return f"{YES}, without padding" if changes else f"{YES}; _READS_PADDING names it for nothing"
    return "padding before a prompt changes answers" if changes else YES


def _answer(model: PreTrainedModel | PeftModel, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """Four greedy tokens after each prompt of a left-padded batch, and the logits of the first two."""
    longest = max(map(len, prompts))
    result = model.generate(
        input_ids=torch.tensor([[0] * (longest - len(ids)) + ids for ids in prompts]),
        attention_mask=torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
        max_new_tokens=4,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return result.sequences[:, longest:], torch.stack(result.logits[:2], dim=1)


def _parallel(full: Tiny, comparison: Comparison, kind: str) -> str:
    if (reason := _refusal(full, kind)) is not None:
        return reason
    if type(full.module.base_model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return NOT_RUN  # the text part of Emu3 is written with the rest of the model alone
    if full.config.model_type in DRAWS_EXPERTS:
        return "its router draws experts in training, on each rank others"
    without = [SEQUENCE] if kind == "tensor" and _refusal(full, kind, sequence_parallel=True) is not None else []
    cases = defaultdict[str, list[str]](list)
    for case, what in comparison.differences(kind, without).items():
        cases[what].append(case)
    verdict = YES + (", without sequence_parallel" if without else "")
    if not cases:
        return verdict
    found = "; ".join(f"{' and '.join(names)}: {what}" for what, names in cases.items())
    if sum(map(len, cases.values())) < len(WAYS) * (len(STRATEGIES[kind]) - len(without)):
        return f"{verdict}; {found}"
    return next(iter(cases)) if len(cases) == 1 else found


def _refusal(full: Tiny, kind: str, sequence_parallel: bool = False) -> str | None:
    """Why ``ModelParallelStrategy`` refuses a model; None if it does not."""
    if kind == "data":
        return None
    experts = 2 if kind == "expert" else 1
    sizes = {"data": experts, **({} if kind == "expert" else {kind: 2})}
    mesh = MeshSizes(**{part: sizes.get(part, 1) for part in MeshSizes._fields})
    dims = ParallelDims(RequestedSizes(*mesh), experts, sequence_parallel=sequence_parallel)
    try:
        dims.check_model(mesh, full.module, full.model)
    except RecipeError as error:
        reason = str(error).split("; ")[0].replace(type(full.module.base_model).__name__, "the model")
        reason = re.sub(r" \(\w+(, \w+)*\),", ",", reason)  # names of classes
        reason = re.sub(r"lit_ft.CausalLM with its (.*), but .* has (\w+)$", r"\1, and the model has \2", reason)
        return re.sub(r"^\w+_parallel_size=2(: |, but | )?|^tensor parallelism: ", "", reason)
    return None

"""LoRA inits that read training data (EVA, CorDA, LoRA-GA), subtract the initial adapter from the base weights (PiSSA,
OLoRA, CorDA, LoRA-GA) or compensate for quantization (LoftQ): computed once, then stored in checkpoints.

Terms: a *start* is the result of such an init (``LoraInitState``). Checkpoints hold it, so that a resumed run, a
validation and an export start from the same base weights without running the init again.
"""

import copy
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from peft import EvaConfig, LoraConfig, LoraGAConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, ParamWrapper
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.eva import initialize_lora_eva_weights
from peft.tuners.lora.loraga import preprocess_loraga
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_ft.errors import RecipeError
from lit_ft.packed_batch import PackedBatch, TokenLoss, terms_of_mean
from lit_ft.tuning.targets.patterns import of_parameter

FROM_DATA = ("eva", "corda", "lora_ga")
"""Values of ``init_lora_weights`` that read training data."""
FROM_THE_BASE = ("pissa", "olora", "corda", "lora_ga")
"""Prefixes of values of ``init_lora_weights`` that subtract the initial adapter from the base weights."""

DEFAULT_ROWS = 64
"""Micro-batches of training data that an init reads, where a recipe says nothing."""

_EVA_PASSES = 50
"""Maximum number of passes over the data for EVA, which repeats them without limit until its directions converge."""


class LoraInitState(TypedDict):
    """Result of an init, for checkpoints."""

    settings: dict[str, object]
    """Fields of the LoRA config that the init has set: EVA distributes ranks over the layers."""
    taken: dict[str, Tensor]
    """Initial factors A and B, by their names in the adapter, whose scaled product was subtracted from the base."""


def init_of(peft: PeftConfig | None) -> str:
    """Name of the init of a LoRA config; ``""`` for PEFT's default and for other methods."""
    if not isinstance(peft, LoraConfig) or not isinstance(peft.init_lora_weights, str):
        return ""
    return peft.init_lora_weights


def check_rows(rows: int, peft: PeftConfig | None) -> None:
    """Refuse a number of micro-batches for an init that reads none.

    Raises:
        RecipeError: it is given, and the config has no such init.
    """
    if rows != DEFAULT_ROWS and not init_of(peft).startswith(FROM_DATA):
        raise RecipeError(
            f"model.init_rows={rows} has no effect without init_lora_weights of {', '.join(FROM_DATA)}; leave it out"
        )


def needs_init(peft: PeftConfig | None) -> bool:
    """Whether the init does more than draw random numbers."""
    return init_of(peft).startswith((*FROM_DATA, *FROM_THE_BASE, "loftq"))


def subtracts_product(peft: PeftConfig | None) -> bool:
    """Whether the init subtracts the product that the adapter begins with from the base's weights."""
    return init_of(peft).startswith(FROM_THE_BASE)


def changes_base(peft: PeftConfig | None) -> bool:
    """Whether a method gives the base itself other weights, which are there when its adapter is switched off.

    An init that subtracts a product, KaSA's truncation, and biases that are trained in place.
    """
    is_kasa = isinstance(peft, LoraConfig) and peft.kasa_config is not None
    return is_kasa or subtracts_product(peft) or changes_biases(peft)


def changes_biases(peft: PeftConfig | None) -> bool:
    """Whether a method trains biases of the base in place."""
    return getattr(peft, "bias", "none") not in ("none", False)


def with_default_init(peft: PeftConfig, start: LoraInitState | None = None) -> PeftConfig:
    """Copy of a config with PEFT's default init, and with the fields that an init has set."""
    config = _reset_init(copy.deepcopy(peft))
    for name, value in (start["settings"] if start else {}).items():
        setattr(config, name, value)
    return config


def _reset_init(config: LoraConfig) -> LoraConfig:
    config.init_lora_weights = True
    config.eva_config = config.corda_config = config.lora_ga_config = None
    config.loftq_config = {}
    return config


def set_defaults(peft: PeftConfig | None) -> None:
    """Give a config the default settings of its init; PEFT does so for some, and for none where LoftQ's are set too.

    A recipe always has those, at their defaults.
    """
    if init_of(peft) == "eva" and (config := cast(LoraConfig, peft)).eva_config is None:
        config.eva_config = EvaConfig()
    if init_of(peft) == "corda" and (config := cast(LoraConfig, peft)).corda_config is None:
        config.corda_config = CordaConfig()
    if init_of(peft) == "lora_ga" and (config := cast(LoraConfig, peft)).lora_ga_config is None:
        config.lora_ga_config = LoraGAConfig()


def check_init(peft: PeftConfig, is_quantized: bool) -> None:
    """Refuse settings that an init cannot be combined with.

    Raises:
        RecipeError: DoRA, whose magnitudes would be those of the changed base; LoftQ on a base that is not quantized;
            parameters that are no linear layers.
    """
    if isinstance(peft, LoraConfig) and peft.use_dora and subtracts_product(peft):
        raise RecipeError(
            f"model.peft: init_lora_weights={init_of(peft)!r} subtracts its first product from the base, and use_dora "
            "trains magnitudes of that base, so that the adapter could not be used on the base itself; leave one out"
        )
    if isinstance(peft, LoraConfig) and peft.target_parameters and init_of(peft) not in ("", "gaussian"):
        raise RecipeError(
            f"model.peft: init_lora_weights={init_of(peft)!r} reads linear layers, and target_parameters are none; "
            "take the default, or leave target_parameters out"
        )
    if init_of(peft) == "loftq" and not is_quantized:
        raise RecipeError(
            "model.peft: init_lora_weights='loftq' makes up for what quantization costs; set model.quantization "
            "(recipes/tuning/qlora_nf4.yaml), or take another init"
        )
    if init_of(peft) == "loftq" and (passes := cast(LoraConfig, peft).loftq_config.get("loftq_iter", 1)) != 1:
        raise RecipeError(
            f"model.peft: loftq_iter={passes} would quantize the base anew in each pass, so that the adapter fitted no "
            "base that can be had elsewhere; set it to 1"
        )


def check_layers(model: nn.Module, peft: PeftConfig) -> None:
    """Refuse layers from which an init cannot subtract its initial adapter so that the adapter fits the base elsewhere.

    Args:
        model: model, or its skeleton, with the adapter.
        peft: config of the adapter.

    Raises:
        RecipeError: a layer is no linear one, or another module has its weight too, which would change with it.
    """
    if not subtracts_product(peft):
        return
    owners = Counter(id(weight) for module in model.modules() for weight in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        layer = module.get_base_layer()
        if isinstance(layer, nn.Linear) and owners[id(layer.weight)] == 1:
            continue
        why = "shares its weight with another module" if isinstance(layer, nn.Linear) else "is no linear layer"
        raise RecipeError(
            f"model.peft: init_lora_weights={init_of(peft)!r} subtracts its first product from the base, and "
            f"{name.removeprefix('base_model.model.')} ({type(layer).__name__}) {why}; leave it out of target_modules, "
            "or take the default init"
        )


def run_lora_init(
    base: nn.Module,
    peft: PeftConfig,
    wrap: Callable[[PeftConfig], PeftModel],
    batches: Sequence[PackedBatch],
    forward: Callable[[PackedBatch], TokenLoss],
    unquantized: Callable[[], nn.Module],
) -> tuple[PeftModel, LoraInitState]:
    """Wrap a base model and run the config's init.

    Args:
        base: base model; its weights are changed if the init subtracts the initial adapter from them.
        peft: config of an init for which ``needs_init`` is true.
        wrap: function that creates the ``PeftModel`` of a config.
        batches: packed batches of training data; unused by inits that do not read data.
        forward: function that runs the model on a packed batch.
        unquantized: function that reads the base model without quantization, for LoftQ.

    Raises:
        RecipeError: EVA's directions do not converge.
    """
    init, began = init_of(peft), time.perf_counter()
    config = cast(LoraConfig, copy.deepcopy(peft))
    rank_zero_info(
        f"adapter init {init}: " + (f"{len(batches)} micro-batches of training data" if batches else "SVD of layers")
    )
    if init in ("corda", "lora_ga") and config.target_modules in (None, "all-linear"):
        probe = wrap(with_default_init(config))
        given_as_parameters = {name.removesuffix(".weight") for name in probe.targeted_parameter_names}
        config.target_modules = {*probe.targeted_module_names, *given_as_parameters}  # PEFT's preprocessing needs names
        probe.base_model.unload()
    with _weights_kept(base, init):
        if init == "corda":
            with _inputs_as_matrices(base):
                preprocess_corda(base, config, run_model=lambda: _run(forward, batches))
        elif init == "lora_ga":
            preprocess_loraga(base, config, train_step=lambda: _backward(forward, batches))
        model = wrap(with_default_init(config) if init == "loftq" else config)
        if init == "eva":
            _eva(model, batches, forward)
        elif init == "loftq":
            _loftq(model, unquantized())
        start = _state_after(model, init)
    _subtract_initial_product(model, start["taken"])
    ranks = [module.r["default"] for module in model.modules() if isinstance(module, LoraLayer)]
    spread = f"ranks {min(ranks)} to {max(ranks)}, " if min(ranks) != max(ranks) else ""
    rank_zero_info(f"adapter init {init}: done, {spread}{time.perf_counter() - began:.1f} s")
    return model, start


def _state_after(model: PeftModel, init: str) -> LoraInitState:
    """State that an init has left in a model: settings that it chose, and weights that are taken from the base."""
    saved = get_peft_model_state_dict(model).items() if init.startswith(FROM_THE_BASE) else ()
    taken = {name: tensor.clone() for name, tensor in saved if "lora_" in name}
    settings: dict[str, object] = {}
    config = _reset_init(model.peft_config["default"])
    if init == "eva":
        layers = _name_adapted_layers(model, config)
        settings = {"rank_pattern": config.rank_pattern, "alpha_pattern": config.alpha_pattern}
        settings["target_modules"] = layers
    return LoraInitState(settings=settings, taken=taken)


def _name_adapted_layers(model: PeftModel, config: LoraConfig) -> list[str]:
    """Name the layers that EVA has left an adapter in a config, which PEFT does as if none were given as parameters.

    Returns:
        Names of all of these layers.
    """
    layers = {name: part for name, part in model.get_base_model().named_modules() if isinstance(part, LoraLayer)}
    parameters = {name for name, part in layers.items() if isinstance(part, ParamWrapper)}
    config.target_modules = set(layers) - parameters
    config.target_parameters = sorted(f"{name}.weight" for name in parameters) or None
    for option in ("rank_pattern", "alpha_pattern"):
        by_name = getattr(config, option).items()
        setattr(config, option, {of_parameter(n) if n in parameters else n: value for n, value in by_name})
    return sorted(layers)


def restore(model: PeftModel, start: LoraInitState) -> PeftModel:
    """Apply the init state of an earlier run to a newly wrapped base model."""
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in start["taken"].items():
            own[name.removesuffix(".weight") + ".default.weight"].copy_(tensor)
    _subtract_initial_product(model, start["taken"])
    return model


def check_same(ours: LoraInitState | None, saved: LoraInitState | None) -> None:
    """Refuse weights that were trained from another init state.

    Raises:
        RecipeError: the init was run again, with another result.
    """
    if ours is saved is None:
        return
    if ours is None or saved is None or ours["settings"] != saved["settings"] or _differ(ours["taken"], saved["taken"]):
        raise RecipeError(
            "the checkpoint was trained from another initial state than the adapter's init has computed now; set "
            "module.start to the checkpoint's 'adapter_start' before the trainer builds the model, as the command line "
            "does"
        )


def _differ(ours: dict[str, Tensor], saved: dict[str, Tensor]) -> bool:
    return ours.keys() != saved.keys() or any(not torch.equal(ours[name].cpu(), saved[name].cpu()) for name in ours)


@torch.no_grad()
def _subtract_initial_product(model: PeftModel, taken: dict[str, Tensor]) -> None:
    for name, module in model.named_modules():
        down, up = (taken.get(f"{name}.lora_{factor}.weight") for factor in "AB")
        if isinstance(module, LoraLayer) and down is not None and up is not None:
            weight = module.get_base_layer().weight
            product = module.scaling["default"] * (up.to(weight.device).float() @ down.to(weight.device).float())
            weight.copy_(weight.float() - product)


@contextmanager
def _weights_kept(base: nn.Module, init: str) -> Iterator[None]:
    """Restore the weights of linear layers after PEFT has changed them; ``_subtract_initial_product`` does it again."""
    is_needed = init.startswith(FROM_THE_BASE)
    layers = [module for module in base.modules() if isinstance(module, nn.Linear)] if is_needed else []
    # OLoRA subtracts in place; the others put a new tensor into the layer, so that the earlier one is as it was.
    kept = [layer.weight.detach().clone() if init == "olora" else layer.weight.data for layer in layers]
    yield
    for layer, weight in zip(layers, kept, strict=True):
        layer.weight.data = weight


@contextmanager
def _inputs_as_matrices(base: nn.Module) -> Iterator[None]:
    """Context in which linear layers get inputs ``(tokens, features)``, as PEFT's CorDA reads them from hooks.

    Those of latent attention have more dimensions than a batch and its tokens (peft 0.21).
    """
    shapes: dict[nn.Module, torch.Size] = {}

    def flatten(layer: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        shapes[layer] = inputs[0].shape
        return (inputs[0].flatten(0, -2),)

    def unflatten(layer: nn.Module, _: tuple[Tensor], output: Tensor) -> Tensor:
        return output.view(*shapes.pop(layer)[:-1], -1)

    layers = [module for module in base.modules() if type(module) is nn.Linear]
    hooks = [
        hook
        for layer in layers
        for hook in (layer.register_forward_pre_hook(flatten), layer.register_forward_hook(unflatten))
    ]
    yield
    for hook in hooks:
        hook.remove()


def _run(forward: Callable[[PackedBatch], TokenLoss], batches: Sequence[PackedBatch]) -> None:
    for batch in batches:
        forward(batch)


def _backward(forward: Callable[[PackedBatch], TokenLoss], batches: Sequence[PackedBatch]) -> None:
    # The inputs of the first layers need no gradients, but the hooks of these layers are still called.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    for batch in batches:
        (forward(batch).loss_sum / terms_of_mean(batch)).backward()


class _AsItIs(dict[str, object]):
    """Packed batch that PEFT does not move between devices."""

    def to(self, _: object) -> "_AsItIs":
        return self


def _eva(model: PeftModel, batches: Sequence[PackedBatch], forward: Callable[[PackedBatch], TokenLoss]) -> None:
    supervised_only = model.peft_config["default"].eva_config.use_label_mask
    calls = 0

    def predicting(batch: PackedBatch, _: object) -> Tensor | slice:
        return batch["predict_at"] if supervised_only else slice(None)

    def run(_: object, batch: PackedBatch) -> None:
        nonlocal calls
        calls += 1
        if calls > _EVA_PASSES * len(batches):
            raise RecipeError(
                f"model.peft: EVA's directions still move after {_EVA_PASSES} passes over {len(batches)} micro-batches;"
                f" raise model.init_rows, or lower the eva_config's tau={model.peft_config['default'].eva_config.tau:g}"
            )
        forward(batch)

    initialize_lora_eva_weights(
        model,
        [_AsItIs(batch) for batch in batches],
        forward_fn=run,
        prepare_model_inputs_fn=predicting,
        prepare_layer_inputs_fn=lambda inputs, where, _: inputs[0].reshape(-1, inputs[0].shape[-1])[where],
        gather_distributed_inputs=False,  # all ranks read the same batches
        show_progress_bar=False,
    )


@torch.no_grad()
def _loftq(model: PeftModel, original: nn.Module) -> None:
    """Set LoRA factors to the best low-rank approximation of the quantization error (Li et al. 2023, arXiv:2310.08659).

    PEFT's own ``replace_lora_weights_loftq`` runs only on CUDA, and ignores the scaling.
    """
    for name, module in model.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            weight = original.get_submodule(name).weight.float()
            residual = weight - dequantize_module_weight(module.get_base_layer()).to(weight)
            if not residual.any():  # not quantized: factors of zero would never train
                continue
            up, values, down = torch.linalg.svd(residual, full_matrices=False)
            rank, root = module.r["default"], values.sqrt()
            module.lora_A["default"].weight.copy_(root[:rank, None] * down[:rank])
            module.lora_B["default"].weight.copy_(up[:, :rank] * root[:rank] / module.scaling["default"])


def save_as_plain_lora(
    model: PeftModel,
    start: LoraInitState,
    has_own_embeddings: bool,
    folder: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write an adapter, whose initial value was subtracted from the base, as one for the unchanged base.

    ``W - s B0 A0 + s B A`` is ``W + s [B, -B0] [A; A0]``: LoRA of twice the rank with the same scaling.

    Args:
        model: model with the adapter.
        start: state of the adapter's init.
        has_own_embeddings: whether the adapter holds embeddings of added tokens, so that the base's are not written.
        folder: path of the adapter's folder.
        state_dict: weights by their names in ``model``; None takes them from there.
    """
    config = cast(LoraConfig, copy.deepcopy(model.peft_config["default"]))
    with_embeddings = False if has_own_embeddings else "auto"
    state = get_peft_model_state_dict(model, state_dict, save_embedding_layers=with_embeddings)
    for name, tensor in start["taken"].items():
        tensor = tensor.to(state[name])
        is_down = name.endswith("lora_A.weight")
        state[name] = torch.cat([state[name], tensor] if is_down else [state[name], -tensor], dim=0 if is_down else 1)
    alpha = 2**0.5 if config.use_rslora else 2  # the scaling is alpha / sqrt(r), or alpha / r
    config.r, config.lora_alpha = 2 * config.r, alpha * config.lora_alpha
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha * value for name, value in config.alpha_pattern.items()}
    config.inference_mode = True
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    places: set[int] = set()
    for name, tensor in state.items():
        if (place := tensor.untyped_storage().data_ptr()) in places:
            state[name] = tensor.clone()  # tied embeddings: safetensors takes no tensor twice
        places.add(place)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "adapter_model.safetensors")

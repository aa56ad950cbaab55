"""Samples of a packed batch do not influence each other, whatever mixes the tokens of a layer."""

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.tiny_configs import tiny_config
from lit_ft import CausalLM, RecipeError
from lit_ft.commands.check import leak_probe
from lit_ft.model.isolation import architectures, lengths, token_mixers
from lit_ft.model.loading import load_config
from lit_ft.strategies import ModelParallelStrategy


def save(folder: Path, model_type: str, **values: object) -> str:
    tiny_config(model_type, **values).save_pretrained(folder)
    return str(folder)


class Doubling(nn.Module):
    """A mixer that returns what it was given, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[dict[str, Any]] = []

    def forward(self, hidden_states: Tensor, past_key_values: None = None, **rest: Any) -> tuple[Tensor, Any, None]:
        self.calls.append(rest)
        return 2 * hidden_states, hidden_states[..., : hidden_states.shape[1]], None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.mixer = Doubling()
        layer.mlp = nn.Linear(4, 4)
        self.layers = nn.ModuleList([layer])


def sample_by_sample(mixer: Any) -> Any:
    return partial(token_mixers._sample_by_sample, mixer, mixer.forward)


def test_all_arguments_and_results_are_those_of_one_sample() -> None:
    model = Layers()
    assert list(token_mixers.mixers(model)) == [model.layers[0].mixer]
    mixer: Any = model.layers[0].mixer
    call = sample_by_sample(mixer)
    hidden, mask = torch.arange(20.0).view(1, 5, 4), torch.arange(25.0).view(1, 1, 5, 5)
    positions = torch.tensor([0, 1, 0, 1, 2])
    rest = {
        "mask": mask,
        "distances": mask[0, 0],
        "cos": (hidden, positions[None]),
        "positions": positions[None, None],
        "scale": torch.ones(()),
    }
    with lengths.samples_of([2, 3]):
        whole, pieces, nothing = call(hidden, **rest, segment_lengths=[2, 3])
        call(hidden_states=hidden, chosen=pieces)
    torch.testing.assert_close(whole, 2 * hidden)
    assert [piece.shape for piece in pieces] == [(1, 2, 2), (1, 3, 3)]
    assert nothing is None
    second = mixer.calls[1]
    torch.testing.assert_close(second["mask"], mask[..., 2:, 2:])
    torch.testing.assert_close(second["distances"], mask[0, 0, 2:, 2:])
    torch.testing.assert_close(second["cos"][0], hidden[:, 2:])
    assert second["positions"].tolist() == [[[0, 1, 2]]]
    assert second["segment_lengths"] == [3]
    assert second["scale"].ndim == 0
    assert mixer.calls[3]["chosen"] is pieces[1]


def test_outside_of_a_packed_batch_a_mixer_is_called_once() -> None:
    mixer = Doubling()
    sample_by_sample(mixer)(torch.ones(2, 7, 4))
    assert len(mixer.calls) == 1


def test_a_part_of_a_packed_batch_is_refused() -> None:
    with (
        lengths.samples_of([2, 3]),
        pytest.raises(RecipeError, match="computes 4 tokens at once of a packed batch with 5"),
    ):
        sample_by_sample(Doubling())(torch.ones(1, 4, 4))


def test_a_copy_of_a_model_computes_with_weights_and_settings_of_its_own() -> None:
    """Merges copy the model: to the CPU, without dropout, with another attention function."""
    model: Any = AutoModelForCausalLM.from_config(tiny_config("falcon_h1")).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        token_mixers.keep_samples_apart(model)
        copied = copy.deepcopy(model)
        for mixer in token_mixers.mixers(model):
            for parameter in mixer.parameters():
                parameter.fill_(torch.nan)
        torch.testing.assert_close(copied(input_ids=ids).logits, expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "nemotron_h", "lfm3"])
def test_the_leak_probe_sees_layers_of_all_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    folder = save(tmp_path, model_type)
    assert leak_probe(CausalLM(folder)) == 0
    monkeypatch.setattr(token_mixers, "isolates", lambda model, mixer: True)
    assert leak_probe(CausalLM(folder)) > 1e-4


def test_a_model_whose_caches_have_unknown_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_mixers, "_CACHES", {"earlier_tokens"})
    with pytest.raises(
        RecipeError, match="no layer of Qwen3_5ForCausalLM takes a cache under a name that lit_ft knows"
    ):
        CausalLM(save(tmp_path, "qwen3_5_text"), init="random").configure_model()


def test_kernels_get_the_boundaries_of_the_samples() -> None:
    """The kernels themselves run on CUDA alone (not run here); those of an evaluation can be trained with."""
    token_mixers._boundaries.cache_clear()
    with torch.inference_mode():
        given = token_mixers._boundaries((2, 3, 1), torch.device("cpu"))
    assert not any(tensor.is_inference() for tensor in given.values())
    assert given["cu_seq_lens_q"].tolist() == [0, 2, 5, 6]
    assert given["seq_idx"].tolist() == [[0, 0, 1, 1, 1, 2]]
    assert {tensor.dtype for tensor in given.values()} == {torch.int32}


def test_boundaries_without_kernels_are_refused_by_transformers() -> None:
    """So what passes them on by mistake cannot be wrong silently."""
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
    mixer = next(token_mixers.mixers(model))
    with pytest.raises(ValueError, match="can't keep packed sequences apart"):
        mixer(torch.ones(1, 6, 64), **token_mixers._boundaries((2, 4), torch.device("cpu")))


def test_context_parallelism_is_refused(tmp_path: Path, make_trainer: Any) -> None:
    module = CausalLM(save(tmp_path, "qwen3_5_text"), init="random")
    trainer = make_trainer(devices=2, strategy=ModelParallelStrategy(context_parallel_size=2))
    skeleton = AutoModelForCausalLM.from_config(load_config(module.spec.base.pretrained))
    message = r"context_parallel_size=2 gives .* \(Qwen3_5GatedDeltaNet\), which would see that part alone; set it to 1"
    with pytest.raises(RecipeError, match=message):
        trainer.strategy.check_model(module, skeleton)


# --- refused and unknown architectures ---------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["mllama", "roberta", "xlnet"])
def test_a_refused_architecture_says_why(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(RecipeError) as error:
        CausalLM(str(tmp_path), init="random").spec.base.skeleton()
    assert f"{model_type} {architectures.REFUSED[model_type]}; take another model" in str(error.value)


def test_an_encoder_is_refused_until_it_is_a_decoder(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="this bert says is_decoder: false, so that tokens attend to later ones"):
        architectures.check(load_config(save(tmp_path, "bert", is_decoder=False)))
    architectures.check(load_config(save(tmp_path, "bert")))


def test_an_architecture_that_was_not_compared_gives_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "COMPARED", frozenset())
    with pytest.warns(UserWarning, match="llama was not compared: whether its packed batches equal single samples"):
        architectures.check(tiny_config("llama"))

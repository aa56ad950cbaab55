"""Protocols: plain modules have none of what callbacks ask for, and loggers that make methods up are recognized."""

import pytest
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lit_callbacks import protocols
from plain_modules import Digits, TinyLM

OF_MODULES = [
    protocols.AnswersPrompts,
    protocols.HoldsTokenizer,
    protocols.KnowsFullModelFlops,
    protocols.MeasuresGradientNorm,
    protocols.MeasuresTextLoss,
    protocols.RecordsLosses,
    protocols.RendersPrompts,
    protocols.SavesAdapter,
]


@pytest.mark.parametrize("protocol", OF_MODULES)
def test_a_plain_module_implements_none(protocol: type) -> None:
    assert not isinstance(Digits(), protocol)
    assert not isinstance(TinyLM(), protocol)


def test_a_tokenizer_is_optional() -> None:
    module = Digits()
    assert protocols.tokenizer_of(module) is None
    module.tokenizer = {"bos": 1}
    assert protocols.tokenizer_of(module) == {"bos": 1}


def test_an_attribute_set_on_an_instance_counts() -> None:
    module = Digits()
    module.record_losses = None
    assert isinstance(module, protocols.RecordsLosses)


def test_experiments_that_take_text(tmp_path: str) -> None:
    """That of a dry run (``fast_dev_run``) answers to every name."""
    assert protocols.adds_text(DummyLogger().experiment)
    assert not protocols.adds_text(CSVLogger(tmp_path).experiment)

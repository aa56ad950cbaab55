"""Fine-tune Hugging Face causal language models with Lightning.

``CausalLM`` is the ``LightningModule``, ``TextDataModule`` the ``LightningDataModule``, ``Source`` one data set of
its mixture, ``DFT`` weighs tokens, ``PreferenceLM`` trains on better and worse answers by an objective (``DPO``,
``IPO``, ``SimPO``, ``ORPO``, ``KTO``), ``RewardLM`` makes a reward model of them, ``PolicyLM`` trains on answers of its
own, by an algorithm (``GRPO``, ``DrGRPO``, ``DAPO``, ``RLOO``) and rewards (``ExactAnswer``, ``FinalNumber``,
``Similarity``, ``Matches``, ``OverlongPenalty``, ``RewardModel``), ``DistillationLM`` and ``OnPolicyDistillationLM`` on
a teacher's probabilities, by a divergence (``ForwardKL``, ``ReverseKL``, ``JensenShannon``), ``ExactMatch`` and
``AnswerScores`` (ROUGE, BLEU) are callbacks that compare answers, ``InitialAdamState`` one that starts AdamW with the
moments of a Megatron training, ``RecipeError`` the error that a user can correct. LoRA::

    from lightning.pytorch import Trainer
    from peft import LoraConfig
    from lit_ft import CausalLM, TextDataModule

    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = CausalLM("Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16", peft=lora)
    data = TextDataModule("huanhuan.json", val_fraction=0.05, max_length=384)
    Trainer(max_epochs=3).fit(model, data)

More: docs/python.md; ``help(lit_ft.CausalLM)``; on the command line, ``python -m lit_ft --help``.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lit_ft import old_names

if TYPE_CHECKING:
    from lit_ft.data.text.sources import Source
    from lit_ft.data.text_data import TextDataModule
    from lit_ft.errors import RecipeError
    from lit_ft.training.answer_scores.exact_match import ExactMatch
    from lit_ft.training.answer_scores.rouge_and_bleu import AnswerScores
    from lit_ft.training.causal_lm import CausalLM
    from lit_ft.training.distillation.distillation_lm import DistillationLM
    from lit_ft.training.distillation.divergences import ForwardKL, JensenShannon, ReverseKL
    from lit_ft.training.distillation.on_policy import OnPolicyDistillationLM
    from lit_ft.training.loss.token_weights import DFT
    from lit_ft.training.optimizers.initial_state import InitialAdamState
    from lit_ft.training.policy.algorithms import DAPO, GRPO, RLOO, DrGRPO
    from lit_ft.training.policy.policy_lm import PolicyLM
    from lit_ft.training.policy.reward_model import RewardModel
    from lit_ft.training.policy.rewards import ExactAnswer, FinalNumber, Matches, OverlongPenalty, Similarity
    from lit_ft.training.preference.objectives import DPO, IPO, KTO, ORPO, SimPO
    from lit_ft.training.preference.preference_lm import PreferenceLM
    from lit_ft.training.preference.reward_lm import RewardLM

# Public names are imported lazily (PEP 562), so that ``python -m lit_ft --help`` answers without importing torch.
__version__ = "0.1.0"
__all__ = [
    "DAPO",
    "DFT",
    "DPO",
    "GRPO",
    "IPO",
    "KTO",
    "ORPO",
    "RLOO",
    "AnswerScores",
    "CausalLM",
    "DistillationLM",
    "DrGRPO",
    "ExactAnswer",
    "ExactMatch",
    "FinalNumber",
    "ForwardKL",
    "InitialAdamState",
    "JensenShannon",
    "Matches",
    "OnPolicyDistillationLM",
    "OverlongPenalty",
    "PolicyLM",
    "PreferenceLM",
    "RecipeError",
    "ReverseKL",
    "RewardLM",
    "RewardModel",
    "SimPO",
    "Similarity",
    "Source",
    "TextDataModule",
]

_HOME = {
    "DAPO": "lit_ft.training.policy.algorithms",
    "DFT": "lit_ft.training.loss.token_weights",
    "DPO": "lit_ft.training.preference.objectives",
    "GRPO": "lit_ft.training.policy.algorithms",
    "IPO": "lit_ft.training.preference.objectives",
    "KTO": "lit_ft.training.preference.objectives",
    "ORPO": "lit_ft.training.preference.objectives",
    "RLOO": "lit_ft.training.policy.algorithms",
    "AnswerScores": "lit_ft.training.answer_scores.rouge_and_bleu",
    "CausalLM": "lit_ft.training.causal_lm",
    "DistillationLM": "lit_ft.training.distillation.distillation_lm",
    "DrGRPO": "lit_ft.training.policy.algorithms",
    "ExactAnswer": "lit_ft.training.policy.rewards",
    "ExactMatch": "lit_ft.training.answer_scores.exact_match",
    "FinalNumber": "lit_ft.training.policy.rewards",
    "ForwardKL": "lit_ft.training.distillation.divergences",
    "InitialAdamState": "lit_ft.training.optimizers.initial_state",
    "JensenShannon": "lit_ft.training.distillation.divergences",
    "Matches": "lit_ft.training.policy.rewards",
    "OnPolicyDistillationLM": "lit_ft.training.distillation.on_policy",
    "OverlongPenalty": "lit_ft.training.policy.rewards",
    "PolicyLM": "lit_ft.training.policy.policy_lm",
    "PreferenceLM": "lit_ft.training.preference.preference_lm",
    "RecipeError": "lit_ft.errors",
    "ReverseKL": "lit_ft.training.distillation.divergences",
    "RewardLM": "lit_ft.training.preference.reward_lm",
    "RewardModel": "lit_ft.training.policy.reward_model",
    "SimPO": "lit_ft.training.preference.objectives",
    "Similarity": "lit_ft.training.policy.rewards",
    "Source": "lit_ft.data.text.sources",
    "TextDataModule": "lit_ft.data.text_data",
}

old_names.install()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'lit_ft' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith(__name__):
            raise
        repository = Path(__file__).resolve().parents[1]
        raise ModuleNotFoundError(
            f"lit_ft.{name} needs {error.name!r}, which is not installed; pip install -e {repository} -e "
            f"{repository}/callbacks",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""``PreferenceLM`` and ``RewardLM`` from Python. Options: ``epochs``, ``adapter``, ``objective``: dpo, kto or reward.

Rows: texts of prompt, chosen, rejected (dpo, reward), or of prompt, completion, label (kto).
"""

from collections.abc import Callable
from functools import partial

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.lit_ft_python import OPTIMIZER, ClockFromBeginning, data_of, fit
from lit_ft import DPO, KTO, PreferenceLM, RewardLM

_MODULES: dict[str, tuple[Callable[..., PreferenceLM], str]] = {
    "dpo": (partial(PreferenceLM, objective=DPO()), "preference"),
    "kto": (partial(PreferenceLM, objective=KTO()), "unpaired_preference"),
    "reward": (RewardLM, "preference"),
}


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    module_of, form = _MODULES[job.options["objective"]]
    module = module_of(job.model, adapter=job.options["adapter"], dtype="float32", optimizer=OPTIMIZER)
    return fit(job, module, data_of(job, format=form), ClockFromBeginning(Measured()))


if __name__ == "__main__":
    serve(run)

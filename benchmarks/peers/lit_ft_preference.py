"""``PreferenceLM`` from Python. Options: ``epochs``, ``adapter``, ``objective``: dpo or kto.

Rows: texts of prompt, chosen, rejected (dpo), or of prompt, completion, label (kto).
"""

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.lit_ft_python import OPTIMIZER, ClockFromBeginning, data_of, fit
from lit_ft import DPO, KTO, PreferenceLM

_OBJECTIVES = {"dpo": (DPO, "preference"), "kto": (KTO, "unpaired_preference")}


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    objective, form = _OBJECTIVES[job.options["objective"]]
    adapter = job.options["adapter"]
    module = PreferenceLM(job.model, objective(), adapter=adapter, dtype="float32", optimizer=OPTIMIZER)
    return fit(job, module, data_of(job, format=form), ClockFromBeginning(Measured()))


if __name__ == "__main__":
    serve(run)

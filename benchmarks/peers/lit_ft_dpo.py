"""``PreferenceLM`` from Python. Options: ``epochs``, ``adapter``. Rows: texts of prompt, chosen, rejected."""

from benchmarks.peers.job import Job, Measured, serve
from benchmarks.peers.lit_ft_python import OPTIMIZER, ClockFromBeginning, data_of, fit
from lit_ft import PreferenceLM


def run(job: Job) -> Measured:
    """Train the job; the first time of ``ends`` is that of the beginning."""
    module = PreferenceLM(job.model, adapter=job.options["adapter"], dtype="float32", optimizer=OPTIMIZER)
    return fit(job, module, data_of(job, format="preference"), ClockFromBeginning(Measured()))


if __name__ == "__main__":
    serve(run)

"""Callbacks for any Lightning project: they need lightning and torch, and touch public Trainer API only."""

from lit_callbacks.adapter_merger import AdapterMerger
from lit_callbacks.fail_together import FailTogether
from lit_callbacks.forgetting_probe import ForgettingProbe
from lit_callbacks.graceful_stop import GracefulStop, StoppedAtOnce, StopRequested
from lit_callbacks.loss_ledger import LossLedger
from lit_callbacks.memory_profiler import MemoryProfiler
from lit_callbacks.run_report import RunReport
from lit_callbacks.sample_generations import SampleGenerations
from lit_callbacks.spike_guard import SpikeGuard, SpikesPersist
from lit_callbacks.throughput_monitor import ThroughputMonitor

__version__ = "0.1.0"
__all__ = [
    "AdapterMerger",
    "FailTogether",
    "ForgettingProbe",
    "GracefulStop",
    "LossLedger",
    "MemoryProfiler",
    "RunReport",
    "SampleGenerations",
    "SpikeGuard",
    "SpikesPersist",
    "StopRequested",
    "StoppedAtOnce",
    "ThroughputMonitor",
]

"""Callbacks for any Lightning project: they need lightning and torch, and use the public Trainer API only."""

import sys

from lit_callbacks.evaluation.forgetting_probe import ForgettingProbe
from lit_callbacks.evaluation.sample_generations import SampleGenerations
from lit_callbacks.export import merging
from lit_callbacks.export.adapter_merger import AdapterMerger
from lit_callbacks.lifecycle.graceful_stop import GracefulStop, StoppedAtOnce, StopRequested
from lit_callbacks.lifecycle.rank_failure_watchdog import FailTogether, RankFailureWatchdog
from lit_callbacks.loss_ledger.loss_ledger import LossLedger
from lit_callbacks.memory.memory_profiler import MemoryProfiler
from lit_callbacks.report.run_report import RunReport
from lit_callbacks.stability.spike_guard import SpikeGuard, SpikesPersist
from lit_callbacks.throughput import flops
from lit_callbacks.throughput.throughput_monitor import ThroughputMonitor

for _name, _module in {"flops": flops, "merging": merging}.items():  # documented before there were folders
    sys.modules[f"{__name__}.{_name}"] = _module

__version__ = "0.1.0"
__all__ = [
    "AdapterMerger",
    "FailTogether",
    "ForgettingProbe",
    "GracefulStop",
    "LossLedger",
    "MemoryProfiler",
    "RankFailureWatchdog",
    "RunReport",
    "SampleGenerations",
    "SpikeGuard",
    "SpikesPersist",
    "StopRequested",
    "StoppedAtOnce",
    "ThroughputMonitor",
]

"""Processes in a clean environment, independent of earlier tests."""

import os
import subprocess
from pathlib import Path

_KEPT = {"PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"}


def clean_environment() -> dict[str, str]:
    """Environment variables for a process and for pip, without the ports, ranks and seeds that Lightning sets."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or name.startswith(("PIP_", "SSL_")) or name.upper().endswith("_PROXY")
    }
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # not slowed by threads, not on a shared GPU


def python(executable: Path | str, *arguments: str, folder: Path, timeout: float = 300) -> str:
    """Run Python in a new process; returns its stdout."""
    done = subprocess.run(
        [str(executable), *arguments],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    said = f"--- stdout\n{done.stdout[-5000:]}\n--- stderr\n{done.stderr[-5000:]}"
    assert done.returncode == 0, f"exit code {done.returncode} of {arguments}\n{said}"
    return done.stdout

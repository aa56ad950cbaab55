"""Virtual environments of the peers, with pinned versions.

    python -m benchmarks.peers.environments --root DIR
    python -m benchmarks.peers.environments --root DIR --cuda trl llamafactory

If an installation fails, its reason is written to ``DIR/NAME.failed``, which ``benchmarks.compare`` shows in its table.
"""

import argparse
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

REQUIREMENTS: dict[str, list[str]] = {
    "transformers": ["transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0"],
    "trl": ["trl==1.16.0", "transformers==5.23.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.2.0"],
    "litgpt": ["litgpt==0.5.13", "lightning==2.6.6", "requests"],
    "llamafactory": ["llamafactory==0.9.5"],
    "torchtune": ["torchtune==0.6.1", "torchao==0.10.0"],
}
"""Requirements by environment: the latest release of each peer, and of dependencies that it does not pin.

torchtune 0.6.1, its last release, needs a torchao that still has ``torchao.dtypes.nf4tensor``.
"""

CUDA_REQUIREMENTS: dict[str, list[str]] = {
    "transformers": ["liger-kernel==0.8.5", "bitsandbytes==0.50.2", "kernels==0.17.2"],
    "trl": ["liger-kernel==0.8.5", "kernels==0.17.2"],
    "llamafactory": ["liger-kernel==0.8.5"],
}
"""Additional requirements of the best settings on a GPU."""

CUDA_BUILDS: dict[str, list[str]] = {"llamafactory": ["torchvision", "torchaudio"]}
"""Dependencies that text does not need and that registries have for CUDA only: they fail with torch for a CPU."""


def python_of(root: Path, name: str) -> Path:
    """Path of an environment's Python interpreter."""
    return root / name / "bin" / "python"


def reason_of(root: Path, name: str) -> str | None:
    """Reason why an environment is missing; None if it exists."""
    failed = root / f"{name}.failed"
    if failed.is_file():
        return failed.read_text(encoding="utf-8").strip()
    if python_of(root, name).is_file():
        return None
    return f"python -m benchmarks.peers.environments --root {root} {name} was not run"


def install(root: Path, name: str, torch: str, is_cuda: bool = False) -> str | None:
    """Create an environment.

    Args:
        root: folder of all environments.
        name: name of the environment, a key of ``REQUIREMENTS``.
        torch: version of torch, the same for all peers.
        is_cuda: whether to install the kernels for a GPU too.

    Returns:
        Last line of pip's error; None on success.
    """
    failed = root / f"{name}.failed"
    failed.unlink(missing_ok=True)
    venv.create(root / name, with_pip=True, clear=True)
    wanted = [f"torch=={torch}", *REQUIREMENTS[name], *(CUDA_REQUIREMENTS.get(name, []) if is_cuda else [])]
    pip = [str(python_of(root, name)), "-m", "pip"]
    done = subprocess.run([*pip, "install", "-q", *wanted], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        if not is_cuda and name in CUDA_BUILDS:
            subprocess.run([*pip, "uninstall", "-q", "-y", *CUDA_BUILDS[name]], check=True)
        return None
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()[-1:]
    reason = f"does not install with torch {torch}: {errors[0].removeprefix('ERROR: ')}"
    failed.write_text(f"{reason}\n", encoding="utf-8")
    return reason


def main() -> None:
    """Install the environments that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(REQUIREMENTS), help=f"of {', '.join(REQUIREMENTS)}; or all")
    parser.add_argument("--root", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--torch", default=version("torch").split("+")[0], help="version, by default the one here")
    parser.add_argument("--cuda", action="store_true", help="with kernels for a GPU")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        print(f"{name}: {install(options.root, name, options.torch, options.cuda) or 'ready'}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""A virtual environment for each peer, with pinned versions.

    python -m benchmarks.peers.environments --root DIR
    python -m benchmarks.peers.environments --root DIR --cuda trl llamafactory

One that does not install leaves its reason in ``DIR/NAME.failed``, which ``benchmarks.compare`` shows in its table.
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
"""By environment: the latest release of each peer, and of what it is built on where it leaves a choice.

torchtune 0.6.1, its last release, needs a torchao that still has ``torchao.dtypes.nf4tensor``.
"""

CUDA_REQUIREMENTS: dict[str, list[str]] = {
    "transformers": ["liger-kernel==0.8.5", "bitsandbytes==0.50.2", "kernels==0.17.2"],
    "trl": ["liger-kernel==0.8.5", "kernels==0.17.2"],
    "llamafactory": ["liger-kernel==0.8.5"],
}
"""What the best settings need on top where there is a GPU."""

CUDA_BUILDS: dict[str, list[str]] = {"llamafactory": ["torchvision", "torchaudio"]}
"""What a peer depends on, text does not need, and registries hold for CUDA alone: beside a CPU's torch it fails."""


def python_of(root: Path, name: str) -> Path:
    """The interpreter of an environment."""
    return root / name / "bin" / "python"


def reason_of(root: Path, name: str) -> str | None:
    """Why an environment is missing; None where it is there."""
    failed = root / f"{name}.failed"
    if failed.is_file():
        return failed.read_text(encoding="utf-8").strip()
    if python_of(root, name).is_file():
        return None
    return f"python -m benchmarks.peers.environments --root {root} {name} was not run"


def install(root: Path, name: str, torch: str, is_cuda: bool = False) -> str | None:
    """Make an environment.

    Args:
        root: folder of all environments.
        name: a key of ``REQUIREMENTS``.
        torch: version of torch, the same for all peers.
        is_cuda: whether kernels for a GPU are installed, too.

    Returns:
        The last line of pip's error, None where it went well.
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
    """Parse and install."""
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

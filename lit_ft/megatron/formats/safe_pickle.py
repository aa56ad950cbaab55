"""Reading of Megatron's pickled files without running code that they contain.

torch's restricted unpickler builds tensors and plain containers. Megatron's files also hold ``argparse.Namespace`` (the
arguments), and states that are not converted, in classes that may not be installed: these become ``Unread`` objects.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint, safe_globals

from lit_ft.errors import RecipeError, explained


class Unread:
    """Object of a class whose content is not converted."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


IGNORED = (
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype"),
    *("numpy.dtypes.UInt32DType", "_io.BytesIO", "signal.Signals", "types.SimpleNamespace"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # the second is that of Python 3.13
    "megatron.core.enums.ModelType",
    "megatron.core.optimizer.OptimizerConfig",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode",
    "megatron.core.rerun_state_machine.RerunState",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
)
"""Classes of random-number, optimizer and rerun states and of some arguments: those of megatron.core.safe_globals."""


def load(path: Path) -> dict[str, Any]:
    """Content of a file that ``torch.save`` wrote; tensors are mapped into memory.

    Raises:
        RecipeError: the file is unreadable, or names code that no checkpoint needs.
    """
    # The context removes at its end what it is given, also what the program that calls this has registered before.
    known = {one[1] if isinstance(one, tuple) else f"{one.__module__}.{one.__qualname__}" for one in get_safe_globals()}
    stand_ins = {"argparse.Namespace": Namespace} | {name: type("Unread", (Unread,), {}) for name in IGNORED}
    allowed: list[Any] = [(stand_in, name) for name, stand_in in stand_ins.items() if name not in known]
    with safe_globals(allowed), explained(f"{path} is no checkpoint that can be read", _FIX):
        if unsafe := get_unsafe_globals_in_checkpoint(path):
            raise RecipeError(
                f"{path} is not read: it names code that no checkpoint needs ({sorted(unsafe)[0]}); {_FIX}"
            )
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(content, dict):
        raise RecipeError(f"{path} is no checkpoint of Megatron: it holds a {type(content).__name__}; {_FIX}")
    return content


_FIX = "take a checkpoint that Megatron wrote"

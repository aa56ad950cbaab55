"""llama.cpp's HTTP server on a GGUF file, from the package xllamacpp, in a process of its own.

llama.cpp ends the process in which a file is damaged; here that process is not the one that exports.
"""

import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE
from tempfile import TemporaryFile

LONGEST_SAID = 500
"""Characters of llama.cpp's messages that an error repeats."""


class LlamaFailed(RuntimeError):
    """llama.cpp does not read the file."""


def has_llama() -> bool:
    """Whether llama.cpp is installed, by the package xllamacpp."""
    return find_spec("xllamacpp") is not None


@contextmanager
def llama_server(model: Path, lora: Path | None = None, positions: int = 512) -> Iterator[str]:
    """Address of llama.cpp's server, which is up within this context, on a free port of this machine.

    Keys and values are cached in float32, so that the weights are the only numbers that are rounded.

    Args:
        model: GGUF file of the model.
        lora: GGUF file of a LoRA adapter.
        positions: most tokens of a request.

    Raises:
        LlamaFailed: llama.cpp does not read the files.
    """
    options = ["--lora", str(lora)] if lora is not None else []
    options += ["--positions", str(positions)]
    command = [sys.executable, "-m", "lit_ft.gguf.llama_server", str(model), *options]
    quiet = os.environ | {"GGML_NO_BACKTRACE": "1"}  # its lines would hide the reason, and a debugger takes a minute
    with (
        TemporaryFile("w+", encoding="utf-8", errors="replace") as messages,
        # The server ends when its standard input does, also after a kill of this process.
        subprocess.Popen(command, env=quiet, stdin=PIPE, stdout=PIPE, stderr=messages, text=True) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            address = server.stdout.readline().strip()
            if not address.startswith("http://"):
                server.wait()
                messages.seek(0)
                output = " ".join(messages.read().split())[-LONGEST_SAID:]
                raise LlamaFailed(f"llama.cpp does not read {model.name} (exit code {server.returncode}): {output}")
            yield address
        finally:
            server.stdin.close()
            server.wait()


def main() -> None:
    """Serve until standard input ends; print the address once requests are answered."""
    import xllamacpp

    parser = ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--lora")
    parser.add_argument("--positions", type=int, required=True)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path, params.port, params.verbosity, params.warmup = options.model, 0, 1, False
    params.n_ctx, params.n_parallel, params.n_gpu_layers = options.positions, 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.swa_full = True  # the cache of a window is reused wrongly for another prompt (llama.cpp of October 2026)
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if options.lora is not None:
        lora = xllamacpp.CommonAdapterLoraInfo()
        lora.path, lora.scale = options.lora, 1.0
        params.lora_adapters = [lora]
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        sys.exit(str(error))  # after llama.cpp's own messages
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()

"""The command line: list the commands without importing them, and turn errors into one line and an exit code.

Exit codes: 0 done; 1 failed during the run; 2 an error in the recipe, the data or the folders
(reported before training starts); 130 stopped by Ctrl-C; 143 by SIGTERM.
"""

import errno
import gc
import logging
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import NoReturn

from lit_ft import __version__
from lit_ft.recipe.allowed_code import as_options, take_option

COMMANDS = {
    "fit": ("lit_ft.commands.train", "train a model"),
    "sweep": ("lit_ft.commands.sweep", "train with several values of some options, and compare the runs"),
    "validate": ("lit_ft.commands.train", "measure loss and accuracy on the validation data"),
    "test": ("lit_ft.commands.train", "measure loss and accuracy on the test data"),
    "predict": ("lit_ft.commands.train", "answer the prompts of the test data"),
    "chat": ("lit_ft.commands.inference.chat", "talk to a trained model, beside its base if asked"),
    "serve": (
        "lit_ft.commands.inference.serve",
        "answer requests of OpenAI's HTTP interface, for trying and small loads",
    ),
    "parity": (
        "lit_ft.commands.inference.parity",
        "compare a server with the run that it serves: tokens, log-probabilities",
    ),
    "evaluate": (
        "lit_ft.commands.inference.evaluate",
        "score a trained model beside its base: tasks, a data set, a judge",
    ),
    "board": ("lit_ft.commands.board", "start runs from a page in the browser, and watch them"),
    "check": ("lit_ft.commands.check", "look at the data of a recipe: what is trained on, and what is wrong"),
    "plan": ("lit_ft.commands.plan", "what each rank would hold and send; draw a pipeline's schedule"),
    "convert": ("lit_ft.commands.convert", "write data in another format, or a model for Megatron and back"),
    "bandwidth": ("lit_ft.commands.bandwidth", "measure how fast the ranks of a cluster exchange tensors"),
    "report": ("lit_ft.commands.report", "write one HTML page about a run"),
    "verify": ("lit_ft.commands.verify", "compare checkpoints and exported folders with their SHA-256 sums"),
    "export": ("lit_ft.commands.export", "write a run's adapter or merged model as a Hugging Face folder"),
}

HELP = """usage: python -m lit_ft COMMAND [options]

Fine-tune a Hugging Face causal language model.

commands:
{commands}

  python -m lit_ft COMMAND --help                            what a command takes
  python -m lit_ft fit --config recipes/quickstart.yaml      an example that runs anywhere
  --version                                                  the version of lit_ft
  --debug                                                    full tracebacks, with any command
  --allow_code MODULE                                        let recipes name your own classes, with any command"""


def help_text() -> str:
    """Text that ``--help`` prints."""
    return HELP.format(commands="\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items()))


def main(argv: list[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(help_text())
        sys.exit(0 if arguments else 2)
    if name == "--version":
        print(f"lit_ft {__version__}")
        sys.exit(0)
    if name not in COMMANDS:
        _fail(f"unknown command {name!r}; the commands are {', '.join(COMMANDS)}{_did_you_mean(name)}", 2)
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    _open_closed_streams()
    _escape_log_lines()
    if not debug:
        _quieten()
    try:
        arguments = take_option(arguments)
        with _exit_on_signals():
            _command(COMMANDS[name][0])(arguments)
    except Exception as error:
        if debug:
            traceback.print_exc()
        _report(error)
    except KeyboardInterrupt:
        _fail("stopped by Ctrl-C", 130)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Give a process that was started with closed streams (a daemon, ``>&-``) what it can write to and read from."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # The number too: a file that is opened later would get it, and C++ code would write into that file.
            if (opened := os.open(os.devnull, os.O_RDWR)) != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8", closefd=False))  # noqa: SIM115


def _command(module: str) -> Callable[[list[str]], None]:
    """Function that runs a command; a process that only runs this command gets as many threads as cores are free."""
    if "torch" in sys.modules:  # of a program that may have set its threads
        return _run_of(module)
    # Searches for cycles among what is imported, which stays, take a third of a command's CPU time until a recipe is
    # parsed: meanwhile, each time after it, and at the process's end.
    gc.disable()
    try:
        run = _run_of(module)
    finally:
        gc.freeze()
        gc.enable()
    if "torch" in sys.modules:
        from lit_ft.process import choose_threads

        choose_threads()
    return run


def _run_of(module: str) -> Callable[[list[str]], None]:
    run: Callable[[list[str]], None] = import_module(module).run
    return run


SAME_SIGNAL_SECONDS = 1.0
"""Seconds within which a second signal changes nothing; a later one ends the process at once."""


@contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Raise SystemExit on Ctrl-C and SIGTERM, so that workers, locks and unfinished files are cleaned up.

    Not KeyboardInterrupt: Lightning turns it into exit code 1. During training, GracefulStop handles the signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _exit) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_forking = threading.local()


def _hold_signals() -> None:
    """Let signals wait during a fork: Python drops one that reaches the new process before its own setup is done."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _end_at_signals() -> None:
    """Let a forked process end at signals as others do: a library's pool ends its workers by SIGTERM.

    A handler of Python would say so, and would not run while the worker waits for a lock, which the pool waits for.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is _exit:
            signal.signal(number, signal.SIG_DFL)
    _release_signals()


os.register_at_fork(before=_hold_signals, after_in_parent=_release_signals, after_in_child=_end_at_signals)


def _exit(number: int, _: FrameType | None) -> NoReturn:
    # Not print: the signal may arrive during a print of the main thread.
    os.write(2, f"lit_ft: stopped by {'Ctrl-C' if number == signal.SIGINT else 'SIGTERM'}\n".encode())
    first = time.monotonic()

    def again(number: int, _: FrameType | None) -> None:
        # `timeout` and schedulers send a signal twice: the second must not interrupt what the first cleans up.
        if time.monotonic() - first > SAME_SIGNAL_SECONDS:
            os._exit(128 + number)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, again)
    sys.exit(128 + number)


def _escape_log_lines() -> None:
    """Escape control characters in log lines and warnings, which may quote data, answers and file names.

    Our own warnings are about the run: they are one line, without the line of our code that gave them.
    """
    if logging.getLogRecordFactory() is _EscapedRecord:
        return
    form = warnings.formatwarning
    specs = filter(None, map(find_spec, ("lit_ft", "lit_callbacks")))  # imports neither
    folders = [f"{folder}{os.sep}" for spec in specs for folder in spec.submodule_search_locations or []]

    def escaped(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if filename.startswith(tuple(folders)):
            return _printable(f"lit_ft: warning: {message}\n")
        return _printable(form(message, category, filename, lineno, line))

    logging.setLogRecordFactory(_EscapedRecord)
    warnings.formatwarning = escaped


class _EscapedRecord(logging.LogRecord):
    """Log record with control characters escaped."""

    def getMessage(self) -> str:
        return _printable(super().getMessage())


def _printable(text: str) -> str:
    if text.replace("\n", "").replace("\t", "").isprintable():
        return text  # without the import below, which fails in a log line of a library that is being imported
    from lit_callbacks.output.printable import (
        printable,  # not at the top: it imports torch, which --help does not need
    )

    return printable(text)


def _quieten() -> None:
    """Suppress messages of libraries that say nothing about the run."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A store whose host has ended logs a stack of C++ frames at each access.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # The last two log as soon as torchao is imported, which PEFT does wherever it is installed.
    for name in ("bitsandbytes", "huggingface_hub", "torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
    for message in _CHATTER:
        warnings.filterwarnings("ignore", message=message)
    for name in _LOGGERS_OF_BANNERS:
        logging.getLogger(name).addFilter(lambda record: not record.getMessage().startswith(_BANNERS))


_LOGGERS_OF_BANNERS = (
    "lightning.fabric.utilities.rank_zero",
    "lightning.pytorch.trainer.connectors.checkpoint_connector",
    "lightning.pytorch.utilities.rank_zero",
)
_BANNERS = (
    "💡",
    "GPU available",
    "TPU available",
    "LOCAL_RANK:",
    "`Trainer.fit` stopped",
    "Loading `train_dataloader`",
    "`weights_only`",
    "Restor",
)
_CHATTER = (
    ".*is_gradient_checkpointing.*",  # a deprecated property that torch's own attribute look-ups read
    ".*loftq_config.*",  # PEFT warns about its own default when a config is built from all its fields
    # PEFT (0.21) takes the biases of lora_bias, the only ones named here, for parts of a factor that is missing others.
    r"Adapter .* LoRA tensor\(s\) have invalid shape: (\S+\.lora_B\.bias:\([1-9]\d*,\)(, )?)+( \(\+\d+ more\))?\. ",
    ".*LeafSpec.*",
    ".*does not have many workers.*",  # samples are in memory: workers would only add start-up time
    ".*smaller than the logging interval.*",
    ".*overridden `on_after_batch_transfer` in `LightningModule`.*",  # PolicyLM's is meant for any data
    ".*Total length of `tuple` across ranks is zero.*",  # there is no validation data, and none was asked for
    ".*sync_dist=True.*",  # metrics are summed over ranks before they are logged
    ".*Checkpoint directory .* exists and is not empty.*",  # the resolved recipe is stored beside the checkpoints
    ".*torch.distributed.reduce_op.*",  # NiceGUI looks at all objects for its server
    ".*torch.distributed.*_tensor` is deprecated.*",  # DeepSpeed calls functions that torch 2.13 has renamed
)


def _did_you_mean(name: str) -> str:
    from difflib import get_close_matches

    if name.startswith("-"):
        return "; the command is the first word, e.g. fit --config recipes/qwen.yaml"
    word = name.lower().replace("-", "_")
    near = [_WORDS_OF_OTHERS[word]] if word in _WORDS_OF_OTHERS else get_close_matches(name.lower(), COMMANDS, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


_WORDS_OF_OTHERS = {
    **dict.fromkeys(("train", "finetune", "fine_tune", "sft", "pt", "rlhf", "tune"), "fit"),
    **dict.fromkeys(("merge", "merge_lora"), "export RUN --merge"),
    **dict.fromkeys(("eval", "benchmark"), "evaluate"),
    **dict.fromkeys(("infer", "inference", "generate"), "predict or chat"),
    **dict.fromkeys(("webui", "web_ui", "ui", "gui"), "board"),
    **dict.fromkeys(("api", "deploy"), "serve"),
}
"""Commands of other trainers, with the command that does the same here."""


def _report(error: Exception) -> NoReturn:
    from lightning.pytorch.utilities.exceptions import MisconfigurationException
    from lit_callbacks.lifecycle.graceful_stop import StopRequested

    from lit_ft.errors import DISK_ERRORS, RecipeError
    from lit_ft.run.launching import explain_distributed_error, rank_prefix

    rank = rank_prefix()
    if isinstance(error, StopRequested):
        if rank not in ("", "rank 0: "):  # all ranks stop together: rank 0 prints the message
            sys.exit(error.exit_code)
        _fail(f"{error}; {_how_to_resume(Path(error.checkpoint))}", error.exit_code)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        _fail(f"{rank}error: {str(error.filename)[:100]!r}... is too long for a path; name a shorter one", 2)
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        what = f"{error.filename!r}" if error.filename else "a file"
        _fail(f"{rank}error: {what} could not be written: {error.strerror}; make room, or write elsewhere", 2)
    if isinstance(error, RecipeError | MisconfigurationException):  # the second is Lightning's class for the same
        line = _in_one_line(error)  # Lightning's repeat the value, however long it is
        _fail(f"{rank}error: {line if isinstance(error, RecipeError) else line[:_LONGEST_OF_LIGHTNING]}", 2)
    if (blamed := explain_distributed_error(error)) is not None:
        _fail(f"{rank}{blamed}", 1)
    line = _in_one_line(error) or "no message"
    if len(line) > _LONGEST_UNEXPECTED:  # a compiler's whole output
        line = f"{line[:_LONGEST_UNEXPECTED]}... ({len(line):,} characters)"
    message = f"{rank}failed: {type(error).__name__}: {line}"
    # With several ranks, print the traceback at once: such a run is expensive to repeat.
    _fail(f"{message}\n{traceback.format_exc()}" if rank else f"{message} (--debug shows where)", 1)


def _how_to_resume(checkpoint: Path) -> str:
    """Advice that resumes a stopped run in its own folder, which the same command may not name."""
    config = checkpoint.parent.with_name("config.yaml")
    if not config.is_file():
        return f"resume with the same command and --ckpt_path {checkpoint}"
    if "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_NTASKS" in os.environ:  # a launcher starts the processes
        return f"resume with the same command and --run_dir {shlex.quote(str(config.parent))} --resume auto"
    return f"resume with: python -m lit_ft fit --config {shlex.quote(str(config))} --ckpt_path last{as_options()}"


_LONGEST_OF_LIGHTNING = 600
"""Maximum characters of an error message of Lightning."""
_LONGEST_UNEXPECTED = 2000
"""Maximum characters of the message of an error that no check foresaw; ``--debug`` prints all of them."""


def _in_one_line(error: Exception) -> str:
    """Message of an error on one line, with control characters escaped."""
    return _printable(" ".join(line.strip() for line in str(error).splitlines() if line.strip()))


def _fail(message: str, code: int) -> NoReturn:
    # In one write: several ranks may print at the same time.
    print(f"lit_ft: {message}\n", end="", file=sys.stderr, flush=True)
    sys.exit(code)

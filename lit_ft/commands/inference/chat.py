"""The ``chat`` command: talk to a trained model in the terminal, beside its base if asked."""

import io
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from types import FrameType

from lit_callbacks.output.printable import printable
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lit_ft.errors import RecipeError
from lit_ft.inference.conversation import Conversation
from lit_ft.inference.opening import OpenedModel, open_model
from lit_ft.inference.text_stream import Decoding, StreamedAnswer, stream_answer
from lit_ft.recipe.parser import RecipeParser
from lit_ft.run.folder import LAST
from lit_ft.training.console import show_progress_on_terminals_only

HELP = """\
/system TEXT      set the system prompt (without TEXT: none), and begin anew
/set              show how answers are generated;  /set NAME VALUE changes it, VALUE `default` is the model's own
/undo             take back the last question and its answer
/reset            begin anew
/save FILE.jsonl  append the conversation to a file that data.path reads
/exit             end, as Ctrl-D does; Ctrl-C stops an answer
A line that ends in \\ goes on in the next one."""


def run(arguments: list[str]) -> None:
    """Talk to a trained model; questions of a pipe are answered as plain text."""
    show_progress_on_terminals_only()
    parser = RecipeParser(prog="python -m lit_ft chat", description=(run.__doc__ or ""))
    parser.add_argument("path", help="a run's folder, an adapter's, a model's, or a hub id")
    parser.add_argument("--ckpt_path", default=LAST, help="checkpoint of a run: last, best or a path")
    parser.add_argument("--base", type=str | None, help="base model of an adapter's folder")
    parser.add_argument("--compare", action="store_true", help="answer with the base model too, beside the adapter")
    parser.add_argument("--system", type=str | None, help="system prompt")
    parser.add_argument("--chat_template", type=str | None, help="in place of the tokenizer's or the run's")
    parser.add_class_arguments(Decoding, nested_key=None, as_group=False)
    options = parser.parse_args(arguments[1:])
    decoding = Decoding(**{field.name: options[field.name] for field in fields(Decoding)})
    opened = open_model(options.path, options.ckpt_path, options.base, options.chat_template)
    if options.compare:
        opened.check_adapter()
    chat = Chat(opened, decoding, options.system, options.compare)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # where the locale is strict, reading would end the chat
    if sys.stdin.isatty():
        chat.talk()
    else:
        chat.answer_pipe(sys.stdin.read())


class Chat:
    """A conversation in a terminal or through a pipe; with ``compare``, one with the base and one with the adapter."""

    def __init__(self, opened: OpenedModel, decoding: Decoding, system: str | None, compare: bool) -> None:
        self.opened, self.decoding = opened, decoding
        names = ("base", "adapter") if compare else ("model",)
        self.conversations = {name: Conversation(system) for name in names}
        self.console = Console(highlight=False)

    # --- a pipe ----------------------------------------------------------------------------------

    def answer_pipe(self, text: str) -> None:
        """Answer all of a text as one question, on standard output."""
        if not (question := text.strip("\n")):
            raise RecipeError("standard input is empty; pipe a question in, or start chat in a terminal")
        for name, conversation in self.conversations.items():
            if len(self.conversations) > 1:
                print(f"{name}:")
            answer = self._answer(name, conversation, question, _write)
            print(flush=True)
            if not answer.text.strip():
                print("lit_ft: the answer is empty", file=sys.stderr)
            if answer.ended == "length":
                print(f"lit_ft: {self._cut(answer)}", file=sys.stderr)

    # --- a terminal ------------------------------------------------------------------------------

    def talk(self) -> None:
        """Read questions and commands until the end of input."""
        name = printable(self.opened.name, one_line=True)
        self._say(f"{name}: {self.decoding.describe(self.opened)}. /help lists commands.")
        while (question := _read()) is not None:
            try:
                if question.startswith("/"):
                    if question.split()[0] in ("/exit", "/quit"):
                        return
                    self._say(self._command(question))
                elif question.strip():
                    self._ask(question)
            except RecipeError as error:
                self._say(printable(str(error)))

    def _ask(self, question: str) -> None:
        with _flag_on_interrupt() as is_interrupted:
            if len(self.conversations) == 1:
                ((name, conversation),) = self.conversations.items()
                answer = self._answer(name, conversation, question, _write, is_interrupted)
                print(flush=True)
                self._say(self._figures(answer))
                self._add(question, {name: answer})
            else:
                self._ask_both(question, is_interrupted)

    def _ask_both(self, question: str, is_interrupted: Callable[[], bool]) -> None:
        texts, notes = dict.fromkeys(self.conversations, ""), dict.fromkeys(self.conversations, "")
        answers: dict[str, StreamedAnswer] = {}
        with Live(side_by_side(texts, notes), console=self.console, refresh_per_second=10) as live:
            for name, conversation in self.conversations.items():

                def show(piece: str, name: str = name) -> None:
                    texts[name] += printable(piece)
                    live.update(side_by_side(texts, notes))

                answers[name] = self._answer(name, conversation, question, show, is_interrupted)
                notes[name] = self._figures(answers[name])
                live.update(side_by_side(texts, notes))
        self._add(question, answers)  # only now, so that a question that one refuses is in neither

    def _add(self, question: str, answers: dict[str, StreamedAnswer]) -> None:
        """Add a question and its answers to the conversations; without an answer, no data set could hold it."""
        if not all(answer.text.strip() for answer in answers.values()):
            self._say("no answer: the question is taken back")
            return
        for name, answer in answers.items():
            self.conversations[name].add(question, answer.text, answer.ended == "stop")

    def _answer(
        self,
        name: str,
        conversation: Conversation,
        question: str,
        show: Callable[[str], None],
        is_interrupted: Callable[[], bool] = lambda: False,
    ) -> StreamedAnswer:
        prompt = self.opened.template.render(conversation.asked(question), generation=True)
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RecipeError(f"question or system prompt is no UTF-8 text ({error.reason}); convert it") from error
        with self.opened.without_adapter() if name == "base" else nullcontext():
            return stream_answer(self.opened, prompt, self.decoding, show, is_interrupted)

    def _figures(self, answer: StreamedAnswer) -> str:
        speed = f"{answer.tokens} token{'s' * (answer.tokens != 1)}, {answer.tokens / answer.seconds:.1f} tokens/s"
        return {"stop": speed, "length": f"{speed}; {self._cut(answer)}", "cancelled": f"{speed}; stopped"}[
            answer.ended
        ]

    def _cut(self, answer: StreamedAnswer) -> str:
        return (
            f"cut after {answer.tokens:,} tokens: max_new_tokens is {self.decoding.max_new_tokens:,}"
            if answer.tokens >= self.decoding.max_new_tokens
            else f"cut after {answer.tokens:,} tokens: the model has no further positions"
        )

    def _command(self, line: str) -> str:
        """Carry out a command; returns the text to print."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        every = self.conversations.values()
        if name == "/help":
            return HELP
        if name == "/system":
            self.conversations = {one: Conversation(rest or None) for one in self.conversations}
            return "system prompt set; the conversation begins anew" if rest else "no system prompt; it begins anew"
        if name == "/set":
            if rest:
                option, _, value = rest.replace("=", " ", 1).partition(" ")
                self.decoding = self.decoding.changed(option, value.strip())
            return self.decoding.describe(self.opened)
        if name == "/undo":
            taken = [one.undo() for one in every]  # alike: each conversation has the same questions
            return "the last question is taken back" if all(taken) else "there is nothing to undo"
        if name == "/reset":
            for one in every:
                one.turns.clear()
            return "the conversation begins anew"
        if name == "/save":
            if not rest:
                raise RecipeError("/save needs a file, e.g. /save chats.jsonl")
            of_adapter = list(every)[-1]  # the base's answers are there to compare, not to train on
            saved = f"{rest}: conversation {of_adapter.save(Path(rest).expanduser())} of the file"
            if cut := of_adapter.incomplete:
                saved += f"; {cut} of {len(of_adapter.turns) // 2} answers stopped or cut, saved with train: false"
            return saved
        raise RecipeError(f"{name} is no command; /help lists them")

    def _say(self, text: str) -> None:
        self.console.print(Text(text, style="dim"))


def _write(piece: str) -> None:
    print(printable(piece) if sys.stdout.isatty() else piece, end="", flush=True)


def _read() -> str | None:
    """One question, which may go on over several lines; None at the end of input."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  # input() then edits lines and keeps their history
    lines: list[str] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        while True:
            try:
                line = input("... " if lines else "> ")
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D ends)")
                lines = []
                continue
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
    finally:
        signal.signal(signal.SIGINT, before)


def side_by_side(texts: Mapping[str, str], notes: Mapping[str, str]) -> Table:
    """Answers beside each other, each with its name above and its note below."""
    table = Table.grid(expand=True)
    for _ in texts:
        table.add_column(ratio=1)
    # Folded: by default rich cuts a line of a cell that has no space to break at, as Chinese has none.
    answers = {name: Text(text or "...", overflow="fold") for name, text in texts.items()}
    # Below the text, not on the frame, where it would be cut in a narrow terminal.
    below = {name: [Text(f"\n{note}", style="dim")] if note else [] for name, note in notes.items()}
    table.add_row(*(Panel(Group(answer, *below[name]), title=name) for name, answer in answers.items()))
    return table


@contextmanager
def _flag_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Context in which Ctrl-C only sets a flag; gives the function that reads it."""
    is_set = False

    def handle(_: int, frame: FrameType | None) -> None:
        nonlocal is_set
        is_set = True

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: is_set
    finally:
        signal.signal(signal.SIGINT, before)

"""`lfm2 chat`: turns of user and model. Keeps the messages; the model keeps their state."""

import contextlib
import importlib
import sys

import click

import lfm2
from lfm2.cli.generate import report
from lfm2.cli.loading import decode, kept_states, load_model, request_of
from lfm2.cli.options import (
    REPLYING,
    SAMPLING,
    loading_options,
    no_cache_option,
    options,
    prompt_cache_option,
)
from lfm2.cli.terminal import OutputFailed, Terminal
from lfm2.errors import LFM2Error, RequestError
from lfm2.request import ContextFull, check_options

PROMPT = "> "
# The other names are those that neighbouring programs have.
RESET, HELP, EXIT = ("/reset", "/clear"), ("/help", "/?"), ("/exit", "/quit")
HELP_TEXT = """/reset  forget the conversation (/clear does too)
/help   this list (/? too)
/exit   leave (/quit too); so do Ctrl-D, and Ctrl-C where nothing is typed
Ctrl-C during a reply stops it; what was said stays in the conversation."""


class Keyboard:
    """The lines of standard input, edited and asked for if it is a terminal."""

    def __init__(self) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._readline = None
        if self.is_terminal and sys.stdout.isatty():
            # Imported here: it is not everywhere, and may write to an output that is no terminal.
            with contextlib.suppress(ImportError):
                self._readline = importlib.import_module("readline")

    def read(self) -> str | None:
        """The next line without its end, or none at the end of input.

        Raises RequestError, and KeyboardInterrupt where nothing was typed.
        """
        while True:
            try:
                return self._read()
            except KeyboardInterrupt:
                sys.stderr.write("\n")
                if not self._readline or not self._readline.get_line_buffer():
                    raise

    def _read(self) -> str | None:
        if self._readline:
            with contextlib.suppress(EOFError):
                return self._checked(input(PROMPT))
            sys.stderr.write("\n")
            return None
        if self.is_terminal:
            sys.stderr.write(PROMPT)
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        return decode(line, "standard input").rstrip("\r\n") if line else None

    def _checked(self, line: str) -> str:
        # What is not UTF-8 may have been read as unpaired surrogates.
        return decode(line.encode("utf-8", "surrogateescape"), "the input")


class Chat:
    """The messages so far, and the options of every reply.

    exit_code: that of the last line of a pipe that was refused.
    """

    def __init__(self, terminal: Terminal, model: "lfm2.Model", request: dict) -> None:
        self.terminal = terminal
        self.model = model
        self.request = request
        self.messages: list[dict] = []
        self.exit_code = 0

    def reset(self) -> None:
        self.messages.clear()

    def reply(self, text: str) -> None:
        """Answers `text`. A turn that failed, or stopped before its first piece, is forgotten."""
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        stream = self.stream([*self.messages, turn])
        try:
            self.model.prepare(stream)
            for piece in stream:
                pieces.append(piece)
                self.terminal.write(piece)
        except KeyboardInterrupt:
            stream.cancel()
            self.terminal.write("\n" if pieces else "")
        else:
            self.terminal.write("\n")
            self.tell_about(stream.reply)
        if pieces:
            self.messages += [turn, {"role": "assistant", "content": "".join(pieces)}]

    def stream(self, messages: list[dict]) -> "lfm2.Stream":
        """The model's stream. Tells a conversation that has grown too long from a message."""
        try:
            return self.model.stream(messages, **self.request)
        except ContextFull as error:
            if not self.messages:
                raise
            num_tokens = error.num_tokens + (error.max_tokens or 0)
            reply = ", the reply included" if error.max_tokens else ""
            raise RequestError(
                f"the conversation is full ({num_tokens} of {error.context} tokens{reply}): "
                "/reset starts a new one, -c N gives more room"
            ) from error

    def tell_about(self, reply: "lfm2.Reply") -> None:
        for line in report(reply, {"first_token_s": reply.prefill_s}):
            self.terminal.detail(line)
        if reply.ended_by == "context":
            self.terminal.note(
                "(the context is full: /reset starts a new conversation, -c N gives more room)"
            )


@click.command()
@options(
    loading_options("Tokens that a whole conversation may have"),
    no_cache_option,
    prompt_cache_option,
    REPLYING,
    SAMPLING,
)
@click.pass_obj
def chat(terminal: Terminal, **given) -> None:
    """Talks with a model: a line is a message, /help lists the commands.

    Reads from a pipe too, a message a line.
    """
    request = request_of(given)
    check_options(**{name: value for name, value in request.items() if name != "system"})
    model = load_model(terminal, given)
    keyboard = Keyboard()
    talk = Chat(terminal, model, request)
    if keyboard.is_terminal:
        terminal.note("/help lists the commands")
    states = kept_states(terminal, model, given["prompt_cache"])
    with states, contextlib.suppress(KeyboardInterrupt):
        while take_turn(terminal, keyboard, talk):
            pass
    click.get_current_context().exit(talk.exit_code)


def take_turn(terminal: Terminal, keyboard: Keyboard, talk: Chat) -> bool:
    """Reads a line and does what it says; false when the chat is over."""
    try:
        line = keyboard.read()
        if line is None or line.strip() in EXIT:
            return False
        run_line(terminal, talk, line)
    except OutputFailed:
        raise
    except LFM2Error as error:
        # Who types has seen it; a pipe's reader must learn that a reply is missing.
        if not keyboard.is_terminal:
            talk.exit_code = error.exit_code
        terminal.end_line()
        terminal.note(f"Error: {error}")
    return True


def run_line(terminal: Terminal, talk: Chat, line: str) -> None:
    command = line.strip()
    if command in RESET:
        talk.reset()
        terminal.note("the conversation is forgotten")
    elif command in HELP:
        terminal.note(HELP_TEXT)
    elif command.startswith("/") and command[1:].isalpha():
        raise RequestError(f"there is no command {command}; /help lists them")
    elif command:
        talk.reply(line)

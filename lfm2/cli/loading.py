"""Loads a model for a command, with the progress that a user sees, and reads what it is given to
work on.
"""

import contextlib
import os
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import lfm2
from lfm2.cli.terminal import Bar, Terminal, bytes_text
from lfm2.errors import PromptCacheError, RequestError

# The options that are `lfm2.load`'s; what else a command is given, it asks of the model.
LOADING_NAMES = (
    "model",
    "device",
    "dtype",
    "context",
    "no_cache",
    "streams",
    "max_gap_ms",
    "prompt_cache",
)


class Compilation:
    """Tells what is being compiled, and counts it. `count` is told too, such as "3 of 10, "."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.num_steps = 0
        self.count = ""

    def __call__(self, capacity) -> None:
        self.num_steps += 1
        size = f"up to {capacity.rows} tokens at once" if capacity.rows > 1 else "single tokens"
        message = f"compiling for {size} ({self.count}first time only) ..."
        self.terminal.detail(message)
        self.terminal.show(message)


def request_of(given: dict) -> dict:
    """Of a command's arguments those that are for `Model.stream`."""
    return {name: value for name, value in given.items() if name not in LOADING_NAMES}


def load_model(
    terminal: Terminal,
    given: dict,
    compilation: Compilation | None = None,
    needs_text: bool = True,
) -> "lfm2.Model":
    """Loads the model that a command's arguments name, as their other loading options say."""
    if given["model"] is None:
        terminal.note("using the built-in model (name another with -m FOLDER or -m org/name)")
    return lfm2.load(
        given["model"],
        device=given["device"],
        dtype=given["dtype"],
        context=given["context"],
        cache=not given.get("no_cache", False),
        needs_text=needs_text,
        streams=given.get("streams") or 1,
        max_gap_ms=given.get("max_gap_ms"),
        progress=Bar(terminal, "loading weights", bytes_text),
        compiling=compilation or Compilation(terminal),
        warn=terminal.warn,
    )


@contextlib.contextmanager
def kept_states(terminal: Terminal, model: "lfm2.Model", path: str | None) -> Iterator[None]:
    """Takes over the kept states of the file that --prompt-cache names, and writes it anew at the
    end, an interrupt's too. Raises PromptCacheError.
    """
    if path is None:
        yield
        return
    folder = Path(path).absolute().parent
    if not os.access(folder, os.W_OK):
        raise PromptCacheError(f"{path} cannot be written: {folder} is no folder one may write to")
    if Path(path).exists():
        terminal.detail(f"{path}: {model.load_prompt_cache(path)} kept states")
    try:
        yield
    except BaseException:
        try:
            model.save_prompt_cache(path)
        except PromptCacheError as error:
            terminal.warn(str(error))
        raise
    terminal.detail(f"{path}: {model.save_prompt_cache(path)} kept states written")


def read_text(path: str) -> str:
    """The UTF-8 text of a file, or of standard input for `-`, as it is. Raises RequestError."""
    name = "standard input" if path == "-" else path
    try:
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror}") from error
    return decode(content, name)


def decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: byte {content[error.start]:#04x} at offset {error.start}"
        ) from error


def peak_memory_bytes() -> int:
    """The most memory that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Stopwatch:
    """Seconds since it was made or last read."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap_s(self) -> float:
        start, self._start = self._start, time.perf_counter()
        return self._start - start

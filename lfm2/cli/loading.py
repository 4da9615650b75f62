"""Loads a model for a command, with the progress that a user sees, and reads what it is given to work on."""

import resource
import sys
import time
from pathlib import Path

import lfm2
from lfm2.cli.terminal import Bar, Terminal, bytes_text
from lfm2.errors import RequestError


class Compilation:
    """Tells what is being compiled; counts it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.num_forms = 0

    def __call__(self, capacity) -> None:
        self.num_forms += 1
        rows = f"{capacity.rows} row{'s' * (capacity.rows > 1)}"
        message = f"compiling the form for {rows}, once for this model and machine ..."
        self.terminal.detail(message)
        self.terminal.show(message)


def load_model(
    terminal: Terminal, given: dict, compilation: Compilation | None = None
) -> "lfm2.Model":
    """Takes the loading options out of a command's arguments and loads the model they name."""
    name = given.pop("model")
    no_cache = given.pop("no_cache", False)
    if name is None:
        terminal.note("using the built-in model (name another with -m FOLDER or -m org/name)")
    return lfm2.load(
        name,
        device=given.pop("device"),
        dtype=given.pop("dtype"),
        context=given.pop("context"),
        cache=not no_cache,
        progress=Bar(terminal, "loading weights", bytes_text),
        compiling=compilation or Compilation(terminal),
        warn=terminal.warn,
    )


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

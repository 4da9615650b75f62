"""What the commands say: text on standard output; notes, warnings and progress on standard error.

A progress line is written only on a terminal and wiped before anything else is. Knows nothing of
models.
"""

import contextlib
import shutil
import sys
import time
from collections.abc import Callable

from lfm2.errors import LFM2Error

# To the start of the line, which is cleared.
WIPE = "\r\x1b[K"
BAR_WIDTH = 30
# A bar that is there for less than this is a flicker.
BAR_DELAY_S = 1.0
BAR_INTERVAL_S = 0.1


class OutputFailed(LFM2Error):
    """Standard output is closed, or where it goes is full."""


class Terminal:
    """Both outputs of one run, and whether --verbose was asked for."""

    def __init__(self) -> None:
        self.is_verbose = False
        self.is_terminal = sys.stderr.isatty()
        self._has_line = False
        self._is_inside_line = False
        self._told: set[str] = set()

    def write(self, text: str) -> None:
        """Text of the model or of a result, written at once. Raises OutputFailed."""
        self.wipe()
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(f"the output cannot be written: {error.strerror}") from error
        if text:
            self._is_inside_line = not text.endswith("\n")

    def end_line(self) -> None:
        """Ends the line of a text that broke off, if there is still somebody to write to."""
        if self._is_inside_line:
            with contextlib.suppress(OSError, OutputFailed):
                self.write("\n")

    def break_off(self) -> None:
        """After an interrupt: nothing of ours is left in the line where the shell goes on."""
        self.wipe()
        is_ended = self._is_inside_line and sys.stdout.isatty()
        self.end_line()
        # The terminal itself has put ^C there.
        if self.is_terminal and not is_ended:
            self._tell("\n")

    def note(self, message: str) -> None:
        """A line on standard error."""
        self.wipe()
        if self._is_inside_line and self.is_terminal and sys.stdout.isatty():
            self.end_line()
        self._tell(message + "\n")

    def _tell(self, text: str) -> None:
        """Standard error that cannot be written is no reason to stop."""
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def warn(self, message: str) -> None:
        """A warning, told once."""
        if message not in self._told:
            self._told.add(message)
            self.note(f"Warning: {message}")

    def detail(self, message: str) -> None:
        """A line for those who asked for --verbose."""
        if self.is_verbose:
            self.note(message)

    def show(self, message: str) -> None:
        """Replaces the progress line."""
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            # Before it is, lest an interrupt come between.
            self._has_line = True
            self._tell(WIPE + message[:width])

    def wipe(self) -> None:
        """Takes the progress line away."""
        if self._has_line:
            self._tell(WIPE)
            self._has_line = False


class Bar:
    """A progress bar over something counted, from the time it is made; hears of (done, total).

    `text` shows a count.
    """

    def __init__(self, terminal: Terminal, label: str, text: Callable[[int], str]) -> None:
        self.terminal = terminal
        self.label = label
        self.text = text
        self._start = time.monotonic()
        self._next_s = BAR_DELAY_S

    def __call__(self, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - self._start
        if done >= total:
            self.terminal.wipe()
        elif elapsed_s >= self._next_s:
            self._next_s = elapsed_s + BAR_INTERVAL_S
            self.terminal.show(self._line(done, total))

    def _line(self, done: int, total: int) -> str:
        filled = BAR_WIDTH * done // total
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        return (
            f"{self.label} [{bar}] {100 * done // total}%, {self.text(done)} of {self.text(total)}"
        )


def bytes_text(num_bytes: float) -> str:
    """A size for people: 1.23 GB, 456 MB, 7.8 kB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} bytes"

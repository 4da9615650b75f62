"""What a user of `lfm2 batch` sees of its course: counts, speed, and the time that is left."""

import time

from lfm2.cli.batch_lines import Lines
from lfm2.cli.terminal import Terminal

SHOW_INTERVAL_S = 0.1


class Progress:
    """Counts what is done, and shows it. num_lines: of all of IN, where that is known."""

    def __init__(
        self, terminal: Terminal, lines: Lines, num_lines: int | None, num_streams: int
    ) -> None:
        self.terminal = terminal
        self.lines = lines
        self.num_lines = num_lines
        self.num_streams = num_streams
        self.num_served = 0
        self.num_refused = 0
        self.num_tokens = 0
        self._start = time.monotonic()
        self._next_s = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def add(self, num_tokens: int) -> None:
        self.num_served += 1
        self.num_tokens += num_tokens

    def show(self, num_waiting: int) -> None:
        elapsed_s = self.elapsed_s
        if elapsed_s >= self._next_s:
            self._next_s = elapsed_s + SHOW_INTERVAL_S
            self.terminal.show(self.line(num_waiting, elapsed_s))

    def line(self, num_waiting: int, elapsed_s: float) -> str:
        num_done = self.lines.num_skipped + self.num_served + self.num_refused
        total = "" if self.num_lines is None else f" of {self.num_lines}"
        line = f"{num_done}{total} requests, {self.num_tokens / max(elapsed_s, 1e-9):.1f} tokens/s"
        line += f", {count_text(min(num_waiting, self.num_streams), 'stream')}"
        # Refused lines and skipped ones take no time.
        if self.num_lines is not None and self.num_served:
            left = max(self.num_lines - num_done, 0) * elapsed_s / self.num_served
            line += f", {clock(left)} left"
        return line

    def summary(self) -> str:
        tokens_per_s = self.num_tokens / max(self.elapsed_s, 1e-9)
        skipped = self.lines.num_skipped
        return (
            f"{count_text(self.num_served, 'request')} served in {self.elapsed_s:.1f} s, "
            f"{count_text(self.num_tokens, 'token')}, {tokens_per_s:.1f} tokens/s"
            + (f"; {skipped} served before" if skipped else "")
        )


def count_text(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' * (count != 1)}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds: 1:02:03, or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

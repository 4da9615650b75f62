"""What a scheduler wants of that which computes. Knows no tensors: a kept state is an object that
is handed back as it was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from scheduler.rounds import Segment
from scheduler.stream import Stream


@dataclass(frozen=True)
class Drawn:
    """A drawn token, and what the runner wants delivered with it, as log-probabilities."""

    token: int
    details: object = None


@dataclass(frozen=True)
class Window:
    """The rows of one stream in a round: a chunk of its prompt, or its pending token and drafts.

    The token of drawn row i is chosen by `stream.request.sampling` for the position after that row;
    what stands before it is `stream.tokens[: segment.start]` and the segment's tokens up to the
    row.
    """

    stream: Stream
    segment: Segment

    @property
    def num_rows(self) -> int:
        return len(self.segment.tokens)

    @property
    def end(self) -> int:
        """The position after its last row."""
        return self.segment.start + len(self.segment.tokens)

    @property
    def is_chunk(self) -> bool:
        return self.segment.start < len(self.stream.request.prompt)


@dataclass(frozen=True)
class Outcome:
    """What a round made of one window: a token for each of its drawn rows, or what is wrong with
    this stream alone, as a logit that is not finite.
    """

    drawn: tuple[Drawn, ...] = ()
    error: Exception | None = None


class Runner(Protocol):
    """Called by the one thread that owns the scheduler, one call at a time.

    A round that raises may have written any positions of its windows. The scheduler then runs rows
    of decoding streams again (so few spoil nothing that they read) and starts passes over prompts
    anew at 0 (a chunk may have overwritten what its first rows read).
    """

    def prefill_step(self, chunks: Sequence[Window]) -> Sequence[Outcome]:
        """Runs one round of prompt chunks alone, of different slots; an outcome for each.

        It may return before the device is done where no row is drawn.
        """

    def cancel_prefill(self, slot: int) -> None:
        """A stream leaves its slot before the end of its prompt: forget the pass. When it returns
        the slot's state stands at the end of the last chunk and nothing writes to it any more.
        """

    def run(self, windows: Sequence[Window]) -> Sequence[Outcome]:
        """Runs one round of windows of different slots, prompt chunks among them; an outcome for
        each.
        """

    def keep(self, slot: int, base: int, at: int) -> object:
        """A copy of a slot's state as it stands after `at` tokens; base: where its keys begin."""

    def restore(self, kept: object, slot: int, base: int) -> None:
        """Puts a kept state into a slot, whatever that held before. Raises if it cannot."""

    def release(self, kept: object) -> None:
        """Frees a kept state. It is not used again."""

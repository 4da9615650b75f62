"""The queue of requests that wait for a slot: foreground before background, each as it came."""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.chunks import Plan
from scheduler.request import Request
from scheduler.stream import Stream


@dataclass(frozen=True)
class Leader:
    """A stream whose state at `cut` is to be kept, and is worth waiting for."""

    stream: Stream
    cut: int

    @property
    def is_ahead(self) -> bool:
        """Whether that state is still to come."""
        return not self.stream.has_left and self.stream.held < self.cut


@dataclass(eq=False)
class Waiting:
    """A submitted request. leader: what it lets others pass for."""

    number: int
    request: Request
    plan: Plan
    submitted_s: float
    leader: Leader | None = None


class WaitingQueue:
    """`patience`: a background request is next once so many foreground ones went before it."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self._foreground: dict[int, Waiting] = {}
        self._background: dict[int, Waiting] = {}
        self._num_overtaking = 0

    def __len__(self) -> int:
        return len(self._foreground) + len(self._background)

    def __iter__(self) -> Iterator[Waiting]:
        """In the order of admission, over a copy."""
        groups = [self._foreground, self._background]
        if self._num_overtaking >= self.patience:
            groups.reverse()
        return iter([waiting for group in groups for waiting in group.values()])

    def add(self, waiting: Waiting) -> None:
        self._group(waiting)[waiting.number] = waiting

    def take(self, waiting: Waiting) -> None:
        """Removes a request that is admitted."""
        self.remove(waiting)
        is_overtaking = bool(self._background) and not waiting.request.is_background
        self._num_overtaking = self._num_overtaking + 1 if is_overtaking else 0

    def remove(self, waiting: Waiting) -> None:
        """Removes a request that is cancelled."""
        del self._group(waiting)[waiting.number]

    def find(self, number: int) -> Waiting | None:
        return self._foreground.get(number) or self._background.get(number)

    def _group(self, waiting: Waiting) -> dict[int, Waiting]:
        return self._background if waiting.request.is_background else self._foreground

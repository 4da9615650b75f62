"""One loop for all replies of a model: a scheduler, and a box of events for each request.

Nothing runs by itself: whoever waits for a reply turns the loop, and with it all others.
"""

from collections import deque
from collections.abc import Sequence

from lfm2.errors import LFM2Error, RequestError
from lfm2.kept import StateCopy
from lfm2.runner import Runner
from lfm2.serving import DrawingRunner
from scheduler.cache import Kept, PromptCache
from scheduler.chunks import Plan
from scheduler.events import Event
from scheduler.loop import Scheduler
from scheduler.options import Options
from scheduler.request import Request, RequestRefused

# Streams that decode in one round.
MAX_ROUND_STREAMS = 32
# States are kept of prompts of at least so many tokens, and at least so many apart, but where a
# request asks for more.
MIN_PROMPT = 64
MIN_GAP = 64
DEFAULT_CACHE_BYTES = 256 << 20
# How many of the last used kept states are looked at for one that a prompt can go on from.
MOST_COMPARED = 64


class Service:
    """streams: most replies under way at once, of those that the state has slots for. chunk: most
    tokens of a prompt in a round. cache_bytes: what kept states may take, 0 for none.
    """

    def __init__(
        self,
        runner: Runner,
        streams: int = 1,
        chunk: int | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        self.runner = DrawingRunner(runner)
        round_streams = min(streams, MAX_ROUND_STREAMS)
        self.options = Options(
            num_slots=streams,
            num_tokens=runner.state.num_tokens,
            chunk=chunk or largest_chunk(runner.state.max_rows, streams),
            max_rows=runner.state.max_rows,
            round_rows=round_streams,
            round_streams=round_streams,
            min_gap=MIN_GAP,
        )
        self.cache = None
        if cache_bytes:
            size = self.runner.copier.size
            self.cache = PromptCache(self.runner, cache_bytes, size, MIN_PROMPT, MIN_GAP)
        self.scheduler = Scheduler(self.runner, self.options, self.cache)
        # Who runs rounds without the scheduler, see `alone`.
        self.soloist: object = None
        self._boxes: dict[int, deque[Event]] = {}
        self._streams: set[int] = set()
        self._has_left = False

    def submit(self, request: Request) -> int:
        """Queues a request, whose events are kept for `take`. Raises RequestError."""
        try:
            number = self.scheduler.submit(request)
        except RequestRefused as error:
            raise RequestError(str(error)) from error
        self.soloist = None
        self._boxes[number] = deque()
        return number

    def begin_stream(self, request: Request) -> int:
        """The same for a stream, which may be left half-way: it ends the ones before it where only
        one can be.
        """
        self.end_streams()
        number = self.submit(request)
        self._streams.add(number)
        return number

    def end_streams(self) -> None:
        """Ends all streams, if there is only one slot."""
        if self.options.num_slots == 1:
            for number in list(self._streams):
                self.scheduler.cancel(number)

    def alone(self, soloist: object) -> None:
        """Ends every request: until the next one comes, slot 0 and all of the pool are the
        soloist's.
        """
        for number in list(self._boxes):
            self.scheduler.cancel(number)
        while not self.scheduler.is_idle:
            self.turn()
        self.soloist = soloist

    def take(self, number: int) -> deque[Event]:
        """The box of a request, empty if it must wait for another turn."""
        return self._boxes[number]

    def turn(self) -> None:
        """One turn of the loop, for all requests."""
        self._has_left = False
        if self.scheduler.is_idle:
            raise LFM2Error("a reply was lost in an interrupt")
        for event in self.scheduler.step():
            # Nobody waits for one that was left.
            if event.number in self._boxes:
                self._boxes[event.number].append(event)

    def leave(self, number: int) -> None:
        """Ends a request that nobody waits for any more, at the next turn."""
        if number in self._boxes:
            self.forget(number)
            self.scheduler.cancel(number)
            self._has_left = True

    def forget(self, number: int) -> None:
        """Takes away the box of a request that is finished."""
        self._streams.discard(number)
        self._boxes.pop(number, None)

    def resumable(self, prompt: Sequence[int]) -> int:
        """How many first tokens of a prompt need not run: a kept state has them, and one is left.

        A state that goes on otherwise than the prompt will do, where its rings reach back to the
        last token that they share: the shorter state becomes a kept one too.
        """
        if self._has_left and not self.scheduler.is_idle:
            # What was left is kept at the next turn, and may be what this prompt goes on from.
            self.turn()
        prompt = tuple(prompt[:-1])
        best, found = 0, None
        for kept in self.cache.states[-MOST_COMPARED:] if self.cache is not None else ():
            at = common(prompt, kept.prompt[: kept.at])
            is_there = at == kept.at or self.runner.copier.reaches(kept.copy, at)
            if at > best and is_there:
                best, found = at, kept
        if found is not None and best < found.at:
            self._adopt(found, best)
        return best

    def chunk_lengths(self, request: Request) -> list[int]:
        """How many rows each chunk of a prompt would have that comes now."""
        plan = Plan.of(request, self.options.chunk, self.options.min_gap)
        found = None if self.cache is None else self.cache.find(plan)
        cuts = [cut for cut in plan.cuts if found is None or cut >= found.at]
        return [plan.end(cut) - cut for cut in cuts]

    def _adopt(self, kept: Kept, at: int) -> None:
        copy: StateCopy = kept.copy
        self.cache.adopt(kept.prompt[:at], copy.shortened(at))


def largest_chunk(max_rows: int, streams: int) -> int:
    """Rows of a prompt that a round has room for beside those of all who decode."""
    return max_rows - (min(streams, MAX_ROUND_STREAMS) if streams > 1 else 0)


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many first tokens two texts share."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # They share the first `low`, and not the first `high`.
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low

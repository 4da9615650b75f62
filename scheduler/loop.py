"""The loop: cancel, admit, a chunk and a round, deliver.

Owns the queue, the streams and their slots. Knows integers only; whatever computes is behind
`Runner`.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.cache import PromptCache
from scheduler.chunks import Plan
from scheduler.core import Core
from scheduler.events import Event, Finished, Stats
from scheduler.options import Options
from scheduler.request import Request, RequestRefused
from scheduler.runner import Runner
from scheduler.turns import Draft
from scheduler.waiting import Leader, Waiting, WaitingQueue

# Whether there is memory for a prompt of so many tokens and a reply of so many more.
Fits = Callable[[int, int], bool]


@dataclass(frozen=True)
class Progress:
    """Prompt tokens that are in the state, of `total`."""

    done: int
    total: int


@dataclass(frozen=True)
class Counts:
    """Requests of each kind."""

    queued: int
    filling: int
    decoding: int


class Scheduler:
    """Serves requests with one runner.

    `submit`, `cancel`, `wait` and what only tells may be called from any thread; one thread at a
    time calls `step`. cache: kept states, if any are to be. draft: proposes tokens for windows
    wider than one row. fits: asked before a request is admitted beside others.
    """

    def __init__(
        self,
        runner: Runner,
        options: Options,
        cache: PromptCache | None = None,
        draft: Draft | None = None,
        fits: Fits | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.options = options
        self.cache = cache
        self.fits = fits
        self.clock = clock
        self._queue = WaitingQueue(options.background_patience)
        self._core = Core(runner, options, cache, draft, self._is_cancelled, clock)
        # Guards what other threads write.
        self._mail = threading.Condition()
        self._arrived: list[Waiting] = []
        self._cancelled: set[int] = set()
        self._num_submitted = 0
        self._stepping = threading.Lock()

    def submit(self, request: Request) -> int:
        """Queues a request; the number by which events and `cancel` know it.

        Raises RequestRefused if it could never fit.
        """
        if request.num_tokens > self.options.num_tokens:
            raise RequestRefused(
                f"a prompt of {len(request.prompt)} tokens and a reply of {request.max_tokens} "
                f"need room for {request.num_tokens}; there is room for {self.options.num_tokens}"
            )
        plan = Plan.of(request, self.options.chunk, self.options.min_gap)
        with self._mail:
            self._num_submitted += 1
            waiting = Waiting(self._num_submitted, request, plan, self.clock())
            self._arrived.append(waiting)
            self._mail.notify_all()
        return waiting.number

    def cancel(self, number: int) -> None:
        """Ends a request at the next turn. Nothing happens to one that has ended."""
        with self._mail:
            self._cancelled.add(number)
            self._mail.notify_all()

    def wait(self, timeout_s: float = 0.1) -> None:
        """Returns when a request or a cancel is there, or after `timeout_s`."""
        with self._mail:
            if not self._arrived and not self._cancelled:
                self._mail.wait(timeout_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or under way."""
        with self._mail:
            return not (self._arrived or len(self._queue) or self._core.streams)

    @property
    def is_whole(self) -> bool:
        """Whether every slot and all of the pool are free."""
        return self._core.slots.is_whole and self._core.extents.is_whole

    def counts(self) -> Counts:
        """How many requests there are."""
        streams = list(self._core.streams.values())
        num_filling = sum(stream.is_filling for stream in streams)
        num_queued = len(self._queue) + len(self._arrived)
        return Counts(num_queued, num_filling, len(streams) - num_filling)

    def fill_progress(self, number: int) -> Progress | None:
        """How far the prompt of an admitted request is."""
        stream = self._core.streams.get(number)
        if stream is None:
            return None
        total = len(stream.request.prompt)
        return Progress(min(stream.held, total), total)

    def step(self) -> list[Event]:
        """One turn: cancels, admissions, a chunk and a round; what came of them.

        An interrupt of the runner leaves by here, with every request as it was before the round,
        but that prompts whose chunks it cut short begin anew. The next step goes on.
        """
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("another thread is in step: one thread owns a scheduler")
        try:
            self._read_mail()
            self._admit()
            self._core.run_turn()
            events, self._core.events = self._core.events, []
            return events
        finally:
            self._stepping.release()

    def serve(self, deliver: Callable[[Event], None], is_over: Callable[[], bool]) -> None:
        """Steps and delivers until `is_over`, asked between turns and ten times a second."""
        while not is_over():
            for event in self.step():
                deliver(event)
            if self.is_idle:
                self.wait()

    def _is_cancelled(self, number: int) -> bool:
        with self._mail:
            return number in self._cancelled

    def _read_mail(self) -> None:
        with self._mail:
            for waiting in self._arrived:
                self._queue.add(waiting)
                if self.cache is not None:
                    self.cache.see(waiting.plan)
            cancelled = sorted(self._cancelled)
            self._arrived = []
        for number in cancelled:
            waiting = self._queue.find(number)
            if waiting is not None:
                self._queue.remove(waiting)
                queue_s = self.clock() - waiting.submitted_s
                stats = Stats(len(waiting.request.prompt), queue_s=queue_s)
                self._core.events.append(Finished(number, "cancelled", stats))
            elif number in self._core.streams:
                self._core.finish(self._core.streams[number], "cancelled")
            # Only now: an interrupt above leaves it to be seen again.
            with self._mail:
                self._cancelled.discard(number)

    def _admit(self) -> None:
        """Admits in the order of the queue until one does not fit. Those who wait for a prefix that
        is being computed let others pass.
        """
        if self._core.is_full:
            return
        for waiting in self._queue:
            if self._is_led(waiting):
                continue
            is_alone = not self._core.streams
            request = waiting.request
            if self.fits is not None and not is_alone:
                if not self.fits(len(request.prompt), request.max_tokens):
                    break
            stream = self._core.admit(waiting)
            if stream is None:
                break
            self._queue.take(waiting)
            self._core.begin(stream)

    def _is_led(self, waiting: Waiting) -> bool:
        """Whether a filling stream is about to compute what this prompt begins with."""
        if self.cache is None:
            return False
        leader = waiting.leader
        if leader is None or not leader.is_ahead:
            leader = waiting.leader = self._find_leader(waiting.plan)
        return leader is not None

    def _find_leader(self, plan: Plan) -> Leader | None:
        """The filling stream whose chunks come to end where the longest common prefix does, with a
        mark set there. None if what is kept is about as long.
        """
        filling = self._core.filling
        found = self.cache.find(plan)
        num_kept = 0 if found is None else found.at
        for cut in reversed(plan.cuts[1:]):
            if cut - num_kept < self.cache.min_gap:
                return None
            for stream in filling:
                is_common = stream.plan.keys.get(cut) == plan.keys[cut]
                if is_common and stream.held < cut and self.cache.admits(cut):
                    stream.marks[cut] = True
                    return Leader(stream, cut)
        return None

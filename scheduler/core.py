"""The admitted streams: admits them to slots, runs their rounds, commits what was drawn, ends them.

For the owner thread alone; `loop.py` has what other threads may touch.
"""

from collections.abc import Callable, Sequence

from scheduler.cache import PromptCache
from scheduler.events import Event, Finished, Prefilled, Reason, Stats, Tokens
from scheduler.options import Options
from scheduler.request import Request
from scheduler.runner import Drawn, Outcome, Runner, Window
from scheduler.slots import Extents, Slots
from scheduler.stream import Stream
from scheduler.turns import Draft, accept, is_mixed, next_chunks, next_windows
from scheduler.waiting import Waiting


class Core:
    """streams: by number, in the order of admission. events: what happened, for the loop to take.

    is_cancelled: whether a request is to end at the next turn; nothing more is drawn for it.
    """

    def __init__(
        self,
        runner: Runner,
        options: Options,
        cache: PromptCache | None,
        draft: Draft | None,
        is_cancelled: Callable[[int], bool],
        clock: Callable[[], float],
    ) -> None:
        self.runner = runner
        self.options = options
        self.cache = cache
        self.draft = draft
        self.is_cancelled = is_cancelled
        self.clock = clock
        self.slots = Slots(options.num_slots)
        self.extents = Extents(options.num_tokens)
        self.streams: dict[int, Stream] = {}
        self.events: list[Event] = []
        self._num_served = 0

    @property
    def filling(self) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.is_filling]

    @property
    def decoding(self) -> list[Stream]:
        return [stream for stream in self.streams.values() if stream.num_made]

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return len(self.streams) == self.slots.count

    def admit(self, waiting: Waiting) -> Stream | None:
        """Gives a request a slot and an extent; None if either is short."""
        slot = self.slots.take()
        if slot is None:
            return None
        extent = self.extents.take(waiting.request.num_tokens)
        if extent is None:
            self.slots.give_back(slot)
            return None
        stream = Stream(
            waiting.number,
            waiting.request,
            waiting.plan,
            slot,
            extent,
            submitted_s=waiting.submitted_s,
            admitted_s=self.clock(),
        )
        self.streams[stream.number] = stream
        return stream

    def begin(self, stream: Stream) -> None:
        """Begins the pass over a prompt, from a kept state if there is one."""
        if self.cache is not None:
            self.cache.begin(stream)

    def run_turn(self) -> None:
        """A chunk of a prompt, or of several short ones, and a round of those that decode: in one
        forward if they may share it, else one after the other.
        """
        for stream in self.streams.values():
            if stream.is_in_chunk:
                stream.spoil()
        chunks = next_chunks(self.filling, self.options)
        for stream in self.filling:
            is_taken = any(chunk.stream is stream for chunk in chunks)
            stream.passed_over = 0 if is_taken else stream.passed_over + 1
        if is_mixed(chunks, self.options):
            self._run([*chunks, *self._next_windows()])
        else:
            self._run(chunks)
            self._run(self._next_windows())

    def finish(self, stream: Stream, reason: Reason, error: Exception | None = None) -> None:
        """Ends a stream and frees what it has. What a cancelled pass has computed is kept like a
        mark; a reply's state is kept if its request says so.
        """
        request, cache = stream.request, self.cache
        if stream.is_in_chunk:
            stream.spoil()
        if stream.is_filling:
            self.runner.cancel_prefill(stream.slot)
        try:
            if cache is not None and reason != "error":
                is_reply = stream.num_made > 0
                if request.keeps_reply if is_reply else cache.is_worth_keeping(stream):
                    cache.keep(stream)
        finally:
            # An interrupt of the copy must not leave a stream that has ended among those that run.
            del self.streams[stream.number]
            stream.has_left = True
            self.slots.give_back(stream.slot)
            self.extents.give_back(stream.extent)
            self.events.append(Finished(stream.number, reason, self._stats(stream), error))

    def _next_windows(self) -> list[Window]:
        """Those whose turn it is, in the order of admission."""
        windows = next_windows(self.decoding, self.options, self.draft)
        for window in windows:
            self._note_served(window.stream)
        return sorted(windows, key=lambda window: window.stream.number)

    def _note_served(self, stream: Stream) -> None:
        self._num_served += 1
        stream.last_served = self._num_served

    def _run(self, windows: Sequence[Window]) -> None:
        """Runs a round and commits it, or deals with its failure."""
        if not windows:
            return
        for window in windows:
            window.stream.is_in_chunk = window.is_chunk
        is_prefill = all(window.is_chunk for window in windows)
        forward = self.runner.prefill_step if is_prefill else self.runner.run
        try:
            made = list(zip(windows, forward(windows), strict=True))
        except Exception as error:
            self._separate(windows, error)
            return
        num_rows = sum(window.num_rows for window in windows)
        for window, outcome in made:
            self._commit(window, outcome, num_rows)

    def _separate(self, windows: Sequence[Window], error: Exception) -> None:
        """A round failed. One of a single chunk, or of decoding streams only, fails what was in it.
        In any other, prompts begin anew, each alone from now on, and the rest has its next turn.
        """
        if len(windows) == 1 or not any(window.is_chunk for window in windows):
            for window in windows:
                self.finish(window.stream, "error", error)
        for window in windows:
            window.stream.is_alone |= window.is_chunk

    def _commit(self, window: Window, outcome: Outcome, num_rows: int) -> None:
        stream = window.stream
        is_cancelled = self.is_cancelled(stream.number)
        if outcome.error is not None:
            self.finish(stream, "error", outcome.error)
        elif window.is_chunk:
            self._commit_chunk(window, outcome, is_cancelled)
        elif not is_cancelled:
            accepted = accept(window.segment.tokens[1:], outcome.drawn)
            stream.num_rounds += 1
            stream.num_drafted += window.num_rows - 1
            stream.num_accepted += len(accepted) - 1
            stream.min_rows = min(stream.min_rows or num_rows, num_rows)
            self._deliver(stream, accepted, is_fed=True)

    def _commit_chunk(self, window: Window, outcome: Outcome, is_cancelled: bool) -> None:
        stream = window.stream
        stream.held = window.end
        if self.cache is not None and stream.held in stream.marks:
            self.cache.keep(stream, stream.marks[stream.held])
        if not stream.is_filling and not is_cancelled:
            # Its first token is its turn: else newcomers could keep others waiting for ever.
            self._note_served(stream)
            stream.prefilled_s = self.clock()
            self.events.append(Prefilled(stream.number, stream.num_cached))
            self._deliver(stream, outcome.drawn, is_fed=False)
        stream.is_in_chunk = False

    def _deliver(self, stream: Stream, drawn: Sequence[Drawn], is_fed: bool) -> None:
        """Adds tokens to a reply, up to the one that ends it. is_fed: for each of them a row was
        run that the state now has.
        """
        made: list[Drawn] = []
        reason, error = None, None
        for token in drawn:
            made.append(token)
            try:
                reason = ending(stream.request, token.token, stream.num_made + len(made))
            except Exception as raised:
                reason, error = "error", raised
            if reason is not None:
                break
        stream.tokens += [token.token for token in made]
        # A chunk is done with its token, before its stream may end with that.
        stream.is_in_chunk = False
        stream.held += len(made) if is_fed else 0
        self.events.append(Tokens(stream.number, tuple(made)))
        if reason is not None:
            self.finish(stream, reason, error)

    def _stats(self, stream: Stream) -> Stats:
        now = self.clock()
        prefilled_s = now if stream.prefilled_s is None else stream.prefilled_s
        return Stats(
            num_prompt=len(stream.request.prompt),
            num_cached=stream.num_cached,
            has_reuse_failed=stream.has_reuse_failed,
            num_tokens=stream.num_made,
            num_rounds=stream.num_rounds,
            num_drafted=stream.num_drafted,
            num_accepted=stream.num_accepted,
            min_rows=stream.min_rows,
            queue_s=stream.admitted_s - stream.submitted_s,
            prefill_s=prefilled_s - stream.admitted_s,
            decode_s=now - prefilled_s,
        )


def ending(request: Request, token: int, num_made: int) -> Reason | None:
    """Why a reply ends with its token number `num_made`, if it does."""
    if token in request.stop_tokens or (request.ends is not None and request.ends(token)):
        return "stop"
    return "length" if num_made == request.max_tokens else None

"""Many requests through one model: taken as they are needed, answered as they are finished."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

from lfm2.errors import LFM2Error, RequestError
from lfm2.service import MIN_GAP, Service, common
from lfm2.stream import Reply, Transcript
from scheduler.events import Finished, Tokens
from scheduler.request import Request

# Requests taken ahead, for each stream, so that none waits for the next.
NUM_AHEAD = 2

# In place of a request once there are no more.
END = object()

MakeRequest = Callable[..., tuple[Request, Transcript]]


@dataclass(frozen=True)
class BatchReply:
    """What became of request number `index`, from 0: a reply, or why there is none."""

    index: int
    reply: Reply | None
    error: LFM2Error | None


@dataclass(frozen=True)
class Pending:
    """A request under way."""

    index: int
    number: int
    transcript: Transcript


def batch(
    service: Service, make_request: MakeRequest, requests: Iterable[dict | None], ordered: bool
) -> Iterator[BatchReply]:
    """See `Model.batch`."""
    early: dict[int, BatchReply] = {}
    replies = served(Batch(service, make_request, early), iter(requests))
    return in_order(replies, early) if ordered else replies


class Batch:
    """The requests of one batch that are under way. early: replies that wait for one before them."""

    def __init__(
        self, service: Service, make_request: MakeRequest, early: dict[int, BatchReply]
    ) -> None:
        self.service = service
        self.make_request = make_request
        self.early = early
        self.pending: dict[int, Pending] = {}
        self._last_prompt: tuple[int, ...] = ()

    @property
    def is_full(self) -> bool:
        most = NUM_AHEAD * self.service.options.num_slots
        return len(self.pending) + len(self.early) >= most

    def begin(self, index: int, asked: dict) -> None:
        """Queues a request. What it has in common with the one before is worth keeping. Raises
        LFM2Error.
        """
        request, transcript = self.make_request(**arguments(asked))
        shared = common(request.prompt, self._last_prompt)
        self._last_prompt = request.prompt
        if MIN_GAP <= shared < len(request.prompt):
            request = replace(request, marks=(shared,))
        number = self.service.submit(request)
        self.pending[number] = Pending(index, number, transcript)

    def turn(self) -> list[BatchReply]:
        """A turn of the loop, if nothing is there yet; the replies that are finished."""
        if not any(self.service.take(number) for number in self.pending):
            self.service.turn()
        replies = []
        for one in list(self.pending.values()):
            finished = heard(self.service, one)
            if finished is not None:
                del self.pending[one.number]
                self.service.forget(one.number)
                replies.append(ended(one, finished))
        return replies

    def leave(self) -> None:
        """Ends what is under way."""
        for number in self.pending:
            self.service.leave(number)


def served(batch: Batch, requests: Iterator[dict | None]) -> Iterator[BatchReply]:
    """Replies as they are finished."""
    batch.service.end_streams()
    index = -1
    is_exhausted = False
    try:
        while batch.pending or not is_exhausted:
            while not (is_exhausted or batch.is_full):
                asked = next(requests, END)
                is_exhausted = asked is END
                if asked is END or asked is None:
                    break
                index += 1
                try:
                    batch.begin(index, asked)
                except LFM2Error as error:
                    yield BatchReply(index, None, error)
            if batch.pending:
                yield from batch.turn()
    finally:
        batch.leave()


def arguments(asked: dict) -> dict:
    """What `Model.request` is called with for a request of a batch. Raises RequestError."""
    if not isinstance(asked, dict):
        raise RequestError(f"a request is a dict, got {type(asked).__name__}")
    given = dict(asked)
    found = [name for name in ("prompt", "messages") if given.get(name) is not None]
    if len(found) != 1:
        both = "both prompt and messages" if found else "neither prompt nor messages"
        raise RequestError(f"a request has {both}; give one of them")
    prompt = given.pop(found[0])
    given.pop("messages", None)
    return given | {"prompt": prompt}


def heard(service: Service, one: Pending) -> Finished | None:
    """Takes in what there is of a reply; its end, if that is there."""
    box = service.take(one.number)
    while box:
        event = box.popleft()
        if isinstance(event, Tokens):
            one.transcript.draws += [drawn.details for drawn in event.drawn]
        if isinstance(event, Finished):
            return event
    return None


def ended(one: Pending, finished: Finished) -> BatchReply:
    error = finished.error
    if finished.reason == "cancelled":
        error = RequestError("this request was ended by a later call on the same model")
    if error is None:
        return BatchReply(one.index, one.transcript.reply(finished), None)
    if not isinstance(error, LFM2Error):
        error = LFM2Error(f"this request failed: {type(error).__name__}: {error}")
    return BatchReply(one.index, None, error)


def in_order(replies: Iterator[BatchReply], early: dict[int, BatchReply]) -> Iterator[BatchReply]:
    """The replies by their index; those that come too early wait, in `early`."""
    index = 0
    with closing(replies):
        for reply in replies:
            early[reply.index] = reply
            while index in early:
                yield early.pop(index)
                index += 1

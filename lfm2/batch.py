"""Many requests through one model: taken as they are needed, answered as they are finished."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lfm2.errors import LFM2Error, RequestError
from lfm2.service import Service
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
    replies = served(service, make_request, iter(requests))
    return in_order(replies) if ordered else replies


def served(
    service: Service, make_request: MakeRequest, requests: Iterator[dict | None]
) -> Iterator[BatchReply]:
    """Replies as they are finished."""
    service.end_streams()
    pending: dict[int, Pending] = {}
    index = -1
    is_exhausted = False
    try:
        while pending or not is_exhausted:
            while not is_exhausted and len(pending) < NUM_AHEAD * service.options.num_slots:
                asked = next(requests, END)
                is_exhausted = asked is END
                if asked is END or asked is None:
                    break
                index += 1
                try:
                    number, transcript = begin(service, make_request, asked)
                except LFM2Error as error:
                    yield BatchReply(index, None, error)
                    continue
                pending[number] = Pending(index, number, transcript)
            service.turn()
            for number in list(pending):
                finished = heard(service, pending[number])
                if finished is not None:
                    one = pending.pop(number)
                    service.leave(number)
                    yield ended(one, finished)
    finally:
        for number in pending:
            service.leave(number)


def begin(service: Service, make_request: MakeRequest, asked: dict) -> tuple[int, Transcript]:
    """Queues a request as it stands in a batch. Raises LFM2Error."""
    request, transcript = make_request(**arguments(asked))
    return service.submit(request), transcript


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


def in_order(replies: Iterator[BatchReply]) -> Iterator[BatchReply]:
    """The replies by their index; those that come too early wait."""
    early: dict[int, BatchReply] = {}
    index = 0
    for reply in replies:
        early[reply.index] = reply
        while index in early:
            yield early.pop(index)
            index += 1

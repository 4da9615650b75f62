"""One reply as it is made: a request to the model's loop, its tokens as text."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lfm2.errors import RequestError
from lfm2.sampling import Draw
from lfm2.service import Service
from lfm2.text_stream import TextStream
from lfm2.tokenizer import NoTokenizer, Tokenizer
from scheduler.events import Finished, Tokens
from scheduler.request import Request


@dataclass(frozen=True)
class Reply:
    """A finished reply.

    ended_by: "end token", "stop text", "max_tokens", or "context" where that is full.
    tokens are those drawn, an end token included; text is without it. draws holds
    log-probabilities, if asked for. Times in seconds: queue_s until the prompt's turn came,
    prefill_s from there until the first token is drawn, decode_s from then on.
    """

    text: str
    tokens: tuple[int, ...]
    ended_by: str
    draws: tuple[Draw, ...]
    num_prompt_tokens: int
    num_reused_tokens: int
    prefill_s: float
    decode_s: float
    queue_s: float = 0.0

    @property
    def finish_reason(self) -> str:
        """As servers put it: "stop" for an end token or a stop text, "length" for a limit."""
        return "length" if self.ended_by in ("max_tokens", "context") else "stop"


class Transcript:
    """A reply's text and draws as its tokens come. `add` is the request's `ends`."""

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        stops: str | Sequence[str],
        limit: str,
        keeps_draws: bool,
    ) -> None:
        self.eos_token_ids = tokenizer.eos_token_ids
        self.limit = limit
        self.keeps_draws = keeps_draws
        self.draws: list[Draw] = []
        self.pieces: list[str] = []
        self._text_stream = TextStream(tokenizer, stops)

    def add(self, token: int) -> bool:
        """Takes the next token; whether a stop text is complete with it."""
        self.pieces.append(self._text_stream.add(token))
        return self._text_stream.is_stopped

    def reply(self, finished: Finished) -> Reply:
        """The whole, once nothing follows."""
        stats = finished.stats
        self.pieces.append(self._text_stream.finish())
        tokens = tuple(draw.token for draw in self.draws)
        ended_by = self.limit
        if finished.reason == "stop":
            ended_by = "end token" if tokens[-1] in self.eos_token_ids else "stop text"
        return Reply(
            text="".join(self.pieces),
            tokens=tokens,
            ended_by=ended_by,
            draws=tuple(self.draws) if self.keeps_draws else (),
            num_prompt_tokens=stats.num_prompt,
            num_reused_tokens=stats.num_cached,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
            queue_s=stats.queue_s,
        )


class Stream:
    """Iterates, once, over the pieces of a reply's text; `reply` is there once they are all out.

    Runs only as it is iterated, or as others of the same model are. A loop that was left goes on
    where it was with the next one; a stream that nothing refers to any more ends.
    """

    def __init__(self, service: Service, request: Request, transcript: Transcript) -> None:
        self.service = service
        self.request = request
        self.transcript = transcript
        self.reply: Reply | None = None
        self._number: int | None = None
        self._is_over = False
        self._ready: deque[str] = deque()
        self._num_read = 0

    @property
    def prompt(self) -> list[int]:
        """The token ids of the prompt."""
        return list(self.request.prompt)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._ready:
            if self._is_over:
                raise StopIteration
            self._advance()
        return self._ready.popleft()

    def cancel(self) -> None:
        """Ends the reply here. What was computed may be of use to later prompts."""
        self._is_over = True
        if self._number is not None:
            self.service.leave(self._number)

    def __del__(self) -> None:
        self.cancel()

    def _advance(self) -> None:
        """Takes what there is for this stream, or has the loop make a turn."""
        if self._number is None:
            self._number = self.service.begin_stream(self.request)
        box = self.service.take(self._number)
        if not box:
            self.service.turn()
            return
        event = box.popleft()
        if isinstance(event, Tokens):
            self.transcript.draws += [drawn.details for drawn in event.drawn]
        if isinstance(event, Finished):
            self._finish(event)
        pieces = self.transcript.pieces
        self._ready += [piece for piece in pieces[self._num_read :] if piece]
        self._num_read = len(pieces)

    def _finish(self, event: Finished) -> None:
        self._is_over = True
        self.service.leave(self._number)
        if event.reason == "cancelled":
            raise RequestError("this stream was ended by a later call on the same model")
        if event.error is not None:
            raise event.error
        self.reply = self.transcript.reply(event)

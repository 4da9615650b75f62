"""One reply as it is made: prompt chunks, then one drawn token a round, as text."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lfm2.runner import Drawn
from lfm2.sampling import Draw, Sampling, draw, seed_of
from lfm2.text_stream import TextStream
from lfm2.tokenizer import Tokenizer

# Takes the tokens of one segment, and how many of its last rows are drawn.
RunSegment = Callable[[Sequence[int], int], Drawn]


@dataclass(frozen=True)
class Reply:
    """A finished reply.

    ended_by: "end token", "stop text", "max_tokens", or "context" where that is full.
    tokens are those drawn, an end token included; text is without it. draws holds
    log-probabilities, if asked for. Times in seconds: prefill_s until the first token is drawn,
    decode_s from then on.
    """

    text: str
    tokens: tuple[int, ...]
    ended_by: str
    draws: tuple[Draw, ...]
    num_prompt_tokens: int
    num_reused_tokens: int
    prefill_s: float
    decode_s: float

    @property
    def finish_reason(self) -> str:
        """As servers put it: "stop" for an end token or a stop text, "length" for a limit."""
        return "length" if self.ended_by in ("max_tokens", "context") else "stop"


class Stream:
    """Iterates, once, over the pieces of a reply's text; `reply` is there once they are all out.

    A loop that was left goes on where it was with the next one.
    """

    def __init__(
        self,
        run: RunSegment,
        tokenizer: Tokenizer,
        prompt: list[int],
        num_reused: int,
        chunk: int,
        max_tokens: int,
        room: int,
        stops: Sequence[str],
        sampling: Sampling,
    ) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.num_reused = num_reused
        self.chunk = chunk
        self.max_tokens = max_tokens
        self.limit = "context" if max_tokens == room else "max_tokens"
        self.sampling = sampling
        self.seed = seed_of(prompt) if sampling.seed is None else sampling.seed
        self.text_stream = TextStream(tokenizer, stops)
        self.context = np.zeros(len(prompt) + max_tokens, np.int64)
        self.context[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.draws: list[Draw] = []
        self.reply: Reply | None = None
        self._pieces = self._make()

    def segment_lengths(self) -> list[int]:
        """How many rows each segment of this stream has: the prompt's, then one for all that
        decode.
        """
        starts = range(self.num_reused, len(self.prompt), self.chunk)
        lengths = [min(self.chunk, len(self.prompt) - start) for start in starts]
        return lengths + [1] * (self.max_tokens > 1)

    def __iter__(self) -> Iterator[str]:
        return self._pieces

    def _make(self) -> Iterator[str]:
        start = time.perf_counter()
        token = self._prefill()
        first = time.perf_counter()
        pieces: list[str] = []
        ended_by = None
        while ended_by is None:
            if token in self.tokenizer.eos_token_ids:
                ended_by = "end token"
                break
            pieces.append(self.text_stream.add(token))
            if self.text_stream.is_stopped:
                ended_by = "stop text"
            elif len(self.draws) == self.max_tokens:
                ended_by = self.limit
            if pieces[-1]:
                yield pieces[-1]
            if ended_by is None:
                token = self._draw(self.run([token], 1))
        pieces.append(self.text_stream.finish())
        if pieces[-1]:
            yield pieces[-1]
        self.reply = Reply(
            text="".join(pieces),
            tokens=tuple(drawn.token for drawn in self.draws),
            ended_by=ended_by,
            draws=tuple(self.draws) if self.sampling.num_logprobs else (),
            num_prompt_tokens=len(self.prompt),
            num_reused_tokens=self.num_reused,
            prefill_s=first - start,
            decode_s=time.perf_counter() - first,
        )

    def _prefill(self) -> int:
        length = len(self.prompt)
        for start in range(self.num_reused, length, self.chunk):
            end = min(start + self.chunk, length)
            drawn = self.run(self.prompt[start:end], int(end == length))
        return self._draw(drawn)

    def _draw(self, drawn: Drawn) -> int:
        """The next token: the device's pick where that is the answer, else a keyed draw over the
        logits.
        """
        if self.sampling.is_greedy and drawn.is_finite[0]:
            made = Draw(int(drawn.tokens[0]))
        else:
            context = self.context[: self.num_tokens]
            made = draw(drawn.logits()[0], self.sampling, self.seed, self.num_tokens, context)
        self.draws.append(made)
        self.context[self.num_tokens] = made.token
        self.num_tokens += 1
        return made.token

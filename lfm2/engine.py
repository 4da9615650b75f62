"""The Python interface: a loaded model that replies, and tells the logits of any tokens."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lfm2 import prompt_cache
from lfm2.batch import BatchReply, batch
from lfm2.config import Config
from lfm2.errors import RequestError
from lfm2.request import (
    ContextFull,
    Prompt,
    check_prompt,
    check_request,
    is_token_ids,
)
from lfm2.runner import Drawn, Form, bucket
from lfm2.sampling import Sampling
from lfm2.service import MIN_GAP, Service
from lfm2.serving import Drawing
from lfm2.stream import Reply, Stream, Transcript
from lfm2.tokenizer import NoTokenizer, Tokenizer
from metal_ops.table import Capacity
from scheduler.chunks import spaced
from scheduler.request import Request
from scheduler.rounds import Round, Segment

# Takes the tokens of one segment, and how many of its last rows are drawn.
RunSegment = Callable[[Sequence[int], int], Drawn]
# Rows whose logits are computed at once: a row of 65,536 logits is 256 KiB.
LOGITS_CHUNK = 64
DEFAULT_MAX_TOKENS = 512


class Model:
    """A loaded checkpoint that serves the replies of one service. Not for several threads at
    once.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | NoTokenizer,
        service: Service,
        sampling: Sampling,
        context: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.service = service
        self.runner = service.runner.runner
        self.sampling = sampling
        self.context = context

    def generate(self, prompt: Prompt, **options) -> Reply:
        """The whole reply to a prompt; options as for `stream`."""
        stream = self.stream(prompt, **options)
        try:
            for _ in stream:
                pass
        except BaseException:
            stream.cancel()
            raise
        return stream.reply

    def stream(self, prompt: Prompt, **options) -> Stream:
        """An iterator over the pieces of the reply to a question or a list of chat messages.

        Options: max_tokens, 512 by default, or what the context has room for; stop, a text or
        several; system, a system prompt; tools, what the chat template is told of; raw: the prompt
        is text to go on with, not a question, and no chat template is applied. A list of token ids
        is taken as it is, and is all that a folder without a tokenizer takes. Everything else
        (temperature, top_k, top_p, min_p, repetition_penalty, seed, ...) is an option of
        `Sampling`; what is not given comes from the checkpoint's generation_config.json. Raises
        RequestError, before any work, for a prompt or an option that cannot be served.
        """
        request, transcript = self.request(prompt, **options)
        resumable = self.service.resumable(request.prompt)
        marks = (resumable, start_of_question(request), len(request.prompt))
        request = replace(request, marks=tuple(filter(None, marks)), keeps_reply=True)
        return Stream(self.service, request, transcript)

    def batch(
        self, requests: Iterable[dict | None], *, ordered: bool = False
    ) -> Iterator[BatchReply]:
        """The replies to many requests, as many at once as the model has streams.

        A request is a dict of "prompt" or "messages" and the options of `stream`. They are taken as
        they are needed, and replies come as they are finished, or in the order of the requests. One
        that cannot be served is a reply with its error, and the others go on. None in place of a
        request says that there is none yet: those under way go on before the next is asked for.
        """
        return batch(self.service, self.request, requests, ordered)

    def request(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        system: str | None = None,
        tools: list[dict] | None = None,
        raw: bool = False,
        **sampling,
    ) -> tuple[Request, Transcript]:
        """What the scheduler is asked for a reply, and what its tokens go to. Raises RequestError;
        options as for `stream`.
        """
        texts = {"system": system, "tools": tools, "raw": raw}
        check_request(prompt, max_tokens=max_tokens, stop=stop, **texts, **sampling)
        options = self.sampling.override(**sampling)
        options.check_vocabulary(self.config.vocab_size)
        ids = self._in_vocabulary(self.encode(prompt, **texts))
        if not ids:
            raise RequestError("the prompt makes no tokens")
        room = self.context - len(ids)
        if room < 1:
            raise ContextFull(len(ids), self.context)
        if max_tokens is None:
            max_tokens = min(DEFAULT_MAX_TOKENS, room)
        max_tokens = int(max_tokens)
        if max_tokens > room:
            raise ContextFull(len(ids), self.context, max_tokens)
        limit = "context" if max_tokens == room else "max_tokens"
        stops = () if stop is None else stop
        transcript = Transcript(self.tokenizer, stops, limit, options.num_logprobs > 0)
        request = Request(
            prompt=tuple(ids),
            max_tokens=max_tokens,
            sampling=Drawing(options, ids, max_tokens),
            stop_tokens=frozenset(self.tokenizer.eos_token_ids),
            ends=transcript.add,
            starts=tuple(self.tokenizer.message_starts(ids)),
        )
        return request, transcript

    def prepare(self, stream: Stream) -> None:
        """Compiles now what a stream would else compile on the way, if it is alone."""
        for num_rows in self.service.chunk_lengths(stream.request):
            self.form(num_rows)
        if stream.request.max_tokens > 1:
            self.form(1)

    def form(self, num_rows: int) -> Form:
        """The compiled form of a round of one segment with so many rows, the last of them drawn."""
        return self.runner.form(Capacity(bucket(num_rows), 1, 1))

    def load_prompt_cache(self, path: str | Path) -> int:
        """Takes over the kept states of a file; how many. Raises PromptCacheError."""
        return prompt_cache.load(Path(path), self.service, self.runner.model)

    def save_prompt_cache(self, path: str | Path) -> int:
        """Writes all kept states to a file, for a later process with the same model; how many.
        Raises PromptCacheError.
        """
        return prompt_cache.save(Path(path), self.service, self.runner.model)

    def encode(
        self,
        prompt: Prompt,
        *,
        system: str | None = None,
        tools: list[dict] | None = None,
        raw: bool = False,
    ) -> list[int]:
        """The token ids of a prompt as `stream` would run it."""
        check_prompt(prompt, system=system, tools=tools, raw=raw)
        if is_token_ids(prompt):
            return [int(token) for token in prompt]
        if raw:
            return self.tokenizer.encode(prompt)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.encode_chat(messages, tools=tools)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids, by default without special tokens such as the end token."""
        return self.tokenizer.decode(self._in_vocabulary(ids), skip_special)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits of every row, float32 (len(ids), V): row i is what follows ids[: i + 1]."""
        rows = [logits for _, logits in self.logits_by_chunk(ids)]
        return np.concatenate(rows)

    def logits_by_chunk(self, ids: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """The same in pieces: (index of the first row, logits)."""
        ids = self._checked_ids(ids)
        run = self.feed()
        for start in range(0, len(ids), LOGITS_CHUNK):
            tokens = ids[start : start + LOGITS_CHUNK]
            yield start, run(tokens, len(tokens)).logits()

    def _checked_ids(self, ids: Sequence[int]) -> list[int]:
        ids = self._in_vocabulary(ids)
        if not ids:
            raise RequestError("no tokens given")
        if len(ids) > self.context:
            raise RequestError(f"{len(ids)} tokens given and the context holds {self.context}")
        return ids

    def _in_vocabulary(self, ids: Sequence[int]) -> list[int]:
        ids = [int(token) for token in ids]
        wrong = next((token for token in ids if not 0 <= token < self.config.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token {wrong} is not in the vocabulary of {self.config.vocab_size}"
            )
        return ids

    def feed(self) -> RunSegment:
        """A function that runs tokens through the model, a call's after the last call's.

        It starts at position 0, and takes the tokens and how many of them, from the end, are to be
        drawn. Ends what the model was at before.
        """
        start = 0

        def run(tokens: Sequence[int], num_drawn: int) -> Drawn:
            nonlocal start
            if self.service.soloist is not run:
                raise RequestError("this was ended by a later call on the same model")
            first, start = start, start + len(tokens)
            return self.runner.run(Round((Segment(0, 0, first, tuple(tokens), num_drawn),)))

        self.service.alone(run)
        return run


def start_of_question(request: Request) -> int:
    """Where the message before the reply begins: the state there is for others in its place. 0 if
    no chunk begins there.
    """
    starts = request.starts[-2:-1]
    return starts[0] if starts and starts[0] in spaced(request.starts, MIN_GAP) else 0

"""The Python interface: a loaded model that replies, and tells the logits of any tokens."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from lfm2.artifacts import Artifacts, model_key
from lfm2.config import Config
from lfm2.device import opened_device
from lfm2.environment import cache_folder, settle_tinygrad
from lfm2.errors import RequestError
from lfm2.hub import resolve
from lfm2.model import LFM2
from lfm2.request import (
    ContextFull,
    Prompt,
    check_count,
    check_prompt,
    check_request,
    is_token_ids,
)
from lfm2.runner import Compiling, Drawn, Form, Runner, bucket
from lfm2.sampling import Sampling
from lfm2.state import MAX_ROWS, MAX_WINDOW, State
from lfm2.stream import Reply, RunSegment, Stream
from lfm2.tokenizer import NoTokenizer, Tokenizer
from lfm2.tokenizer_files import read_generation_config
from lfm2.weights import Progress, load_weights
from metal_ops.table import Capacity
from scheduler.rounds import Round, Segment

# Rows of a prompt that go through the model at once.
CHUNK = MAX_ROWS
# Rows whose logits are computed at once: a row of 65,536 logits is 256 KiB.
LOGITS_CHUNK = 64
DEFAULT_CONTEXT = 32768
DEFAULT_MAX_TOKENS = 512
DTYPES = {"bfloat16": dtypes.bfloat16, "float16": dtypes.float16, "float32": dtypes.float32}


class Model:
    """A loaded checkpoint with one stream's state. Not for several threads at once."""

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer | NoTokenizer,
        runner: Runner,
        sampling: Sampling,
        context: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.runner = runner
        self.sampling = sampling
        self.context = context
        # The tokens whose state slot 0 holds.
        self._held: list[int] = []
        # Up to which position the slot was written since a stream began it anew.
        self._written = 0
        self._running: object = None

    def generate(self, prompt: Prompt, **options) -> Reply:
        """The whole reply to a prompt; options as for `stream`."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.reply

    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop: str | Sequence[str] | None = None,
        system: str | None = None,
        tools: list[dict] | None = None,
        raw: bool = False,
        **sampling,
    ) -> Stream:
        """An iterator over the pieces of the reply to a question or a list of chat messages.

        raw: the prompt is text to go on with, not a question, and no chat template is applied. A
        list of token ids is taken as it is, and is all that a folder without a tokenizer takes.
        max_tokens: 512 by default, or what the context has room for. Everything else (temperature,
        top_k, top_p, min_p, repetition_penalty, seed, ...) is an option of `Sampling`; what is not
        given comes from the checkpoint's generation_config.json. Raises RequestError, before any
        work, for a prompt or an option that cannot be served.
        """
        check_request(
            prompt,
            max_tokens=max_tokens,
            stop=stop,
            system=system,
            tools=tools,
            raw=raw,
            **sampling,
        )
        options = self.sampling.override(**sampling)
        options.check_vocabulary(self.config.vocab_size)
        ids = self._in_vocabulary(self.encode(prompt, system=system, tools=tools, raw=raw))
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
        reused = self._reusable(ids)
        run = self._segment_runner(ids[:reused])
        stream = Stream(
            run,
            self.tokenizer,
            ids,
            reused,
            CHUNK,
            max_tokens,
            room,
            () if stop is None else stop,
            options,
        )
        self._running = run
        return stream

    def prepare(self, stream: Stream) -> None:
        """Compiles now what a stream would else compile on the way."""
        for num_rows in stream.segment_lengths():
            self.form(num_rows)

    def form(self, num_rows: int) -> Form:
        """The compiled form of a round of one segment with so many rows, the last of them drawn."""
        return self.runner.form(Capacity(bucket(num_rows), 1, 1))

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
        self._running = run = self._segment_runner([])
        return run

    def _segment_runner(self, held: list[int]) -> RunSegment:
        """Runs a stream's segments one after the other; the slot holds its first tokens."""

        def run(tokens: Sequence[int], num_drawn: int) -> Drawn:
            if self._running is not run:
                raise RequestError("this stream was ended by a later call on the same model")
            # An interrupt may leave a segment half written: a long one has overwritten the ring,
            # one row spoils none.
            self._held = held if len(tokens) == 1 else []
            end = len(held) + len(tokens)
            self._written = max(self._written, end) if held else end
            drawn = self.runner.run(Round((Segment(0, 0, len(held), tuple(tokens), num_drawn),)))
            held.extend(tokens)
            self._held = held
            return drawn

        return run

    def _reusable(self, ids: list[int]) -> int:
        """How many first tokens of a prompt need not run: the slot has them, and one is left."""
        common = 0
        for ours, theirs in zip(self._held, ids[:-1]):
            if ours != theirs:
                break
            common += 1
        # The convolution's ring reaches so far back from the last position ever written.
        is_within_ring = self._written - common <= MAX_WINDOW
        return common if is_within_ring else 0


def load(
    name: str | Path | None = None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    cache: str | Path | bool = True,
    needs_text: bool = False,
    progress: Progress | None = None,
    compiling: Compiling | None = None,
    warn: Callable[[str], None] | None = None,
) -> Model:
    """Loads a folder, a hub name `org/name[@revision]`, or, without a name, the built-in model.

    device: a tinygrad device. dtype: the compute type, by default the checkpoint's own; weights
    stay as they are stored. context: how many tokens prompt and reply may have together. cache: the
    folder of compiled steps, or False for none. needs_text: a folder without a tokenizer, which
    could serve token ids, is refused. progress hears of bytes read, compiling of each form that has
    to be compiled, warn of what works less well than it could. Raises LFM2Error.
    """
    warn = warn or (lambda message: None)
    folder = resolve(name)
    config = Config.from_folder(folder)
    has_tokenizer = needs_text or (folder / "tokenizer.json").exists()
    tokenizer = (Tokenizer.from_folder if has_tokenizer else NoTokenizer)(folder, config)
    sampling = Sampling.from_generation_config(read_generation_config(folder))
    compute = compute_dtype(dtype or config.dtype)
    context = checked_context(context, config)
    settle_tinygrad()
    device = opened_device(device, warn)
    weights = load_weights(folder, config, device, progress)
    model = LFM2(config, weights, compute, device, context)
    state = State.create(config, num_slots=1, num_tokens=context, dtype=compute, device=device)
    root = cache_folder() if cache is True else Path(cache) if cache else None
    artifacts = Artifacts(root, model_key(model, state, device), warn)
    runner = Runner(model, state, device, artifacts, compiling)
    return Model(config, tokenizer, runner, sampling, context)


def compute_dtype(name: str) -> DType:
    if name not in DTYPES:
        raise RequestError(f"dtype is {name!r}; it must be one of {', '.join(DTYPES)}")
    return DTYPES[name]


def checked_context(context: int | None, config: Config) -> int:
    if context is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    check_count("context", context)
    if context > config.max_positions:
        raise RequestError(f"context is {context}; this model takes 1 to {config.max_positions}")
    return int(context)

"""Trials of the engine's loop: requests on a scheduler, and when each of their tokens came.

What scripts/bench_rounds.py measures with. Knows no tables and no files.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import lfm2
from lfm2.runner import Runner
from lfm2.sampling import Sampling
from lfm2.serving import Drawing, DrawingRunner
from scheduler.events import Finished, Tokens
from scheduler.loop import Scheduler
from scheduler.request import Request
from scheduler.rounds import Segment
from scheduler.runner import Outcome, Window

# Of the streams that decode while a long prompt comes.
SHORT_PROMPT = 32
# Tokens that each of them has before it comes, and more rounds after its first token.
NUM_BEFORE, NUM_AFTER = 16, 8
# After the prefix that two requests share, each has so many tokens of its own.
SUFFIX = 32


@dataclass(frozen=True)
class Sharing:
    """How a long prompt and decoding streams share the device: rows of a chunk, and whether a chunk
    and the decoding rows are one forward.
    """

    chunk: int
    is_mixing: bool


@dataclass(frozen=True)
class Turn:
    """Seconds of a turn of the loop, and of those in the runner: forwards and draws."""

    total_s: float
    runner_s: float

    @property
    def scheduling_s(self) -> float:
        return self.total_s - self.runner_s


@dataclass(frozen=True)
class Stall:
    """What one run with a long prompt gave. Times in seconds from its arrival; `tokens` are those
    of each decoding stream, first_token that of the prompt. chunk_s: the forward of a whole chunk.
    """

    tokens: list[list[float]]
    first_token: float
    chunk_s: float

    @property
    def before_s(self) -> float:
        """The median gap before the prompt came."""
        return median(after - before for before, after in self._pairs if after <= 0)

    @property
    def gaps(self) -> list[float]:
        """Seconds between tokens while the prompt filled."""
        end = self.first_token
        return [after - before for before, after in self._pairs if after > 0 and before < end]

    @property
    def _pairs(self) -> list[tuple[float, float]]:
        """When each token and the next one of its stream came."""
        return [pair for tokens in self.tokens for pair in pairwise(tokens)]

    @property
    def figures(self) -> dict[str, float]:
        return {
            "before_s": self.before_s,
            "median_gap_s": median(self.gaps),
            "worst_gap_s": max(self.gaps),
            "first_token_s": self.first_token,
            "chunk_s": self.chunk_s,
            "worst_gap_over_chunk": max(self.gaps) / self.chunk_s,
        }


class TimedRunner(DrawingRunner):
    """The engine's runner with a watch. Windows that are more than one round can hold run in as
    many as it takes, with nothing between them.
    """

    def __init__(self, runner: Runner) -> None:
        super().__init__(runner)
        self.busy_s = 0.0
        # (rows of prompts, seconds) of every call.
        self.calls: list[tuple[int, float]] = []

    def run(self, windows: Sequence[Window]) -> list[Outcome]:
        began = time.perf_counter()
        if sum(window.num_rows for window in windows) <= self.runner.state.max_rows:
            outcomes = super().run(windows)
        else:
            outcomes = [self._run_in_pieces(window) for window in windows]
        seconds = time.perf_counter() - began
        self.busy_s += seconds
        num_prompt_rows = sum(window.num_rows for window in windows if window.is_chunk)
        self.calls.append((num_prompt_rows, seconds))
        return outcomes

    def _run_in_pieces(self, window: Window) -> Outcome:
        for segment in pieces(window.segment, self.runner.state.max_rows):
            (outcome,) = super().run([Window(window.stream, segment)])
        return outcome


def pieces(segment: Segment, max_rows: int) -> Iterator[Segment]:
    """A segment as several of at most `max_rows` rows; only the last one's are drawn."""
    for first in range(0, len(segment.tokens), max_rows):
        tokens = segment.tokens[first : first + max_rows]
        is_last = first + len(tokens) == len(segment.tokens)
        num_drawn = segment.num_drawn if is_last else 0
        yield replace(segment, start=segment.start + first, tokens=tokens, num_drawn=num_drawn)


class Trial:
    """A scheduler of its own on a model's runner, without kept states. tokens: request -> when each
    of its tokens came.
    """

    def __init__(self, model: lfm2.Model, sharing: Sharing | None = None) -> None:
        self.runner = TimedRunner(model.runner)
        self.vocab_size = model.config.vocab_size
        options = model.service.options
        if sharing is not None:
            options = replace(
                options, **vars(sharing), max_rows=max(options.max_rows, sharing.chunk)
            )
        self.scheduler = Scheduler(self.runner, options)
        self.tokens: dict[int, list[float]] = {}

    def submit(self, index: int, num_prompt: int, max_tokens: int) -> int:
        """Queues a greedy request that only `max_tokens` ends; its number."""
        prompt = prompt_ids(index, num_prompt, self.vocab_size)
        drawing = Drawing(Sampling(), prompt, max_tokens)
        number = self.scheduler.submit(Request(tuple(prompt), max_tokens, drawing))
        self.tokens[number] = []
        return number

    def turn(self) -> Turn:
        self.runner.busy_s = 0.0
        began = time.perf_counter()
        events = self.scheduler.step()
        ended = time.perf_counter()
        for event in events:
            if isinstance(event, Finished) and event.error is not None:
                raise event.error
            if isinstance(event, Tokens):
                self.tokens[event.number] += [ended] * len(event.drawn)
        return Turn(ended - began, self.runner.busy_s)

    def turn_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.turn()

    def have(self, numbers: Sequence[int], count: int) -> bool:
        """Whether each of these requests has so many tokens."""
        return all(len(self.tokens[number]) >= count for number in numbers)

    def end(self) -> None:
        """Ends all requests."""
        for number in self.tokens:
            self.scheduler.cancel(number)
        self.turn_until(lambda: self.scheduler.is_idle)


def prompt_ids(index: int, num_tokens: int, vocab_size: int) -> list[int]:
    """The tokens of prompt number `index`, closed form, without the special ones below 8."""
    num_plain = vocab_size - 8
    return [8 + (37 * i + 101 * index * (i + 1)) % num_plain for i in range(num_tokens)]


def most_turns(num_streams: int, num_prompt: int, chunk: int) -> int:
    """More turns than so many prompts take to fill."""
    return num_streams * (num_prompt // chunk + 2)


def run_streams(
    model: lfm2.Model, num_streams: int, num_prompt: int, num_tokens: int
) -> dict[str, float]:
    """`num_streams` prompts that come together, then `num_tokens` rounds of them all."""
    trial = Trial(model)
    most = num_tokens + most_turns(num_streams, num_prompt, trial.scheduler.options.chunk)
    began = time.perf_counter()
    numbers = [trial.submit(index, num_prompt, most) for index in range(num_streams)]
    trial.turn_until(lambda: trial.have(numbers, 1))
    firsts = [trial.tokens[number][0] - began for number in numbers]
    turns = [trial.turn() for _ in range(num_tokens)]
    trial.end()
    return {
        "tok_s": num_streams * num_tokens / sum(turn.total_s for turn in turns),
        "first_token_s": median(firsts),
        "last_first_token_s": max(firsts),
        "round_s": median(turn.total_s for turn in turns),
        "scheduling_s": median(turn.scheduling_s for turn in turns),
        "most_scheduling_s": max(turn.scheduling_s for turn in turns),
    }


def run_stall(model: lfm2.Model, num_streams: int, num_prompt: int, sharing: Sharing) -> Stall:
    """Streams that decode, and a long prompt that comes in between."""
    trial = Trial(model, sharing)
    most = stall_tokens(num_streams, num_prompt, sharing.chunk)
    decoding = [trial.submit(index, SHORT_PROMPT, most) for index in range(num_streams)]
    trial.turn_until(lambda: trial.have(decoding, NUM_BEFORE))
    trial.runner.calls.clear()
    arrived = time.perf_counter()
    prompt = trial.submit(num_streams, num_prompt, NUM_AFTER + 1)
    trial.turn_until(lambda: trial.have([prompt], 1))
    most_rows = max(rows for rows, _ in trial.runner.calls)
    chunk_s = median(seconds for rows, seconds in trial.runner.calls if rows == most_rows)
    for _ in range(NUM_AFTER):
        trial.turn()
    trial.end()
    tokens = [[at - arrived for at in trial.tokens[number]] for number in decoding]
    return Stall(tokens, trial.tokens[prompt][0] - arrived, chunk_s)


def stall_tokens(num_streams: int, num_prompt: int, chunk: int) -> int:
    """Tokens that no stream of `run_stall` comes to."""
    num_fill = most_turns(num_streams, SHORT_PROMPT, chunk) + most_turns(1, num_prompt, chunk)
    return NUM_BEFORE + NUM_AFTER + num_fill


def run_reuse(model: lfm2.Model, num_shared: int, index: int) -> dict[str, float]:
    """The times to first token of two requests that begin alike, one after the other."""
    vocab_size = model.config.vocab_size
    prefix = prompt_ids(index, num_shared, vocab_size)
    seconds, replies = [], []
    for other in (1, 2):
        prompt = prefix + [(token + other) % vocab_size for token in prefix[:SUFFIX]]
        began = time.perf_counter()
        replies.append(model.generate(prompt, max_tokens=1))
        seconds.append(time.perf_counter() - began)
    return {
        "first_s": seconds[0],
        "second_s": seconds[1],
        "reused_tokens": replies[1].num_reused_tokens,
    }

"""A runner without a model, for tests of the scheduler: the next token depends on all that was fed.

It has the state of the real one: a pool of values by extent, as keys and values are, and rings by
position modulo their size, as convolutions have. A value depends on the two before it, which are
read from the ring, and a drawn token on all of them. So one row too many, too few, at a wrong
place or of another stream changes the reply. Nothing is cleared, and all is poisoned to begin with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scheduler.chunks import Plan
from scheduler.request import Request
from scheduler.runner import Drawn, Outcome, Window

VOCABULARY = 97
# Holds a window of 4 rows and the 2 values before it.
RING = 8
POISON = 10**6
# Prompts with these fail their round, or have a logit that is not finite.
BAD_CHUNK, BAD_LOGIT = 1000, 1001


class RoundFailed(Exception):
    """What the fake raises for a round with BAD_CHUNK in it."""


@dataclass(frozen=True)
class Copy:
    """A kept state: its values, and the last two of its ring."""

    values: tuple[int, ...]
    ring: tuple[int, int]


def value_of(token: int, before: tuple[int, int], cut: int) -> int:
    """What a row stores; `before` are the values one and two positions earlier."""
    return (token + 3 * before[0] + 5 * before[1] + 7 * cut + 1) % VOCABULARY


def token_of(values: Sequence[int], seed: int | None) -> int:
    """What is drawn after these values, with noise of its position if there is a seed."""
    noise = 0 if seed is None else (seed * 2654435761 + len(values) * 40503) >> 7
    return (sum(values) + 13 * len(values) + 3 * values[-1] + noise) % VOCABULARY


class FakeRunner:
    """is_cut_sensitive: rows of a prompt depend on where their chunk begins, as with some models.

    rounds: the windows of every round, as (stream number, first position, number of rows).
    interrupted: the rounds, counted from 1, that an interrupt ends when all is written.
    """

    def __init__(self, num_slots: int, num_tokens: int, is_cut_sensitive: bool = False) -> None:
        self.is_cut_sensitive = is_cut_sensitive
        self.pool = [POISON] * num_tokens
        self.rings = [[POISON] * RING for _ in range(num_slots)]
        self.rounds: list[list[tuple[int, int, int]]] = []
        self.left: list[int] = []
        self.num_restored = 0
        self.copies: set[int] = set()
        self.fails_restore = self.fails_keep = False
        self.interrupted: set[int] = set()

    def prefill_step(self, chunks: Sequence[Window]) -> list[Outcome]:
        assert all(chunk.is_chunk for chunk in chunks)
        return self.run(chunks)

    def cancel_prefill(self, slot: int) -> None:
        self.left.append(slot)

    def run(self, windows: Sequence[Window]) -> list[Outcome]:
        self.rounds.append([(w.stream.number, w.segment.start, w.num_rows) for w in windows])
        slots = [window.segment.slot for window in windows]
        assert len(set(slots)) == len(slots), "a slot is twice in a round"
        outcomes = [self._run(window) for window in windows]
        if len(self.rounds) in self.interrupted:
            raise KeyboardInterrupt
        if any(BAD_CHUNK in window.segment.tokens for window in windows):
            raise RoundFailed("a chunk that cannot be run")
        return outcomes

    def keep(self, slot: int, base: int, at: int) -> Copy:
        if self.fails_keep:
            raise MemoryError("no room on the device")
        copy = Copy(tuple(self.pool[base : base + at]), self._before(slot, at))
        self.copies.add(id(copy))
        return copy

    def restore(self, kept: Copy, slot: int, base: int) -> None:
        assert id(kept) in self.copies, "restored after its release"
        if self.fails_restore:
            raise OSError("the copy is gone")
        self.num_restored += 1
        at = len(kept.values)
        self.pool[base : base + at] = kept.values
        self.rings[slot] = [POISON] * RING
        for distance, value in enumerate(kept.ring, start=1):
            self.rings[slot][(at - distance) % RING] = value

    def release(self, kept: Copy) -> None:
        self.copies.remove(id(kept))

    def _before(self, slot: int, at: int) -> tuple[int, int]:
        ring = self.rings[slot]
        return (ring[(at - 1) % RING] if at > 0 else 0, ring[(at - 2) % RING] if at > 1 else 0)

    def _run(self, window: Window) -> Outcome:
        segment, drawn = window.segment, []
        extent = window.stream.extent
        assert segment.base == extent.base and window.end <= extent.size, "outside its extent"
        cut = segment.start if self.is_cut_sensitive and window.is_chunk else 0
        for row, token in enumerate(segment.tokens):
            at = segment.start + row
            value = value_of(token, self._before(segment.slot, at), cut)
            self.pool[segment.base + at] = self.rings[segment.slot][at % RING] = value
            if row >= len(segment.tokens) - segment.num_drawn:
                values = self.pool[segment.base : segment.base + at + 1]
                drawn.append(Drawn(token_of(values, window.stream.request.sampling)))
        if BAD_LOGIT in segment.tokens:
            return Outcome(error=ArithmeticError("a logit is not finite"))
        return Outcome(tuple(drawn))


def solo(request: Request, chunk: int, min_gap: int = 1, is_cut_sensitive: bool = False):
    """The reply to a request on its own, computed without slots, rounds or a scheduler."""
    plan = Plan.of(request, chunk, min_gap)
    values: list[int] = []

    def feed(token: int, cut: int) -> None:
        before = (values[-1] if values else 0, values[-2] if len(values) > 1 else 0)
        values.append(value_of(token, before, cut if is_cut_sensitive else 0))

    for cut in plan.cuts:
        for token in request.prompt[cut : plan.end(cut)]:
            feed(token, cut)
    reply = [token_of(values, request.sampling)]
    while len(reply) < request.max_tokens and reply[-1] not in request.stop_tokens:
        feed(reply[-1], 0)
        reply.append(token_of(values, request.sampling))
    return reply


def tokens(number: int, length: int) -> tuple[int, ...]:
    """The tokens of a prompt, closed form; another number, another prompt from the first on."""
    return tuple((37 * i + 11 * number * i + 29 * number + 5) % VOCABULARY for i in range(length))

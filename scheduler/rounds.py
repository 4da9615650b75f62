"""A round: what one forward of the model computes, in integers."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one stream: a decode step, a window of drafted tokens or a chunk of a
    prompt.

    slot: which state it reads and writes; base: where the slot's keys and values start in the pool;
    start: the absolute position of its first token, which is how many the slot holds already;
    num_drawn: how many of its last rows have their logits computed.
    """

    slot: int
    base: int
    start: int
    tokens: tuple[int, ...]
    num_drawn: int


@dataclass(frozen=True)
class Round:
    """The segments of one forward, at most one of each slot."""

    segments: tuple[Segment, ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(len(segment.tokens) for segment in self.segments)

    @cached_property
    def num_drawn(self) -> int:
        return sum(segment.num_drawn for segment in self.segments)

"""Where a prompt is cut. Pure functions of the request and the options, never of the load: a
stepped prompt has the cuts of a whole pass, a resumed one those of a fresh one.
"""

import hashlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler.request import Request

# A round of fewer rows is dominated by reading the weights, whatever gap was asked for.
MIN_CAPACITY = 16


@dataclass(frozen=True)
class RoundCost:
    """Measured seconds of a round: `fixed_s`, and `row_s` for every row of its capacity."""

    fixed_s: float
    row_s: float

    def seconds(self, num_rows: int) -> float:
        return self.fixed_s + self.row_s * num_rows


@dataclass(frozen=True)
class Plan:
    """The chunks of a prompt of `length` tokens.

    cuts: where chunks begin, ascending from 0. keys: position -> what stands for all tokens before
    it, for every cut but 0 and for the end; ascending.
    """

    length: int
    cuts: tuple[int, ...]
    keys: dict[int, bytes]

    @classmethod
    def of(cls, request: Request, chunk: int, min_gap: int) -> "Plan":
        """The plan of a request for chunks of at most `chunk` rows."""
        length = len(request.prompt)
        starts = spaced(request.starts, min_gap)
        marks = sorted(set(request.marks))
        cuts, at = [], 0
        while at < length:
            cuts.append(at)
            at = chunk_end(at, length, chunk, starts, marks)
        return cls(length, tuple(cuts), keys_at(request.prompt, [*cuts[1:], length]))

    def end(self, at: int) -> int:
        """The end of the chunk that begins at `at`."""
        index = bisect_right(self.cuts, at)
        return self.cuts[index] if index < len(self.cuts) else self.length


def chunk_end(at: int, length: int, chunk: int, starts: Sequence[int], marks: Sequence[int]) -> int:
    """The end of the chunk at `at`: `chunk` rows further, or the next of the planned starts, of the
    marks (both ascending) or the end of the prompt, whichever comes first.
    """
    ends = [at + chunk, length]
    for points in (starts, marks):
        index = bisect_right(points, at)
        ends += points[index : index + 1]
    return min(ends)


def spaced(points: Iterable[int], min_gap: int) -> list[int]:
    """The points, ascending, without those closer than `min_gap` to the one before them or to 0."""
    found, last = [], 0
    for point in sorted(points):
        if point - last >= min_gap:
            found.append(point)
            last = point
    return found


def keys_at(tokens: Sequence[int], positions: Sequence[int]) -> dict[int, bytes]:
    """Position -> SHA-256 of the tokens before it, for ascending positions."""
    digest, keys, last = hashlib.sha256(), {}, 0
    for position in positions:
        digest.update(array("q", tokens[last:position]).tobytes())
        keys[position] = digest.digest()
        last = position
    return keys


def planned_chunk(max_gap_s: float, cost: RoundCost, num_streams: int, max_rows: int) -> int:
    """Rows of a chunk such that a round of it and a row of each of `num_streams` streams takes at
    most `max_gap_s`, as far as a round can be that short.

    Rounds are computed at capacities, powers of two up to `max_rows`, so chunk and streams fill
    one; streams take at most half of it.
    """
    capacity = min(MIN_CAPACITY, max_rows)
    while capacity * 2 <= max_rows and cost.seconds(capacity * 2) <= max_gap_s:
        capacity *= 2
    return max(capacity - min(num_streams, capacity // 2), 1)

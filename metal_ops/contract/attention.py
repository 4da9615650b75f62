"""The contracts of attend_partial.metal with attend_merge.metal, and of attend_prompt.metal."""

from dataclasses import dataclass
from functools import partial

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.attention import attend_kernels
from metal_ops.contract.case import EPSILON, Buffers, Case, Contract, Control, Expected, SameBits
from metal_ops.contract.case import pattern, rounded
from metal_ops.kernel import TYPES, Target
from metal_ops.table import SEGMENT_COLUMNS, Capacity

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
# Scores and sums in fp32, relative to the largest value.
SUM_ROOM = 2e-5
# Long enough that splits have several chunks: 32 chunks of 32 are one each.
LONG = 2105
GAP = 3


@dataclass(frozen=True)
class Heads:
    """H, K and D of a model, and its compute type."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    # By default a few keys outweigh the rest.
    steepness: float = 0.8

    @property
    def scale(self) -> float:
        return self.steepness / self.head_dim**0.5


@dataclass(frozen=True)
class Part:
    """Rows of a stream in a round, from position `start` on."""

    stream: int
    start: int
    num_rows: int = 1


SMALL = Heads(4, 2, 16, F32)
REAL = Heads(32, 8, 64, BF16)
# One key outweighs all others, and exp() of what lies between two would overflow.
STEEP = Heads(4, 2, 16, F32, steepness=80)
STAGES = (0, 30, 31, 32, 126, 127, 128, 299)


def contracts(target: Target) -> list[Contract]:
    return [few_rows(target), prompt(target)]


def few_rows(target: Target) -> Contract:
    make_case = partial(case, target)
    alone = partial(same, target)
    windows = [Part(0, 120, 13), Part(2, 29, 7), Part(1, 0, 3), Part(3, LONG - 2, 2)]
    cases = [
        make_case([Part(i, start) for i, start in enumerate(STAGES)], Capacity(8, 8, 8), SMALL),
        make_case(windows, Capacity(32, 4, 4), SMALL),
        make_case(windows, Capacity(32, 4, 4), STEEP),
        make_case(windows, Capacity(27, 4, 4), Heads(2, 2, 32, F32)),
        make_case([Part(1, 57, 9), Part(0, 0, 1)], Capacity(16, 2, 2), Heads(3, 1, 32, BF16)),
        make_case([Part(1, 61, 5)], Capacity(8, 1, 1), Heads(8, 2, 64, F16)),
        make_case([Part(0, 40), Part(1, 3)], Capacity(2, 2, 2), Heads(16, 1, 48, F16)),
        make_case([Part(0, 69, 3)], Capacity(4, 1, 1), Heads(5, 1, 128, F32)),
        make_case([Part(0, 599), Part(1, 256), Part(2, 32)], Capacity(4, 4, 4), REAL, "reference"),
    ]
    whole = make_case(windows, Capacity(32, 8, 8), SMALL)
    rows = [alone(whole, windows, [part], Capacity(part.num_rows, 1, 1), SMALL) for part in windows]
    rows += [
        alone(whole, windows, windows[::-1], Capacity(25, 25, 25), SMALL),
        alone(whole, windows, [Part(0, 125), Part(2, 31)], Capacity(4, 2, 2), SMALL),
        alone(whole, windows, [Part(0, 131, 2), Part(3, LONG - 1)], Capacity(3, 2, 2), SMALL),
    ]
    controls = (
        *walk_controls(),
        Control("every split is merged", "position / KEY_CHUNK + 1", "SPLITS", "shapes"),
        Control("the last split is not merged", "i >= num_splits", "i >= num_splits - 1", "shapes"),
        Control("padding takes the tile's value", "if (position == 0)", "if (false)", "shapes"),
    )
    return Contract("attend", tuple(cases), tuple(rows), controls)


def prompt(target: Target) -> Contract:
    make_case = partial(case, target)
    alone = partial(same, target)
    parts = [Part(0, 22, 35), Part(2, 130), Part(1, 0, 6), Part(3, LONG - 3, 3)]
    cases = [
        make_case(parts, Capacity(48, 4, 4), SMALL),
        make_case(parts, Capacity(48, 4, 4), STEEP),
        make_case(parts[:3], Capacity(42, 4, 4), Heads(2, 2, 32, F32)),
        make_case([Part(1, 57, 33)], Capacity(36, 2, 2), Heads(3, 1, 32, BF16)),
        # Tiles that fill the launched threadgroups but for one.
        make_case([Part(0, 9, 120)], Capacity(120, 1, 1), SMALL),
        make_case([Part(0, 567, 33)], Capacity(33, 1, 1), REAL, "reference"),
    ]
    # Rows and heads for the widest tiles of a GPU.
    heads, wide_parts = Heads(128, 16, 16, BF16), [Part(0, 29, 250)]
    wide = make_case(wide_parts, Capacity(256, 2, 2), heads)
    if target is not Target.METAL:
        cases.append(wide)
    whole = make_case(parts, Capacity(64, 4, 4), SMALL)
    shifted = [Part(3, LONG - 2, 2), Part(0, 25, 32)]
    rows = (
        alone(whole, parts, [Part(0, 22, 32)], Capacity(32, 1, 1), SMALL),
        alone(whole, parts, [Part(0, 54, 3), *parts[1:]], Capacity(16, 8, 8), SMALL),
        alone(whole, parts, shifted, Capacity(34, 2, 2), SMALL),
        alone(whole, parts, parts[::-1], Capacity(45, 45, 45), SMALL),
    )
    if target is not Target.METAL:
        rows += (alone(wide, wide_parts, [Part(0, 61, 9)], Capacity(9, 1, 1), heads),)
    walk = "values + place, {}, split + 1, tile, lane);\n    UNROLL for"
    from_last = "min(SPLITS, tile.last / KEY_CHUNK + 1) - 1 - split"
    controls = (
        *walk_controls(),
        Control(
            "splits are folded from the last on",
            walk.format("split"),
            walk.format(from_last),
            "rows",
        ),
        Control(
            "a threadgroup starts at the last tile of the one before",
            "int(group.y) * SIMDGROUPS",
            "int(group.y) * (SIMDGROUPS - 1)",
            "shapes",
        ),
        Control(
            "padding takes the tile's value",
            "if (queries.positions[p][n] == 0)",
            "if (false)",
            "shapes",
        ),
    )
    return Contract("attend_prompt", tuple(cases), rows, controls)


def walk_controls() -> tuple[Control, ...]:
    """Of what both forms share."""
    return (
        Control(
            "every stream reads the first stream's keys and values",
            "tile.base = segment.base",
            "tile.base = load_segment(table, 0).base",
            "rows",
        ),
        Control(
            "a row sees all of a chunk that it is in",
            "KEY_CHUNK <= tile.first + 1",
            "KEY_CHUNK <= tile.first + 2",
            "shapes",
        ),
        Control("a row does not see itself", "key <= queries", "key < queries", "shapes"),
        Control(
            "a row sees the next one", "positions[p][n] ? ", "positions[p][n] + 1 ? ", "shapes"
        ),
        Control(
            "values beyond the last, which are not written",
            "TILE * (k + h) + lane_row(lane) + i, last)",
            "TILE * (k + h) + lane_row(lane) + i, last + 1)",
            "shapes",
        ),
        Control("sums are not rescaled", "*= rescale[i % PLACE_COLUMNS]", "*= 1", "shapes"),
        Control("splits are folded as they are", "part, fold.part", "part, 1", "shapes"),
        Control("the highest is the last's", "= max(whole, part)", "= part", "shapes"),
        Control(
            "the scores of half the keys",
            "PLACE_BITS; i++) x = max",
            "PLACE_BITS - 1; i++) x = max",
            "shapes",
        ),
    )


def same(
    target: Target,
    whole: Case,
    parts: list[Part],
    chosen: list[Part],
    capacity: Capacity,
    heads: Heads,
) -> SameBits:
    """The rows of `chosen`, which are among those of `parts`, by themselves."""
    alone = case(target, chosen, capacity, heads)
    places = {place: t for t, place in enumerate(rows_of(parts))}
    wanted = [places[place] for place in rows_of(chosen)]

    def pick(found: Buffers) -> np.ndarray:
        return found["out"][wanted]

    def pick_alone(found: Buffers) -> np.ndarray:
        return found["out"][: len(wanted)]

    return SameBits(alone.shape, (whole, alone), (pick, pick_alone))


def rows_of(parts: list[Part]) -> list[tuple[int, int]]:
    """The stream and the position of each row of a round."""
    return [(part.stream, part.start + i) for part in parts for i in range(part.num_rows)]


def case(
    target: Target,
    parts: list[Part],
    capacity: Capacity,
    heads: Heads,
    gate: str = "shapes",
) -> Case:
    """A round whose streams lie in the pool in an order of their own, the last at its end; what no
    row may see is NaN.
    """
    kinds = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    lengths = {part.stream: part.start + part.num_rows for part in parts}
    streams = {
        stream: [
            rounded(
                size * pattern(length, count, heads.head_dim, seed=10 * stream + i), heads.dtype
            )
            for i, (count, size) in enumerate(zip(kinds, (16, 8, 1)))
        ]
        for stream, length in lengths.items()
    }
    num_padding = capacity.rows - sum(part.num_rows for part in parts)
    scratch = GAP
    bases, end = {}, scratch + num_padding
    for stream in sorted(lengths, key=lambda stream: (stream * 5 + 1) % 7):
        bases[stream] = end + GAP
        end = bases[stream] + lengths[stream]
    keys, values = np.full((2, end, heads.num_kv_heads, heads.head_dim), np.nan)
    for pool, i in ((keys, 1), (values, 2)):
        for stream, base in bases.items():
            pool[base : base + lengths[stream]] = streams[stream][i]
        pool[scratch : scratch + num_padding] = pattern(num_padding, *pool.shape[1:], seed=i)
    q = pattern(capacity.rows, heads.num_heads, heads.head_dim)
    out = np.zeros((capacity.rows, heads.num_heads, heads.head_dim))
    for t, (stream, position) in enumerate(rows_of(parts)):
        q[t] = streams[stream][0][position]
        seen = slice(bases[stream], bases[stream] + position + 1)
        out[t] = attention(q[t], keys[seen], values[seen], heads.scale)
    group = heads.num_heads // heads.num_kv_heads
    padding = values[scratch : scratch + num_padding]
    out[capacity.rows - num_padding :] = padding.repeat(group, 1)

    kernels = attend_kernels(
        capacity, heads.num_heads, keys.shape, heads.scale, heads.dtype, heads.dtype, target
    )
    table = table_of(parts, bases, capacity, scratch)
    # A weight's rounding counts by how far its value lies from the result.
    largest = np.abs(values[~np.isnan(values)]).max()
    room = {"absolute": largest * (2 * EPSILON[heads.dtype] + SUM_ROOM)}
    expected = {
        "out": Expected(out.reshape(capacity.rows, -1), **room, relative=EPSILON[heads.dtype])
    }
    buffers = {"q": q, "keys": keys, "values": values, "table": table}
    shape = f"{kernels[0].name} {TYPES[heads.dtype]}, " + ", ".join(
        f"{part.start}+{part.num_rows}" for part in parts
    )
    return Case(shape, kernels, buffers, expected, gate)


def table_of(
    parts: list[Part], bases: dict[int, int], capacity: Capacity, scratch: int
) -> np.ndarray:
    """The table of a round, padding included; slots are not read."""
    table = np.full(capacity.table_size, -1)
    segments = table[1 : capacity.rows_offset].reshape(-1, len(SEGMENT_COLUMNS))
    rows = table[capacity.rows_offset : capacity.drawn_offset].reshape(-1, 2)
    row = 0
    for columns, part in zip(segments, parts):
        columns[1:] = part.start, row, part.num_rows, bases[part.stream]
        row += part.num_rows
    rows[:row] = [(position, bases[stream]) for stream, position in rows_of(parts)]
    num_padding = capacity.rows - row
    if num_padding:
        segments[len(parts)][1:] = 0, row, num_padding, scratch
        rows[row:] = [(0, scratch + i) for i in range(num_padding)]
    table[0] = len(parts) + (num_padding > 0)
    return table


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
    """One row's, of q (H, D) over keys and values (P, K, D): (H, D)."""
    group = q.shape[0] // keys.shape[1]
    scores = scale * np.einsum("hd,phd->hp", q, keys.repeat(group, 1))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("hp,phd->hd", weights, values.repeat(group, 1))

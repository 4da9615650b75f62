"""The contract of conv.metal, and the rounds that it and other contracts of streams look at."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import Case, Contract, Control, Expected, SameBits, pattern, rounded
from metal_ops.conv import conv_kernel
from metal_ops.kernel import TYPES
from metal_ops.table import Capacity

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
# Types of rows, of taps and of the bias, or none.
KINDS = ((F32, F32, None), (BF16, BF16, BF16), (F16, F16, F32), (F32, BF16, None), (BF16, F32, F16))
PADDING = 9  # the stream that stands for it


@dataclass(frozen=True)
class Segment:
    """Rows of a round: `num_rows` of a stream, which decides their numbers, from position `start`
    on.
    """

    stream: int
    slot: int
    start: int
    num_rows: int
    base: int = 0


def table_of(capacity: Capacity, segments: tuple[Segment, ...], padding: Segment) -> np.ndarray:
    """The table of a round whose spare rows are `padding`'s. Spare segments hold what no kernel may
    use.
    """
    table = np.full(capacity.table_size, 1)
    columns = table[1 : capacity.rows_offset].reshape(-1, 5)
    rows = table[capacity.rows_offset : capacity.drawn_offset].reshape(-1, 2)
    table[capacity.drawn_offset :] = 0
    row = 0
    for index, segment in enumerate(segments):
        end = row + segment.num_rows
        columns[index] = segment.slot, segment.start, row, segment.num_rows, segment.base
        rows[row:end, 0] = segment.start + np.arange(segment.num_rows)
        rows[row:end, 1] = segment.base
        row = end
    num_padding = capacity.rows - row
    if num_padding:
        columns[len(segments)] = padding.slot, 0, row, num_padding, padding.base
        rows[row:, 0] = 0
        rows[row:, 1] = padding.base + np.arange(num_padding)
    table[0] = len(segments) + (num_padding > 0)
    return table


def fine(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of 8 bits, hundreds of them: multiples of 1/1024 within 187/1024."""
    return pattern(*shape, seed=seed) + pattern(*shape, seed=seed + 1)[..., ::-1] / 16


def contracts() -> list[Contract]:
    # Lengths and starts around the taps, the runs of 8 rows and the ring; channels around a vector,
    # a SIMD-group and a threadgroup.
    shapes = [
        (4, 3, 4, [(0, 1), (1, 2), (2, 3), (5, 4), (3, 5)]),
        (20, 3, 8, [(0, 6), (1, 7), (9, 8), (2, 9), (0, 17), (7, 1)]),
        (132, 4, 8, [(1, 11), (2, 5), (3, 6), (40, 24)]),
        (8, 2, 2, [(0, 3), (1, 1), (6, 16)]),
        (12, 8, 8, [(0, 7), (3, 9), (7, 8), (100, 25), (8, 1)]),
        (260, 5, 16, [(13, 29), (3, 12), (4, 13), (0, 1)]),
    ]
    cases = [
        case(channels, num_taps, ring_size, placed(spans), KINDS[(i + j) % len(KINDS)])
        for i, (channels, num_taps, ring_size, spans) in enumerate(shapes)
        for j in (0, 1)
    ]
    # A segment that fills the round: no launched run is to spare, as none is in a model's prompts.
    for num_rows in (16, 24, 64):
        filled = placed([(num_rows, num_rows)])
        cases.append(case(64, 3, 16, filled, KINDS[1], num_padding=0, num_spare=0))
    decode, prompt = [(40, 1), (7, 1), (0, 1)], [(123, 1), (64, 21)]
    for spans in (decode, prompt):
        cases.append(case(2048, 3, 64, placed(spans), KINDS[1], "reference"))
    controls = (
        Control(
            "every stream reads the first stream's conv state",
            "load_values(ring + ",
            "load_values(ring + (load_segment(table, 0).slot - segment.slot) * RING * CHANNELS + ",
            "rows",
        ),
        Control(
            "every stream writes the first stream's conv state",
            "store_values(ring + ",
            "store_values(ring + (load_segment(table, 0).slot - segment.slot) * RING * CHANNELS + ",
            "rows",
        ),
        Control(
            "a run starts at the last row of the one before",
            "int(group.z) * RUN;",
            "int(group.z) * (RUN - 1);",
            "shapes",
        ),
        Control("memory decides what is before position 0", "position < 0 ?", "false ?", "shapes"),
        Control("the first run leaves its places", "if (first > 0) return", "return", "shapes"),
        Control("u is not rounded", "float(T(b[i] * x[i]))", "b[i] * x[i]", "reference"),
        Control("v is not rounded", "float(T(v))", "v", "reference"),
    )
    return [Contract("short_conv", tuple(cases), tuple(company()), controls)]


def placed(spans: list[tuple[int, int]]) -> tuple[Segment, ...]:
    """Segments of (start, num_rows), each of a stream of its own, in slots of falling numbers."""
    num = len(spans)
    return tuple(Segment(i, num - i, *span) for i, span in enumerate(spans))


def case(
    channels: int,
    num_taps: int,
    ring_size: int,
    segments: tuple[Segment, ...],
    kind: tuple[DType, DType, DType | None],
    gate: str = "shapes",
    num_padding: int = 2,
    num_spare: int = 1,
) -> Case:
    """A round over rings that are NaN but for the positions that its rows may read."""
    dtype, taps_dtype, bias_dtype = kind
    num_rows = sum(segment.num_rows for segment in segments) + num_padding
    capacity = Capacity(num_rows, len(segments) + num_spare, 1)
    padding = Segment(PADDING, max(s.slot for s in segments) + 1, 0, num_padding)
    num_slots = padding.slot + 1
    ring_shape = (num_slots, ring_size, channels)
    kernel = conv_kernel(capacity, ring_shape, num_taps, dtype, taps_dtype, bias_dtype)
    taps = pattern(channels, num_taps)
    bias = np.zeros(channels) if bias_dtype is None else pattern(channels, seed=1)
    ring = np.full(ring_shape, np.nan)
    ring_after, bcx, y = ring.copy(), [], []
    for segment in (*segments, padding):
        start, end = segment.start, segment.start + segment.num_rows
        rows = fine(end, 3 * channels, seed=2 + segment.stream)
        u, out = convolved(rows, taps, bias, dtype)
        bcx.append(rows[start:])
        y.append(out[start:])
        before, own = (
            np.arange(max(start - num_taps + 1, 0), start),
            np.arange(max(start, end - ring_size), end),
        )
        ring[segment.slot, before % ring_size] = u[before]
        ring_after[segment.slot, own % ring_size] = u[own]
    buffers = {
        "ring": ring,
        "bcx": np.concatenate(bcx),
        "taps": taps,
        "bias": bias,
        "table": table_of(capacity, segments, padding),
    }
    expected = {
        "y": Expected(np.concatenate(y)),
        "ring": Expected(ring_after, written=np.isfinite(ring_after)),
    }
    types = ", ".join(TYPES[part] for part in kind if part is not None)
    spans = " ".join(f"{s.start}+{s.num_rows}" for s in segments)
    shape = f"{channels} channels, {num_taps} taps, ring of {ring_size}, rows {spans}, {types}"
    return Case(shape, (kernel,), buffers, expected, gate)


def convolved(
    rows: np.ndarray, taps: np.ndarray, bias: np.ndarray, dtype: DType
) -> tuple[np.ndarray, np.ndarray]:
    """u and y of a stream from position 0 on, rounded where the kernel rounds.

    The numbers have so few bits that fp32 sums of them are exact.
    """
    b, c, x = np.split(rows, 3, axis=1)
    u = rounded(b * x, dtype)
    num_taps = taps.shape[1]
    reached = np.concatenate([np.zeros((num_taps - 1, u.shape[1])), u])
    v = sum(taps[:, j] * reached[j : j + len(u)] for j in range(num_taps)) + bias
    return u, rounded(c * rounded(v, dtype), dtype)


def company() -> Iterable[SameBits]:
    """Each segment of a round alone, in another slot; the last rows of a prompt in a round of their
    own.
    """
    sizes = (132, 3, 16)
    segments = placed([(5, 1), (9, 11), (0, 2), (30, 35)])
    whole = case(*sizes, segments, KINDS[1], num_padding=3)
    row = 0
    for segment in segments:
        own = slice(row, row + segment.num_rows)
        alone = case(*sizes, (replace(segment, slot=0),), KINDS[1], num_padding=0, num_spare=0)
        yield same(f"stream {segment.stream}", whole, own, segment.slot, alone)
        row = own.stop
    cut = replace(segments[-1], slot=2, start=segments[-1].start + 18, num_rows=17)
    last = case(*sizes, (cut,), KINDS[1])
    yield same("the last rows of a prompt", whole, slice(row - 17, row), segments[-1].slot, last, 2)


def same(
    shape: str, whole: Case, own: slice, slot: int, other: Case, other_slot: int = 0
) -> SameBits:
    """Rows `own` of a round and their stream's ring, and the first rows of another."""
    num_rows = own.stop - own.start
    return SameBits(
        shape,
        (whole, other),
        (
            lambda found: np.concatenate([found["y"][own], found["ring"][slot]]),
            lambda found: np.concatenate([found["y"][:num_rows], found["ring"][other_slot]]),
        ),
    )

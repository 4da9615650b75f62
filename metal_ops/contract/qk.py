"""The contract of qk.metal."""

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import EPSILON, Case, Contract, Control, Expected, SameBits
from metal_ops.contract.case import pattern, rounded
from metal_ops.contract.conv import PADDING, Segment, fine, table_of
from metal_ops.kernel import TYPES
from metal_ops.qk import qk_kernel
from metal_ops.table import Capacity

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
KINDS = ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32))
# Far from that of a model, so that it shows.
EPS = 0.1
CONTEXT, NUM_TOKENS, SCRATCH = 50, 90, 84
SEGMENTS = (Segment(1, 0, 7, 1, 30), Segment(2, 1, 0, 3, 3), Segment(3, 2, 41, 2, 40))


def contracts() -> list[Contract]:
    # Heads around a threadgroup of 4; pairs around a SIMD-group of 32.
    shapes = [(2, 1, 6), (6, 3, 10), (3, 2, 64), (4, 4, 66), (5, 1, 96), (2, 1, 256)]
    cases = [
        case(*shape, KINDS[(i + j) % len(KINDS)]) for i, shape in enumerate(shapes) for j in (0, 1)
    ]
    cases += [case(32, 8, 64, kind, "reference") for kind in KINDS]
    kind = KINDS[1]
    whole = case(6, 3, 64, kind)
    rows = [
        same(segment, r, whole, case(6, 3, 64, kind, segments=(alone(segment, r),), num_padding=0))
        for segment, r in zip(SEGMENTS, (0, 2, 1))
    ]
    controls = (
        Control(
            "every stream writes the first stream's KV cache",
            "row_base(table, t)",
            "row_base(table, 0)",
            "rows",
        ),
        Control(
            "a row stands at its place in the round", "angles += position", "angles += t", "rows"
        ),
        Control(
            "keys are normed by the weight of queries",
            "is_query ? q_weight : k_weight",
            "q_weight",
            "shapes",
        ),
        Control(
            "the normed value is not rounded",
            "float(T(low[i] * scale))",
            "low[i] * scale",
            "shapes",
        ),
        Control("RoPE turns the other way", "fma(-normed_high", "fma(normed_high", "reference"),
    )
    return [Contract("store_qkv", tuple(cases), tuple(rows), controls)]


def alone(segment: Segment, r: int) -> Segment:
    """Row r of a segment, in another place of the pool."""
    return Segment(segment.stream, 0, segment.start + r, 1, 11)


def case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kind: tuple[DType, DType],
    gate: str = "shapes",
    segments: tuple[Segment, ...] = SEGMENTS,
    num_padding: int = 2,
) -> Case:
    """A round over pools that are NaN."""
    dtype, weight_dtype = kind
    num_rows = sum(segment.num_rows for segment in segments) + num_padding
    capacity = Capacity(num_rows, len(segments) + 1, 1)
    pool = (NUM_TOKENS, num_kv_heads, head_dim)
    kernel = qk_kernel(
        capacity, num_heads, pool, CONTEXT, EPS, dtype, dtype, weight_dtype, weight_dtype
    )
    padding = Segment(PADDING, 0, 0, num_padding, SCRATCH)
    table = table_of(capacity, segments, padding)
    positions, bases = table[capacity.rows_offset : capacity.drawn_offset].reshape(-1, 2).T
    # What a row holds is told by its stream and its place there.
    keys_of_rows = np.concatenate(
        [37 * s.stream + s.start + np.arange(s.num_rows) for s in (*segments, padding)]
    )
    q, k = (
        heads(keys_of_rows, num, head_dim, seed)
        for num, seed in ((num_heads, 0), (num_kv_heads, num_heads))
    )
    v = np.stack([fine(num_kv_heads, head_dim, seed=key) for key in keys_of_rows])
    weights = {f"{name}_weight": 1 + pattern(head_dim, seed=seed) for seed, name in enumerate("qk")}
    angles = 4 * fine(CONTEXT, head_dim, seed=3)
    buffers = {"q": q, "k": k, "v": v, "angles": angles, "table": table} | weights
    turned = angles[positions][:, None]
    places = bases + positions
    expected = {
        "q_out": Expected(rotated(q, weights["q_weight"], turned, dtype), **room(dtype)),
        "keys": pooled(pool, places, rotated(k, weights["k_weight"], turned, dtype), room(dtype)),
        "values": pooled(pool, places, rounded(v, dtype), {}),
    }
    shape = f"{num_heads} and {num_kv_heads} heads of {head_dim}, {TYPES[dtype]}"
    shape = f"{num_rows} rows, {shape}, weights {TYPES[weight_dtype]}"
    return Case(shape, (kernel,), buffers, expected, gate)


def heads(keys_of_rows: np.ndarray, num: int, head_dim: int, seed: int) -> np.ndarray:
    """(T, num, D): the same odd numbers / 64 in each head, turned by row and head.

    Of so few bits that fp32 sums of their squares are exact.
    """
    turns = (seed + np.arange(num)) + 11 * keys_of_rows[:, None]
    odd = 2 * ((7 * np.arange(head_dim) + turns[..., None]) % head_dim) + 1 - head_dim
    return odd / 64


def rotated(x: np.ndarray, weight: np.ndarray, angles: np.ndarray, dtype: DType) -> np.ndarray:
    """Normed and rotated heads, in fp32 and rounded where the kernel rounds."""
    mean = np.float32((x**2).sum(-1, keepdims=True)) / np.float32(x.shape[-1])
    scale = 1 / np.sqrt(mean + np.float32(EPS))
    unit = rounded(np.float32(x) * scale, dtype)
    normed = rounded(np.float32(unit) * np.float32(weight), dtype)
    (low, high), (cos, sin) = np.split(normed, 2, -1), np.split(angles, 2, -1)
    turned = np.concatenate([low * cos - high * sin, low * sin + high * cos], -1)
    return rounded(np.float32(turned), dtype)


def room(dtype: DType) -> dict[str, float]:
    """In 16 bits every rounding hides how fp32 came about."""
    return {"absolute": 8 * EPSILON[F32], "relative": 8 * EPSILON[F32]} if dtype == F32 else {}


def pooled(
    pool: tuple[int, ...], places: np.ndarray, rows: np.ndarray, bounds: dict[str, float]
) -> Expected:
    """Rows at their places of a pool, the rest of which is not written."""
    values = np.full(pool, np.nan)
    values[places] = rows
    return Expected(values, written=np.isfinite(values), **bounds)


def same(segment: Segment, r: int, whole: Case, other: Case) -> SameBits:
    """Row r of a segment, in the round and alone."""
    t = sum(s.num_rows for s in SEGMENTS[: SEGMENTS.index(segment)]) + r
    place, other_place = segment.base + segment.start + r, 11 + segment.start + r

    def pick(t: int, place: int):
        return lambda found: np.concatenate(
            [found["q_out"][t], found["keys"][place], found["values"][place]]
        )

    return SameBits(
        f"row {r} of stream {segment.stream}",
        (whole, other),
        (pick(t, place), pick(0, other_place)),
    )

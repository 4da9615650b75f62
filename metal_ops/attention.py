"""attend: causal grouped-query attention of a ragged round over the slots' extents.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . keys[base + j, h // (H / K)]) * values[base + j, h
    // (H / K)],  j <= position

q (T, H, D) in the compute type, keys and values (tokens, K, D), out (T, H D). Keys are taken in
chunks of 32 from the slot's first on, with an online softmax in fp32: a running maximum m, sum l
and output o, rescaled from chunk to chunk. The chunks are those of the positions, so a row's bits
do not depend on the round. A K/V row serves the whole group of heads. kernels/attend.metal says how
the kernels sum.
"""

from math import e, log2, prod

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from metal_ops.checks import expect
from metal_ops.kernel import (
    FLOATS,
    SIMD_WIDTH,
    Argument,
    Kernel,
    Target,
    compose,
    divide_up,
    target_of,
)
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.product_tile import TILE
from metal_ops.sums import pair_off, products
from metal_ops.table import Capacity

KEY_CHUNK = 32
# Keys whose dot products are summed side by side, in registers.
KEY_TILE = 4
# A row's chunks of keys are dealt to so many splits, whatever its round: 8 kv heads then give 256
# SIMD-groups to a round of one row in a context of 1,024 and more.
SPLITS = 32
# The sums of each split go through memory in rounds of so many rows at most: 8.6 MB for 32 heads of
# 64. Rounds of more rows have tiles enough.
MAX_SPLIT_ROWS = 32
# A context that estimates of work reckon with: when a form is made, no one knows how long streams
# are.
NOMINAL_KEYS = 1024
THREADS = 128
# Of 8 (row, head) pairs each, for heads of up to 64: 2 take 32 registers for their sums, and as
# many again where splits are folded.
MAX_PAIR_TILES = 2
WIDEST_HEAD = 64
# A thread of NVIDIA's GPUs has registers for twice as many, whose keys and values are then loaded
# half as often: from so many SIMD-groups of them on, two threadgroups a multiprocessor of an H200.
CUDA_PAIR_TILES = 4
FEWEST_SIMDGROUPS = 1024
# Lanes have an eighth of a head each, which they load by 2 numbers at least.
HEAD_DIM_UNIT = 16
MAX_HEAD_DIM = 128
MAX_GROUP = TILE * MAX_PAIR_TILES
MERGED_VALUES = 4  # of a thread, of attend_merge


def attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, table: Tensor, capacity: Capacity
) -> Tensor:
    """Each row's attention over its slot's keys up to its own position: (T, H D)."""
    expect("attend", "q", q, (capacity.rows, q.shape[1], keys.shape[2]))
    expect("attend", "values", values, keys.shape, (keys.dtype,))
    expect("attend", "table", table, (capacity.table_size,), (dtypes.int32,))
    if q.shape[1] % keys.shape[1]:
        raise ValueError(
            f"attend: {q.shape[1]} query heads do not divide over {keys.shape[1]} kv heads"
        )
    kernels, target = None, target_of(q.device)
    if target is not None:
        kernels = attend_kernels(
            capacity, q.shape[1], keys.shape, scale, q.dtype, keys.dtype, target
        )
    if kernels is None:
        return reference(q, keys, values, scale, table, capacity)
    *sums, last = kernels
    reads = [q, keys, values, table]
    for kernel in sums:
        reads = [*inject(kernel, reads), values, table]
    return inject(last, reads)[0]


def attend_kernels(
    capacity: Capacity,
    num_heads: int,
    pool: tuple[int, int, int],
    scale: float,
    dtype: DType,
    pool_dtype: DType,
    target: Target = Target.METAL,
) -> tuple[Kernel, ...] | None:
    """The kernels for these shapes, in order: heads of a multiple of 16 up to 128, groups of up to
    16, keys and values in the compute type.

    pool: the shape of keys and of values. Up to 32 rows these are attend_partial and attend_merge,
    beyond that attend_prompt; a row's bits are the same in both forms.
    """
    num_tokens, num_kv_heads, head_dim = pool
    group, num_rows = num_heads // num_kv_heads, capacity.rows
    if head_dim % HEAD_DIM_UNIT or head_dim > MAX_HEAD_DIM or group > MAX_GROUP or scale <= 0:
        return None
    if dtype not in FLOATS or pool_dtype != dtype:
        return None
    constants = _constants(capacity, num_heads, pool, scale, dtype, target)
    num_tiles = most_tiles(capacity, TILE * constants["PAIR_TILES"] // group)
    size = f"{num_rows}x{capacity.segments}x{num_heads}x{num_kv_heads}x{head_dim}"
    q = Argument("q", (num_rows, num_heads, head_dim), dtype)
    keys, values = Argument("keys", pool, dtype), Argument("values", pool, dtype)
    table = Argument("table", (capacity.table_size,), dtypes.int32)
    out = Argument("out", (num_rows, num_heads * head_dim), dtype)
    reads = (q, keys, values, table)
    num_ops = 4 * prod(out.shape) * min(num_tokens, NOMINAL_KEYS)
    if num_rows > MAX_SPLIT_ROWS:
        grid = (num_kv_heads, divide_up(num_tiles, THREADS // SIMD_WIDTH), 1)
        return (_kernel("attend_prompt", size, target, constants, grid, (out,), reads, num_ops),)
    mixed = Argument("mixed", (num_rows, num_heads, SPLITS, head_dim), dtypes.float32)
    totals = Argument("totals", (num_rows, num_heads, SPLITS, 2), dtypes.float32)
    sums = (mixed, totals)
    grid = (num_kv_heads, SPLITS * SIMD_WIDTH // THREADS, num_tiles)
    partial = _kernel("attend_partial", size, target, constants, grid, sums, reads, num_ops)
    grid = (divide_up(num_heads * head_dim, MERGED_VALUES * THREADS), num_rows, 1)
    reads, num_ops = (*sums, values, table), 4 * prod(mixed.shape)
    merge = _kernel("attend_merge", size, target, constants, grid, (out,), reads, num_ops)
    return partial, merge


def _constants(
    capacity: Capacity,
    num_heads: int,
    pool: tuple[int, int, int],
    scale: float,
    dtype: DType,
    target: Target,
) -> dict[str, int | float | DType]:
    _, num_kv_heads, head_dim = pool
    group = num_heads // num_kv_heads
    return {
        "T": dtype,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "PAIR_TILES": num_pair_tiles(capacity, group, num_kv_heads, head_dim, target),
        "KEY_CHUNK": KEY_CHUNK,
        "SPLITS": SPLITS,
        "SCALE": float(scale * log2(e)),
        "IS_FLOAT": dtype == dtypes.float32,
        "THREADS": THREADS,
        **capacity.constants,
    }


def num_pair_tiles(
    capacity: Capacity, group: int, num_kv_heads: int, head_dim: int, target: Target
) -> int:
    """How wide a tile of (row, head) pairs is, in eights: at least a group, and as wide as the rows
    of a segment are likely to fill and the registers allow.
    """
    rows = divide_up(capacity.rows, capacity.segments)
    most, num_pairs = MAX_PAIR_TILES, capacity.rows * group * num_kv_heads
    if target is not Target.METAL and num_pairs >= TILE * CUDA_PAIR_TILES * FEWEST_SIMDGROUPS:
        most = CUDA_PAIR_TILES
    widest = max(1, min(most, most * WIDEST_HEAD // head_dim))
    return max(divide_up(group, TILE), min(divide_up(rows * group, TILE), widest))


def most_tiles(capacity: Capacity, tile_rows: int) -> int:
    """The most tiles of `tile_rows` rows of one segment that a round has, padding included."""
    num_segments = min(capacity.segments + 1, capacity.rows)
    return (capacity.rows + num_segments * (tile_rows - 1)) // tile_rows


def _kernel(
    op: str,
    size: str,
    target: Target,
    constants: dict[str, int | float | DType],
    grid: tuple[int, int, int],
    writes: tuple[Argument, ...],
    reads: tuple[Argument, ...],
    num_ops: int,
) -> Kernel:
    """What it computes and moves is reckoned for streams of NOMINAL_KEYS."""
    name = f"{op}_{size}"
    source = compose(("table", "lanes", "places", "attend", op), op, name, target, **constants)
    pools = ("keys", "values")
    num_bytes = sum(
        min(argument.num_bytes, NOMINAL_KEYS * argument.num_bytes // argument.shape[0])
        if argument.name in pools
        else argument.num_bytes
        for argument in (*writes, *reads)
    )
    return Kernel(name, source, grid, THREADS, writes, reads, num_ops, num_bytes)


def reference(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, table: Tensor, capacity: Capacity
) -> Tensor:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads

    def body(loops: Loops, out: Array, q: Array, keys: Array, values: Array, table: Array) -> None:
        with loops.share(num_rows * num_kv_heads) as share, loops.over(share.size) as i:
            t, kv_head = share[i] // num_kv_heads, share[i] % num_kv_heads
            position, base = capacity.row(table, t, "position"), capacity.row(table, t, "base")
            best, weight, mixed = (
                loops.local(group),
                loops.local(group),
                loops.local(group, head_dim),
            )
            with loops.over(group) as h:
                best[h] = -float("inf")
                weight[h] = 0.0
                with loops.over(head_dim) as d:
                    mixed[h, d] = 0.0
            with loops.over(position // KEY_CHUNK + 1) as chunk:
                # Keys past the row's own position read that position, which is written, and weigh
                # nothing.
                def key_row(j):
                    return base + (chunk * KEY_CHUNK + j).minimum(position)

                dots = loops.local(group, KEY_CHUNK)
                with loops.over(KEY_CHUNK // KEY_TILE) as key_tile:
                    sums = products(
                        loops,
                        group,
                        KEY_TILE,
                        head_dim,
                        lambda h, d: q[t, kv_head * group + h, d].cast(dtypes.float),
                        lambda j, d: keys[key_row(key_tile * KEY_TILE + j), kv_head, d].cast(
                            dtypes.float
                        ),
                    )
                    with loops.over(group) as h, loops.over(KEY_TILE) as j:
                        dots[h, key_tile * KEY_TILE + j] = sums[h, j]
                with loops.over(group) as h:
                    scores, lanes = loops.local(KEY_CHUNK), loops.local(KEY_CHUNK)
                    highest, rescale = loops.local(1), loops.local(1)
                    before = loops.keep(best, h)
                    highest[0] = before
                    with loops.over(KEY_CHUNK) as j:
                        is_seen = chunk * KEY_CHUNK + j <= position
                        scores[j] = is_seen.where(dots[h, j] * scale, -float("inf"))
                        highest[0] = highest[0].maximum(scores[j])
                    rescale[0] = (before - highest[0]).exp()
                    best[h] = highest[0]
                    with loops.over(KEY_CHUNK) as j:
                        scores[j] = (scores[j] - highest[0]).exp()
                        lanes[j] = scores[j]
                    pair_off(loops, lanes, KEY_CHUNK)
                    weight[h] = weight[h] * rescale[0] + lanes[0]
                    with loops.over(head_dim) as d:
                        mixed[h, d] = mixed[h, d] * rescale[0]
                    with loops.over(KEY_CHUNK) as j, loops.over(head_dim) as d:
                        value = values[key_row(j), kv_head, d].cast(dtypes.float)
                        mixed[h, d] = mixed[h, d] + scores[j] * value
            with loops.over(group) as h, loops.over(head_dim) as d:
                out[t, (kv_head * group + h) * head_dim + d] = mixed[h, d] / weight[h]

    out = Tensor.empty(num_rows, num_heads * head_dim, dtype=q.dtype, device=q.device)
    return loop_kernel(f"attend_{num_rows}_{num_heads}", body, [out], [q, keys, values, table])[0]

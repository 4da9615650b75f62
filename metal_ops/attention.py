"""attend: causal grouped-query attention of a ragged round over the slots' extents.

    out[t, h] = sum_j softmax_j(scale * q[t, h] . keys[base + j, h // (H / K)]) * values[base + j, h
    // (H / K)],  j <= position

q (T, H, D) in the compute type, keys and values (tokens, K, D), out (T, H D). Keys are taken in
chunks of 32 from the slot's first on, with an online softmax in fp32: a running maximum m, sum l
and output o, rescaled from chunk to chunk. The chunks are those of the positions, so a row's bits
do not depend on the round. A K/V row serves the whole group of heads.
"""

from tinygrad import Tensor, dtypes

from metal_ops.checks import expect
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.sums import pair_off, products
from metal_ops.table import Capacity

KEY_CHUNK = 32
# Keys whose dot products are summed side by side, in registers.
KEY_TILE = 4


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
    return reference(q, keys, values, scale, table, capacity)


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

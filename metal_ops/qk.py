"""store_qkv: q/k norm, RoPE, and the write of keys and values into the slots' extents.

    q_out[t, h] = rope(rms_norm(q[t, h]) * q_weight, position[t])
    keys[base + position] = rope(rms_norm(k[t]) * k_weight, position)
    values[base + position] = v[t]

q (T, H D), k and v (T, K D) in the compute type; q_weight and k_weight (D); angles (context, D)
fp32, cos in the first half of a row and sin in the second; keys and values (tokens, K, D). RoPE
rotates halves (dimension d with d + D/2) in fp32 and rounds once; the norm rounds as rms_norm does.
The position comes from the table, never from the row's place in the round. Moves q, k and v in and
out once.
"""

from dataclasses import replace

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, SIMD_WIDTH, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Index, Loops, loop_kernel
from metal_ops.sums import total
from metal_ops.table import Capacity

MAX_HEAD_DIM = 256
MAX_SIMDGROUPS = 4  # heads of a threadgroup


def store_qkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    angles: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    capacity: Capacity,
) -> tuple[Tensor, Tensor, Tensor]:
    """The rotated queries (T, H, D), and the pools of keys and values after the write."""
    num_kv_heads, head_dim = keys.shape[1:]
    expect("store_qkv", "q", q, (capacity.rows, q.shape[1]))
    expect("store_qkv", "k", k, (capacity.rows, num_kv_heads * head_dim), (q.dtype,))
    expect("store_qkv", "v", v, k.shape, (q.dtype,))
    expect("store_qkv", "q_weight", q_weight, (head_dim,))
    expect("store_qkv", "k_weight", k_weight, (head_dim,))
    expect("store_qkv", "angles", angles, (angles.shape[0], head_dim), (dtypes.float32,))
    expect("store_qkv", "values", values, keys.shape, (keys.dtype,))
    expect("store_qkv", "table", table, (capacity.table_size,), (dtypes.int32,))
    reads, state = [q, k, v, q_weight, k_weight, angles, table], (keys, values)
    kernel = None
    if has_kernels(q.device):
        num_heads, context = q.shape[1] // head_dim, angles.shape[0]
        types = (q.dtype, keys.dtype, q_weight.dtype, k_weight.dtype)
        kernel = qk_kernel(capacity, num_heads, keys.shape, context, eps, *types)
    if kernel is None:
        q_out, keys, values = reference(reads, eps, state, capacity)
    else:
        q_out, keys, values = inject(kernel, reads, state)
    return q_out, keys, values


def qk_kernel(
    capacity: Capacity,
    num_heads: int,
    pool: tuple[int, int, int],
    context: int,
    eps: float,
    dtype: DType,
    pool_dtype: DType,
    q_weight_dtype: DType,
    k_weight_dtype: DType,
) -> Kernel | None:
    """The kernel for these shapes: heads of any even width up to 256, keys and values in the
    compute type, both weights in one type.

    pool: the shape of keys and of values.
    """
    num_kv_heads, head_dim = pool[1:]
    if head_dim % 2 or head_dim > MAX_HEAD_DIM or dtype not in FLOATS or pool_dtype != dtype:
        return None
    if q_weight_dtype not in FLOATS or k_weight_dtype != q_weight_dtype:
        return None
    simdgroups = min(MAX_SIMDGROUPS, num_heads + num_kv_heads)
    q_out = Argument("q_out", (capacity.rows, num_heads, head_dim), dtype)
    q = Argument("q", (capacity.rows, num_heads * head_dim), dtype)
    k = Argument("k", (capacity.rows, num_kv_heads * head_dim), dtype)
    v = replace(k, name="v")
    name = f"store_qkv_{capacity.rows}x{num_heads}x{num_kv_heads}x{head_dim}"
    source = compose(
        ("table", "qk"),
        "store_qkv",
        name,
        T=dtype,
        W=q_weight_dtype,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        EPS=eps,
        THREADS=simdgroups * SIMD_WIDTH,
        **capacity.constants,
    )
    return Kernel(
        name,
        source,
        (divide_up(num_heads + num_kv_heads, simdgroups), capacity.rows, 1),
        simdgroups * SIMD_WIDTH,
        (q_out, Argument("keys", pool, dtype), Argument("values", pool, dtype)),
        (
            q,
            k,
            v,
            Argument("q_weight", (head_dim,), q_weight_dtype),
            Argument("k_weight", (head_dim,), k_weight_dtype),
            Argument("angles", (context, head_dim), dtypes.float32),
            Argument("table", (capacity.table_size,), dtypes.int32),
        ),
        num_ops=capacity.rows * (num_heads + num_kv_heads) * head_dim * 8,
        num_bytes=2 * (q.num_bytes + k.num_bytes + v.num_bytes),
    )


def reference(
    reads: list[Tensor], eps: float, state: tuple[Tensor, Tensor], capacity: Capacity
) -> list[Tensor]:
    """reads and state: as the kernel takes them."""
    q, (keys, _) = reads[0], state
    num_kv_heads, head_dim = keys.shape[1:]
    num_heads, half = q.shape[1] // head_dim, head_dim // 2

    def rotated(
        loops: Loops,
        x: Array,
        row: Index,
        head: Index,
        weight: Array,
        angles: Array,
        position: Index,
    ):
        """The normed and rotated head as a local array of D fp32 values."""
        compute = x.dtype

        def value(d: Index):
            return x[row, head * head_dim + d].cast(dtypes.float)

        scale, normed, out = loops.local(1), loops.local(head_dim), loops.local(head_dim)
        scale[0] = (total(loops, head_dim, lambda d: value(d) * value(d)) / head_dim + eps).rsqrt()
        with loops.over(head_dim) as d:
            unit = (value(d) * scale[0]).cast(compute).cast(dtypes.float)
            normed[d] = (unit * weight[d].cast(dtypes.float)).cast(compute).cast(dtypes.float)
        with loops.over(half) as d:
            cos, sin = angles[position, d], angles[position, half + d]
            low, high = normed[d], normed[half + d]
            out[d] = low * cos - high * sin
            out[half + d] = high * cos + low * sin
        return out

    def body(loops: Loops, q_out: Array, keys: Array, values: Array, *reads: Array) -> None:
        q, k, v, q_weight, k_weight, angles, table = reads
        with loops.share(capacity.rows) as share, loops.over(share.size) as i:
            t = share[i]
            position, base = capacity.row(table, t, "position"), capacity.row(table, t, "base")
            with loops.over(num_heads) as head:
                query = rotated(loops, q, t, head, q_weight, angles, position)
                with loops.over(head_dim) as d:
                    q_out[t, head, d] = query[d]
            with loops.over(num_kv_heads) as head:
                key = rotated(loops, k, t, head, k_weight, angles, position)
                with loops.over(head_dim) as d:
                    keys[base + position, head, d] = key[d]
                    values[base + position, head, d] = v[t, head * head_dim + d]

    q_out = Tensor.empty(capacity.rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    name = f"store_qkv_{capacity.rows}_{num_heads}"
    return loop_kernel(name, body, [q_out, *state], reads)

"""short_conv: the gated short convolution of a ragged round, with the ring that carries it from
round to round.

    u[t]    = round(B[t] * x[t])                    B, C, x: the three thirds of in_proj's output
    v[t, c] = round(sum_j taps[c, j] * u[t - (L - 1) + j, c] + bias[c])       fp32, oldest first
    y[t]    = round(C[t] * v[t])

bcx (T, 3 C) and y (T, C) in the compute type, taps (C, L), bias (C) or none, ring (slots, R, C). A
row at position p reads u of p - 1, p - 2, ... from its own segment, or else from ring[slot,
position % R], or as zero before position 0: the position decides, never what the memory holds.
Every row's u goes to the ring, so that a later round may start at any of the last R - (L - 1)
positions. Moves bcx and y once, and of the ring what it reads and writes.
"""

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.sums import largest_divisor
from metal_ops.table import Capacity

VALUES = 4  # channels of a thread
RUN = 8  # rows that a thread walks, and the most taps
MAX_THREADS = 64


def short_conv(
    bcx: Tensor, taps: Tensor, bias: Tensor | None, ring: Tensor, table: Tensor, capacity: Capacity
) -> Tensor:
    """The convolution of every segment of the round: y (T, C). Writes the ring."""
    channels, num_taps = taps.shape
    expect("short_conv", "bcx", bcx, (capacity.rows, 3 * channels))
    expect("short_conv", "ring", ring, (*ring.shape[:2], channels), (bcx.dtype,))
    expect("short_conv", "table", table, (capacity.table_size,), (dtypes.int32,))
    if num_taps < 2 or ring.shape[1] < num_taps:
        raise ValueError(
            "short_conv: 2 taps at least, and a ring of as many, expected; "
            f"found {num_taps} and {ring.shape[1]}"
        )
    kernel = None
    if has_kernels(bcx.device):
        bias_dtype = None if bias is None else bias.dtype
        kernel = conv_kernel(capacity, ring.shape, num_taps, bcx.dtype, taps.dtype, bias_dtype)
    if kernel is None:
        return reference(bcx, taps, bias, ring, table, capacity)
    reads = [bcx, taps, *([] if bias is None else [bias]), table]
    return inject(kernel, reads, (ring,))[0]


def conv_kernel(
    capacity: Capacity,
    ring_shape: tuple[int, int, int],
    num_taps: int,
    dtype: DType,
    taps_dtype: DType,
    bias_dtype: DType | None,
) -> Kernel | None:
    """The kernel for these shapes: channels that are a multiple of 4, 8 taps at most."""
    ring_size, channels = ring_shape[1:]
    types = (dtype, taps_dtype, bias_dtype or taps_dtype)
    if channels % VALUES or num_taps > RUN or not set(types) <= set(FLOATS):
        return None
    threads = min(MAX_THREADS, 32 * divide_up(channels, 32 * VALUES))
    y = Argument("y", (capacity.rows, channels), dtype)
    ring = Argument("ring", ring_shape, dtype)
    bcx = Argument("bcx", (capacity.rows, 3 * channels), dtype)
    taps = Argument("taps", (channels, num_taps), taps_dtype)
    bias = () if bias_dtype is None else (Argument("bias", (channels,), bias_dtype),)
    name = f"short_conv_{capacity.rows}x{channels}"
    source = compose(
        ("table", "conv"),
        "short_conv",
        name,
        T=dtype,
        W=taps_dtype,
        CHANNELS=channels,
        TAPS=num_taps,
        RING=ring_size,
        RUN=RUN,
        THREADS=threads,
        **({} if bias_dtype is None else {"BIAS": bias_dtype}),
        **capacity.constants,
    )
    # Every row's u goes to the ring, unless rows after it take its place.
    num_carried = min(capacity.rows, capacity.segments + 1) * (num_taps - 1)
    ring_bytes = (capacity.rows + num_carried) * channels * dtype.itemsize
    return Kernel(
        name,
        source,
        (
            divide_up(channels, threads * VALUES),
            capacity.segments + 1,
            divide_up(capacity.rows, RUN),
        ),
        threads,
        (y, ring),
        (bcx, taps, *bias, Argument("table", (capacity.table_size,), dtypes.int32)),
        num_ops=capacity.rows * channels * 2 * (num_taps + 1),
        num_bytes=bcx.num_bytes + taps.num_bytes + y.num_bytes + ring_bytes,
    )


def reference(
    bcx: Tensor, taps: Tensor, bias: Tensor | None, ring: Tensor, table: Tensor, capacity: Capacity
) -> Tensor:
    """One thread owns a channel of a segment and walks its rows, so no row meets another's
    write.
    """
    channels, num_taps = taps.shape
    ring_size, num_carried = ring.shape[1], num_taps - 1
    block = largest_divisor(channels, (64, 32, 16, 8, 4, 2))

    def body(
        loops: Loops, y: Array, ring: Array, bcx: Array, taps: Array, table: Array, *bias: Array
    ) -> None:
        def step(c: UOp, lane: UOp, row: UOp, carried: Array) -> UOp:
            """One row of one channel: writes y, shifts the carried values, returns u."""
            gated = bcx[row, c].cast(dtypes.float) * bcx[row, 2 * channels + c].cast(dtypes.float)
            u = gated.cast(y.dtype).cast(dtypes.float)
            window = [loops.keep(carried, (j, lane)) for j in range(num_carried)] + [u]
            v = sum(taps[c, j].cast(dtypes.float) * value for j, value in enumerate(window))
            if bias:
                v = v + bias[0][c].cast(dtypes.float)
            y[row, c] = bcx[row, channels + c].cast(dtypes.float) * v.cast(y.dtype).cast(
                dtypes.float
            )
            for j, value in enumerate(window[1:]):
                carried[j, lane] = value
            return u

        with (
            loops.share(channels // block) as share,
            loops.over(share.size) as i,
            loops.over(capacity.num_segments(table)) as s,
        ):
            channel_block = share[i]
            slot, start, first_row, num_rows = (
                capacity.segment(table, s, column)
                for column in ("slot", "start", "first_row", "num_rows")
            )
            carried = loops.local(num_carried, block)
            with loops.over(num_carried) as j, loops.over(block) as lane:
                position = start - num_carried + j
                before = ring[slot, position.maximum(0) % ring_size, channel_block * block + lane]
                carried[j, lane] = (position >= 0).where(before.cast(dtypes.float), 0.0)
            with loops.over(num_rows) as r, loops.over(block) as lane:
                c = channel_block * block + lane
                ring[slot, (start + r) % ring_size, c] = step(c, lane, first_row + r, carried)

    y = Tensor.empty(capacity.rows, channels, dtype=bcx.dtype, device=bcx.device)
    reads = [bcx, taps, table] if bias is None else [bcx, taps, table, bias]
    return loop_kernel(f"short_conv_{capacity.rows}_{channels}", body, [y, ring], reads)[0]

"""rms_norm: RMSNorm of rows.

    out[t, c] = round(x[t, c] / sqrt(mean(x[t]^2) + eps)) * weight[c]

x (T, C) in the compute type, weight (C), out (T, C) or (N, C) in the compute type. The mean is
taken in fp32; the normed value is rounded to the compute type before the weight, as transformers
and MLX do. Reads x twice, writes it once.
"""

from tinygrad import Tensor, dtypes

from metal_ops.checks import expect
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.sums import total
from metal_ops.table import Capacity


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every row of x (T, C)."""
    expect("rms_norm", "weight", weight, x.shape[-1:])
    return reference(x, weight, eps)


def rms_norm_drawn(
    x: Tensor, weight: Tensor, eps: float, table: Tensor, capacity: Capacity
) -> Tensor:
    """RMSNorm of the N drawn rows of x (T, C), in the table's order: (N, C)."""
    expect("rms_norm_drawn", "weight", weight, x.shape[-1:])
    expect("rms_norm_drawn", "table", table, (capacity.table_size,), (dtypes.int32,))
    return reference(x, weight, eps, table, capacity)


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float,
    table: Tensor | None = None,
    capacity: Capacity | None = None,
) -> Tensor:
    width = x.shape[-1]
    num_rows = x.shape[0] if capacity is None else capacity.drawn

    def body(loops: Loops, out: Array, x: Array, weight: Array, *table: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            row = capacity.drawn_row(table[0], t) if table else t
            scale = loops.local(1)
            squares = total(
                loops, width, lambda c: x[row, c].cast(dtypes.float) * x[row, c].cast(dtypes.float)
            )
            scale[0] = (squares / width + eps).rsqrt()
            with loops.over(width) as c:
                normed = (x[row, c].cast(dtypes.float) * scale[0]).cast(x.dtype)
                out[t, c] = normed.cast(dtypes.float) * weight[c].cast(dtypes.float)

    out = Tensor.empty(num_rows, width, dtype=x.dtype, device=x.device)
    reads = [x, weight] if table is None else [x, weight, table]
    return loop_kernel(f"rms_norm_{num_rows}_{width}", body, [out], reads)[0]

"""rms_norm, add_rms_norm, rms_norm_drawn: RMSNorm of rows, and the residual addition before it.

    sum[t] = round(x[t] + delta[t])
    out[t, c] = round(round(sum[t, c] / sqrt(mean(sum[t]^2) + eps)) * weight[c])

x and sum (T, C) in the compute type, weight (C), out (T, C) or (N, C) in the compute type. delta is
what half a layer made of the rows: (T, C), or a `Mixture` of experts, whose weighted sum is taken
here, in order of choice and rounded once. The mean is taken in fp32; the normed value is rounded to
the compute type before the weight, as transformers and MLX do. Moves x, delta, sum and out once.
"""

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Index, Loops, loop_kernel
from metal_ops.sums import total
from metal_ops.table import Capacity

VALUES = 4  # of a thread at once
MAX_THREADS = 512


@dataclass(frozen=True)
class Mixture:
    """What the chosen experts made of each row: outputs (T A, C) fp32, to be summed by weights (T,
    A) fp32.
    """

    outputs: Tensor
    weights: Tensor

    @property
    def num_active(self) -> int:
        return self.weights.shape[1]


Delta = Tensor | Mixture


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of every row of x (T, C)."""
    return _norm(x, None, weight, eps)[-1]


def add_rms_norm(x: Tensor, delta: Delta, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x (T, C) plus delta, and its RMSNorm: two (T, C)."""
    sum, out = _norm(x, delta, weight, eps)
    return sum, out


def rms_norm_drawn(
    x: Tensor, delta: Delta, weight: Tensor, eps: float, table: Tensor, capacity: Capacity
) -> Tensor:
    """RMSNorm of the N drawn rows of x (T, C) plus delta, in the table's order: (N, C)."""
    expect("rms_norm_drawn", "table", table, (capacity.table_size,), (dtypes.int32,))
    return _norm(x, delta, weight, eps, table, capacity)[-1]


def _norm(
    x: Tensor,
    delta: Delta | None,
    weight: Tensor,
    eps: float,
    table: Tensor | None = None,
    capacity: Capacity | None = None,
) -> list[Tensor]:
    num_rows, width = x.shape
    expect("rms_norm", "weight", weight, (width,))
    num_active = delta.num_active if isinstance(delta, Mixture) else 0
    if num_active:
        expect("rms_norm", "weights", delta.weights, (num_rows, num_active), (dtypes.float32,))
        outputs_shape = (num_rows * num_active, width)
        expect("rms_norm", "outputs", delta.outputs, outputs_shape, (dtypes.float32,))
    elif delta is not None:
        expect("rms_norm", "delta", delta, x.shape, (x.dtype,))
    kernel = None
    if has_kernels(x.device):
        kernel = norm_kernel(
            num_rows, width, x.dtype, weight.dtype, eps, delta is not None, num_active, capacity
        )
    if kernel is None:
        return reference(x, delta, weight, eps, table, capacity)
    added = [delta.outputs, delta.weights] if num_active else [] if delta is None else [delta]
    written = inject(kernel, [*added, x, weight, *([] if table is None else [table])])
    return written[::-1]


def norm_kernel(
    num_rows: int,
    width: int,
    dtype: DType,
    weight_dtype: DType,
    eps: float,
    has_delta: bool,
    num_active: int,
    capacity: Capacity | None,
) -> Kernel | None:
    """The kernel for these shapes: any width that is a multiple of 4.

    num_active: of a Mixture, else 0. capacity: of the table that names the drawn rows, or none.
    """
    if width % VALUES or dtype not in FLOATS or weight_dtype not in FLOATS:
        return None
    num_outputs = num_rows if capacity is None else capacity.drawn
    has_sum = has_delta and capacity is None
    out = Argument("out", (num_outputs, width), dtype)
    rows = Argument("sum", (num_rows, width), dtype)
    if num_active:
        delta = (
            Argument("outputs", (num_rows * num_active, width), dtypes.float32),
            Argument("weights", (num_rows, num_active), dtypes.float32),
        )
    else:
        delta = (Argument("delta", (num_rows, width), dtype),) if has_delta else ()
    reads = (
        *delta,
        Argument("x", (num_rows, width), dtype),
        Argument("weight", (width,), weight_dtype),
    )
    table = () if capacity is None else (Argument("table", (capacity.table_size,), dtypes.int32),)
    threads = min(MAX_THREADS, 32 * divide_up(width, 32 * VALUES))
    kind = ["rms_norm", "add_rms_norm"][has_delta] + (f"_{num_active}" if num_active else "")
    name = f"{kind}_{num_outputs}x{width}"
    stems = ("norm",) if capacity is None else ("table", "norm")
    source = compose(
        stems,
        "rms_norm",
        name,
        T=dtype,
        W=weight_dtype,
        WIDTH=width,
        THREADS=threads,
        EPS=eps,
        ACTIVE=num_active,
        HAS_DELTA=has_delta,
        HAS_SUM=has_sum,
        IS_DRAWN=capacity is not None,
        **({} if capacity is None else capacity.constants),
    )
    moved = (out, *([rows] if has_sum else []), *delta, Argument("x", out.shape, dtype))
    return Kernel(
        name,
        source,
        (num_outputs, 1, 1),
        threads,
        (out, rows) if has_sum else (out,),
        (*reads, *table),
        num_ops=num_outputs * width * (4 + 2 * num_active),
        num_bytes=sum(argument.num_bytes for argument in moved),
    )


def reference(
    x: Tensor,
    delta: Delta | None,
    weight: Tensor,
    eps: float,
    table: Tensor | None = None,
    capacity: Capacity | None = None,
) -> list[Tensor]:
    """The sum, if there is a delta and all rows are asked for, and the normed rows."""
    num_rows, width = x.shape
    num_outputs = num_rows if capacity is None else capacity.drawn
    num_active = delta.num_active if isinstance(delta, Mixture) else 0
    has_sum = delta is not None and capacity is None
    added = [delta.outputs, delta.weights] if num_active else [] if delta is None else [delta]

    def body(loops: Loops, *arrays: Array) -> None:
        arrays = iter(arrays)
        out = next(arrays)
        kept = next(arrays) if has_sum else None
        addends = [next(arrays) for _ in added]
        x, weight = next(arrays), next(arrays)
        table = next(arrays, None)

        def value(row: Index, c: Index) -> UOp:
            sum = x[row, c].cast(dtypes.float)
            if not addends:
                return sum
            addend = addends[0][row, c]
            if num_active:
                outputs, weights = addends
                addend = _mixed(outputs, weights, row, c, num_active).cast(x.dtype)
            return (sum + addend.cast(dtypes.float)).cast(x.dtype).cast(dtypes.float)

        with loops.share(num_outputs) as share, loops.over(share.size) as i:
            t = share[i]
            row = t if table is None else capacity.drawn_row(table, t)
            values, scale = loops.local(width), loops.local(1)
            with loops.over(width) as c:
                values[c] = value(row, c)
            squares = total(loops, width, lambda c: values[c] * values[c])
            scale[0] = (squares / width + eps).rsqrt()
            with loops.over(width) as c:
                normed = (values[c] * scale[0]).cast(x.dtype).cast(dtypes.float)
                out[t, c] = normed * weight[c].cast(dtypes.float)
                if kept is not None:
                    kept[t, c] = values[c]

    shapes = [(num_outputs, width), *([x.shape] if has_sum else [])]
    writes = [Tensor.empty(*shape, dtype=x.dtype, device=x.device) for shape in shapes]
    reads = [*added, x, weight, *([] if table is None else [table])]
    kind = "add_rms_norm" if delta is not None else "rms_norm"
    return loop_kernel(f"{kind}_{num_outputs}_{width}", body, writes, reads)[::-1]


def _mixed(outputs: Array, weights: Array, row: Index, c: Index, num_active: int) -> UOp:
    """The weighted sum of a row's experts, in order of choice."""
    return sum(weights[row, a] * outputs[row * num_active + a, c] for a in range(num_active))

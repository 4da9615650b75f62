"""tap: the rows of a layer's output, kept beside those of other layers.

    scratch[t, index * C + c] = x[t, c]

x (T, C), scratch (T_max, taps * C) of one type, T at most T_max. A tap is one layer's C columns of
the scratch; those of the others, and the rows from T on, keep what they hold. Copies T C values.
"""

from tinygrad import Tensor
from tinygrad.dtype import DType

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel

VALUES = 4  # of a thread
MAX_THREADS = 256


def tap(x: Tensor, scratch: Tensor, index: int) -> Tensor:
    """Copies x (T, C) into the columns of tap `index` of scratch (T_max, taps * C); the scratch as
    it is then.

    scratch: a whole buffer, written in place.
    """
    num_rows, width = x.shape
    max_rows, row_size = scratch.shape
    num_taps = row_size // width
    expect("tap", "scratch", scratch, (max(max_rows, num_rows), num_taps * width), (x.dtype,))
    if not 0 <= index < num_taps:
        raise ValueError(f"tap: index must be below {num_taps}, found {index}")
    kernel = None
    if has_kernels(x.device):
        kernel = tap_kernel(num_rows, max_rows, width, num_taps, index, x.dtype)
    if kernel is None:
        return reference(x, scratch, index)
    return inject(kernel, [x], (scratch,))[0]


def tap_kernel(
    num_rows: int, max_rows: int, width: int, num_taps: int, index: int, dtype: DType
) -> Kernel | None:
    """The kernel for these shapes: any width that is a multiple of 4."""
    if width % VALUES or dtype not in FLOATS:
        return None
    threads = min(MAX_THREADS, 32 * divide_up(width, 32 * VALUES))
    name = f"tap_{index}of{num_taps}_{num_rows}x{width}"
    source = compose(
        ("tap",), "tap", name, T=dtype, WIDTH=width, TAPS=num_taps, TAP=index, THREADS=threads
    )
    x = Argument("x", (num_rows, width), dtype)
    return Kernel(
        name,
        source,
        (divide_up(width, threads * VALUES), num_rows, 1),
        threads,
        (Argument("scratch", (max_rows, num_taps * width), dtype),),
        (x,),
        num_ops=0,
        num_bytes=2 * x.num_bytes,
    )


def reference(x: Tensor, scratch: Tensor, index: int) -> Tensor:
    num_rows, width = x.shape

    def body(loops: Loops, scratch: Array, x: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            with loops.over(width) as c:
                scratch[t, index * width + c] = x[t, c]

    return loop_kernel(f"tap_{index}_{num_rows}_{width}", body, [scratch], [x])[0]

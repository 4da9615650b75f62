"""embed: the rows of a stored weight that tokens name, plain or packed.

    out[t, k] = round(weight[token[t], k])

tokens (T) int32, each below V; weight (V, C), out (T, C) in the compute type. A packed weight's
value is code * scale + bias in fp32, in one rounding where the scale has fewer bits than fp32, and
then rounded to the compute type. Moves the named rows in and out once.
"""

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.products import PACKED_BITS, WeightKind, kind_of, weight_arguments
from metal_ops.quantized import WORD_BITS
from metal_ops.rows import Rows, Weight, parts

VALUES = 4  # of a plain row, that a thread takes at once
MAX_THREADS = 256


def embed(tokens: Tensor, weight: Weight, dtype: DType) -> Tensor:
    """The rows of weight (V, C) that tokens (T) name, in `dtype`: (T, C)."""
    expect("embed", "tokens", tokens, (tokens.shape[0],), (dtypes.int32,))
    if has_kernels(tokens.device):
        kernel = embed_kernel(tokens.shape[0], kind_of(weight), dtype)
        if kernel is not None:
            return inject(kernel, [tokens, *parts(weight)])[0]
    return reference(tokens, weight, dtype)


def embed_kernel(num_rows: int, weight: WeightKind, dtype: DType) -> Kernel | None:
    """The kernel for these shapes: any width that is a multiple of 4, codes of 4 and 8 bits."""
    vocab_size, width = weight.shape
    if width % VALUES or dtype not in FLOATS or weight.dtype not in FLOATS:
        return None
    if weight.bits not in (0, *PACKED_BITS):
        return None
    values = WORD_BITS // weight.bits if weight.bits else VALUES
    threads = min(MAX_THREADS, 32 * divide_up(width, 32 * values))
    name = f"embed{weight.suffix}_{num_rows}x{width}"
    source = compose(
        ("embed",),
        "embed",
        name,
        T=dtype,
        W=weight.dtype,
        WIDTH=width,
        BITS=weight.bits,
        GROUP=weight.group_size,
        THREADS=threads,
    )
    out = Argument("out", (num_rows, width), dtype)
    return Kernel(
        name,
        source,
        (divide_up(width, threads * values), num_rows, 1),
        threads,
        (out,),
        (Argument("tokens", (num_rows,), dtypes.int32), *weight_arguments("weight", weight)),
        num_ops=2 * num_rows * width if weight.bits else 0,
        num_bytes=num_rows * weight.num_bytes // vocab_size + out.num_bytes,
    )


def reference(tokens: Tensor, weight: Weight, dtype: DType) -> Tensor:
    num_rows, width = tokens.shape[0], weight.shape[1]

    def body(loops: Loops, out: Array, tokens: Array, *arrays: Array) -> None:
        rows = Rows(weight, list(arrays))
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            row = loops.local(width)
            rows.unpack(loops, (tokens[t].cast(dtypes.weakint),), row)
            with loops.over(width) as k:
                out[t, k] = row[k]

    out = Tensor.empty(num_rows, width, dtype=dtype, device=tokens.device)
    return loop_kernel(f"embed_{num_rows}_{width}", body, [out], [tokens, *parts(weight)])[0]

"""argmax: the pick of a greedy row.

    out[n] = (the lowest id of the largest logit, 1 if every logit of the row is finite else 0)

logits (N, V) fp32, out (N, 2) int32. Ties are judged on the fp32 logits, and the lower id wins. A
NaN counts as -inf, so a row that has nothing larger gives id 0. Reads the logits once.
"""

from tinygrad import Tensor, dtypes

from metal_ops.checks import expect
from metal_ops.kernel import Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.sums import num_lanes

VALUES = 4  # of a thread at once
MAX_THREADS = 512


def argmax(logits: Tensor) -> Tensor:
    """The largest logit's id and the row's finite flag, of each row of logits (N, V)."""
    expect("argmax", "logits", logits, logits.shape, (dtypes.float32,))
    kernel = argmax_kernel(*logits.shape) if has_kernels(logits.device) else None
    return reference(logits) if kernel is None else inject(kernel, [logits])[0]


def argmax_kernel(num_rows: int, vocab_size: int) -> Kernel | None:
    """The kernel for logits of this shape: any vocabulary of 4 and more."""
    if vocab_size < VALUES:
        return None
    threads = min(MAX_THREADS, 32 * divide_up(vocab_size, 32 * VALUES))
    name = f"argmax_{num_rows}x{vocab_size}"
    source = compose(("argmax",), "argmax", name, VOCAB_SIZE=vocab_size, THREADS=threads)
    out = Argument("out", (num_rows, 2), dtypes.int32)
    logits = Argument("logits", (num_rows, vocab_size), dtypes.float32)
    return Kernel(
        name,
        source,
        (num_rows, 1, 1),
        threads,
        (out,),
        (logits,),
        num_ops=2 * num_rows * vocab_size,
        num_bytes=logits.num_bytes + out.num_bytes,
    )


def reference(logits: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    lanes = num_lanes(vocab_size)

    def body(loops: Loops, out: Array, logits: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            n = share[i]
            best, is_finite = loops.local(lanes), loops.local(lanes, dtype=dtypes.int32)
            best_id = loops.local(lanes, dtype=dtypes.int32)
            with loops.over(lanes) as lane:
                best[lane] = -float("inf")
                best_id[lane] = lane.cast(dtypes.int32)
                is_finite[lane] = 1
            with loops.over(vocab_size // lanes) as step, loops.over(lanes) as lane:
                token = step * lanes + lane
                value = logits[n, token]
                is_better = value > best[lane]
                best_id[lane] = is_better.where(token.cast(dtypes.int32), best_id[lane])
                best[lane] = is_better.where(value, best[lane])
                is_finite[lane] = (value.abs() < float("inf")).where(is_finite[lane], 0)
            with loops.over(lanes) as lane:
                is_lower = best[lane].eq(best[0]) & (best_id[lane] < best_id[0])
                is_better = (best[lane] > best[0]) | is_lower
                best_id[0] = is_better.where(best_id[lane], best_id[0])
                best[0] = is_better.where(best[lane], best[0])
                is_finite[0] = is_finite[0] * is_finite[lane]
            out[n, 0] = best_id[0]
            out[n, 1] = is_finite[0]

    out = Tensor.empty(num_rows, 2, dtype=dtypes.int32, device=logits.device)
    return loop_kernel(f"argmax_{num_rows}_{vocab_size}", body, [out], [logits])[0]

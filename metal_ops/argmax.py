"""argmax: the pick of a greedy row.

    out[n] = (the lowest id of the largest logit, 1 if every logit of the row is finite else 0)

logits (N, V) fp32, out (N, 2) int32. Ties are judged on the fp32 logits, and the lower id wins.
"""

from tinygrad import Tensor, dtypes

from metal_ops.checks import expect
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.sums import num_lanes


def argmax(logits: Tensor) -> Tensor:
    """The largest logit's id and the row's finite flag, of each row of logits (N, V)."""
    expect("argmax", "logits", logits, logits.shape, (dtypes.float32,))
    return reference(logits)


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

"""route: the experts of each row, and their weights.

    s = sigmoid(gate x[t]);  chosen: the A largest s + expert_bias, the lower id on ties, largest
    first
    weights[t, a] = scale * s[chosen] / (sum of the chosen s + 1e-6)     (the division if asked for)

x (T, C) in the compute type; gate (E, C), plain or packed, expert_bias (E) fp32. All of the routing
is fp32, and the bias decides the choice alone.
"""

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, SIMD_WIDTH, Argument, Kernel, compose, divide_up, has_kernels
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.matmul import matmul
from metal_ops.products import PACKED_BITS, WeightKind, kind_of, num_ops, weight_arguments
from metal_ops.rows import Weight, parts

VALUES = 8  # of a lane at once
MAX_SIMDGROUPS = 16
# Whose scores a SIMD-group makes at once: 16 bytes of each in flight a lane.
MAX_EXPERTS_AT_ONCE = 4
# Rows that share a load of the gate.
MAX_ROWS = 4
# A lane of the choice keeps a score of every 32nd expert in a register.
MAX_EXPERTS = 256


def route(
    x: Tensor,
    gate: Weight,
    expert_bias: Tensor | None,
    num_active: int,
    is_normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The experts chosen for each row of x (T, C) by gate (E, C): (T, A) int32, and their weights
    (T, A) fp32.
    """
    num_experts, width = gate.shape
    expect("route", "x", x, (x.shape[0], width))
    if expert_bias is not None:
        expect("route", "expert_bias", expert_bias, (num_experts,), (dtypes.float32,))
    if not 1 <= num_active <= num_experts:
        raise ValueError(f"route: {num_active} active experts of {num_experts} asked for")
    bias = [] if expert_bias is None else [expert_bias]
    if has_kernels(x.device):
        kind = kind_of(gate)
        kernel = route_kernel(
            x.shape[0], kind, x.dtype, num_active, bool(bias), is_normalised, scale
        )
        if kernel is not None:
            chosen, weights = inject(kernel, [x, *parts(gate), *bias])
            return chosen, weights
    logits = matmul(x, gate, dtype=dtypes.float32)
    return choose_reference(logits, expert_bias, num_active, is_normalised, scale)


def route_kernel(
    num_rows: int,
    gate: WeightKind,
    dtype: DType,
    num_active: int,
    has_bias: bool,
    is_normalised: bool,
    scale: float,
) -> Kernel | None:
    """The kernel for these shapes: up to 256 experts, any width that is a multiple of 8, codes of 4
    and 8 bits.
    """
    num_experts, width = gate.shape
    if dtype not in FLOATS or gate.dtype not in FLOATS or gate.bits not in (0, *PACKED_BITS):
        return None
    if width % VALUES or num_experts > MAX_EXPERTS:
        return None
    experts_at_once = min(MAX_EXPERTS_AT_ONCE, divide_up(num_experts, MAX_SIMDGROUPS))
    threads = SIMD_WIDTH * min(MAX_SIMDGROUPS, divide_up(num_experts, experts_at_once))
    rows_at_once = min(MAX_ROWS, 1 << (num_rows - 1).bit_length())
    name = f"route{gate.suffix}_{num_rows}x{num_experts}x{width}"
    source = compose(
        ("route",),
        "route",
        name,
        **{"T": dtype, "S" if gate.bits else "W": gate.dtype},
        BITS=gate.bits,
        GROUP=gate.group_size,
        DEPTH=width,
        NUM_ROWS=num_rows,
        NUM_EXPERTS=num_experts,
        ACTIVE=num_active,
        ROWS=rows_at_once,
        EXPERTS=experts_at_once,
        THREADS=threads,
        HAS_BIAS=has_bias,
        IS_NORMALISED=is_normalised,
        SCALE=float(scale),
    )
    bias = (Argument("expert_bias", (num_experts,), dtypes.float32),) if has_bias else ()
    x = Argument("x", (num_rows, width), dtype)
    num_groups = divide_up(num_rows, rows_at_once)
    return Kernel(
        name,
        source,
        (num_groups, 1, 1),
        threads,
        (
            Argument("chosen", (num_rows, num_active), dtypes.int32),
            Argument("weights", (num_rows, num_active), dtypes.float32),
        ),
        (x, *weight_arguments("gate", gate), *bias),
        num_ops=num_ops(gate, num_rows),
        num_bytes=num_groups * gate.num_bytes + x.num_bytes,
    )


def choose_reference(
    logits: Tensor, expert_bias: Tensor | None, num_active: int, is_normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The choice from the router's logits (T, E) fp32."""
    num_rows, num_experts = logits.shape

    def body(loops: Loops, chosen: Array, weights: Array, logits: Array, *bias: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            biased, sum_chosen = loops.local(num_experts), loops.local(1)
            best, score = loops.local(1, dtype=dtypes.int32), loops.local(1)
            with loops.over(num_experts) as e:
                biased[e] = sigmoid(logits[t, e]) + (bias[0][e] if bias else 0.0)
            sum_chosen[0] = 0.0
            with loops.over(num_active) as a:
                best[0] = 0
                score[0] = -float("inf")
                with loops.over(num_experts) as e:
                    is_better = biased[e] > score[0]
                    best[0] = is_better.where(e.cast(dtypes.int32), best[0])
                    score[0] = is_better.where(biased[e], score[0])
                expert = best[0].cast(dtypes.weakint)
                biased[expert] = -float("inf")
                chosen[t, a] = best[0]
                weights[t, a] = sigmoid(logits[t, expert])
                sum_chosen[0] = sum_chosen[0] + sigmoid(logits[t, expert])
            with loops.over(num_active) as a:
                divisor = sum_chosen[0] + 1e-6 if is_normalised else 1.0
                weights[t, a] = weights[t, a] / divisor * scale

    chosen = Tensor.empty(num_rows, num_active, dtype=dtypes.int32, device=logits.device)
    weights = Tensor.empty(num_rows, num_active, dtype=dtypes.float32, device=logits.device)
    reads = [logits] if expert_bias is None else [logits, expert_bias]
    chosen, weights = loop_kernel(f"route_{num_rows}_{num_experts}", body, [chosen, weights], reads)
    return chosen, weights


def sigmoid(x: UOp) -> UOp:
    return 1 / (1 + (-x).exp())

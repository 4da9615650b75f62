"""route: the experts of each row, their weights, and the rows grouped by expert.

    s = sigmoid(gate x[t]);  chosen: the A largest s + expert_bias, the lower id on ties, largest
    first
    weights[t, a] = scale * s[chosen] / (sum of the chosen s + 1e-6)     (the division if asked for)
    lists = (how many experts have pairs; those experts, the most pairs first; of each the first
            place and the number of its pairs; the pairs)

x (T, C) in the compute type; gate (E, C), plain or packed, expert_bias (E) fp32. All of the routing
is fp32, and the bias decides the choice alone. A pair is row * A + choice; `Lists` says where what
is.
"""

from dataclasses import dataclass

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import (
    SIMD_WIDTH,
    THREADGROUP_BYTES,
    Argument,
    Kernel,
    compose,
    divide_up,
    has_kernels,
)
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.matmul import matmul
from metal_ops.products import kind_of
from metal_ops.rows import Weight

MAX_SIMDGROUPS = 16
# Rows from which on choosing is a launch of its own, on several cores: 8 a SIMD-group of one
# threadgroup, which is twice what are waited for together.
FEWEST_APART = 8 * MAX_SIMDGROUPS + 1
CHOOSING_SIMDGROUPS = 4
# Rows of a SIMD-group at once, and scores of a lane: what is waited for together, in registers.
MAX_ROWS_AT_ONCE = 4
MAX_SCORES = 8
# A lane has a score of every 32nd expert in registers.
MAX_EXPERTS = 256


@dataclass(frozen=True)
class Lists:
    """The layout of the pairs grouped by expert, (2 + 3 E + T A) int32.

    How many experts have pairs; which they are, those with the most first, of equals the lowest id:
    what takes long begins early. Of each of those, where among the pairs its first one is; of each,
    how many it has; the pairs, in order of expert id and within an expert; a spare place. What lies
    beyond the experts that have pairs, and the spare place, may hold anything.
    """

    num_experts: int
    num_pairs: int

    @property
    def experts_offset(self) -> int:
        return 1

    @property
    def firsts_offset(self) -> int:
        return self.experts_offset + self.num_experts

    @property
    def counts_offset(self) -> int:
        return self.firsts_offset + self.num_experts

    @property
    def pairs_offset(self) -> int:
        return self.counts_offset + self.num_experts

    @property
    def argument(self) -> Argument:
        return Argument("lists", (self.pairs_offset + self.num_pairs + 1,), dtypes.int32)

    @property
    def constants(self) -> dict[str, int]:
        """What the texts of the kernels need to know of the layout and of its experts."""
        return {
            "EXPERTS_OFFSET": self.experts_offset,
            "FIRSTS_OFFSET": self.firsts_offset,
            "COUNTS_OFFSET": self.counts_offset,
            "PAIRS_OFFSET": self.pairs_offset,
            "NUM_EXPERTS": self.num_experts,
            # Of a lane, each 32 after the other.
            "SLOTS": divide_up(self.num_experts, SIMD_WIDTH),
        }

    @property
    def most_used(self) -> int:
        """How many experts may have pairs."""
        return min(self.num_experts, self.num_pairs)


def route(
    x: Tensor,
    gate: Weight,
    expert_bias: Tensor | None,
    num_active: int,
    is_normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The weights (T, A) fp32 of the experts that gate (E, C) chooses for each row of x (T, C), and
    the pairs of rows and choices grouped by expert, as `Lists` lays them out.
    """
    num_experts, width = gate.shape
    expect("route", "x", x, (x.shape[0], width))
    if expert_bias is not None:
        expect("route", "expert_bias", expert_bias, (num_experts,), (dtypes.float32,))
    if not 1 <= num_active <= num_experts:
        raise ValueError(f"route: {num_active} active experts of {num_experts} asked for")
    logits, bias = gate_logits(x, gate), [] if expert_bias is None else [expert_bias]
    if has_kernels(x.device):
        kernels = route_kernels(*logits.shape, num_active, bool(bias), is_normalised, scale)
        if len(kernels) == 1:
            weights, lists = inject(kernels[0], [logits, *bias])
            return weights, lists
        if kernels:
            choose, group = kernels
            weights, chosen = inject(choose, [logits, *bias])
            return weights, inject(group, [chosen])[0]
    chosen, weights = choose_reference(logits, expert_bias, num_active, is_normalised, scale)
    return weights, group_reference(chosen, num_experts)


def gate_logits(x: Tensor, gate: Weight) -> Tensor:
    """x (T, C) times the gate (E, C), in fp32: (T, E)."""
    kind = kind_of(gate)
    # Kernels round the values of a plain weight to the type of the rows. Where that holds less than
    # the gate's it would move choices, so the rows, which lose nothing, become fp32.
    is_exact = kind.bits or x.dtype in (kind.dtype, dtypes.float32)
    return matmul(x if is_exact else x.cast(dtypes.float32), gate, dtype=dtypes.float32)


def route_kernels(
    num_rows: int,
    num_experts: int,
    num_active: int,
    has_bias: bool,
    is_normalised: bool,
    scale: float,
) -> tuple[Kernel, ...]:
    """The launches for these shapes, up to 256 experts: route or, for many rows, route_choose and
    route_group. Empty where a threadgroup's memory has no room for the choices.
    """
    if num_experts > MAX_EXPERTS:
        return ()
    lists = Lists(num_experts, num_rows * num_active)
    slots = lists.constants["SLOTS"]
    logits = Argument("logits", (num_rows, num_experts), dtypes.float32)
    bias = (Argument("expert_bias", (num_experts,), dtypes.float32),) if has_bias else ()
    weights = Argument("weights", (num_rows, num_active), dtypes.float32)
    chosen = Argument("chosen", (lists.num_pairs,), dtypes.int32)
    is_apart = num_rows >= FEWEST_APART
    at_once = min(MAX_ROWS_AT_ONCE, MAX_SCORES // slots)
    own_rows = at_once if is_apart else divide_up(num_rows, MAX_SIMDGROUPS)
    choosing = {
        "NUM_ROWS": num_rows,
        "OWN_ROWS": own_rows,
        "ROWS": min(own_rows, at_once),
        "ACTIVE": num_active,
        "HAS_BIAS": has_bias,
        "IS_NORMALISED": is_normalised,
        "SCALE": float(scale),
    }

    def kernel(
        op: str,
        texts: tuple[str, ...],
        num_groups: int,
        num_simdgroups: int,
        writes: tuple[Argument, ...],
        reads: tuple[Argument, ...],
        num_ops: int,
        **constants: int | float,
    ) -> Kernel:
        name = f"{op}_{num_rows}x{num_experts}_{num_active}"
        constants |= lists.constants
        constants |= {"THREADS": SIMD_WIDTH * num_simdgroups, "SIMDGROUPS": num_simdgroups}
        return Kernel(
            name,
            compose((*texts, op), op, name, **constants),
            (num_groups, 1, 1),
            constants["THREADS"],
            writes,
            reads,
            num_ops,
            num_bytes=sum(argument.num_bytes for argument in (*writes, *reads)),
        )

    num_choices = num_rows * num_experts * num_active
    if not is_apart:
        num_simdgroups = divide_up(num_rows, own_rows)
        # For a choice of each pair and counts of each SIMD-group.
        if 2 * (lists.num_pairs + num_simdgroups * slots * SIMD_WIDTH) > THREADGROUP_BYTES:
            return ()
        texts, writes = ("route_choice", "route_grouping"), (weights, lists.argument)
        reads = (logits, *bias)
        return (kernel("route", texts, 1, num_simdgroups, writes, reads, num_choices, **choosing),)
    group_rows = own_rows * CHOOSING_SIMDGROUPS
    if 2 * group_rows * num_active > THREADGROUP_BYTES:
        return ()
    own_pairs = divide_up(lists.num_pairs, MAX_SIMDGROUPS * SIMD_WIDTH) * SIMD_WIDTH
    choose = kernel(
        "route_choose",
        ("route_choice",),
        divide_up(num_rows, group_rows),
        CHOOSING_SIMDGROUPS,
        (weights, chosen),
        (logits, *bias),
        num_choices,
        **choosing,
    )
    group = kernel(
        "route_group",
        ("route_grouping",),
        1,
        divide_up(lists.num_pairs, own_pairs),
        (lists.argument,),
        (chosen,),
        lists.num_pairs,
        NUM_PAIRS=lists.num_pairs,
        OWN_PAIRS=own_pairs,
    )
    return choose, group


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


def group_reference(chosen: Tensor, num_experts: int) -> Tensor:
    """The pairs of chosen (T, A) int32, as `Lists` lays them out."""
    num_pairs = chosen.shape[0] * chosen.shape[1]
    flat = chosen.reshape(num_pairs)
    layout = Lists(num_experts, num_pairs)

    def body(loops: Loops, lists: Array, chosen: Array) -> None:
        num_used = loops.local(1, dtype=dtypes.int32)
        num_listed = loops.local(1, dtype=dtypes.int32)
        rank = loops.local(1, dtype=dtypes.int32)
        firsts = loops.local(num_experts, dtype=dtypes.int32)
        counts = loops.local(num_experts, dtype=dtypes.int32)
        num_used[0] = 0
        num_listed[0] = 0
        with loops.over(num_experts) as e:
            firsts[e] = loops.keep(num_listed, 0)
            with loops.over(num_pairs) as pair:
                # Written always, but only a pair of this expert moves the count past what was
                # written.
                place = layout.pairs_offset + num_listed[0].cast(dtypes.weakint)
                lists[place] = pair.cast(dtypes.int32)
                num_listed[0] = num_listed[0] + chosen[pair].cast(dtypes.weakint).eq(e).cast(
                    dtypes.int32
                )
            counts[e] = num_listed[0] - firsts[e]
            num_used[0] = num_used[0] + (counts[e] > 0).cast(dtypes.int32)
        with loops.over(num_experts) as e:
            rank[0] = 0
            with loops.over(num_experts) as other:
                is_before = (counts[other] > counts[e]) | (
                    counts[other].eq(counts[e]) & (other < e)
                )
                rank[0] = rank[0] + is_before.cast(dtypes.int32)
            at = rank[0].cast(dtypes.weakint)
            lists[layout.experts_offset + at] = e.cast(dtypes.int32)
            lists[layout.firsts_offset + at] = firsts[e]
            lists[layout.counts_offset + at] = counts[e]
        lists[0] = num_used[0]

    lists = Tensor.empty(*layout.argument.shape, dtype=dtypes.int32, device=chosen.device)
    return loop_kernel(f"group_{num_pairs}_{num_experts}", body, [lists], [flat])[0]

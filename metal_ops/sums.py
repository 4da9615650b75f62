"""Sums in a fixed order, shared by the kernels of `reference()`.

Every sum runs in up to 16 lanes, each over every 16th term from the first to the last, and then
pairs the lanes off, upper half onto lower. The order depends on the number of terms alone, never on
how many rows or outputs a kernel takes at once. 16 fp32 lanes are one AVX-512 register or two AVX2
ones; the code generator's C compiler vectorises the lane loop.
"""

from collections.abc import Callable
from contextlib import ExitStack

from tinygrad.uop.ops import UOp

from metal_ops.loops import Array, Index, Loops

MAX_LANES = 16


def largest_divisor(size: int, choices: tuple[int, ...]) -> int:
    """The first of `choices`, in the order given, that divides `size`; 1 if none does."""
    return next((choice for choice in choices if size % choice == 0), 1)


def num_lanes(num_terms: int) -> int:
    """How many lanes a sum of so many terms has: a power of two that divides it, at most 16."""
    return largest_divisor(num_terms, (16, 8, 4, 2))


def pair_off(loops: Loops, lanes: Array, num: int, *outer: int) -> None:
    """Leaves in `lanes[..., 0]` the total of `lanes[..., :num]`, upper half added onto lower until
    one is left.

    `outer` are the sizes of the axes before the lanes. All sums take a step before any takes the
    next, so that none waits for its own last one.
    """
    while num > 1:
        num //= 2
        with ExitStack() as nest:
            at = [nest.enter_context(loops.over(size)) for size in outer]
            with loops.over(num) as lane:
                lanes[*at, lane] = lanes[*at, lane] + lanes[*at, lane + num]


def total(loops: Loops, num_terms: int, term: Callable[[UOp], UOp]) -> UOp:
    """The sum of term(0) .. term(num_terms - 1) in fp32."""
    num = num_lanes(num_terms)
    lanes = loops.local(num)
    with loops.over(num) as lane:
        lanes[lane] = 0.0
    with loops.over(num_terms // num) as step, loops.over(num) as lane:
        lanes[lane] = lanes[lane] + term(step * num + lane)
    pair_off(loops, lanes, num)
    return lanes[0]


def products(
    loops: Loops,
    num_rows: int,
    num_outputs: int,
    num_terms: int,
    left: Callable[[Index, UOp], UOp],
    right: Callable[[Index, UOp], UOp],
    run: int = MAX_LANES,
    group: int = MAX_LANES,
) -> Array:
    """sums[a, b] = sum over c of left(a, c) * right(b, c): a tile of a matrix product, (rows,
    outputs) in fp32.

    Each sum is that of `total`, whatever the tile: a row's bits are the same alone or beside
    others. run and group: how many consecutive terms share a word of a packed row, and how many a
    scale; loops are cut there.
    """
    num = num_lanes(num_terms)
    run, group = min(run, num), max(group, num)
    lanes = loops.local(num_rows, num_outputs, num)
    with loops.over(num_rows) as a, loops.over(num_outputs) as b, loops.over(num) as lane:
        lanes[a, b, lane] = 0.0
    with loops.over(num_terms // group) as outer, loops.over(group // num) as step:
        with loops.over(num_rows) as a, loops.over(num_outputs) as b:
            with loops.over(num // run) as first, loops.over(run) as i:
                lane = first * run + i
                c = outer * group + step * num + lane
                lanes[a, b, lane] = lanes[a, b, lane] + left(a, c) * right(b, c)
    pair_off(loops, lanes, num, num_rows, num_outputs)
    # Side by side, so that what is done to them next runs over all of them at once.
    sums = loops.local(num_rows, num_outputs)
    with loops.over(num_rows) as a, loops.over(num_outputs) as b:
        sums[a, b] = lanes[a, b, 0]
    return sums

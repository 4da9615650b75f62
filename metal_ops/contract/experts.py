"""The contracts of expert_gate_up.metal and expert_down.metal, with plain and packed weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import (
    EPSILON,
    Buffers,
    Case,
    Contract,
    Control,
    Expected,
    SameBits,
    pattern,
    rounded,
)
from metal_ops.contract.matmul import BARRIER, KINDS, SUM_ROOM, TURNS, named, weights_of
from metal_ops.contract.route import grouped
from metal_ops.experts import expert_down_kernel, expert_gate_up_kernel
from metal_ops.kernel import Kernel, Target
from metal_ops.matmul import gate_up_kernel, matmul_kernel
from metal_ops.product_tile import MANY_ROWS
from metal_ops.products import WeightKind

Kind = tuple[DType, DType, int, int]
# An expert's outputs are the first one's, so many further.
SHIFT = 5
CONTROLS = (
    TURNS,
    Control(
        "no barrier before the next tile",
        f"    // The next tile's rows and sums go where these were.\n    {BARRIER}",
        "",
        "shapes",
        is_race=True,
    ),
    Control(
        "an expert reads the first expert's weights",
        "members.expert * NUM_OUTPUTS + output",
        "output",
        "reference",
    ),
    Control(
        "members after the first take the first member's row",
        "members.pairs[member]",
        "members.pairs[0]",
        "rows",
    ),
    Control("an expert's tiles are all its first", "(number - from) * ROWS", "0", "shapes"),
    Control(
        "experts without members have tiles", "< num_used ?", ">= 0 ?", "reference", is_race=True
    ),
    Control(
        "experts without members are walked",
        "number < lists[0] ?",
        "true ?",
        "shapes",
        is_race=True,
    ),
    Control(
        "experts after the 32nd begin at the first tile",
        "const int from = num_before +",
        "const int from =",
        "shapes",
    ),
    Control(
        "every tile takes the first members",
        "min(first + pointed_row",
        "min(pointed_row",
        "rows",
    ),
)


def contracts(target: Target) -> list[Contract]:
    return [
        *(gate_up_contract(name, kinds, target) for name, kinds in KINDS.items()),
        *(down_contract(name, kinds, target) for name, kinds in KINDS.items()),
    ]


def gate_up_contract(name: str, kinds: list[Kind], target: Target) -> Contract:
    make_case = partial(gate_up_case, target)
    cases = [
        make_case(spread(1, 1, 4), 4, 80, 128, kinds[0]),
        make_case(spread(1, 4, 6), 6, 33, 384, kinds[1]),
        make_case(spread(5, 2, 8), 8, 17, 256, kinds[2]),
        make_case(spread(3, 3, 5), 5, 80, 96, kinds[1]),
        make_case(spread(20, 3, 4), 4, 9, 128, kinds[-1]),
        make_case(same(70, 1, 4), 4, 24, 128, kinds[0]),
        # More members than a tile, of a threadgroup that takes all of an expert's.
        make_case(same(20, 2, 64), 64, 16, 128, kinds[0]),
        # More experts than lanes have members, and one of them has several tiles.
        make_case(skewed(45, 40), 40, 16, 128, kinds[0]),
        make_case(spread(2, 4, 8), 8, 320, 128, kinds[0]),
        make_case(spread(6, 4, 8), 8, 24, 1024, kinds[0], "reference"),
    ]
    if name == " 4-bit":
        cases.append(make_case(same(2, 4, 8), 8, 1536, 2048, kinds[0], "reference"))
    if target is not Target.METAL:
        # Outputs and members for all of a GPU, whose threadgroups have their largest tile.
        cases.append(make_case(spread(256, 1, 16), 16, 576, 256, kinds[0]))
        cases.append(make_case(same(70, 1, 2), 2, 4288, 256, kinds[0]))

    def make(chosen: np.ndarray, num_experts: int) -> Case:
        return make_case(chosen, num_experts, 24, 640, kinds[0])

    def dense(num_rows: int) -> Kernel:
        weight = WeightKind((24, 640), *kinds[0][1:])
        return gate_up_kernel(num_rows, weight, weight, kinds[0][0], target)

    swapped = ("swiglu(gate, up);", "swiglu(up, gate);")
    controls = (*CONTROLS, Control("gate and up change places", *swapped, "reference"))
    rows = company(target, make, "x", "hidden", dense)
    return Contract(f"expert_gate_up{name}", tuple(cases), rows, controls)


def down_contract(name: str, kinds: list[Kind], target: Target) -> Contract:
    make_case = partial(down_case, target)
    cases = [
        make_case(spread(1, 1, 4), 4, 96, 128, kinds[0]),
        make_case(spread(1, 4, 6), 6, 97, 384, kinds[1]),
        make_case(spread(5, 2, 8), 8, 17, 256, kinds[2]),
        make_case(spread(3, 3, 5), 5, 96, 32, kinds[1]),
        make_case(spread(20, 3, 4), 4, 24, 128, kinds[-1]),
        make_case(same(70, 1, 4), 4, 40, 128, kinds[0]),
        # More members than a tile, of a threadgroup that takes all of an expert's.
        make_case(same(20, 2, 64), 64, 16, 128, kinds[0]),
        # More experts than lanes have members, and one of them has several tiles.
        make_case(skewed(45, 40), 40, 16, 128, kinds[0]),
        make_case(spread(2, 4, 8), 8, 640, 128, kinds[0]),
        make_case(spread(6, 4, 8), 8, 48, 1024, kinds[0], "reference"),
    ]
    if name == " 4-bit":
        cases.append(make_case(same(2, 4, 8), 8, 2048, 1536, kinds[0], "reference"))
    if target is not Target.METAL:
        cases.append(make_case(spread(256, 1, 16), 16, 1152, 256, kinds[0]))
        cases.append(make_case(same(70, 1, 2), 2, 8512, 256, kinds[0]))

    def make(chosen: np.ndarray, num_experts: int) -> Case:
        return make_case(chosen, num_experts, 40, 640, kinds[0])

    def dense(num_rows: int) -> Kernel:
        weight = WeightKind((40, 640), *kinds[0][1:])
        return matmul_kernel(num_rows, weight, kinds[0][0], dtypes.float32, target=target)

    rows = company(target, make, "hidden", "outputs", dense)
    return Contract(f"expert_down{name}", tuple(cases), rows, CONTROLS)


def gate_up_case(
    target: Target,
    chosen: np.ndarray,
    num_experts: int,
    num_outputs: int,
    depth: int,
    kind: Kind,
    gate: str = "shapes",
) -> Case:
    num_rows, num_active = chosen.shape
    dtype, kinds, buffers, values, order = stacked(
        kind, num_experts, num_outputs, depth, "w1", "w3"
    )
    kernel = expert_gate_up_kernel(num_rows, num_active, *kinds, dtype, target)
    x = rounded(pattern(num_rows, depth, seed=5), dtype)
    pair = np.arange(chosen.size)[:, None]
    at = pair // num_active, order[chosen.reshape(-1)]
    g, u = ((x @ values[name].T)[at] for name in ("w1", "w3"))
    out = g / (1 + np.exp(-g)) * u
    # As of gate_up.
    room = SUM_ROOM * depth**0.5 * (np.abs(u) + np.abs(g) + 1)
    room += 4.5 * EPSILON[dtype] * np.abs(g * u)
    buffers |= {"x": x, "lists": filled(grouped(chosen, num_experts))}
    return Case(named(kernel, kind), (kernel,), buffers, {"hidden": Expected(out, room)}, gate)


def down_case(
    target: Target,
    chosen: np.ndarray,
    num_experts: int,
    num_outputs: int,
    depth: int,
    kind: Kind,
    gate: str = "shapes",
) -> Case:
    dtype, kinds, buffers, values, order = stacked(kind, num_experts, num_outputs, depth, "w2")
    kernel = expert_down_kernel(chosen.size, *kinds, dtype, target)
    hidden = rounded(pattern(chosen.size, depth, seed=5), dtype)
    at = np.arange(chosen.size)[:, None], order[chosen.reshape(-1)]
    out = Expected((hidden @ values["w2"].T)[at], SUM_ROOM * depth**0.5, EPSILON[dtypes.float32])
    buffers |= {"hidden": hidden, "lists": filled(grouped(chosen, num_experts))}
    return Case(named(kernel, kind), (kernel,), buffers, {"outputs": out}, gate)


def company(
    target: Target,
    make: Callable[[np.ndarray, int], Case],
    x: str,
    out: str,
    dense: Callable[[int], Kernel],
) -> tuple[SameBits, ...]:
    """Rows of a wide case and the same rows in narrower ones; an expert's members by the dense
    kernel of its weights.

    x, out: the buffers that hold the rows and what is made of them.
    """
    num_rows = MANY_ROWS[target][0].num_rows + 8
    others = np.array([0, 1, 3])[np.arange(num_rows) % 3]
    chosen = np.stack([np.full(num_rows, 2), others], 1)
    wide = make(chosen, 4)

    def rows_of(buffer: np.ndarray, rows: list[int]) -> np.ndarray:
        return buffer.reshape(num_rows, -1, buffer.shape[-1])[rows].reshape(-1, buffer.shape[-1])

    def picked(rows: list[int]) -> SameBits:
        narrow = make(chosen[rows], 4)
        buffers = narrow.buffers | {x: rows_of(wide.buffers[x], rows)}
        alone = replace(narrow, shape=f"{len(rows)} rows", buffers=buffers)
        picks = (lambda found: rows_of(found[out], rows), lambda found: found[out])
        return SameBits(f"rows {rows[:3]} of {num_rows}", (wide, alone), picks)

    def as_dense(case: Case, chosen: np.ndarray, expert: int) -> SameBits:
        members = np.flatnonzero(chosen == expert)
        rows = members * len(case.buffers[x]) // chosen.size
        kernel = dense(len(members))
        weights = zip(kernel.reads[1:], case.kernels[0].reads[2:])
        buffers = {to.name: case.buffers[of.name][expert] for to, of in weights}
        buffers["x"] = case.buffers[x][rows]
        alone = Case(kernel.name, (kernel,), buffers)
        picks = (lambda found: found[out][members], lambda found: found["out"])
        return SameBits(f"expert {expert} of {case.shape}", (case, alone), picks)

    every = list(range(num_rows))
    only = np.zeros((9, 1), int)
    return (
        *map(picked, ([0], every[-1:], [35, 3], every[8:17], every[4:-4], every[::-1])),
        *(as_dense(wide, chosen, expert) for expert in (2, 1)),
        as_dense(make(only, 1), only, 0),
    )


def stacked(
    kind: Kind, num_experts: int, num_outputs: int, depth: int, *names: str
) -> tuple[DType, list[WeightKind], Buffers, Buffers, np.ndarray]:
    """The compute type, the kinds of stacked weights, their buffers, what those of the first expert
    stand for, and which of its outputs (E, N) each expert's are.
    """
    sizes = dict.fromkeys(names, num_outputs)
    dtype, kinds, buffers, values = weights_of(kind, depth, **sizes)
    order = np.arange(num_outputs) + SHIFT * np.arange(num_experts)[:, None]
    order %= num_outputs
    kinds = [replace(one, shape=(num_experts, *one.shape)) for one in kinds.values()]
    return dtype, kinds, {name: part[order] for name, part in buffers.items()}, values, order


def filled(lists: np.ndarray) -> np.ndarray:
    """Lists that hold, where nothing is, what could be an expert with two pairs."""
    return np.where(lists < 0, 2, lists)


def spread(num_rows: int, num_active: int, num_experts: int) -> np.ndarray:
    """Choices (T, A) all over the experts, none twice in a row."""
    t = np.arange(num_rows)[:, None]
    return (3 * t * t + t + np.arange(num_active) * (num_experts // num_active)) % num_experts


def skewed(num_rows: int, num_experts: int) -> np.ndarray:
    """Choices (T, 2) of the first expert by every row, and of the others in turn."""
    t = np.arange(num_rows)
    return np.stack([0 * t, 1 + t % (num_experts - 1)], 1)


def same(num_rows: int, num_active: int, num_experts: int) -> np.ndarray:
    """Choices (T, A) of the same last experts by every row."""
    return np.tile(num_experts - 1 - np.arange(num_active), (num_rows, 1))

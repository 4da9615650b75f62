"""The contract of norm.metal."""

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import EPSILON, Case, Contract, Control, Expected, SameBits, pattern
from metal_ops.contract.matmul import BARRIER
from metal_ops.kernel import TYPES
from metal_ops.norm import norm_kernel
from metal_ops.table import Capacity

EPS = 1e-5
# x and delta, the normed value and the product with the weight are each rounded once; fp32 inside.
ROUNDINGS = 3
F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16


def contracts() -> list[Contract]:
    kinds = [(F32, F32, None), (BF16, BF16, 0), (F16, F16, 4), (F32, BF16, 2)]
    small = [(1, 64), (5, 96), (2, 2560)]
    cases = [case(*shape, *kind) for shape in small for kind in kinds]
    cases += [case(6, 2048, *kind, gate="reference") for kind in kinds]
    cases.append(case(9, 1024, BF16, BF16, 2, drawn=(4, 0, 4, 8)))
    whole = case(9, 1024, BF16, BF16, 4)
    rows = [
        SameBits(
            f"row {t} of 9",
            (whole, alone(whole, t)),
            (lambda found, t=t: found["out"][t], lambda found: found["out"][0]),
        )
        for t in (1, 8)
    ]
    controls = (
        Control("the mean is a sum", "total / WIDTH", "total", "reference"),
        Control("no barrier before the total", BARRIER, "", "shapes", is_race=True),
        Control("a row takes the first row's experts", "(t * ACTIVE + a)", "a", "rows"),
        Control("a drawn row is its place", "drawn_row(table, row)", "row", "shapes"),
    )
    return [Contract("rms_norm", tuple(cases), tuple(rows), controls)]


def case(
    num_rows: int,
    width: int,
    dtype: DType,
    weight_dtype: DType,
    num_active: int | None,
    gate: str = "shapes",
    drawn: tuple[int, ...] = (),
) -> Case:
    """num_active: None without a delta, 0 with a plain one. drawn: the rows whose norm is taken."""
    capacity = Capacity(num_rows, 1, len(drawn)) if drawn else None
    has_delta = num_active is not None
    kernel = norm_kernel(
        num_rows, width, dtype, weight_dtype, EPS, has_delta, num_active or 0, capacity
    )
    buffers = {"x": pattern(num_rows, width), "weight": 1 + pattern(width, seed=1)}
    sums = buffers["x"]
    if num_active:
        outputs = pattern(num_rows * num_active, width, seed=2)
        weights = np.abs(pattern(num_rows, num_active, seed=3)) + 1 / 8
        buffers |= {"outputs": outputs, "weights": weights}
        mixed = outputs.reshape(num_rows, num_active, width) * weights[:, :, None]
        sums = sums + mixed.sum(1)
    elif has_delta:
        buffers["delta"] = pattern(num_rows, width, seed=2)
        sums = sums + buffers["delta"]
    if capacity is not None:
        table = np.zeros(capacity.table_size)
        table[capacity.drawn_offset :] = drawn
        buffers["table"] = table
    scale = 1 / np.sqrt((sums**2).mean(-1, keepdims=True) + EPS)
    normed = sums * scale * buffers["weight"]
    bound = ROUNDINGS * EPSILON[dtype] + 1e-6
    room = {"absolute": float(scale.max()) * bound / 16, "relative": bound}
    expected = {"out": Expected(normed[list(drawn)] if drawn else normed, **room)}
    if has_delta and not drawn:
        expected["sum"] = Expected(sums, absolute=bound / 16, relative=bound)
    kind = "no delta" if num_active is None else f"{num_active} experts" if num_active else "delta"
    shape = f"{num_rows}x{width} {TYPES[dtype]}, weight {TYPES[weight_dtype]}, {kind}"
    return Case(shape, (kernel,), buffers, expected, gate)


def alone(whole: Case, t: int) -> Case:
    """Row t of a case of 4 experts, by itself."""
    kernel = norm_kernel(1, 1024, BF16, BF16, EPS, True, 4, None)
    rows = {"x": 1, "outputs": 4, "weights": 1, "weight": None}
    buffers = {
        name: whole.buffers[name]
        if count is None
        else whole.buffers[name][t * count : (t + 1) * count]
        for name, count in rows.items()
    }
    return Case(f"row {t} alone", (kernel,), buffers)

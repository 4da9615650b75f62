"""The contract of tap.metal."""

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import Case, Contract, Control, Expected, SameBits
from metal_ops.kernel import TYPES
from metal_ops.tap import tap_kernel

TAPS, THIRD = 5, 2
F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16


def contracts() -> list[Contract]:
    cases = [
        case(3, 3, 36, 3, 2, F32),
        case(2, 5, 1028, 2, 0, F16),
        case(3, 4, 4, 1, 0, BF16),
        *(case(num_rows, 32, 2048, TAPS, THIRD, BF16) for num_rows in (1, 10, 32)),
        case(2048, 2048, 256, TAPS, THIRD, BF16, gate="reference"),
    ]
    width = 64
    columns = slice(THIRD * width, (THIRD + 1) * width)
    whole = case(10, 10, width, TAPS, THIRD, BF16)
    rows = [
        SameBits(
            f"row {t} of 10",
            (whole, case(1, 3, width, TAPS, THIRD, BF16, first=t)),
            (
                lambda found, t=t: found["scratch"][t, columns],
                lambda found: found["scratch"][0, columns],
            ),
        )
        for t in (1, 9)
    ]
    controls = (
        Control("rows packed at the hidden size", "(TAPS * WIDTH)", "WIDTH", "shapes"),
        Control("another tap's column overwritten", "TAP * W", "(TAP + 1) % TAPS * W", "shapes"),
        Control("a wrong source column is read", "WIDTH + at;\n  *", "WIDTH;\n  *", "shapes"),
        Control("a row reads the first row", "x += t * WIDTH", "x += 0", "rows"),
    )
    return [Contract("tap", tuple(cases), tuple(rows), controls)]


def case(
    num_rows: int,
    max_rows: int,
    width: int,
    num_taps: int,
    index: int,
    dtype: DType,
    gate: str = "shapes",
    first: int = 0,
) -> Case:
    """first: which row of a larger x is the first here."""
    kernel = tap_kernel(num_rows, max_rows, width, num_taps, index, dtype)
    # Whole numbers of 7 bits, none of which stands next to itself.
    x = (37 * np.arange(first, first + num_rows)[:, None] + np.arange(width)) % 251 - 125
    values = np.zeros((max_rows, num_taps * width))
    written = np.zeros(values.shape, bool)
    columns = slice(index * width, (index + 1) * width)
    values[:num_rows, columns], written[:num_rows, columns] = x, True
    shape = (
        f"{num_rows}x{width} {TYPES[dtype]}, tap {index} of {num_taps}, {max_rows} rows of scratch"
    )
    return Case(shape, (kernel,), {"x": x}, {"scratch": Expected(values, written=written)}, gate)

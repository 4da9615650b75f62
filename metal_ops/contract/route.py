"""The contracts of route.metal, with a plain and with packed gates."""

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import Case, Contract, Control, Expected, pattern
from metal_ops.contract.matmul import BARRIER, KINDS, company, named, weights_of
from metal_ops.products import weight_arguments
from metal_ops.route import route_kernel

Kind = tuple[DType, DType, int, int]
# Of fp32 sums, an exponential and two divisions.
WEIGHT_ROOM = 2e-6
# The gate of a tied case repeats itself after so many experts: ties between lanes and within one.
PERIOD = 4


def contracts() -> list[Contract]:
    wide_gate = (dtypes.bfloat16, dtypes.float32, 0, 0)
    return [route_contract(name, kinds + [wide_gate] * (not name)) for name, kinds in KINDS.items()]


def route_contract(name: str, kinds: list[Kind]) -> Contract:
    # Rows, experts and active ones around the borders of rows at once, experts at once and lanes.
    shapes = [(1, 4, 1, 128), (5, 6, 4, 384), (2, 33, 8, 256), (3, 64, 4, 128), (9, 101, 3, 640)]
    cases = [
        case(*shape, kinds[(2 * i + again) % len(kinds)])
        for i, shape in enumerate(shapes)
        for again in range(2)
    ]
    cases += [
        case(2, 7, 7, 256, kinds[0], is_normalised=False, scale=2.5),
        case(3, 1, 1, 128, kinds[0], has_bias=False),
        case(3, 40, 40, 256, kinds[0], has_nan=True),
        case(6, 64, 4, 2048, kinds[0], "reference"),
        case(1, 64, 4, 2048, kinds[1], "reference", has_bias=False, scale=1.5),
        case(5, 128, 6, 256, kinds[0], "reference", period=PERIOD),
    ]

    def all_scores(num_rows: int) -> Case:
        return case(num_rows, 40, 40, 640, kinds[0], is_normalised=False)

    rows = company(all_scores, 640, "weights")
    lowest = "simd_min(best == largest ? id : NO_ID)"
    highest = "simd_max(best == largest ? id : -1)"
    taken = "if (id == 32 * i + int(lane)) left[i] = -INFINITY;"
    first_rows = ("min(first_row + r, NUM_ROWS - 1) * DEPTH", "r * DEPTH")
    packed = Control(
        "the first group's scale", "gate_scales[at / GROUP]", "gate_scales[0]", "reference"
    )
    controls = (
        Control("ties go to the higher expert id", lowest, highest, "reference"),
        Control(
            "ties in a lane go to the higher id", "left[i] > best", "left[i] >= best", "reference"
        ),
        Control("bias enters the weights", "] = scores[r][id]", "] = largest", "reference"),
        Control("an expert is chosen again", taken, "", "reference"),
        Control("no barrier before the choice", BARRIER, "", "shapes", is_race=True),
        Control("rows take the first ones' values", *first_rows, "rows"),
        *([packed] if name else []),
    )
    return Contract(f"route{name}", tuple(cases), rows, controls)


def case(
    num_rows: int,
    num_experts: int,
    num_active: int,
    width: int,
    kind: Kind,
    gate: str = "shapes",
    has_bias: bool = True,
    is_normalised: bool = True,
    scale: float = 1.0,
    period: int | None = None,
    has_nan: bool = False,
) -> Case:
    """period: of the gate and the bias, after which the same experts come again. has_nan: all
    logits of row 1 are NaN, and those of expert 3."""
    dtype, kinds, buffers, values = weights_of(kind, width, gate=num_experts)
    again = np.arange(num_experts) % (period or num_experts)
    buffers = {name: buffer[again] for name, buffer in buffers.items()}
    x, rows = pattern(num_rows, width, seed=5), values["gate"][again]
    if has_nan:
        last = weight_arguments("gate", kinds["gate"])[-1].name  # values, or biases
        x[1, 200] = rows[3] = buffers[last][3] = np.nan
    logits = x @ rows.T
    # Within 4, where scores of neighbours are still apart in fp32; by a power of two, exactly.
    halvings = max(0, int(np.ceil(np.log2(np.nanmax(np.abs(logits)) / 4))))
    buffers["x"], logits = x / 2**halvings, logits / 2**halvings
    bias = np.zeros(num_experts)
    if has_bias:
        bias = buffers["expert_bias"] = pattern(num_experts, seed=9)[again]
    kernel = route_kernel(
        num_rows, kinds["gate"], dtype, num_active, has_bias, is_normalised, scale
    )
    chosen, weights = routed(logits, bias, num_active, is_normalised, scale)
    expected = {"chosen": Expected(chosen), "weights": Expected(weights, relative=WEIGHT_ROOM)}
    if has_nan:
        del expected["weights"]
    what = ", ties" * bool(period) + ", NaN" * has_nan
    shape = f"{named(kernel, kind)}, {num_active} active, scale {scale}{what}"
    return Case(shape, (kernel,), buffers, expected, gate)


def routed(
    logits: np.ndarray, bias: np.ndarray, num_active: int, is_normalised: bool, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """The chosen experts, the lowest id of equals, and their weights. Instead of a NaN, 0."""
    scores = 1 / (1 + np.exp(-logits))
    chosen = np.argsort(-(scores + bias), axis=1, kind="stable")[:, :num_active]
    chosen[np.isnan(np.take_along_axis(scores, chosen, 1))] = 0
    weights = np.take_along_axis(scores, chosen, 1)
    divisor = weights.sum(1, keepdims=True) + 1e-6 if is_normalised else 1.0
    return chosen, weights / divisor * scale

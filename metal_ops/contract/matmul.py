"""The contracts of matmul.metal, gate_up.metal and project.metal, with plain and packed weights."""

from collections.abc import Callable
from functools import partial

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import EPSILON, Buffers, Case, Contract, Control, Expected, SameBits
from metal_ops.contract.case import pattern, rounded
from metal_ops.kernel import TYPES, Kernel, Target
from metal_ops.matmul import gate_up_kernel, matmul_kernel, project_kernel
from metal_ops.product_tile import FEWEST_MANY, MANY_ROWS
from metal_ops.products import BLOCK, WeightKind

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
# fp32 sums of products of numbers below 1, in any order: well within this for a depth of 4,096.
SUM_ROOM = 1e-5
KINDS = {
    "": [
        (BF16, BF16, 0, 0),
        (F32, F32, 0, 0),
        (F32, BF16, 0, 0),
        (F16, BF16, 0, 0),
        (F16, F16, 0, 0),
    ],
    " 4-bit": [(BF16, BF16, 4, 64), (F32, F16, 4, 32), (F16, F16, 4, 128)],
    " 8-bit": [(BF16, BF16, 8, 64), (F32, F32, 8, 32), (F16, BF16, 8, 128)],
}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
# Of the kernels on the texts that make a threadgroup's sums.
TURNS = Control(
    "every turn stores the first one's outputs",
    "first_output + turn * OUTPUTS + place.output",
    "first_output + place.output",
    "shapes",
)
# Of those texts.
SUM_CONTROLS = (
    Control(
        "few rows: no barrier before the chunks are added",
        f"  {BARRIER}}}\n",
        "}\n",
        "shapes",
        is_race=True,
    ),
    Control(
        "many rows: no barrier before they are read",
        f"wait_for_copies();\n        {BARRIER}",
        "wait_for_copies();\n",
        "shapes",
        is_race=True,
    ),
    Control(
        "few rows: no barrier before the next turn's sums",
        f"  if (turn > 0) {BARRIER}",
        "",
        "shapes",
        is_race=True,
    ),
    Control(
        "few rows: the next turn has the same weights",
        "row_after(weights[o], OUTPUTS)",
        "row_after(weights[o], 0)",
        "shapes",
    ),
    Control(
        "few rows: the first chunk twice",
        "+= totals.partial[chunk * (ROWS * WEIGHTS * OUTPUTS) + element]",
        "+= totals.partial[element]",
        "shapes",
    ),
    Control(
        "many rows: the last chunk is left out",
        "unit + 1 == chunk_start(chunk)",
        "unit + 1 == chunk_start(chunk) && chunk < CHUNKS",
        "shapes",
    ),
    Control(
        "many rows: those of the stage before",
        "(stage % STAGES * ROWS + TILE",
        "((stage + STAGES - 1) % STAGES * ROWS + TILE",
        "shapes",
    ),
    Control(
        "many rows: tiles that they do not fill are left out",
        "num_rows > TILE",
        "num_rows > 2 * TILE",
        "shapes",
    ),
)


def contracts(target: Target) -> list[Contract]:
    return [
        make(name, kinds, target)
        for make in (matmul_contract, gate_up_contract, project_contract)
        for name, kinds in KINDS.items()
    ]


def matmul_contract(name: str, kinds: list, target: Target) -> Contract:
    make_case = partial(matmul_case, target)
    # Turns, with rows that are kept and that are not.
    cases = [make_case(5, 5120, 128, kind, False) for kind in kinds[:2]]
    cases.append(make_case(3, 5120, 1152, kinds[0], False))
    # Rows and outputs around the tiles' borders; depths of one unit, of few, and of uneven chunks.
    shapes = [(1, 97, 128), (5, 8, 384), (9, 24, 1152), (17, 40, 256), (37, 17, 256)]
    cases += [
        make_case(rows, outputs, depth, kinds[i % len(kinds)], has_bias=bool(i % 2))
        for i, (rows, outputs, depth) in enumerate(shapes * 2)
    ]
    # Many rows, of every kind: a last stage and span that are not full, and those and outputs that
    # are.
    cases += [make_case(43, 70, 9 * (kind[-1] or BLOCK), kind, False) for kind in kinds]
    cases += [make_case(43, 128, 8 * (kind[-1] or BLOCK), kind, False) for kind in kinds]
    if target is not Target.METAL:
        # Rows and outputs for all of a GPU, whose threadgroups have their largest tile.
        cases.append(make_case(65, 8512, 8 * (kinds[0][-1] or BLOCK), kinds[0], False))
        cases.append(make_case(65, 40, 192, (F16, F16, *kinds[0][2:]), False))
    # Many rows of few outputs, a router's, which few_rows.metal multiplies.
    cases += [
        make_case(70, 24, 256, kind, False, out_dtype=F32, fewest_many=None) for kind in kinds[:2]
    ]
    # Whole rows and outputs of a real matrix, the wide projection of the convolution.
    cases.append(make_case(16, 6144 // 8, 2048, kinds[0], False, "reference"))
    cases.append(make_case(1, 2048, 1024, kinds[0], True, "reference"))
    cases.append(make_case(3, 65, 1024, kinds[1], False, "reference", F32))
    rows = company(target, lambda num_rows: make_case(num_rows, 24, 1152, kinds[0], True))
    rows += company(
        target, lambda num_rows: make_case(num_rows, 8, 640, kinds[0], True, fewest_many=None)
    )[:2]
    controls = (
        *SUM_CONTROLS,
        TURNS,
        Control(
            "rows beyond a tile take the first tile's",
            "min(first_row + pointed_row",
            "min(pointed_row",
            "rows",
        ),
        *packed_controls(name),
    )
    return Contract(f"matmul{name}", tuple(cases), rows, controls)


def packed_controls(name: str) -> tuple[Control, ...]:
    if not name:
        return (
            Control(
                "the weights of a block in reverse",
                "to_values(weights.words[j])",
                "to_values(weights.words[3 - j])",
                "reference",
            ),
        )
    return (
        Control(
            "many rows: no barrier before they are added up",
            f"wait_for_copies();\n  {BARRIER}",
            "wait_for_copies();\n",
            "shapes",
            is_race=True,
        ),
        Control("the bias is left out", "fma(bias, row_sums[r][i], scaled)", "scaled", "reference"),
        Control("the first group's scale", "row.scales + unit,", "row.scales,", "reference"),
        Control(
            "many rows: every span has the first one's scales",
            "load_four(row.scales + span)",
            "load_four(row.scales)",
            "shapes",
        ),
    )


def gate_up_contract(name: str, kinds: list, target: Target) -> Contract:
    make_case = partial(gate_up_case, target)
    shapes = [(1, 33, 128), (9, 8, 384), (37, 17, 256)]
    cases = [make_case(*shape, kinds[i % len(kinds)]) for i, shape in enumerate(shapes * 2)]
    cases.append(make_case(2, 2560, 128, kinds[0]))
    if target is not Target.METAL:
        cases.append(make_case(65, 4288, 256, kinds[0]))
    cases.append(make_case(4, 576, 1024, kinds[0], "reference"))
    rows = company(target, lambda num_rows: make_case(num_rows, 16, 640, kinds[0]))
    controls = (
        TURNS,
        Control("gate and up change places", "swiglu(gate, up);", "swiglu(up, gate);", "reference"),
    )
    return Contract(f"gate_up{name}", tuple(cases), rows, controls)


def project_contract(name: str, kinds: list, target: Target) -> Contract:
    make_case = partial(project_case, target)
    shapes = [(1, 96, 32, 128), (9, 48, 16, 384), (37, 33, 17, 256)]
    cases = [make_case(*shape, kinds[i % len(kinds)]) for i, shape in enumerate(shapes * 2)]
    cases.append(make_case(2, 1024, 512, 1024, kinds[0], "reference"))
    rows = company(target, lambda num_rows: make_case(num_rows, 32, 16, 640, kinds[0]), "q")
    controls = (
        Control("the values are the keys", ": v;", ": k;", "shapes"),
        Control(
            "the keys' weights for the values",
            "WEIGHT_ROW(v_weight",
            "WEIGHT_ROW(k_weight",
            "reference",
        ),
    )
    return Contract(f"project{name}", tuple(cases), rows, controls)


def company(target: Target, make: Callable[[int], Case], out: str = "out") -> tuple[SameBits, ...]:
    """Rows of a wide case, more than a tile of many holds, and the same rows in narrower ones, in
    another order too.
    """
    count = MANY_ROWS[target][0].num_rows + 5
    wide = make(count)
    x = wide.buffers["x"]

    def picked(rows: list[int]) -> SameBits:
        narrow = make(len(rows))
        alone = Case(f"{len(rows)} rows", narrow.kernels, narrow.buffers | {"x": x[rows]})

        def pick(found: Buffers) -> np.ndarray:
            return found[out][rows]

        name = f"rows {rows[:3]} of {count}"
        return SameBits(name, (wide, alone), (pick, lambda found: found[out]))

    every = list(range(count))
    few = ([0], [count - 1], [count - 2, 3], every[8:17])
    return tuple(map(picked, (*few, every[4 : count - 1], every[::-1])))


def matmul_case(
    target: Target,
    num_rows: int,
    num_outputs: int,
    depth: int,
    kind: tuple[DType, DType, int, int],
    has_bias: bool,
    gate: str = "shapes",
    out_dtype: DType | None = None,
    fewest_many: int | None = FEWEST_MANY,
) -> Case:
    """fewest_many: by default as where outputs are many, which would take the emulator long."""
    dtype, weight, buffers, values = weights_of(kind, depth, weight=num_outputs)
    out_dtype = out_dtype or dtype
    bias_dtype = weight["weight"].dtype if has_bias else None
    kernel = matmul_kernel(
        num_rows, weight["weight"], dtype, out_dtype, bias_dtype, target, fewest_many
    )
    x = buffers["x"] = rounded(pattern(num_rows, depth, seed=5), dtype)
    out = x @ values["weight"].T
    if has_bias:
        buffers["bias"] = pattern(num_outputs, seed=7)
        out = out + buffers["bias"]
    room = SUM_ROOM * depth**0.5
    expected = {"out": Expected(out, absolute=room, relative=EPSILON[out_dtype])}
    return Case(named(kernel, kind), (kernel,), buffers, expected, gate)


def gate_up_case(
    target: Target,
    num_rows: int,
    num_outputs: int,
    depth: int,
    kind: tuple,
    gate: str = "shapes",
) -> Case:
    dtype, weight, buffers, values = weights_of(kind, depth, w1=num_outputs, w3=num_outputs)
    kernel = gate_up_kernel(num_rows, weight["w1"], weight["w3"], dtype, target)
    x = buffers["x"] = rounded(pattern(num_rows, depth, seed=5), dtype)
    g, u = x @ values["w1"].T, x @ values["w3"].T
    out = g / (1 + np.exp(-g)) * u
    # Four roundings: gate, silu, up and their product; an error of the gate grows by at most 1.1.
    bound = 4.5 * EPSILON[dtype]
    room = SUM_ROOM * depth**0.5 * (np.abs(u) + np.abs(g) + 1) + bound * np.abs(g * u)
    return Case(named(kernel, kind), (kernel,), buffers, {"out": Expected(out, room)}, gate)


def project_case(
    target: Target,
    num_rows: int,
    num_q: int,
    num_kv: int,
    depth: int,
    kind: tuple,
    gate: str = "shapes",
) -> Case:
    sizes = {"q_weight": num_q, "k_weight": num_kv, "v_weight": num_kv}
    dtype, weight, buffers, values = weights_of(kind, depth, **sizes)
    kernel = project_kernel(num_rows, *weight.values(), dtype, target)
    x = buffers["x"] = rounded(pattern(num_rows, depth, seed=5), dtype)
    room = {"absolute": SUM_ROOM * depth**0.5, "relative": EPSILON[dtype]}
    expected = {name[0]: Expected(x @ values[name].T, **room) for name in sizes}
    return Case(named(kernel, kind), (kernel,), buffers, expected, gate)


def named(kernel: Kernel, kind: tuple) -> str:
    dtype, stored, _, group = kind
    groups = f" groups of {group}" if group else ""
    return f"{kernel.name} {TYPES[dtype]}, weight {TYPES[stored]}{groups}"


def weights_of(
    kind: tuple[DType, DType, int, int], depth: int, **num_outputs: int
) -> tuple[DType, dict[str, WeightKind], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The compute type, and by name the kinds of weights, their buffers and what they stand for."""
    dtype, stored, bits, group = kind
    kinds, buffers, values = {}, {}, {}
    for seed, (name, outputs) in enumerate(num_outputs.items()):
        kinds[name] = WeightKind((outputs, depth), stored, bits, group)
        if not bits:
            buffers[f"{name}_values"] = values[name] = pattern(outputs, depth, seed=seed)
            continue
        codes = (np.arange(outputs * depth) * 2654435761 >> 7) + seed
        codes = (codes ^ codes >> 9).reshape(outputs, depth) % 2**bits
        scales = pattern(outputs, depth // group, seed=seed + 1) / 2 ** (bits - 1)
        biases = pattern(outputs, depth // group, seed=seed + 2)
        per_word = 32 // bits
        shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(bits)
        grouped = codes.reshape(outputs, depth // per_word, per_word).astype(np.uint64)
        buffers[f"{name}_codes"] = (grouped << shifts).sum(-1)
        buffers[f"{name}_scales"], buffers[f"{name}_biases"] = scales, biases
        values[name] = codes * scales.repeat(group, 1) + biases.repeat(group, 1)
    return dtype, kinds, buffers, values

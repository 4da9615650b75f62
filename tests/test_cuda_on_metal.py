"""The kernels' texts for NVIDIA GPUs on emulated Metal: what they sum up is the contract's.

cuda_on_metal.h stands in for what cuda.cuh does in PTX, which itself runs on a GPU only.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from metal_ops.contract import gates
from metal_ops.contract.case import Buffers, Case, Contract, Control
from metal_ops.contract.report import contracts, seen
from metal_ops.emulated_metal import compile, run
from metal_ops.kernel import HEAD, Target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")

HEADER = (Path(__file__).parent / "cuda_on_metal.h").read_text()
PRODUCTS = ("matmul", "gate_up", "project", "expert_gate_up", "expert_down")
ATTENTION = ("attend", "attend_prompt")
CONTRACTS = {
    contract.name: contract
    for contract in contracts(Target.CUDA)
    if contract.name.split()[0] in (*PRODUCTS, *ATTENTION)
}
WIDE = "#define IS_WIDE 1\n"
# Of Hopper what is its own.
WIDE_CONTRACTS = {
    contract.name: replace(contract, cases=wide)
    for contract in contracts(Target.HOPPER)
    if (wide := tuple(case for case in contract.cases if WIDE in case.kernels[0].source))
}
# How a text makes its sums; what of that is looked at in some, which the others only repeat.
DETAILED = ("matmul", "matmul 4-bit", "matmul 8-bit")
FORM = re.compile(r"#define (?:ROW_TILES [18]|IS_STAGED 1|OUTPUT_TILES 4|TURNS 1)$", re.MULTILINE)
DETAILS = re.compile(r"#define (?:T|ROW_TILES|IS_WHOLE) .*")
FEW, MANY = "#define ROW_TILES 1\n", "#define IS_STAGED 1\n"
WIDE_TILES = "#define PAIR_TILES 4\n"
SPLIT, WHOLE = "void attend_partial(", "void attend_prompt("
FLOAT, HALF, BFLOAT = "#define T float\n", "#define T half\n", "#define T bfloat\n"


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gates run the texts for CUDA as Metal."""
    monkeypatch.setattr(gates, "run", run_on_metal)


def run_on_metal(case: Case, device: str) -> tuple[Buffers, list[str]]:
    """As gates.run does; an access beyond a buffer is an error of the launch."""
    arguments = {a.name: a for kernel in case.kernels for a in (*kernel.writes, *kernel.reads)}
    buffers = {name: gates.before(case, argument) for name, argument in arguments.items()}
    for kernel in case.kernels:
        text = HEAD + HEADER + kernel.source.removeprefix(HEAD)
        function = compile(text, gates.FILE, strict=False)[kernel.name]
        given = [buffers[argument.name] for argument in (*kernel.writes, *kernel.reads)]
        limit = Target.CUDA.threadgroup_bytes
        run(
            function,
            kernel.grid,
            kernel.threads,
            *given,
            order="random",
            seed=3,
            max_threadgroup_bytes=limit,
        )
    return buffers, []


def has(case: Case, *texts: str) -> bool:
    return all(text in case.kernels[0].source for text in texts)


def one_of_each_form(contract: Contract) -> Contract:
    """Of products; attention has a form for each of its few cases. Of many rows there are those of
    every depth.
    """
    if contract.name in ATTENTION:
        return contract
    found: dict[tuple[str, ...], Case] = {}
    for case in contract.cases:
        source = case.kernels[0].source
        details = []
        if contract.name in DETAILED:
            details = [case.shape] if has(case, MANY) else DETAILS.findall(source)
        found.setdefault((*FORM.findall(source), *details), case)
    return replace(contract, cases=tuple(found.values()))


@pytest.mark.parametrize("name", CONTRACTS)
def test_sums_of_every_form(name):
    contract = one_of_each_form(CONTRACTS[name])
    if name not in ATTENTION:
        assert all(any(has(case, form) for case in contract.cases) for form in (FEW, MANY))
    assert [*gates.shapes(contract, "CUDA"), *gates.reference(contract, "CUDA")] == []


@pytest.mark.parametrize("name", WIDE_CONTRACTS)
def test_sums_of_products_that_only_hopper_has(name):
    contract = one_of_each_form(WIDE_CONTRACTS[name])
    assert [*gates.shapes(contract, "CUDA"), *gates.reference(contract, "CUDA")] == []


@pytest.mark.parametrize("name", ("matmul 4-bit", "matmul 8-bit", "expert_down 4-bit"))
def test_a_rows_bits_are_its_own_on_hopper(name):
    assert list(gates.rows(WIDE_CONTRACTS[name], "CUDA")) == []


@pytest.mark.parametrize("name", ("matmul", "matmul 4-bit", "expert_down 4-bit", *ATTENTION))
def test_a_rows_bits_are_its_own(name):
    assert list(gates.rows(CONTRACTS[name], "CUDA")) == []


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
FAULTS = [
    ("matmul", MANY, BFLOAT, "<STAGES - 2 - LEAD>()", "<STAGES - 1 - LEAD>()"),
    ("matmul 4-bit", MANY, BFLOAT, "<STAGES - 2 - LEAD>()", "<STAGES - 2>()"),
    ("matmul", MANY, BFLOAT, "wait_for_groups_but<STAGES - 2 - LEAD>();", ""),
    ("matmul", MANY, BFLOAT, "  end_copies();\n", ""),
    ("matmul", MANY, BFLOAT, f"        {BARRIER}", ""),
    ("matmul 8-bit", MANY, BFLOAT, f"wait_for_copies();\n  {BARRIER}", "wait_for_copies();\n"),
    ("matmul 4-bit", MANY, BFLOAT, "*(uint4*)to = words;", ""),
    ("matmul 4-bit", FEW, BFLOAT, "0x5410", "0x7632"),
    ("matmul 4-bit", FEW, BFLOAT, "looked_up<0xea>", "looked_up<0xf8>"),
    ("matmul 8-bit", FEW, BFLOAT, "ones.lower, block.steps + j", "ones.lower, block.steps"),
    ("matmul", FEW, BFLOAT, "weights[1].steps + j", "weights[0].steps + j"),
    ("matmul", FEW, BFLOAT, "rows[r].steps + j);", "rows[r].steps + 2 - j);"),
    ("matmul", FEW, BFLOAT, "return lane_output(lane); }", "return lane_output(lane) ^ 1; }"),
    ("matmul", FEW, BFLOAT, "return int(lane / 4); }", "return int(lane % 8); }"),
    ("matmul", FEW, BFLOAT, "return int(lane % 4); }", "return int(lane / 8); }"),
    ("matmul", FEW, FLOAT, "4 * lane_output(lane) + quarter", "4 * quarter"),
    ("matmul 8-bit", FEW, FLOAT, "4 * lane_row(lane) + 4)", "4 * lane_row(lane))"),
    (
        "attend",
        SPLIT,
        BFLOAT,
        "upper[2] = {word_of(right[p])",
        "upper[2] = {word_of(second_right[p])",
    ),
    ("attend", SPLIT, HALF, "lower[2] = {word_of(right[p + 1])", "lower[2] = {word_of(right[p])"),
    ("attend", SPLIT, FLOAT, "lane / 4 * 4 + k / 2", "lane / 4 * 4"),
    ("attend", SPLIT, FLOAT, "{ return 1 << i; }", "{ return 2 << i; }"),
    ("attend_prompt", WHOLE, FLOAT, "{ return lane_row(lane) + i; }", "{ return lane_row(lane); }"),
    ("attend_prompt", WIDE_TILES, BFLOAT, "= {word_of(right[p])", "= {word_of(right[0])"),
    ("attend_prompt", WIDE_TILES, BFLOAT, "sums[p + 1].elements", "sums[1].elements"),
    ("attend_prompt", WHOLE, BFLOAT, "run[i + j] = part.values[j]", "run[i + j] = part.values[0]"),
]


@pytest.mark.parametrize("name, form, dtype, old, new", FAULTS)
def test_a_planted_fault_is_seen(name, form, dtype, old, new):
    """In a case of the form and type."""
    contract = CONTRACTS[name]
    case = next(case for case in contract.cases if has(case, form, dtype))
    control = Control(old, old, new, case.is_checked_by)
    is_seen, found = seen(replace(contract, cases=(case,), rows=()), control, "CUDA")
    assert is_seen, found


WIDE_FAULTS = [
    ("(4 * b + j) * MATRIX_BYTES", "4 * b * MATRIX_BYTES"),
    ("to[j * MATRIX_WORDS]", "to[(j ^ 1) * MATRIX_WORDS]"),
    ("* MATRIX_WORDS + lane", "* MATRIX_WORDS + (lane ^ 1)"),
    ("dealt, MATRIX_BYTES, STAGE_MATRICES", "dealt, 2 * MATRIX_BYTES, STAGE_MATRICES"),
    ("STAGE_MATRICES * MATRIX_BYTES", "MATRIX_BYTES"),
    ("blocks[b][output + 1]", "blocks[b][output]"),
    ("b || j", "b"),
    ("  begin_products();\n", ""),
    ("Wide<TILES>::wait(products);", ""),
    ("stage % 2 * (ROWS * STAGE) + u", "u"),
    (f"        {BARRIER}", ""),
]


@pytest.mark.parametrize("old, new", WIDE_FAULTS)
def test_a_fault_planted_in_what_only_hopper_has_is_seen(old, new):
    contract = WIDE_CONTRACTS["matmul 4-bit"]
    case = next(case for case in contract.cases if has(case, BFLOAT))
    control = Control(old, old, new, case.is_checked_by)
    is_seen, found = seen(replace(contract, cases=(case,), rows=()), control, "CUDA")
    assert is_seen, found

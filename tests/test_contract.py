"""The contract of the kernels on emulated METAL: every gate in two orders, every planted fault."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Device, dtypes

from metal_ops.contract import report
from metal_ops.contract.case import Control
from metal_ops.contract.gates import GATES
from metal_ops.contract.report import contracts, seen, verify
from metal_ops.emulated_metal import install
from metal_ops.kernel import Kernel
from metal_ops.launch import GuardedBuffer, copy_in

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")

CONTRACTS = {contract.name: contract for contract in contracts()}


@pytest.fixture
def emulator():
    emulator = install(checked=True)
    yield emulator
    emulator.checked, emulator.order = False, "fifo"


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_gate_and_planted_fault(emulator, name):
    """Threads in random order, by another seed than the command's."""
    emulator.order, emulator.seed = "random", 7
    lines: list[str] = []
    assert verify([CONTRACTS[name]], "METAL", lines.append, lambda _: None), "\n".join(lines)
    assert lines[-1].startswith("SUMMARY 1 kernels: 1 pass gates 1-5, 0 fail;")


@pytest.mark.parametrize("name", CONTRACTS)
def test_in_the_order_of_the_threads(emulator, name):
    emulator.order = "fifo"
    assert list(GATES["shapes"](CONTRACTS[name], "METAL")) == []


def test_every_kernel_has_two_controls():
    assert [name for name, contract in CONTRACTS.items() if len(contract.controls) < 2] == []


def edited(contract, edit):
    """The contract with every kernel of its cases changed."""
    cases = tuple(replace(case, kernels=tuple(map(edit, case.kernels))) for case in contract.cases)
    return replace(contract, cases=cases, rows=())


def test_builds_compares_names_and_types(emulator):
    def misnamed(kernel: Kernel) -> Kernel:
        x, *rest = kernel.reads
        return replace(kernel, reads=(replace(x, name="y"), *rest))

    contract = replace(CONTRACTS["rms_norm"], cases=CONTRACTS["rms_norm"].cases[:1])
    (fault,) = GATES["builds"](edited(contract, misnamed), "METAL")
    assert "the text's arguments are" in fault

    def broken(kernel: Kernel) -> Kernel:
        return replace(kernel, source=kernel.source.replace("float squares", "floot squares"))

    (fault,) = GATES["builds"](edited(contract, broken), "METAL")
    assert "unknown type name 'floot'" in fault


@pytest.mark.parametrize("offset", [0, GuardedBuffer.GUARD_BYTES + 12])
def test_memory_around_a_buffer_is_looked_at(offset):
    buffer = GuardedBuffer(np.arange(3, dtype=np.float32), dtypes.float32, "CPU")
    assert buffer.read()[0].tolist() == [0, 1, 2] and buffer.read()[1]
    copy_in(buffer.memory, offset, memoryview(bytearray(b"x")))
    assert buffer.read()[0].tolist() == [0, 1, 2] and not buffer.read()[1]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"threads": 544}, "544 threads on Apple7 (M1), 512 there"),
        ({"threads": 100}, "100 threads, no multiple of 32"),
        ({"threads": 64}, "64 threads, which the text does not reserve"),
        ({"grid": (1, 70000, 1)}, "a grid of (1, 70000, 1)"),
    ],
)
def test_limits_of_apples_chips(change, words):
    contract = replace(CONTRACTS["rms_norm"], cases=CONTRACTS["rms_norm"].cases[-1:])
    faults = GATES["limits"](edited(contract, lambda kernel: replace(kernel, **change)), "METAL")
    assert any(words in fault for fault in faults)


def test_threadgroup_memory_is_limited(emulator):
    contract = replace(CONTRACTS["rms_norm"], cases=CONTRACTS["rms_norm"].cases[-1:])

    def large(kernel: Kernel) -> Kernel:
        return replace(kernel, source=kernel.source.replace("[SIMDGROUPS]", "[8192 + SIMDGROUPS]"))

    (fault,) = GATES["limits"](edited(contract, large), "METAL")
    assert "32800 bytes a threadgroup, 32768 possible" in fault


def test_a_control_that_does_not_compile_is_missed(emulator):
    contract = CONTRACTS["rms_norm"]
    control = Control("nonsense", "float squares = 0;", "float squares = ;", "shapes")
    is_seen, found = seen(contract, control, "METAL")
    assert not is_seen and "does not compile" in found
    harmless = Control("nothing", "float squares = 0;", "float squares = 0.0f;", "shapes")
    assert seen(contract, harmless, "METAL") == (False, "nothing seen")
    with pytest.raises(ValueError, match="no text has 'not there'"):
        seen(contract, Control("gone", "not there", "", "shapes"), "METAL")


def test_a_fault_that_ends_the_device_proves_nothing(emulator, monkeypatch):
    def fail() -> None:
        raise RuntimeError("illegal address")

    monkeypatch.setattr(report, "is_emulated", lambda device: False)
    monkeypatch.setattr(Device["METAL"], "synchronize", fail)
    contract, lines = CONTRACTS["tap"], []
    assert not verify([contract], "METAL", lines.append, lambda _: None)
    counts = f"{len(contract.controls)} controls: 0 red as planted, {len(contract.controls)} missed"
    assert counts in lines[-1]
    assert any("METAL runs nothing any more: " in line for line in lines)

"""The kernels' texts for NVIDIA GPUs, on emulated Metal: what they sum up is the contract's."""

import sys
from pathlib import Path

import numpy as np
import pytest

from metal_ops.contract import gates
from metal_ops.contract.case import Case
from metal_ops.contract.report import contracts
from metal_ops.emulated_metal import compile, run
from metal_ops.kernel import HEAD, Target

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")

HEADER = (Path(__file__).parent / "cuda_on_metal.h").read_text()
NAMES = ("matmul", "gate_up", "project", "expert_gate_up", "expert_down")
CONTRACTS = {
    contract.name: contract
    for contract in contracts(Target.CUDA)
    if contract.name.split()[0] in NAMES
}


def run_on_metal(case: Case, checked: bool) -> tuple[dict[str, np.ndarray], list[str]]:
    """As gates.run: all buffers as they are then, and those with damaged surroundings."""
    arguments = {a.name: a for kernel in case.kernels for a in (*kernel.writes, *kernel.reads)}
    buffers = {name: gates.before(case, argument) for name, argument in arguments.items()}
    for kernel in case.kernels:
        text = HEAD + HEADER + kernel.source.removeprefix(HEAD)
        function = compile(text, gates.FILE, checked, strict=False)[kernel.name]
        given = [buffers[argument.name] for argument in (*kernel.writes, *kernel.reads)]
        run(function, kernel.grid, kernel.threads, *given, order="random", seed=3)
    return buffers, []

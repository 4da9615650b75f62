"""The gates of the contract: each looks at one kernel's cases on a device and says what is wrong.

Every fault is one line, `at <shape>: <what>`. A launch that fails is a fault of the gate that ran
it; a text that does not compile is one of the gate "builds", and raises COMPILE_ERRORS in others.
A compiler that fails itself is no kernel's fault: ToolchainError goes through every gate.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import numpy as np
from tinygrad.device import CompileError

from metal_ops.contract.case import (
    STORAGE,
    Buffers,
    Case,
    Contract,
    Control,
    Expected,
    SameBits,
    loaded,
    stored,
)
from metal_ops.contract.limits import exceeded
from metal_ops.emulated_metal import MetalCompileError, MetalLaunchError, ToolchainError, compile
from metal_ops.emulated_metal.build import read_kernels
from metal_ops.emulated_metal.device import FILE
from metal_ops.emulated_metal.toolchain import find_toolchain
from metal_ops.kernel import TYPES, Argument, Target, target_of
from metal_ops.launch import GuardedBuffer, compile_kernel, inject

Faults = Iterator[str]
COMPILE_ERRORS = (CompileError, MetalCompileError)
LAUNCH_ERRORS = (MetalLaunchError, RuntimeError)


def builds(contract: Contract, device: str) -> Faults:
    """Compiles for the device; and, where a clang is, as strictly as Metal with true address
    spaces, and the text's arguments are the contract's.

    Of CUDA, whose texts Metal does not take, the device's compiler alone sees types and order.
    """
    for kernel in contract.kernels:
        try:
            compile_kernel(kernel, device)
            if target_of(device) is not Target.METAL or not has_clang():
                continue
            # By the name that emulated METAL has read it under, so that it is read once.
            declared = {found.name: found for found in read_kernels(kernel.source, FILE, True)}
        except COMPILE_ERRORS as error:
            yield f"at {kernel.name}: {first_line(error)}"
            continue
        if kernel.name not in declared:
            yield f"at {kernel.name}: the text declares {', '.join(declared)}"
            continue
        found = [(b.name, b.type, b.is_written) for b in declared[kernel.name].buffers]
        expected = [
            (argument.name, TYPES[argument.dtype], is_written)
            for arguments, is_written in ((kernel.writes, True), (kernel.reads, False))
            for argument in arguments
        ]
        if found != expected:
            yield f"at {kernel.name}: the text's arguments are {found}, the contract's {expected}"


def shapes(contract: Contract, device: str) -> Faults:
    yield from _compare(contract, device, "shapes")


def reference(contract: Contract, device: str) -> Faults:
    yield from _compare(contract, device, "reference")


def rows(contract: Contract, device: str) -> Faults:
    for same in contract.rows:
        yield from (f"at {same.shape}: {what}" for what in _different(same, device))


def limits(contract: Contract, device: str) -> Faults:
    for kernel in contract.kernels:
        num_bytes = 0
        if target_of(device) is Target.METAL and has_clang():
            num_bytes = compile(kernel.source, FILE)[kernel.name].threadgroup_bytes
        yield from (f"at {kernel.name}: {what}" for what in exceeded(kernel, num_bytes))


@cache
def has_clang() -> bool:
    """Whether texts can be read and compiled here apart from the device: always in emulation."""
    try:
        find_toolchain()
    except ToolchainError:
        return False
    return True


GATES: dict[str, Callable[[Contract, str], Faults]] = {
    "builds": builds,
    "shapes": shapes,
    "rows": rows,
    "reference": reference,
    "limits": limits,
}


def planted(contract: Contract, control: Control) -> Contract:
    """The contract with the control's fault in the text of its kernels, and only what runs those.

    Raises ValueError if no text has what it replaces.
    """

    def is_hit(case: Case) -> bool:
        return any(control.old in kernel.source for kernel in case.kernels)

    cases = tuple(filter(is_hit, contract.cases))
    rows = tuple(same for same in contract.rows if any(map(is_hit, same.cases)))
    if not cases and not rows:
        raise ValueError(
            f"control {control.what!r} of {contract.name}: no text has {control.old!r}"
        )

    def edited(case: Case) -> Case:
        kernels = tuple(
            replace(kernel, source=kernel.source.replace(control.old, control.new))
            for kernel in case.kernels
        )
        return replace(case, kernels=kernels)

    pairs = (replace(same, cases=tuple(map(edited, same.cases))) for same in rows)
    return replace(contract, cases=tuple(map(edited, cases)), rows=tuple(pairs))


def run(case: Case, device: str) -> tuple[Buffers, list[str]]:
    """Launches a case's kernels; returns all buffers as they are then, and those with damaged
    surroundings.
    """
    buffers: dict[str, GuardedBuffer] = {}
    for argument in _arguments(case):
        buffers[argument.name] = GuardedBuffer(before(case, argument), argument.dtype, device)
    for kernel in case.kernels:
        writes = tuple(buffers[argument.name].tensor for argument in kernel.writes)
        reads = [buffers[argument.name].tensor for argument in kernel.reads]
        # One kernel after the other, in place.
        written = inject(kernel, reads, writes)
        written[0].realize(*written[1:])
    after, damaged = {}, []
    for name, buffer in buffers.items():
        after[name], is_intact = buffer.read()
        if not is_intact:
            damaged.append(name)
    return after, damaged


def before(case: Case, argument: Argument) -> np.ndarray:
    """What a buffer holds at first: the case's numbers, else bits that are NaN in every float
    and -1 in integers."""
    if argument.name in case.buffers:
        return stored(case.buffers[argument.name], argument.dtype).reshape(argument.shape)
    bits = np.full(argument.num_bytes, 0xFF, np.uint8)
    return bits.view(STORAGE[argument.dtype]).reshape(argument.shape)


def _arguments(case: Case) -> list[Argument]:
    """The buffers of a case, each once."""
    found = {}
    for kernel in case.kernels:
        for argument in (*kernel.writes, *kernel.reads):
            known = found.setdefault(argument.name, argument)
            if known != argument:
                raise ValueError(f"{case.shape}: {argument.name} is {known} and {argument}")
    return list(found.values())


def _compare(contract: Contract, device: str, gate: str) -> Faults:
    for case in contract.cases:
        if case.is_checked_by == gate:
            yield from (f"at {case.shape}: {what}" for what in _wrong(case, device))


def _wrong(case: Case, device: str) -> Faults:
    try:
        after, damaged = run(case, device)
    except LAUNCH_ERRORS as error:
        yield first_line(error)
        return
    yield from (f"memory around {name} is written to" for name in damaged)
    arguments = {argument.name: argument for argument in _arguments(case)}
    for name, expected in case.expected.items():
        first = before(case, arguments[name])
        yield from _unexpected(arguments[name], first, after[name], expected)
    written = {argument.name for kernel in case.kernels for argument in kernel.writes}
    for name in arguments.keys() - written:
        if after[name].tobytes() != before(case, arguments[name]).tobytes():
            yield f"{name}, which is only read, changed"


def _unexpected(
    argument: Argument, first: np.ndarray, found: np.ndarray, expected: Expected
) -> Faults:
    written = expected.written
    written = np.ones(found.shape, bool) if written is None else written
    kept = found.view(np.uint8).reshape(*found.shape, -1)
    was = first.view(np.uint8).reshape(kept.shape)
    changed = (kept != was).any(-1) & ~written
    if changed.any():
        yield f"{argument.name}{_place(changed)} is not to be written, and changed"
    values, want = loaded(found, argument.dtype), expected.values
    room = expected.absolute + expected.relative * np.abs(want)
    # NOTE: written so that a NaN is wrong.
    wrong = ~(np.abs(values - want) <= room) & ~(values == want) & written
    if wrong.any():
        at = _place(wrong)
        place = tuple(at)
        bound = f"within {np.broadcast_to(room, wrong.shape)[place]:.3g} of "
        bound = bound if np.any(room) else ""
        yield (
            f"{argument.name}{at} is {values[place]:.8g}, expected {bound}{want[place]:.8g} "
            f"({wrong.sum()} of {written.sum()} wrong)"
        )


def _place(mask: np.ndarray) -> list[int]:
    """The first index at which a mask is true."""
    return [int(axis[0]) for axis in np.nonzero(mask)]


def _different(same: SameBits, device: str) -> Faults:
    picked = []
    try:
        for case, pick in zip(same.cases, same.picks):
            picked.append(np.ascontiguousarray(pick(run(case, device)[0])))
    except LAUNCH_ERRORS as error:
        yield first_line(error)
        return
    first, second = picked
    if first.shape != second.shape:
        yield f"{first.shape} compared with {second.shape}"
    elif first.tobytes() != second.tobytes():
        bits = [array.view(np.uint8).reshape(*array.shape, -1) for array in picked]
        differs = (bits[0] != bits[1]).any(-1)
        yield (
            f"{_place(differs)} differs between {same.cases[0].shape} and {same.cases[1].shape} "
            f"({differs.sum()} of {differs.size} elements)"
        )


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__

"""Runs the contract on a device and prints what it finds, fault by fault, and the SUMMARY line.

What the commands that do so share: `python -m metal_ops.contract`, and `lfm2 verify`.
"""

import contextlib
import multiprocessing
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.metadata import version
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tinygrad import Device

from metal_ops.contract import (
    argmax,
    attention,
    conv,
    embed,
    experts,
    matmul,
    norm,
    qk,
    route,
    tap,
)
from metal_ops.contract.case import Contract, Control
from metal_ops.contract.errors import ContractError, Refused
from metal_ops.contract.gates import COMPILE_ERRORS, GATES, first_line, has_clang, planted
from metal_ops.contract.limits import FAMILIES
from metal_ops.emulated_metal import ToolchainError, install
from metal_ops.emulated_metal.toolchain import find_toolchain
from metal_ops.kernel import DEVICES, OLDEST_CUDA, Target, target_of

Say = Callable[[str], None]
DEVICE = re.compile(r"[A-Z]\w*(:\d+)?", re.ASCII)
# The modules that hold contracts.
MODULES = (
    embed,
    matmul,
    norm,
    conv,
    qk,
    attention,
    route,
    experts,
    tap,
    argmax,
)
# Those with kernels that are other ones for another target.
TARGETED = (matmul, attention, experts)


@cache
def contracts(target: Target = Target.METAL) -> list[Contract]:
    """All of them, in the order of a round."""
    return [
        contract
        for module in MODULES
        for contract in (module.contracts(target) if module in TARGETED else module.contracts())
    ]


def choose(names: Iterable[str], target: Target = Target.METAL) -> list[Contract]:
    """The contracts of these names, each once; all of them if there are no names. Case does not
    count. Raises Refused. Every target has the same names.
    """
    known = {contract.name.lower(): contract for contract in contracts(target)}
    wanted = {name.lower(): name for name in names}
    for name, given in wanted.items():
        if name not in known:
            near = _near(name, known)
            raise Refused(f"there is no kernel {given!r}{near}; there are {_list(known)}")
    return [known[name] for name in wanted] or list(known.values())


def _near(name: str, known: Iterable[str]) -> str:
    """What may have been meant, as a part of a message."""
    near = [one for one in known if name and name in one] or get_close_matches(name, known)
    return f" (near it: {_list(near)})" if near else ""


def _list(names: Iterable[str]) -> str:
    return ", ".join(repr(name) if " " in name else name for name in names)


def open_device(name: str, say: Say, order: str = "random", seed: int = 0) -> str:
    """Opens a device to run kernels on, METAL emulated where it is not a Mac's; its name.

    order, seed: of emulated threads. Raises Refused where no kernel runs on such a device,
    ContractError where it cannot be opened.
    """
    device = name.upper()
    kind = _kind(device)
    # NULL computes nothing.
    computing = [known for known in DEVICES if known != "NULL"]
    if not DEVICE.fullmatch(device):
        raise Refused(f"{name!r} names no device: expected one such as METAL, CUDA or CUDA:1")
    if kind not in computing:
        have = "has" if len(computing) == 1 else "have"
        raise Refused(f"{device} has no hand-written kernels; {' and '.join(computing)} {have}")
    try:
        if is_emulated(device):
            find_toolchain()
            emulator = install(checked=True)
            emulator.order, emulator.seed = order, seed
        target = Device[device].renderer.target
    except ToolchainError as error:
        reason = f"METAL is emulated here, which needs clang: {one_line(error)}"
        raise ContractError(reason) from error
    except Exception as error:
        raise ContractError(f"device {device} cannot be opened: {one_line(error)}") from error
    if target_of(device) is None:
        raise ContractError(f"{device} is {target}: kernels need sm_{OLDEST_CUDA} or later")
    if is_emulated(device):
        say(f"METAL: emulated on this machine's processor, checked, {order} order, seed {seed}")
    say(f"{target}, {platform.platform()}, tinygrad {version('tinygrad')}")
    return device


def _kind(device: str) -> str:
    return device.upper().split(":")[0]


def is_emulated(device: str) -> bool:
    return device.startswith("METAL") and sys.platform != "darwin"


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


@dataclass
class Tally:
    """What has been found so far."""

    num_passed: int = 0
    num_failed: int = 0
    num_red: int = 0
    num_missed: int = 0
    num_limits: int = 0

    def add(self, other: "Tally") -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


def num_processors() -> int:
    """How many this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def verify(
    chosen: Iterable[Contract], device: str, say: Say, progress: Say, num_processes: int = 1
) -> bool:
    """Runs every gate and every control of `chosen`; whether all passed and none was missed.

    say: a line of the report. progress: what is being run, for a terminal. num_processes: with
    several, each takes one contract after the other, found by its name. Raises ContractError where
    the compiler itself fails.
    """
    never_run = ", ".join(f"{f.name} ({f.chips})" for f in FAMILIES if not f.is_run)
    say(f"limits are from records; nobody has run {never_run}")
    if not has_clang():
        say("no clang here: arguments and threadgroup memory of the texts are not compared")
    chosen, tally = list(chosen), Tally()
    try:
        num_processes = min(num_processes, len(chosen))
        if num_processes > 1:
            progress(f"{len(chosen)} kernels, {num_processes} at a time")
            names = [contract.name for contract in chosen]
            for number, (lines, part) in enumerate(_apart(names, device, num_processes), 1):
                for line in lines:
                    say(line)
                tally.add(part)
                progress(f"{number} of {len(chosen)} kernels done, {num_processes} at a time")
        else:
            for number, contract in enumerate(chosen, 1):
                place = f"{number} of {len(chosen)} {contract.name}"
                _prove(contract, device, tally, say, lambda what: progress(f"{place}: {what}"))
    except ToolchainError as error:
        reason = f"cannot compile here, which says nothing of the kernels: {_cause(error)}"
        raise ContractError(reason) from error
    say(
        f"SUMMARY {len(chosen)} kernels: {tally.num_passed} pass gates 1-{len(GATES)}, "
        f"{tally.num_failed} fail; {tally.num_red + tally.num_missed} controls: "
        f"{tally.num_red} red as planted, {tally.num_missed} missed; "
        f"{tally.num_limits} limit problems"
    )
    return not tally.num_failed and not tally.num_missed


Result = tuple[list[str], Tally]


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt waits for the end; processes that are started here never hear of one."""
    interrupts = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: interrupts.append(arguments))
    # What multiprocessing starts first would unblock it.
    resource_tracker.ensure_running()
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        signal.signal(signal.SIGINT, handler)
    if interrupts:
        raise KeyboardInterrupt


def _apart(names: list[str], device: str, num_processes: int) -> Iterator[Result]:
    """What processes of their own say of the contracts, in order."""
    emulator = install(checked=True) if is_emulated(device) else None
    emulation = (emulator.order, emulator.seed) if emulator else ()
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    try:
        with _uninterrupted():
            for _ in range(num_processes):
                ours, theirs = context.Pipe()
                work = context.Process(
                    target=_serve, args=(theirs, device, *emulation), daemon=True
                )
                work.start()
                theirs.close()
                processes[ours] = work
        yield from _answers(names, list(processes))
    except (EOFError, ConnectionError):
        raise ContractError(f"a process that ran kernels on {device} died") from None
    finally:
        for connection, work in processes.items():
            work.terminate()
            work.join()
            connection.close()


def _answers(names: list[str], connections: list[Connection]) -> Iterator[Result]:
    """Gives each process another name as soon as it is done with one."""
    left = iter(names)
    for connection, name in zip(connections, left):
        connection.send(name)
    found: dict[str, Result] = {}
    for name in names:
        while name not in found:
            for connection in wait(connections):
                done, result = connection.recv()
                if isinstance(result, ToolchainError):
                    raise result
                found[done] = result
                if (another := next(left, None)) is not None:
                    connection.send(another)
        yield found.pop(name)


def _serve(connection: Connection, device: str, *emulation: str | int) -> None:
    """A process that proves what it is told the names of, for as long as someone does.

    emulation: order and seed of emulated threads.
    """
    open_device(device, _drop, *emulation)
    known = {contract.name: contract for contract in contracts(target_of(device))}
    with contextlib.suppress(EOFError):
        while True:
            name = connection.recv()
            lines, tally = [], Tally()
            try:
                _prove(known[name], device, tally, lines.append, _drop)
                connection.send((name, (lines, tally)))
            except ToolchainError as error:
                connection.send((name, error))


def _drop(line: str) -> None:
    pass


def _prove(contract: Contract, device: str, tally: Tally, say: Say, progress: Say) -> None:
    _look(contract, device, tally, say, progress)
    _plant(contract, device, tally, say, progress)


def _look(contract: Contract, device: str, tally: Tally, say: Say, progress: Say) -> None:
    """Every gate."""
    faults = {}
    for gate, look in GATES.items():
        progress(gate)
        try:
            faults[gate] = list(look(contract, device))
        except COMPILE_ERRORS as error:
            faults[gate] = [f"nothing runs: {first_line(error)}"]
        for fault in faults[gate]:
            say(f"FAIL {gate} {contract.name}: {fault}")
    tally.num_limits += len(faults["limits"])
    has_failed = any(faults.values())
    tally.num_failed += has_failed
    tally.num_passed += not has_failed
    if not has_failed:
        say(f"pass {contract.name}: {len(contract.kernels)} launches")


def _plant(contract: Contract, device: str, tally: Tally, say: Say, progress: Say) -> None:
    """Every control. One that ends the device proves nothing, nor does any after it."""
    for control in contract.controls:
        if control.is_race and not is_emulated(device):
            say(f"skip {control.gate} {contract.name}: {control.what}: a race, for emulation")
            continue
        progress(control.what)
        is_seen, found = seen(contract, control, device)
        if not _is_usable(device):
            is_seen, found = False, f"{device} runs nothing any more: {found}"
        tally.num_red += is_seen
        tally.num_missed += not is_seen
        word = "red" if is_seen else "MISSED"
        say(f"{word} {control.gate} {contract.name}: {control.what}: {found}")


def _cause(error: ToolchainError) -> str:
    """Of all that a compiler said, the line that matters."""
    lines = str(error).splitlines()
    return next((line for line in lines if "error" in line), lines[0])


def seen(contract: Contract, control: Control, device: str) -> tuple[bool, str]:
    """Whether the control's gate sees its fault, and what it says first.

    A text that no longer compiles proves nothing.
    """
    try:
        faults = GATES[control.gate](planted(contract, control), device)
        fault = next(iter(faults), None)
    except COMPILE_ERRORS as error:
        return False, f"does not compile: {first_line(error)}"
    return fault is not None, fault or "nothing seen"


def _is_usable(device: str) -> bool:
    """Whether a device still runs what it is given. Once memory that is not its own is written to,
    CUDA answers everything that follows with the same error, which would pass for what is planted.
    """
    try:
        Device[device].synchronize()
    except RuntimeError:
        return False
    return True

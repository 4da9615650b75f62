"""Runs the contract on a device and prints what it finds, fault by fault, and the SUMMARY line.

What the commands that do so share: `python -m metal_ops.contract`, and `lfm2 verify`.
"""

import platform
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version

import click
from tinygrad import Device

from metal_ops.contract import (
    argmax,
    attention,
    conv,
    embed,
    experts,
    group_rows,
    matmul,
    norm,
    qk,
    route,
    tap,
)
from metal_ops.contract.case import Contract, Control
from metal_ops.contract.gates import COMPILE_ERRORS, GATES, first_line, has_clang, planted
from metal_ops.contract.limits import FAMILIES
from metal_ops.emulated_metal import MetalCompileError, install
from metal_ops.emulated_metal.toolchain import find_toolchain
from metal_ops.kernel import DEVICES, OLDEST_CUDA, Target, has_kernels

Say = Callable[[str], None]
# The modules that hold contracts.
MODULES = (
    embed,
    matmul,
    norm,
    conv,
    qk,
    attention,
    route,
    group_rows,
    experts,
    tap,
    argmax,
)
# Those with kernels that are other ones for another target.
TARGETED = (matmul, attention, experts)


def contracts(target: Target = Target.METAL) -> list[Contract]:
    """All of them, in the order of a round."""
    return [
        contract
        for module in MODULES
        for contract in (module.contracts(target) if module in TARGETED else module.contracts())
    ]


class Refused(click.ClickException):
    """A kernel or a device that is asked for, and is not there."""

    exit_code = 2


def choose(names: Iterable[str], device: str) -> list[Contract]:
    """The contracts of these names for a device, each once; all of them if there are no names.
    Raises Refused.
    """
    target = DEVICES.get(_kind(device), Target.METAL)
    known = {contract.name: contract for contract in contracts(target)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise Refused(f"there is no kernel {unknown[0]!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] or list(known.values())


def open_device(name: str, say: Say, order: str = "random", seed: int = 0) -> str:
    """Opens a device to run kernels on, METAL emulated where it is not a Mac's; its name.

    order, seed: of emulated threads. Raises Refused where no kernel runs on such a device,
    ClickException where it cannot be opened.
    """
    device = name.upper()
    kind = _kind(device)
    # NULL computes nothing.
    computing = [known for known in DEVICES if known != "NULL"]
    if kind not in computing:
        have = "has" if len(computing) == 1 else "have"
        raise Refused(f"{device} has no hand-written kernels; {' and '.join(computing)} {have}")
    try:
        if is_emulated(device):
            find_toolchain()
            emulator = install(checked=True)
            emulator.order, emulator.seed = order, seed
        target = Device[device].renderer.target
    except MetalCompileError as error:
        reason = f"METAL is emulated here, which needs clang: {one_line(error)}"
        raise click.ClickException(reason) from error
    except Exception as error:
        reason = f"device {device} cannot be opened: {one_line(error)}"
        raise click.ClickException(reason) from error
    if not has_kernels(device):
        raise click.ClickException(f"{device} is {target}: kernels need sm_{OLDEST_CUDA} or later")
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


def verify(chosen: Iterable[Contract], device: str, say: Say, progress: Say) -> bool:
    """Runs every gate and every control of `chosen`; whether all passed and none was missed.

    say: a line of the report. progress: what is being run, for a terminal.
    """
    never_run = ", ".join(f"{f.name} ({f.chips})" for f in FAMILIES if not f.is_run)
    say(f"limits are from records; nobody has run {never_run}")
    if not has_clang():
        say("no clang here: arguments and threadgroup memory of the texts are not compared")
    num_passed = num_failed = num_red = num_missed = num_limits = 0
    for contract in chosen:
        faults = {}
        for gate, look in GATES.items():
            progress(f"{contract.name}: {gate}")
            try:
                faults[gate] = list(look(contract, device))
            except COMPILE_ERRORS as error:
                faults[gate] = [f"nothing runs: {first_line(error)}"]
            for fault in faults[gate]:
                say(f"FAIL {gate} {contract.name}: {fault}")
        num_limits += len(faults["limits"])
        has_failed = any(faults.values())
        num_failed += has_failed
        num_passed += not has_failed
        if not has_failed:
            say(f"pass {contract.name}: {len(contract.kernels)} launches")
        for control in contract.controls:
            if control.is_race and not is_emulated(device):
                say(f"skip {control.gate} {contract.name}: {control.what}: a race, for emulation")
                continue
            progress(f"{contract.name}: {control.what}")
            is_seen, found = seen(contract, control, device)
            num_red += is_seen
            num_missed += not is_seen
            word = "red" if is_seen else "MISSED"
            say(f"{word} {control.gate} {contract.name}: {control.what}: {found}")
    num_kernels, num_controls = num_passed + num_failed, num_red + num_missed
    say(
        f"SUMMARY {num_kernels} kernels: {num_passed} pass gates 1-{len(GATES)}, "
        f"{num_failed} fail; "
        f"{num_controls} controls: {num_red} red as planted, {num_missed} missed; "
        f"{num_limits} limit problems"
    )
    return not num_failed and not num_missed


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

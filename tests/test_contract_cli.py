"""The two commands that prove the kernels: what they print, and with which code they end."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lfm2.cli import main as lfm2_main
from metal_ops.contract import report
from metal_ops.contract import tap as contract_of_tap
from metal_ops.contract.__main__ import main as contract_main
from metal_ops.contract.case import Control
from metal_ops.emulated_metal import ToolchainError, build
from metal_ops.emulated_metal.toolchain import Toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 120
SUMMARY = re.compile(
    r"SUMMARY 1 kernels: 1 pass gates 1-5, 0 fail; (\d+) controls: \1 red as planted, 0 missed; "
    r"0 limit problems"
)


@pytest.fixture(params=["python -m metal_ops.contract", "lfm2 verify"])
def command(request, capsys):
    """Runs one of the commands in this process; returns its exit code, output and standard
    error.
    """

    def run(*arguments):
        with pytest.raises(SystemExit) as stopped:
            if request.param == "lfm2 verify":
                lfm2_main(["verify", *arguments])
            else:
                contract_main([*arguments])
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.fixture
def tap(monkeypatch):
    """Makes tap the only contract, and returns what gives it other parts than its own."""
    (contract,) = contract_of_tap.contracts()

    def change(**changes):
        monkeypatch.setattr(report, "contracts", lambda target: [replace(contract, **changes)])

    change()
    return change


def test_a_proved_kernel(command):
    code, output, errors = command("--only", "tap")
    assert (code, errors) == (0, "")
    assert SUMMARY.fullmatch(output.splitlines()[-1]), output


def test_a_missed_fault_is_code_1(command, tap):
    unseen = Control(
        "nothing at all", "const uint t = block.y;", "const uint t = block.y; ;", "rows"
    )
    tap(controls=(unseen,))
    code, output, _ = command()
    assert code == 1 and "MISSED rows tap: nothing at all: nothing seen" in output
    assert "1 controls: 0 red as planted, 1 missed" in output.splitlines()[-1]


def test_a_failing_kernel_is_code_1(command, tap):
    (contract,) = contract_of_tap.contracts()
    case = contract.cases[0]
    scratch = case.expected["scratch"]
    wrong = replace(case, expected={"scratch": replace(scratch, values=scratch.values + 1)})
    tap(cases=(wrong,), rows=(), controls=())
    code, output, _ = command()
    assert code == 1 and "FAIL shapes tap: at 3x36 float" in output
    assert "0 pass gates 1-5, 1 fail" in output.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments, error",
    [
        (("--device", "CPU"), "CPU has no hand-written kernels; METAL and CUDA have"),
        (("--device", "foo"), "FOO has no hand-written kernels; METAL and CUDA have"),
        (("--device", "METAL:x"), "'METAL:x' names no device: expected one such as METAL"),
        (("--device", ""), "'' names no device: expected one such as METAL"),
        (("--only", "nix"), "there is no kernel 'nix'; there are tap"),
        (("--only", "tapp"), "there is no kernel 'tapp' (near it: tap); there are tap"),
    ],
)
def test_what_is_not_there_is_one_line_and_code_2(command, tap, arguments, error):
    code, output, errors = command(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"Error: {error}") and len(errors.splitlines()) == 1


def test_no_compiler_is_one_line(command, tap, monkeypatch):
    def refuse():
        raise ToolchainError("no clang 17\nor newer")

    monkeypatch.setattr(report, "find_toolchain", refuse)
    code, output, errors = command("--only", "tap")
    assert (code, output) == (1, "")
    assert errors == "Error: METAL is emulated here, which needs clang: no clang 17 or newer\n"


def test_a_failing_compiler_is_one_line_and_says_nothing_of_kernels(command, tap, monkeypatch):
    def failing():
        return Toolchain(("false",), ("false",), ("false",), "clang version 19, failing")

    monkeypatch.setattr(build, "find_toolchain", failing)
    code, output, errors = command()
    assert code == 1 and not re.search("FAIL|MISSED|SUMMARY", output)
    assert errors == (
        "Error: cannot compile here, which says nothing of the kernels: "
        "false failed with status 1\n"
    )


def test_names_of_kernels(command, tap):
    tap(name="tap 4-bit")
    assert command("--list") == (0, "tap 4-bit\n", "")
    assert command("--list", "--only", "Tap 4-Bit") == (0, "tap 4-bit\n", "")
    # A name with a blank in it is quoted, so that it can be copied.
    code, _, errors = command("--only", "Nix")
    assert (code, errors) == (2, "Error: there is no kernel 'Nix'; there are 'tap 4-bit'\n")


def test_help_is_h_too(command):
    code, output, _ = command("-h")
    assert code == 0 and "--only NAME" in output


def test_progress_counts_kernels():
    (contract,) = contract_of_tap.contracts()
    short = replace(contract, cases=contract.cases[:1], rows=(), controls=())
    shown = []
    report.open_device("METAL", lambda line: None)
    report.verify([short, short], "METAL", lambda line: None, shown.append)
    assert shown[0] == "1 of 2 tap: builds" and shown[-1] == "2 of 2 tap: limits"


def contract_into(output, *arguments):
    """The exit code and standard error of the contract's command."""
    done = subprocess.run(
        [sys.executable, "-m", "metal_ops.contract", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("arguments", [["--list"], ["--help"]])
def test_an_output_that_is_full_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        code, errors = contract_into(full, *arguments)
    assert code == 1 and len(errors.splitlines()) == 1
    assert errors.startswith("Error: ") and "No space left on device" in errors


def test_an_output_that_nobody_reads_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    assert contract_into(writer, "--list") == (141, "")
    os.close(writer)


def test_kernels_in_processes_of_their_own_say_the_same():
    chosen = report.choose(["argmax", "tap"])
    report.open_device("METAL", lambda line: None)
    said, said_apart, shown = [], [], []
    assert report.verify(chosen, "METAL", said.append, lambda what: None)
    assert report.verify(chosen, "METAL", said_apart.append, shown.append, num_processes=2)
    assert said_apart == said and said[-1].startswith("SUMMARY 2 kernels: 2 pass")
    assert shown[-1] == "2 of 2 kernels done, 2 at a time"


@pytest.mark.parametrize("words", [["metal_ops.contract"], ["lfm2", "verify"]])
@pytest.mark.parametrize("names", [["argmax"], ["argmax", "tap"]])
def test_an_interrupt_is_code_130(words, names):
    only = [word for name in names for word in ("--only", name)]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *words, *only],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout.readline().startswith("METAL: emulated")
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, errors) == (130, "") and "SUMMARY" not in output

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
from metal_ops.emulated_metal import MetalCompileError

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
        (("--only", "nix"), "there is no kernel 'nix'; there are tap"),
    ],
)
def test_what_is_not_there_is_one_line_and_code_2(command, tap, arguments, error):
    code, output, errors = command(*arguments)
    assert (code, output) == (2, "")
    assert errors.startswith(f"Error: {error}") and len(errors.splitlines()) == 1


def test_no_compiler_is_one_line(command, tap, monkeypatch):
    def refuse():
        raise MetalCompileError("no clang 17\nor newer")

    monkeypatch.setattr(report, "find_toolchain", refuse)
    code, output, errors = command("--only", "tap")
    assert (code, output) == (1, "")
    assert errors == "Error: METAL is emulated here, which needs clang: no clang 17 or newer\n"


@pytest.mark.parametrize("words", [["metal_ops.contract"], ["lfm2", "verify"]])
def test_an_interrupt_is_code_130(words):
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", *words, "--only", "argmax"],
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

"""What is no fault of a kernel: damaged files of the cache, a compiler that cannot run, a full
disk, a user who waits no longer.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from metal_ops.emulated_metal import MetalCompileError, ToolchainError, build, compile, toolchain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")
ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 120
SOURCE = """#include <metal_stdlib>
using namespace metal;
kernel void f(device int* out, uint i [[thread_position_in_grid]]) { out[i] = i * i; }
"""
SQUARES = f"""
import numpy as np
from metal_ops.emulated_metal import compile, run
out = np.zeros(4, np.int32)
run(compile('''{SOURCE}''')["f"], 1, 4, out)
print(*out)
"""
ENDLESS = """
import sys
import numpy as np
from metal_ops.emulated_metal import compile, run
kernel = compile('''#include <metal_stdlib>
using namespace metal;
kernel void f(device atomic_int* count) {
  while (atomic_fetch_add_explicit(count, 0, memory_order_relaxed) < 100000000) {}
}''')["f"]
print("ready", flush=True)
run(kernel, 1, 1, np.zeros(1, np.int32))
"""


def python(program, cache, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def squares(cache, **environment):
    """What the program prints and says on standard error, and its exit code."""
    with python(SQUARES, cache, **environment) as process:
        return *process.communicate(timeout=DEADLINE_S), process.returncode


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A cache that has all that the program needs."""
    cache = tmp_path_factory.mktemp("warm")
    assert squares(cache) == ("0 1 4 9\n", "", 0)
    return cache


DAMAGES = {
    "nothing": lambda content: b"",
    "another JSON": lambda content: b"[1]",
    "noise": lambda content: bytes(range(256)) * 64,
    "half": lambda content: content[: len(content) // 2],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_of_the_cache_are_made_anew(warm, tmp_path, damage):
    cache = tmp_path / "cache"
    shutil.copytree(warm, cache)
    kept = [path for path in (cache / "lfm2" / "emulated_metal").iterdir() if path.is_file()]
    whole = [path for path in kept if path.suffix != ".sum"]
    assert {path.suffix for path in whole} == {".ii", ".json", ".pch", ".so"}
    before = {path: path.read_bytes() for path in whole}
    for path, content in before.items():
        path.write_bytes(DAMAGES[damage](content))
    assert squares(cache) == ("0 1 4 9\n", "", 0)
    texts = [path for path in whole if path.suffix in (".ii", ".json")]
    assert [path.read_bytes() for path in texts] == [before[path] for path in texts]


def test_without_a_folder_to_keep_files_in_there_is_one_for_a_while(tmp_path):
    no_folder, temporary = tmp_path / "file", tmp_path / "temporary"
    no_folder.touch()
    temporary.mkdir()
    assert squares(no_folder, TMPDIR=str(temporary)) == ("0 1 4 9\n", "", 0)
    assert list(temporary.iterdir()) == []


@pytest.fixture
def clang_that(monkeypatch, tmp_path):
    """Makes the compiler one that fails with these words, by this command of a shell."""

    def fail(words, ending="exit 1"):
        clang = tmp_path / "clang"
        clang.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{words}\nEND\n{ending}\n")
        clang.chmod(0o755)
        # The version is a part of the names of kept files.
        failing = toolchain.Toolchain(
            (str(clang),), ("ld",), (str(clang),), f"clang version 19 {tmp_path}"
        )
        monkeypatch.setattr(build, "find_toolchain", lambda: failing)

    return fail


@pytest.mark.parametrize(
    "words, ending",
    [
        ("error: unable to open output file 'a.pch': 'No space left on device'", "exit 1"),
        ("fatal error: malformed block record in PCH file: 'a.pch'", "exit 1"),
        ("zig: unable to open global cache directory 'zig': ReadOnlyFileSystem", "exit 1"),
        ("", "kill -9 $$"),
    ],
)
def test_a_compiler_that_cannot_run_is_no_fault_of_the_source(clang_that, words, ending):
    clang_that(words, ending)
    with pytest.raises(ToolchainError, match=words or "failed with status -9"):
        compile(SOURCE)


def test_a_compiler_that_names_a_line_finds_fault_with_the_source(clang_that):
    clang_that("kernel.metal:3:1: error: no\n1 error generated.")
    with pytest.raises(MetalCompileError, match="^kernel.metal:3:1: error: no$"):
        compile(SOURCE)


def test_files_that_cannot_be_kept_are_no_fault_of_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "_cache", lambda: tmp_path / "gone")
    with pytest.raises(ToolchainError, match="gone.*: No such file or directory$"):
        compile(SOURCE)


def test_a_second_interrupt_ends_a_kernel_that_loops_for_ever(warm):
    with python(ENDLESS, warm) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            # The first one is kept for when the launch ends.
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(5) == -signal.SIGINT
        finally:
            process.kill()


def test_an_interrupt_is_raised_when_the_launch_ends(warm):
    long = ENDLESS.replace("(count, 0", "(count, 1")
    with python(long, warm) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"

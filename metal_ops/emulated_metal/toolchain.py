"""Finds a clang, and keeps what it makes: a clang on the PATH, else the one inside the `ziglang`
wheel.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tinygrad.helpers import cache_dir

from metal_ops.emulated_metal.errors import MetalCompileError

# The first whose __bf16 computes and whose -fsanitize=thread has the switches we use.
OLDEST_CLANG = 17


@dataclass(frozen=True)
class Toolchain:
    """Commands, each a list of words: a plain clang, a linker, and a C++ compiler that links whole
    programs.
    """

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    whole: tuple[str, ...]
    version: str

    @property
    def major(self) -> int:
        return _major(self.version)


@cache
def find_toolchain() -> Toolchain:
    """The one toolchain of this process. Raises MetalCompileError if there is none."""
    path, linker = shutil.which("clang"), shutil.which("ld.lld") or shutil.which("ld")
    if path and linker and (version := _usable(path)):
        return Toolchain((path,), (linker,), (path, "-x", "c++"), version)
    spec = importlib.util.find_spec("ziglang")
    if spec is None:
        raise MetalCompileError(
            f"no clang {OLDEST_CLANG} or newer on the PATH and no zig: run pip install ziglang"
        )
    zig = str(Path(spec.submodule_search_locations[0]) / "zig")
    version = call([zig, "clang", "--version"]).splitlines()[0]
    # NOTE: `zig c++` would first build a C++ library, for minutes. `zig cc` compiles the runtime,
    # which needs none.
    return Toolchain((zig, "clang"), (zig, "ld.lld"), (zig, "cc", "-x", "c++"), version)


def _usable(clang: str) -> str | None:
    """The version of a clang that is new enough and finds the headers of the C library."""
    program = [
        clang,
        "-x",
        "c++",
        "-shared",
        "-fPIC",
        "-include",
        "stdlib.h",
        os.devnull,
        "-o",
        os.devnull,
    ]
    try:
        version = call([clang, "--version"]).splitlines()[0]
        call(program)
    except MetalCompileError:
        return None
    return version if _major(version) >= OLDEST_CLANG else None


def _major(version: str) -> int:
    number = version.partition("clang version ")[2].split(".")[0]
    return int(number) if number.isdigit() else 0


def call(command: list[str], folder: Path | None = None) -> str:
    """Runs a command and returns what it printed. Raises MetalCompileError with its messages if it
    fails.
    """
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise MetalCompileError(done.stderr or f"{command[0]} failed with status {done.returncode}")
    return done.stdout


def digest(*parts: object) -> str:
    """A name for what is made out of these strings, bytes, and lists of them."""
    return hashlib.sha256(json.dumps(parts, default=bytes.hex).encode()).hexdigest()[:24]


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the user's cache, made by `make(path)` if it is not there.

    Two processes may make it at once: each works in a folder of its own, and the last to finish
    puts its file there.
    """
    kept = _cache() / name
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="making-", dir=_cache()) as folder:
            made = Path(folder) / name
            make(made)
            os.replace(made, kept)
    return kept


@cache
def _cache() -> Path:
    folder = Path(cache_dir).parent / "lfm2" / "emulated_metal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="emulated_metal-"))

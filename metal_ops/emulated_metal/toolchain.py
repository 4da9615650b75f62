"""Finds a clang, and keeps what it makes: a clang on the PATH, else the one inside the `ziglang`
wheel.
"""

import atexit
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

from metal_ops.emulated_metal.errors import ToolchainError

# The first whose __bf16 computes and whose -fsanitize=thread has the switches we use.
OLDEST_CLANG = 17


@dataclass(frozen=True)
class Toolchain:
    """Commands, each a list of words: a plain clang, a linker, and a C++ compiler that has the C
    library's headers.
    """

    clang: tuple[str, ...]
    linker: tuple[str, ...]
    hosted: tuple[str, ...]
    version: str

    @property
    def major(self) -> int:
        return _major(self.version)


@cache
def find_toolchain() -> Toolchain:
    """The one toolchain of this process. Raises ToolchainError if there is none."""
    path, linker = shutil.which("clang"), shutil.which("ld.lld") or shutil.which("ld")
    if path and linker and (version := _usable(path)):
        return Toolchain((path,), (linker,), (path, "-x", "c++"), version)
    spec = importlib.util.find_spec("ziglang")
    if spec is None:
        raise ToolchainError(
            f"no clang {OLDEST_CLANG} or newer on the PATH and no zig: run pip install ziglang"
        )
    zig = str(Path(spec.submodule_search_locations[0]) / "zig")
    version = call([zig, "clang", "--version"]).splitlines()[0]
    # NOTE: `zig c++` would first build a C++ library, for minutes, and a `zig cc` that links a
    # runtime library, for seconds; what we compile needs neither.
    return Toolchain((zig, "clang"), (zig, "ld.lld"), (zig, "cc", "-x", "c++"), version)


def _usable(clang: str) -> str | None:
    """The version of a clang that is new enough and finds the headers of the C library."""
    program = [clang, "-x", "c++", "-fsyntax-only", "-include", "stdlib.h", os.devnull]
    try:
        version = call([clang, "--version"]).splitlines()[0]
        call(program)
    except ToolchainError:
        return None
    return version if _major(version) >= OLDEST_CLANG else None


def _major(version: str) -> int:
    number = version.partition("clang version ")[2].split(".")[0]
    return int(number) if number.isdigit() else 0


def call(command: list[str], folder: Path | None = None) -> str:
    """Runs a command and returns what it printed. Raises ToolchainError with its messages if it
    fails.
    """
    # zig keeps what it builds; its own folder may not be there to be written to.
    kept = str(_cache() / "zig")
    environment = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": kept, "ZIG_LOCAL_CACHE_DIR": kept}
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment)
    except OSError as error:
        raise ToolchainError(f"{command[0]}: {error.strerror}") from error
    if done.returncode:
        ending = f"failed with status {done.returncode}"
        raise ToolchainError(done.stderr.strip() or f"{command[0]} {ending}")
    return done.stdout


def digest(*parts: object) -> str:
    """A name for what is made out of these strings, bytes, and lists of them."""
    return hashlib.sha256(json.dumps(parts, default=bytes.hex).encode()).hexdigest()[:24]


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """The file of this name in the user's cache, made by `make(path)` if it is not there, or is not
    as it was made. Raises ToolchainError if it cannot be written.

    Two processes may make it at once: each works in a folder of its own, and the last to finish
    puts its file there.
    """
    kept = _cache() / name
    if _is_whole(kept):
        return kept
    try:
        with tempfile.TemporaryDirectory(prefix="making-", dir=_cache()) as folder:
            made = Path(folder) / name
            make(made)
            _checksum_file(made).write_bytes(_checksum(made))
            os.replace(made, kept)
            os.replace(_checksum_file(made), _checksum_file(kept))
    except OSError as error:
        raise ToolchainError(f"{error.filename or kept}: {error.strerror}") from error
    return kept


def _is_whole(kept: Path) -> bool:
    """Whether a file is there with the checksum beside it: 1 ms for the largest, a header."""
    try:
        return _checksum_file(kept).read_bytes() == _checksum(kept)
    except OSError:
        return False


def _checksum_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.sum")


def _checksum(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


@cache
def _cache() -> Path:
    """The user's cache, or if that cannot be written to, a folder that ends with this process."""
    folder = Path(cache_dir).parent / "lfm2" / "emulated_metal"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    try:
        folder = Path(tempfile.mkdtemp(prefix="emulated_metal-"))
    except OSError as error:
        reason = f"no folder can be written to for a cache: {error.strerror}"
        raise ToolchainError(reason) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

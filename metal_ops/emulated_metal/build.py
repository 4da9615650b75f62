"""Compiles Metal source: the lint, the strict compile with real address spaces, and the shared
objects that run.

Everything is kept in the user's cache under the hash of what it is made of, so that a second run
only reads files.
"""

import json
import re
from dataclasses import asdict
from functools import cache
from pathlib import Path

from metal_ops.emulated_metal.declarations import declarations, tokenize
from metal_ops.emulated_metal.errors import MetalCompileError, ToolchainError
from metal_ops.emulated_metal.lint import check
from metal_ops.emulated_metal.toolchain import cached, call, digest, find_toolchain
from metal_ops.emulated_metal.translate import Buffer, Kernel, translate

HERE = Path(__file__).parent
HEADERS = HERE / "msl"
RUNTIME = HERE / "runtime"
INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(\S+).*$", re.MULTILINE)
METAL_HEADER = re.compile(r"<(metal_\w+|simd/simd\.h)>")
DIAGNOSTIC = re.compile(
    r"^(?P<file>[^:\n]+):(?P<line>\d+):(?P<column>\d+): (?P<kind>error|fatal error|note): (?P<text>.*)$",
    re.MULTILINE,
)
# What a Metal source may ask the preprocessor about.
MACROS = ("-undef", "-D__METAL__=1", "-D__METAL_VERSION__=310", "-D__HAVE_BFLOAT__=1")

COMMON = (
    # Metal 3.1 is C++14.
    *("-std=c++14", f"-I{HEADERS}", f"-I{RUNTIME}", "-nostdinc++", "-Wno-everything"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno"),
    # A half or bfloat is rounded after every operation, a product is not joined with a sum, 1.0 is
    # a float.
    *("-ffp-contract=off", "-Xclang", "-ffloat16-excess-precision=none"),
    *("-Xclang", "-fbfloat16-excess-precision=none", "-Xclang", "-cl-single-precision-constant"),
)
REFUSED_WARNINGS = (
    *(
        "-Werror=array-bounds",
        "-Werror=uninitialized",
        "-Werror=return-type",
        "-Werror=vla-extension",
        "-Werror=vla",
    ),
    *("-Werror=c++17-extensions", "-Werror=c++20-extensions", "-Werror=c++23-extensions"),
)
FAST = ("-O2",)
TRAPS = "array-bounds,shift,integer-divide-by-zero,float-cast-overflow,alignment"
CHECKED = (
    *("-O1", "-DMSL_CHECKED", "-gline-tables-only", "-gdwarf-4"),
    *("-mprefer-vector-width=128", "-fno-vectorize", "-fno-slp-vectorize"),
    # Calls before each load and store; they lead to the runtime's own hooks.
    *(
        "-fsanitize=thread",
        "-mllvm",
        "-tsan-instrument-func-entry-exit=0",
        "-mllvm",
        "-tsan-instrument-atomics=0",
    ),
    *(
        "-mllvm",
        "-tsan-instrument-read-before-write=1",
        "-mllvm",
        "-tsan-instrument-memintrinsics=1",
    ),
    # Private memory starts as NaN, and undefined behaviour traps where it is.
    *("-ftrivial-auto-var-init=pattern", f"-fsanitize={TRAPS}", f"-fsanitize-trap={TRAPS}"),
)


def read_kernels(source: str, name: str, strict: bool) -> list[Kernel]:
    """The kernels of the source; with `strict`, lint and compiler have found nothing to refuse."""

    def make(path: Path) -> None:
        text, kernels = _translated(source, name, strict)
        if strict:
            _check_strictly(text, name, path.parent)
        path.write_text(json.dumps([asdict(kernel) for kernel in kernels]))

    key = digest("kernels", source, name, strict, _sources(HERE, "*.py"), *_toolset(HEADERS))
    read = json.loads(cached(f"{key}.json", make).read_text())
    return [
        Kernel(**{**kernel, "buffers": tuple(Buffer(**b) for b in kernel["buffers"])})
        for kernel in read
    ]


def build_kernels(source: str, name: str, checked: bool) -> Path:
    """The shared object that runs them."""
    flags = (
        *COMMON,
        *(_checked_flags() if checked else FAST),
        *_cpu_flags(),
        "-fPIC",
        "-fvisibility=hidden",
    )

    def make(path: Path) -> None:
        text, _ = _translated(source, name, strict=False)
        written, compiled = path.parent / name, path.parent / "kernels.o"
        written.write_text(text)
        toolchain = find_toolchain()
        _compile([*_with_header(flags), "-c", "-o", compiled.name], name, path.parent)
        call([*toolchain.linker, "-shared", compiled.name, "-o", path.name], path.parent)

    key = digest("built", source, name, flags, _sources(HERE, "*.py"), *_toolset(HEADERS))
    return cached(f"{key}.so", make)


def build_runtime() -> Path:
    """The shared object of the runtime."""

    def make(path: Path) -> None:
        flags = ("-std=c++17", "-O2", "-g0", "-fPIC", "-fno-exceptions", "-fno-rtti")
        toolchain = find_toolchain()
        compiled = []
        for file in sorted(RUNTIME.glob("*.cpp")):
            compiled.append(f"{file.stem}.o")
            call([*toolchain.hosted, *flags, "-c", str(file), "-o", compiled[-1]], path.parent)
        call([*toolchain.linker, "-shared", *compiled, "-o", path.name], path.parent)

    return cached(f"{digest('runtime', *_toolset(RUNTIME))}.so", make)


# ---------------------------------------------------------------- steps
def _translated(source: str, name: str, strict: bool) -> tuple[str, list[Kernel]]:
    text = _preprocess(source, name)
    declared = declarations(tokenize(text))
    if strict:
        check(name, declared)
    text, kernels = translate(name, text, declared)
    if not kernels:
        raise MetalCompileError(f"{name}: no kernel in the source")
    return text, kernels


def _preprocess(source: str, name: str) -> str:
    """The source with its own macros expanded; the library's come later."""
    for found in INCLUDE.finditer(source):
        if not METAL_HEADER.fullmatch(found[1]):
            line = source.count("\n", 0, found.start()) + 1
            raise MetalCompileError(
                f"{name}:{line}: #include {found[1]}: a kernel's source is one text"
            )
    source = INCLUDE.sub("", source)

    def make(path: Path) -> None:
        (path.parent / name).write_text(source)
        _compile(["-x", "c++", "-std=c++14", "-E", *MACROS, "-o", path.name], name, path.parent)

    return cached(f"{digest('preprocessed', source, name, *_toolset())}.ii", make).read_text()


def _check_strictly(text: str, name: str, folder: Path) -> None:
    (folder / name).write_text(text)
    _compile(
        [*_with_header((*COMMON, "-DMSL_STRICT")), *REFUSED_WARNINGS, "-fsyntax-only"], name, folder
    )


def _compile(flags: list[str], name: str, folder: Path) -> None:
    """Raises MetalCompileError if clang finds fault with the source, ToolchainError if it fails
    without naming a line of it.
    """
    try:
        call([*find_toolchain().clang, *flags, name], folder)
    except ToolchainError as error:
        told = _in_source(str(error), name)
        if not told:
            raise
        raise MetalCompileError(told) from None


def _in_source(messages: str, name: str) -> str:
    """clang's errors, each where the source causes it: one in the library moves to the note that
    names the source. None of them if no line of the source is named.
    """
    told: list[str] = []
    inside = ""
    for found in DIAGNOSTIC.finditer(messages):
        is_error = found["kind"] != "note"
        if found["file"] == name:
            place = f"{name}:{found['line']}:{found['column']}"
            told.append(
                f"{place}: {inside}" if inside else f"{place}: {found['kind']}: {found['text']}"
            )
            inside = ""
        elif is_error:
            inside = f"error: {found['text']}"
    return "\n".join(told)


def _with_header(flags: tuple[str, ...]) -> list[str]:
    """The flags, and the Metal library as a precompiled header, which saves 0.15 s a compile."""
    header = HEADERS / "metal_stdlib.h"

    def make(path: Path) -> None:
        call([*find_toolchain().clang, "-x", "c++-header", *flags, str(header), "-o", str(path)])

    # NOTE: clang refuses a precompiled header whose parts have another time than they had.
    times = [
        file.stat().st_mtime_ns
        for folder in (HEADERS, RUNTIME)
        for file in sorted(folder.glob("*.h"))
    ]
    key = digest("header", flags, times, *_toolset(HEADERS))
    return ["-x", "c++", *flags, "-include-pch", str(cached(f"{key}.pch", make))]


# ---------------------------------------------------------------- what decides a result
@cache
def _sources(folder: Path, pattern: str) -> list[str]:
    return [file.read_text() for file in sorted(folder.glob(pattern))]


def _toolset(*folders: Path) -> list[object]:
    texts = [_sources(folder, "*") for folder in folders]
    return [find_toolchain().version, texts, (RUNTIME / "interface.h").read_text()]


@cache
def _cpu_flags() -> tuple[str, ...]:
    """The processor's instructions for half and for fused multiply-add."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    present = next((line.split() for line in lines if line.startswith("flags")), ())
    return tuple(f"-m{flag}" for flag in ("avx2", "fma", "f16c") if flag in present)


def _checked_flags() -> tuple[str, ...]:
    """With one trap a check, and its line that of the source."""
    major = find_toolchain().major
    merging = ("-fno-sanitize-merge",) if major >= 20 else ("-mllvm", "-ubsan-unique-traps")
    reasons = ("-fno-sanitize-debug-trap-reasons",) if major >= 22 else ()
    return (*CHECKED, *merging, *reasons)

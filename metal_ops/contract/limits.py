"""Launch limits of Apple's chip families, and whether a launch keeps them.

What is known, and from where. Apple's "Metal feature set tables" give every family below 31 buffers
a kernel, 32 KB of threadgroup memory and at most 1,024 threads a threadgroup. What a compiled
pipeline allows is less on M1 and M2, where it falls with the registers it uses: launches of 1,024
threads met limits of 704, launches of 512 limits of 448. M3 and later give every pipeline 1,024.
So every kernel reserves its threads in its text, for which the compiler then saves registers, and
none has more than 512. None of these figures was measured by this project: no one here has run a
Mac, and `lfm2 verify` on one is what would tell.
"""

import re
from dataclasses import dataclass

from metal_ops.kernel import SIMD_WIDTH, THREADGROUP_BYTES, Kernel

MAX_BUFFERS = 31
# NOTE: not Metal's, whose grids have no such limit, but CUDA's in y and z.
MAX_GRID = 2**16 - 1
RESERVED = "max_total_threads_per_threadgroup(THREADS)"
DEFINED = re.compile(r"#define THREADS (\d+)")


@dataclass(frozen=True)
class Family:
    """Chips whose pipelines allow the same number of threads, if their text reserves them."""

    name: str
    chips: str
    max_threads: int
    is_run: bool = False


FAMILIES = (
    Family("Apple7", "M1", max_threads=512),
    Family("Apple8", "M2", max_threads=512),
    Family("Apple9", "M3, M4", max_threads=1024),
    Family("Apple10", "M5", max_threads=1024),
)


def exceeded(kernel: Kernel, threadgroup_bytes: int = 0) -> list[str]:
    """What a launch asks for beyond the limits, in words."""
    found = []
    if threadgroup_bytes > THREADGROUP_BYTES:
        found.append(f"{threadgroup_bytes} bytes a threadgroup, {THREADGROUP_BYTES} possible")
    num_buffers = len(kernel.writes) + len(kernel.reads)
    if num_buffers > MAX_BUFFERS:
        found.append(f"{num_buffers} buffers, {MAX_BUFFERS} possible")
    if max(kernel.grid) > MAX_GRID or min(kernel.grid) < 1:
        found.append(f"a grid of {kernel.grid}")
    if kernel.threads % SIMD_WIDTH:
        found.append(f"{kernel.threads} threads, no multiple of {SIMD_WIDTH}")
    reserved = DEFINED.search(kernel.source) if RESERVED in kernel.source else None
    if reserved is None or int(reserved[1]) != kernel.threads:
        found.append(f"{kernel.threads} threads, which the text does not reserve")
    for family in FAMILIES:
        if kernel.threads > family.max_threads:
            where = f"{family.name} ({family.chips})"
            found.append(f"{kernel.threads} threads on {where}, {family.max_threads} there")
    return found

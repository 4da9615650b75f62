"""A hand-written kernel: its text out of `kernels/`, its launch and its arguments.

The ops choose one by a pure function of shapes; `launch.inject` places it in a tinygrad graph and
the contract runs it alone. Knows nothing of tinygrad's graph.
"""

from dataclasses import dataclass
from enum import Enum, auto
from functools import cache
from math import prod
from pathlib import Path

from tinygrad import Device, dtypes
from tinygrad.dtype import DType
from tinygrad.renderer.cstyle import CUDARenderer

FOLDER = Path(__file__).parent / "kernels"
HEAD = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
// Loops over arrays that have to be in registers.
#define UNROLL _Pragma("clang loop unroll(full)")
// Before this a kernel reads nothing that the last launch has written, and writes nothing but threadgroup memory. Only
// on Hopper does a launch start before the last one's end, and has something to wait for: kernels/cuda.cuh.
inline void wait_for_last_launch() {}
"""
SIMD_WIDTH = 32
THREADGROUP_BYTES = 32 << 10  # of memory at most, on Apple's GPUs
CUDA_THREADGROUP_BYTES = 48 << 10  # on NVIDIA's, of what is declared in a kernel
# What Metal calls the types of a tensor.
TYPES = {
    dtypes.float32: "float",
    dtypes.float16: "half",
    dtypes.bfloat16: "bfloat",
    dtypes.int32: "int",
    dtypes.uint32: "uint",
}
FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
# Compute capability 8.0, Ampere: the first that multiplies matrices of bfloat.
OLDEST_CUDA = 80
# 9.0: its tensor cores multiply with rows in threadgroup memory, by instructions of its own.
HOPPER_CUDA = 90


class Target(Enum):
    """What a kernel's text is for. HOPPER is CUDA with products that only Hopper has."""

    METAL = auto()
    CUDA = auto()
    HOPPER = auto()

    @property
    def ending(self) -> str:
        """That of texts of which it has its own form."""
        return "metal" if self is Target.METAL else "cuh"

    @property
    def threadgroup_bytes(self) -> int:
        """Of memory that a threadgroup may have."""
        return THREADGROUP_BYTES if self is Target.METAL else CUDA_THREADGROUP_BYTES


# NOTE: NULL computes nothing; launches are counted there.
DEVICES = {"METAL": Target.METAL, "CUDA": Target.CUDA, "NULL": Target.METAL}


@dataclass(frozen=True)
class Argument:
    """A buffer of a kernel: its name in the kernel's text, its shape and type."""

    name: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Kernel:
    """One launch. `grid` counts threadgroups, `threads` those of one of them.

    The buffers are those of `writes`, then those of `reads`, in the order of the kernel's text.
    num_ops and num_bytes: what a launch computes and moves at most, for DEBUG=2.
    """

    name: str
    source: str
    grid: tuple[int, int, int]
    threads: int
    writes: tuple[Argument, ...]
    reads: tuple[Argument, ...]
    num_ops: int
    num_bytes: int


def has_kernels(device: str) -> bool:
    """Whether hand-written kernels run on a device."""
    return target_of(device) is not None


def target_of(device: str) -> Target | None:
    """What hand-written kernels are for that run on a device, if any do."""
    target = DEVICES.get(device.split(":")[0])
    return _cuda_target(device) if target is Target.CUDA else target


def _cuda_target(device: str) -> Target | None:
    """None if the GPU is too old, or tinygrad's compiler for CUDA's C++ is not in use."""
    renderer = Device[device].renderer
    arch = int(renderer.target.arch.removeprefix("sm_"))
    if not isinstance(renderer, CUDARenderer) or arch < OLDEST_CUDA:
        return None
    return Target.HOPPER if arch == HOPPER_CUDA else Target.CUDA


def compose(
    stems: tuple[str, ...],
    entry: str,
    name: str,
    target: Target = Target.METAL,
    **constants: int | float | DType,
) -> str:
    """The source of a kernel: constants as macros, then the texts of `kernels/` in order, in the
    target's own form where there is one.

    The function called `entry` in the text is launched as `name`, which says its shape.
    """
    defines = {entry: name} | {key: _spelled(value) for key, value in constants.items()}
    lines = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return "\n".join([HEAD + lines, *(_text(stem, target) for stem in stems)])


def _spelled(value: int | float | DType) -> str:
    if isinstance(value, DType):
        return TYPES[value]
    return f"{value!r}f" if isinstance(value, float) else str(int(value))


@cache
def _text(stem: str, target: Target) -> str:
    own = FOLDER / f"{stem}.{target.ending}"
    return (own if own.exists() else FOLDER / f"{stem}.{Target.METAL.ending}").read_text()


def divide_up(count: int, size: int) -> int:
    """How many parts of `size` hold `count`."""
    return -(-count // size)

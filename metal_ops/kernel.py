"""A hand-written kernel: its text out of `kernels/`, its launch and its arguments.

The ops choose one by a pure function of shapes; `launch.inject` places it in a tinygrad graph and
the contract runs it alone. Knows nothing of tinygrad's graph.
"""

from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path

from tinygrad import dtypes
from tinygrad.dtype import DType

FOLDER = Path(__file__).parent / "kernels"
HEAD = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
SIMD_WIDTH = 32
# What Metal calls the types of a tensor.
TYPES = {
    dtypes.float32: "float",
    dtypes.float16: "half",
    dtypes.bfloat16: "bfloat",
    dtypes.int32: "int",
    dtypes.uint32: "uint",
}
FLOATS = (dtypes.float32, dtypes.float16, dtypes.bfloat16)
# NOTE: NULL computes nothing; launches are counted there.
DEVICES = ("METAL", "NULL")


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
    return device.split(":")[0] in DEVICES


def compose(stems: tuple[str, ...], entry: str, name: str, **constants: int | float | DType) -> str:
    """The source of a kernel: constants as macros, then the texts of `kernels/` in order.

    The function called `entry` in the text is launched as `name`, which says its shape.
    """
    defines = {entry: name} | {key: _spelled(value) for key, value in constants.items()}
    lines = "".join(f"#define {key} {value}\n" for key, value in defines.items())
    return "\n".join([HEAD + lines, *map(_text, stems)])


def _spelled(value: int | float | DType) -> str:
    if isinstance(value, DType):
        return TYPES[value]
    return f"{value!r}f" if isinstance(value, float) else str(int(value))


@cache
def _text(stem: str) -> str:
    return (FOLDER / f"{stem}.metal").read_text()


def divide_up(count: int, size: int) -> int:
    """How many parts of `size` hold `count`."""
    return -(-count // size)

"""What a contract is made of: cases, rows that must agree, planted faults. Data only."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.kernel import Kernel

# What a numpy array of each type holds: the bits of a bfloat16.
STORAGE = {
    dtypes.float32: np.float32,
    dtypes.float16: np.float16,
    dtypes.bfloat16: np.uint16,
    dtypes.int32: np.int32,
    dtypes.uint32: np.uint32,
}
# Buffers by the names of a kernel's arguments, as they are stored.
Buffers = dict[str, np.ndarray]


@dataclass(frozen=True)
class Expected:
    """What a buffer must hold afterwards: |found - values| <= absolute + relative * |values|.

    written: which elements the kernel writes, all of them by default; the others must keep their
    bits. With both bounds zero, the values have to be met exactly.
    """

    values: np.ndarray
    absolute: float = 0.0
    relative: float = 0.0
    written: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """Launches of kernels on buffers that they share by the names of their arguments.

    buffers: contents before, as numbers; a buffer that is not among them is all NaN. expected: of
    the buffers that are looked at. is_checked_by: the gate that compares them, "shapes" for small
    and odd shapes, "reference" for real ones.
    """

    shape: str
    kernels: tuple[Kernel, ...]
    buffers: dict[str, np.ndarray]
    expected: dict[str, Expected] = field(default_factory=dict)
    is_checked_by: str = "shapes"


@dataclass(frozen=True)
class SameBits:
    """Two runs, and what of each must be equal to the bit."""

    shape: str
    cases: tuple[Case, Case]
    picks: tuple[Callable[[Buffers], np.ndarray], Callable[[Buffers], np.ndarray]]


@dataclass(frozen=True)
class Control:
    """A planted fault: `old` becomes `new` in the text of every kernel that has it, and `gate` must
    turn red.

    is_race: what it breaks is the order of threads or threadgroups that write the same, which a GPU
    may happen to keep; only the emulator, which watches every access, sees it for certain.
    """

    what: str
    old: str
    new: str
    gate: str
    is_race: bool = False


@dataclass(frozen=True)
class Contract:
    """A kernel's cases, rows and controls."""

    name: str
    cases: tuple[Case, ...]
    rows: tuple[SameBits, ...]
    controls: tuple[Control, ...]

    @property
    def kernels(self) -> list[Kernel]:
        """Every launch of the cases, each once."""
        cases = [*self.cases, *(case for same in self.rows for case in same.cases)]
        return list(dict.fromkeys(kernel for case in cases for kernel in case.kernels))


def pattern(*shape: int, seed: int = 0) -> np.ndarray:
    """Small numbers in closed form, which every float type holds exactly: multiples of 1/64 within
    11/64.
    """
    index = np.arange(np.prod(shape)) + 7 * seed
    outer = index // shape[-1]
    return ((3 * outer + 5 * index + index * index % 7 + seed) % 23 - 11).reshape(shape) / 64


def stored(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Numbers as a buffer of `dtype` stores them, rounded to nearest, ties to even."""
    if dtype != dtypes.bfloat16:
        return np.ascontiguousarray(values).astype(STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def loaded(bits: np.ndarray, dtype: DType) -> np.ndarray:
    """What a buffer of `dtype` holds, as float64 or as integers."""
    if dtype == dtypes.bfloat16:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.astype(np.float64) if bits.dtype.kind == "f" else bits


def rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    """float64 numbers that a buffer of `dtype` holds exactly."""
    return loaded(stored(values, dtype), dtype)


# The largest relative error of one rounding.
EPSILON = {dtypes.float32: 2.0**-24, dtypes.float16: 2.0**-11, dtypes.bfloat16: 2.0**-8}

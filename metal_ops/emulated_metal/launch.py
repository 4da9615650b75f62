"""Loads compiled kernels and launches them: on addresses, or on numpy arrays."""

import ctypes
import re
from collections.abc import Sequence
from functools import cache
from math import prod
from pathlib import Path

import numpy as np

from metal_ops.emulated_metal.build import build_kernels, build_runtime, read_kernels
from metal_ops.emulated_metal.errors import MetalLaunchError
from metal_ops.emulated_metal.line_table import line_at
from metal_ops.emulated_metal.memory import GuardedMemory
from metal_ops.emulated_metal.translate import ENTRY, MAX_THREADS, THREADGROUP_BYTES, Kernel

ORDERS = ("fifo", "reverse", "random")
ERROR_BYTES = 2048
# Of threadgroup memory, what Metal grants and what a launch may.
GRANTED_BYTES, MOST_GRANTED_BYTES = 32 << 10, 48 << 10
CODE_PLACE = re.compile(r"at \{pc:(0x[0-9a-f]+)\}")


class Launch(ctypes.Structure):
    """Mirrors Launch of runtime.h."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32 * 3),
        ("num_buffers", ctypes.c_uint32),
        ("order", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("sizes", ctypes.POINTER(ctypes.c_uint64)),
        ("is_written", ctypes.POINTER(ctypes.c_uint8)),
        ("is_checked", ctypes.c_uint32),
        ("threadgroup_bytes", ctypes.c_uint32),
        ("error_bytes", ctypes.c_uint32),
        ("error", ctypes.c_char_p),
    ]


@cache
def _runtime() -> ctypes.PyDLL:
    # Where kernels find exp and its like.
    ctypes.CDLL("libm.so.6", mode=ctypes.RTLD_GLOBAL)
    # The interpreter's lock is held during a launch: the runtime runs one at a time.
    return ctypes.PyDLL(str(build_runtime()), mode=ctypes.RTLD_GLOBAL)


class Library:
    """The kernels of one source, loaded. `library["name"]` is one of them."""

    def __init__(self, shared_object: Path, kernels: list[Kernel], checked: bool) -> None:
        _runtime()
        self.checked = checked
        self.shared_object = shared_object
        self._loaded = ctypes.CDLL(str(shared_object))
        self._kernels = {kernel.name: kernel for kernel in kernels}

    def __iter__(self):
        return iter(self._kernels)

    def __getitem__(self, name: str) -> "Function":
        if name not in self._kernels:
            raise MetalLaunchError(
                f"no kernel {name!r} in the source, which has {sorted(self._kernels)}"
            )
        entry = ctypes.cast(getattr(self._loaded, ENTRY + name), ctypes.c_void_p).value
        return Function(self, self._kernels[name], entry)


class Function:
    """One kernel, ready to be launched."""

    def __init__(self, library: Library, kernel: Kernel, entry: int) -> None:
        self.library = library
        self.kernel = kernel
        self.num_buffers = max((buffer.index for buffer in kernel.buffers), default=-1) + 1
        self._entry = entry

    @property
    def threadgroup_bytes(self) -> int:
        """What the kernel, if it is no template, declares in threadgroup memory."""
        symbol = THREADGROUP_BYTES + self.kernel.name
        return ctypes.c_uint32.in_dll(self.library._loaded, symbol).value

    def launch(
        self,
        memory: Sequence[tuple[int, int]],
        grid: Sequence[int],
        threads: Sequence[int],
        order: str = "fifo",
        seed: int = 0,
        max_threadgroup_bytes: int = GRANTED_BYTES,
    ) -> None:
        """Runs it on (address, size in bytes) of each buffer. Raises MetalLaunchError."""
        self._check(memory, grid, threads, order, max_threadgroup_bytes)
        count = max(self.num_buffers, 1)
        launch = Launch()
        launch.kernel = self._entry
        launch.grid[:] = [*grid, 1, 1][:3]
        launch.threads[:] = [*threads, 1, 1][:3]
        launch.num_buffers = self.num_buffers
        launch.order, launch.seed = ORDERS.index(order), seed
        launch.buffers = (ctypes.c_void_p * count)(*[address for address, _ in memory])
        launch.sizes = (ctypes.c_uint64 * count)(*[size for _, size in memory])
        launch.is_written = (ctypes.c_uint8 * count)()
        for buffer in self.kernel.buffers:
            launch.is_written[buffer.index] = buffer.is_written
        error = ctypes.create_string_buffer(ERROR_BYTES)
        launch.is_checked, launch.error_bytes = self.library.checked, ERROR_BYTES
        launch.threadgroup_bytes = max_threadgroup_bytes
        launch.error = ctypes.cast(error, ctypes.c_char_p)
        if _runtime().emu_launch(ctypes.byref(launch)):
            message = CODE_PLACE.sub(self._place, error.value.decode())
            raise MetalLaunchError(f"{self.kernel.name}: {message}")

    def _place(self, found: re.Match) -> str:
        return (
            line_at(self.library.shared_object, int(found[1], 16))
            if self.library.checked
            else f"at code {found[1]}"
        )

    def _check(
        self,
        memory: Sequence,
        grid: Sequence[int],
        threads: Sequence[int],
        order: str,
        max_threadgroup_bytes: int,
    ) -> None:
        name, most = self.kernel.name, self.kernel.max_threads
        for what, sizes in (("grid", grid), ("threads", threads)):
            if not 1 <= len(sizes) <= 3 or any(int(size) != size or size < 1 for size in sizes):
                raise MetalLaunchError(
                    f"{name}: {what} is {tuple(sizes)}, expected 1 to 3 sizes of at least 1"
                )
        if prod(threads) > most:
            reason = (
                "are possible"
                if most == MAX_THREADS
                else "as its [[max_total_threads_per_threadgroup]] says"
            )
            raise MetalLaunchError(
                f"{name}: {prod(threads)} threads in a threadgroup, at most {most} {reason}"
            )
        if max_threadgroup_bytes > MOST_GRANTED_BYTES:
            raise MetalLaunchError(
                f"{name}: {max_threadgroup_bytes} bytes of threadgroup memory, "
                f"at most {MOST_GRANTED_BYTES} are possible"
            )
        if len(memory) != self.num_buffers:
            raise MetalLaunchError(
                f"{name}: {len(memory)} buffers given, expected {self.num_buffers}"
            )
        for buffer in self.kernel.buffers:
            if not memory[buffer.index][0]:
                raise MetalLaunchError(
                    f"{name}: nothing given for buffer {buffer.index}, {buffer.name}"
                )
        if order not in ORDERS:
            raise MetalLaunchError(f"{name}: order {order!r}, expected one of {', '.join(ORDERS)}")


def compile(
    source: str, name: str = "kernel.metal", checked: bool = True, strict: bool = True
) -> Library:
    """Compiles Metal source and loads its kernels.

    name: the file's, as messages give it. checked: every access to memory is checked, 3 to 5 times
    slower. strict: also refuse what Apple's compiler would. Raises MetalCompileError, and
    ToolchainError where it is not the source that fails.
    """
    kernels = read_kernels(source, name, strict)
    return Library(build_kernels(source, name, checked), kernels, checked)


def run(
    kernel: Function,
    grid: int | Sequence[int],
    threads: int | Sequence[int],
    *arguments: np.ndarray | np.generic,
    order: str = "fifo",
    seed: int = 0,
    max_threadgroup_bytes: int = GRANTED_BYTES,
) -> None:
    """Runs a kernel of a library on arrays, in the order of its buffers; what it writes is in them
    afterwards.

    grid: threadgroups; threads: of one threadgroup. A `constant T&` takes a numpy scalar, such as
    np.int32(4), and bfloat is given as its bits, in uint16. order: of threads and threadgroups,
    "fifo", "reverse" or "random" by `seed`. max_threadgroup_bytes: up to 48 KB. The kernel works on
    copies, each before a page without access. Raises MetalLaunchError.
    """
    arrays = [np.asarray(argument) for argument in arguments]
    buffers = kernel.kernel.buffers
    if len(arrays) != len(buffers):
        expected = ", ".join(buffer.name for buffer in buffers)
        found = f"{kernel.kernel.name}: {len(arrays)} arguments given"
        raise MetalLaunchError(f"{found}, expected {len(buffers)}: {expected}")
    memory: list[GuardedMemory] = []
    given = [(0, 0)] * kernel.num_buffers
    for array, buffer in zip(arrays, buffers):
        copy = GuardedMemory(array.nbytes)
        copy.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)
        memory.append(copy)
        given[buffer.index] = (copy.address, copy.size)
    grid = (grid,) if isinstance(grid, int) else grid
    threads = (threads,) if isinstance(threads, int) else threads
    kernel.launch(given, grid, threads, order, seed, max_threadgroup_bytes)
    for array, buffer, copy in zip(arrays, buffers, memory):
        if buffer.is_written:
            array[...] = copy.bytes.view(array.dtype).reshape(array.shape)

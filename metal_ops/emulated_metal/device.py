"""Puts the emulator in the place of tinygrad's METAL device: `device == "METAL"`, MetalRenderer and
all, on Linux.

Nothing of tinygrad is patched. It looks a device up by importing `tinygrad.runtime.ops_metal`;
`install` puts a module of that name where the import finds it. tinygrad's own MetalRenderer asks
that module for its compiler.
"""

import ctypes
import sys
import time
import types
from dataclasses import dataclass

import numpy as np
from tinygrad.device import (
    Allocator,
    BufferSpec,
    Compiled,
    CompileError,
    Compiler,
    Device,
    Program,
    TinyELF,
)
from tinygrad.engine.jit import GraphRunner
from tinygrad.helpers import DEV, PARALLEL
from tinygrad.renderer.cstyle import MetalRenderer

from metal_ops.emulated_metal.build import read_kernels
from metal_ops.emulated_metal.errors import MetalCompileError, MetalLaunchError
from metal_ops.emulated_metal.launch import Function, compile
from metal_ops.emulated_metal.memory import GuardedMemory

MODULE = "tinygrad.runtime.ops_metal"
# The family of an M3; from the seventh on tinygrad uses simdgroup_matrix, from the sixth bfloat.
ARCHITECTURE = "Apple9"
# What messages call the source of a kernel.
FILE = "kernel.metal"


@dataclass
class Emulator:
    """How the installed device launches kernels. All of it may change at any time, for programs
    that exist too.

    num_launches: kernels launched so far.
    """

    checked: bool
    order: str = "fifo"
    seed: int = 0
    num_launches: int = 0


class MetalCompiler(Compiler):
    """Refuses what Metal's compiler would. What it returns is the source: a program builds what it
    needs to run.
    """

    def compile(self, src: str) -> bytes:
        try:
            read_kernels(src, FILE, strict=True)
        except MetalCompileError as error:
            raise CompileError(str(error)) from error
        return src.encode()


@dataclass(frozen=True)
class EmulatedBuffer:
    """A part of some memory: what a tinygrad buffer or a view of one is."""

    memory: GuardedMemory
    size: int
    offset: int = 0

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    @property
    def bytes(self) -> np.ndarray:
        return self.memory.bytes[self.offset : self.offset + self.size]


class EmulatedAllocator(Allocator):
    """Gives fresh memory, all NaN, to every buffer."""

    def __init__(self, device: "EmulatedDevice") -> None:
        super().__init__(device, supports_transfer=False)

    def _alloc(self, size: int, options: BufferSpec) -> EmulatedBuffer:
        if options.external_ptr:
            raise MetalLaunchError("the emulated METAL device takes no external memory")
        return EmulatedBuffer(GuardedMemory(size), size)

    def _offset(self, buf: EmulatedBuffer, size: int, offset: int) -> EmulatedBuffer:
        return EmulatedBuffer(buf.memory, size, buf.offset + offset)

    def _as_buffer(self, buf: EmulatedBuffer) -> memoryview:
        return memoryview(buf.bytes)

    def _copyin(self, dest: EmulatedBuffer, src: memoryview) -> None:
        self._as_buffer(dest)[:] = src

    def _copyout(self, dest: memoryview, src: EmulatedBuffer) -> None:
        dest[:] = self._as_buffer(src)


class EmulatedProgram(Program):
    """One kernel of a source. Binds buffers and variables as tinygrad's MetalProgram does."""

    def __init__(self, device: "EmulatedDevice", loaded: TinyELF) -> None:
        super().__init__(device, loaded)
        self.emulator = device.emulator
        self.name = loaded.name
        self.source = loaded.lib.decode()
        self.signature = loaded.signature
        self._functions: dict[bool, Function] = {}
        self._function()

    def _function(self) -> Function:
        """The kernel as checked or unchecked as the emulator now is."""
        checked = self.emulator.checked
        if checked not in self._functions:
            self._functions[checked] = compile(self.source, FILE, checked)[self.name]
        return self._functions[checked]

    def __call__(
        self, *bufs, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(), wait=False, **_options
    ) -> float | None:
        given = {index: (buffer.address, buffer.size) for index, buffer in enumerate(bufs)}
        variables = []
        for value, (_, index, dtype, _) in zip(vals, self.signature[len(bufs) :]):
            variable = getattr(ctypes, f"c_int{dtype.bitsize}")(value)
            variables.append(variable)
            given[index] = (ctypes.addressof(variable), dtype.itemsize)
        function = self._function()
        memory = [given.get(index, (0, 0)) for index in range(function.num_buffers)]
        started = time.perf_counter()
        function.launch(memory, global_size, local_size, self.emulator.order, self.emulator.seed)
        self.emulator.num_launches += 1
        return time.perf_counter() - started if wait else None


class EmulatedGraph(GraphRunner):
    """A captured step, as MetalGraph replays it: the same binding of buffers, variables and sizes,
    kernel by kernel.
    """

    def __init__(self, linear, input_uops=()) -> None:
        super().__init__(linear, input_uops)
        nothing = {variable: 0 for variable in self.vars}
        self.sizes = [program.arg.launch_dims(nothing) for _, program, _, _ in self.calls]

    def __call__(self, input_uops, var_vals, wait=False) -> float | None:
        started = time.perf_counter()
        for index, global_size, local_size in self.updated_launch_dims(var_vals):
            self.sizes[index] = (global_size, local_size)
        for index, (_, program, buffers, variables) in enumerate(self.calls):
            bound = [buffer._buf for buffer in buffers]
            for position, slot in self.uop_replace[index]:
                bound[position] = input_uops[slot].buffer._buf
            global_size, local_size = self.sizes[index]
            vals = program.arg.vals({**var_vals, **variables})
            self.runtimes[index](*bound, global_size=global_size, local_size=local_size, vals=vals)
        return time.perf_counter() - started if wait else None


class EmulatedDevice(Compiled):
    """The device; `install` makes the class that carries an emulator."""

    emulator: Emulator

    def __init__(self, device: str) -> None:
        allocator = EmulatedAllocator(self)
        super().__init__(
            device, allocator, [MetalRenderer], EmulatedProgram, EmulatedGraph, arch=ARCHITECTURE
        )


def install(checked: bool = False) -> Emulator:
    """Makes Device["METAL"] the emulator, for the rest of the process, with checks or without.

    tinygrad's default device becomes the CPU. Further calls return the same emulator, set as they
    ask.
    """
    installed = sys.modules.get(MODULE)
    if installed is not None:
        if not hasattr(installed, "emulator"):
            raise RuntimeError("tinygrad has loaded its own METAL device in this process")
        installed.emulator.checked = checked
        return installed.emulator
    if not DEV.device:
        # Else tinygrad would choose METAL, the first device that opens.
        DEV.value = "CPU"
    # tinygrad's compile workers are new processes, in which nothing is installed.
    PARALLEL.value = 0
    module = types.ModuleType(MODULE)
    module.emulator = Emulator(checked)
    module.MetalCompiler = MetalCompiler
    module.MetalDevice = type(
        "MetalDevice", (EmulatedDevice,), {"emulator": module.emulator, "__module__": MODULE}
    )
    sys.modules[MODULE] = module
    if "METAL" not in Device._devices:
        Device._devices.append("METAL")
    return module.emulator

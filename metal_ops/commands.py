"""Runs the kernels of a captured step on the CPU: one call a thread for all of them, and all of the
CPU's threads.

tinygrad 0.14 launches each kernel of a step from Python (40 us a kernel, a hundred and more a
step), and runs the parts of a divided kernel one after the other. Here a step is a list of commands
for each thread, that a few lines of C walk through.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from tinygrad import Device
from tinygrad.device import TinyELF
from tinygrad.engine.realize import get_runtime, resolve_params
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.uop.ops import Ops, UOp

WORDS = 16
FLAG_WORDS = 8
# A piece ends in Python, where an interrupt is noticed.
KERNELS_IN_PIECE = 16


@dataclass(frozen=True)
class Piece:
    """Some consecutive kernels of a step: a list of commands (n, 16) uint64 for every thread."""

    lists: tuple[np.ndarray, ...]


class Threads:
    """The CPU's threads. They sleep between pieces."""

    def __init__(self, num: int) -> None:
        self.num = num
        source = (Path(__file__).parent / "run_commands.c").read_text()
        device = Device["CPU"]
        library = device.renderer.compiler.compile_cached(source)
        elf = TinyELF(library, "run_commands", device.renderer.target, (), b"")
        self._program = device.runtime(elf)
        self._call = self._program.fxn
        self._flags = np.zeros(num * FLAG_WORDS, np.uint64)
        self._yield = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
        self._process = os.getpid()
        # One caller at a time: two models in two threads share these.
        self._turn = threading.Lock()
        self._lock = threading.Condition()
        self._piece: Piece | None = None
        self._generation = 0
        self._num_running = 0
        for me in range(num):
            threading.Thread(target=self._work, args=(me,), daemon=True).start()

    def run(self, piece: Piece) -> None:
        """Runs a piece to its end; an interrupt that comes meanwhile is raised then."""
        if os.getpid() != self._process:
            raise RuntimeError("a model cannot go on in a forked process: load it there")
        with held_interrupts(), self._turn, self._lock:
            self._piece = piece
            self._num_running = self.num
            self._generation += 1
            self._lock.notify_all()
            while self._num_running:
                self._lock.wait()

    def _work(self, me: int) -> None:
        generation = 0
        while True:
            with self._lock:
                while self._generation == generation:
                    self._lock.wait()
                generation, piece = self._generation, self._piece
            commands = piece.lists[me]
            words = (
                commands.ctypes.data,
                len(commands),
                self._flags.ctypes.data,
                me,
                self.num,
                self._yield,
            )
            self._call(*[ctypes.c_uint64(word) for word in words])
            with self._lock:
                self._num_running -= 1
                if not self._num_running:
                    self._lock.notify_all()


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Puts off SIGINT to the end of the block: threads that lose their caller lose step."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


@cache
def cpu_threads(num: int) -> Threads:
    """This process's threads, started at the first call."""
    return Threads(num)


class CommandList:
    """A captured step as commands. `linear` is its calls, `inputs` the buffers that its parameters
    stand for.
    """

    def __init__(self, linear: UOp, inputs: tuple[UOp, ...]) -> None:
        self.threads = cpu_threads(NUM_CPU_THREADS.value)
        self.pieces: list[Piece] = []
        # Kept, because the commands hold bare addresses.
        self._kept: list[object] = []
        calls = [self._commands(call, inputs) for call in linear.src]
        for first in range(0, len(calls), KERNELS_IN_PIECE):
            self.pieces.append(self._piece(calls[first : first + KERNELS_IN_PIECE]))

    def __call__(self) -> None:
        for piece in self.pieces:
            self.threads.run(piece)

    def _commands(self, call: UOp, inputs: tuple[UOp, ...]) -> list[list[int]]:
        """The commands of one kernel, one for each of its parts."""
        program = call.src[0]
        if program.op is not Ops.PROGRAM:
            raise ValueError(f"a step on the CPU must be kernels only, found {program.op}")
        runtime = get_runtime("CPU", program)
        resolved = resolve_params(call, inputs)
        buffers = [resolved[i].buffer.ensure_allocated() for i in program.arg.globals]
        self._kept += [runtime, *buffers]
        words = [runtime.addr, *[buffer._buf.va_addr for buffer in buffers], *program.arg.vals({})]
        if len(words) > WORDS:
            raise ValueError(
                f"kernel {program.arg.name} has {len(words) - 1} arguments, more than {WORDS - 1}"
            )
        words += [0] * (WORDS - len(words))
        parts = []
        for part in range(program.arg.global_size[0]):
            for place in runtime.runtimevars.values():
                words[1 + place] = part
            parts.append(list(words))
        return parts

    def _piece(self, calls: list[list[list[int]]]) -> Piece:
        """Lists for all threads: kernels in one part are the first thread's, and parts do not
        overtake each other.
        """
        num = self.threads.num
        lists: list[list[list[int]]] = [[] for _ in range(num)]
        was_divided = False
        for parts in calls:
            is_divided = len(parts) > 1
            if lists[0] and (is_divided or was_divided):
                for commands in lists:
                    commands.append([0] * WORDS)
            for part, words in enumerate(parts):
                lists[part % num].append(words)
            was_divided = is_divided
        return Piece(tuple(np.array(commands, np.uint64).reshape(-1, WORDS) for commands in lists))

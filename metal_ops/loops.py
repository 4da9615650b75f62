"""Kernels written as loop nests, top to bottom, that tinygrad's own code generator turns into one
kernel on any device.

`reference()` of the ops is written so for three reasons. A loop may end at a number read from the
round's table, so one compiled form serves every context length and every split of rows over
experts. Stores touch only the rows they name. And a row's sum runs in the same order at every
width, so its bits do not depend on who shares the round.

    def body(loops, out, x):
        with loops.over(rows) as t:
            total = loops.local(1)
            total[0] = 0.0
            with loops.over(width) as c:
                total[0] = total[0] + x[t, c]
            out[t] = total[0]

    out, = loop_kernel("row_sum", body, writes=[Tensor.empty(rows)], reads=[x])

tinygrad's graph has no statement order, only dependencies. `Loops` keeps the order the text shows:
a load follows the last store to its array, and what a loop stored is complete where the loop ends.
The one order it cannot keep is that of a store after a load whose value is used later still: such a
load has to be made by `keep`, and a store that finds another raises.

NOTE: tinygrad's internals (`UOp`) are touched here, in `launch.py` and in `commands.py`: that
interface is alpha, and pinned. The ops see UOps only as values to calculate with.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import NUM_CPU_THREADS
from tinygrad.uop.ops import AxisType, KernelInfo, UOp

Index = UOp | int


class Array:
    """A buffer of the kernel: an argument, or local to the innermost loop it was made in. Read and
    written by index.
    """

    def __init__(self, loops: "Loops", buffer: UOp, shape: tuple[int, ...]) -> None:
        self.loops = loops
        # NOTE: indexes are flattened here, because tinygrad takes a modulo where it cannot prove
        # one to be in range.
        self.buffer = buffer.base
        self.dtype = buffer.dtype
        self.strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        self.stored: UOp | None = None
        self.loads: list[UOp] = []
        self.ended: list[UOp] = []

    def _at(self, index: Index | tuple[Index, ...], *earlier: UOp) -> UOp:
        after = [] if self.stored is None else [self.stored]
        if self.stored is not None or self.buffer.addrspace is AddrSpace.REG:
            after += self.loops.ranges
        after += earlier
        buffer = self.buffer.after(*after) if after else self.buffer
        indexes = index if isinstance(index, tuple) else (index,)
        if len(indexes) != len(self.strides):
            raise ValueError(f"{len(indexes)} indexes into an array of {len(self.strides)} axes")
        return buffer.index(sum(i * stride for i, stride in zip(indexes, self.strides)))

    def __getitem__(self, index: Index | tuple[Index, ...]) -> UOp:
        value = self._at(index).load()
        self.loads.append(value)
        self.loops.loaded[-1].append((self, value))
        return value

    def __setitem__(self, index: Index | tuple[Index, ...], value: UOp | float) -> None:
        used = value.backward_slice_with_self if isinstance(value, UOp) else {}
        if any(load not in used for load in self.loads):
            raise ValueError(
                "a value loaded from this array may be used after this store to it: keep() it"
            )
        if isinstance(value, UOp):
            value = value.cast(self.dtype)
        self.stored = self._at(index, *self.ended).store(value)
        self.loads, self.ended = [], []
        self.loops.stored[-1].append(self)


@dataclass(frozen=True)
class Share:
    """A thread's part of a divided loop: `size` consecutive iterations."""

    size: int
    part: UOp

    def __getitem__(self, i: Index) -> UOp:
        """The iteration that is this thread's i-th."""
        return self.part * self.size + i


class Loops:
    """The loop nest being written: which loops are open, and which arrays each of them loaded and
    stored.

    num_threads: those of a CPU; none on a device that has a thread for every iteration.
    """

    def __init__(self, num_threads: int | None) -> None:
        self.num_threads = num_threads
        self.ranges: list[UOp] = []
        self.loaded: list[list[tuple[Array, UOp]]] = [[]]
        self.stored: list[list[Array]] = [[]]
        self._num_names = 0

    def _name(self) -> int:
        self._num_names += 1
        return self._num_names

    def local(self, *shape: int, dtype: DType = dtypes.float32) -> Array:
        """An uninitialised array of the running iteration, in registers where it fits."""
        buffer = UOp.placeholder((prod(shape),), dtype, slot=self._name(), addrspace=AddrSpace.REG)
        return Array(self, buffer, shape)

    def keep(self, array: Array, index: Index | tuple[Index, ...]) -> UOp:
        """An element of an array as it is now, whatever is stored to the array later."""
        kept = self.local(1, dtype=array.dtype)
        kept[0] = array[index]
        array.loads.pop()
        array.ended.append(kept.stored)
        return kept[0]

    @contextmanager
    def over(self, end: Index) -> Iterator[UOp]:
        """Runs the body for 0 .. end - 1. An `end` read from an array must be at least 1."""
        if isinstance(end, int):
            # NOTE: not WEAK, which a GPU's code generator may spread over threads.
            index = UOp.range(end, self._name(), AxisType.LOOP)
            self._enter(index)
            yield index
            self._leave(index)
            return
        # A range must not depend on another one, so a loop with an end from memory counts for
        # itself.
        counter, limit = self.local(1, dtype=dtypes.int32), self.local(1, dtype=dtypes.int32)
        counter[0] = 0
        limit[0] = end
        loop = UOp.loop(self._name())
        self._enter(loop)
        index = counter[0]
        yield index.cast(dtypes.weakint)
        counter[0] = index + 1
        self._leave(loop, index + 1 < limit[0])

    @contextmanager
    def share(self, count: int) -> Iterator["Share"]:
        """Divides 0 .. count - 1 over the device's threads; the outermost loop of a kernel, whose
        parts must not meet.

        A GPU gets a thread for each. On a CPU as many threads as divide the count get a run of them
        each.
        """
        if self.num_threads is None:
            num_parts, kind = count, AxisType.GLOBAL
        else:
            most = min(self.num_threads, count)
            num_parts, kind = next(n for n in range(most, 0, -1) if count % n == 0), AxisType.THREAD
        part = UOp.range(num_parts, self._name(), kind)
        self._enter(part)
        yield Share(count // num_parts, part)
        self._leave(part)

    def _enter(self, loop: UOp) -> None:
        self.ranges.append(loop)
        self.loaded.append([])
        self.stored.append([])

    def _leave(self, loop: UOp, *again: UOp) -> None:
        self.ranges.pop()
        loaded, stored = self.loaded.pop(), list(dict.fromkeys(self.stored.pop()))
        if not stored:
            return
        done = UOp.group(*[array.stored for array in stored]).end(loop, *again)
        for array in stored:
            array.stored = done
        for array, load in loaded:
            # What was loaded in the loop was used in it; what was loaded before may be used after
            # it still.
            array.loads = [pending for pending in array.loads if pending is not load]
            array.ended.append(done)
        self.stored[-1] += stored
        self.loaded[-1] += loaded


def num_threads(device: str) -> int | None:
    """How many threads run a kernel's parts: those of tinygrad's CPU device; none stands for a
    GPU.
    """
    renderer = Device[device].renderer
    if renderer.has_threads:
        return NUM_CPU_THREADS.value
    return None if renderer.has_local else 1


def loop_kernel(
    name: str, body: Callable[..., None], writes: list[Tensor], reads: list[Tensor]
) -> list[Tensor]:
    """Runs `body(loops, *arrays)` as one kernel; the arrays are those of `writes`, then of `reads`.

    Returns the tensors of `writes` as they are after the kernel. A tensor that must keep what the
    kernel does not store (a pool of keys, say) is a whole realized buffer; a fresh one is
    `Tensor.empty`.
    """

    def kernel(*buffers: UOp) -> UOp:
        loops = Loops(num_threads(writes[0].device))
        arrays = [Array(loops, buffer, buffer.shape) for buffer in buffers]
        body(loops, *arrays)
        stores = dict.fromkeys(array.stored for array in arrays[: len(writes)])
        return UOp.sink(*stores, arg=KernelInfo(name=name, opts_to_apply=()))

    first, *rest = [*writes, *reads]
    return first.custom_kernel(*rest, fxn=kernel)[: len(writes)]

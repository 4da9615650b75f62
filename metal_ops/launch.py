"""tinygrad internals that the rest of the project needs: real buffers, bytes copied into them,
hand-written kernels in a graph, captured steps.
"""

import errno
import mmap
import pickle
import platform
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.codegen import to_program_config
from tinygrad.dtype import DType
from tinygrad.engine.jit import CapturedJit, jit_lower
from tinygrad.engine.realize import capturing, get_graph_runtime, graph_cache, run_linear
from tinygrad.helpers import DEBUG, JIT_BATCH_SIZE, Context, disable_gc
from tinygrad.renderer import Estimates
from tinygrad.tensor import all_tensors
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp, buffers

from metal_ops.commands import CommandList
from metal_ops.cuda import translate
from metal_ops.cuda_graph import ChainedGraph, can_chain
from metal_ops.kernel import Argument, Kernel, Target, target_of
from metal_ops.memory import part_of

HUGE_PAGE_BYTES = 1 << 21
MAX_PENDING_BYTES = 1 << 16


def empty(shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
    """A tensor with memory of its own and nothing written to it: a real buffer, fit to be a jit
    input.
    """
    tensor = Tensor.empty(*shape, dtype=dtype, device=device)
    try:
        buffer = tensor.uop.buffer.ensure_allocated()
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{device}: {tensor.nbytes()} bytes") from error
    pages = getattr(buffer._buf, "meta", None)
    if (
        isinstance(pages, mmap.mmap)
        and buffer.nbytes >= HUGE_PAGE_BYTES
        and hasattr(mmap, "MADV_HUGEPAGE")
    ):
        # Host memory is faulted in as it is filled: 1.5 GB/s by huge pages, 0.9 by 4 KiB ones.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return tensor


def view_of(tensor: Tensor, byte_offset: int, count: int, dtype: DType) -> Tensor:
    """`count` numbers in the memory of a real tensor, as a real tensor."""
    view = tensor.uop.buffer.view(count, dtype, byte_offset).ensure_allocated()
    return Tensor(UOp.from_buffer(view))


def copy_in(tensor: Tensor, byte_offset: int, data: memoryview) -> None:
    """Copy `data` over the bytes of a real `tensor` from `byte_offset` on.

    `data` is writable, contiguous and free to be reused on return.
    """
    buffer = tensor.uop.buffer
    part = part_of(buffer, byte_offset, data.nbytes)
    part.allocator._copyin(part._buf, data)
    # NOTE: CUDA keeps a pinned copy of each piece until it is told that all have arrived, as it is
    # when a round is read. That need not wait for what a round takes in.
    if data.nbytes > MAX_PENDING_BYTES:
        Device[buffer.device].synchronize()


def inject(kernel: Kernel, reads: list[Tensor], state: tuple[Tensor, ...] = ()) -> list[Tensor]:
    """Launches a hand-written kernel in the graph; returns the tensors it writes.

    state: whole buffers that it writes in place, the last of kernel.writes, which keep what it does
    not store. The others are fresh. Raises ValueError for a tensor that is not as the kernel says.
    """
    device = reads[0].device
    fresh = kernel.writes[: len(kernel.writes) - len(state)]
    outputs = [Tensor.empty(*out.shape, dtype=out.dtype, device=device) for out in fresh]
    tensors = [*outputs, *state, *reads]
    for argument, tensor in zip((*kernel.writes, *kernel.reads), tensors, strict=True):
        _expect_argument(kernel.name, argument, tensor)
    for tensor in state:
        if not _is_whole(tensor.uop):
            raise ValueError(f"{kernel.name}: writes a slice, which tinygrad would copy first")

    def program(*buffers: UOp) -> UOp:
        # NOTE: bases, because the launch looks for bare parameters among the sources.
        params = tuple(buffer.base for buffer in buffers)
        estimates = Estimates(kernel.num_ops, kernel.num_bytes, kernel.num_bytes)
        sink = UOp.sink(*params, arg=KernelInfo(name=kernel.name, estimates=estimates))
        places = tuple(range(len(params)))
        info = ProgramInfo(
            name=kernel.name,
            global_size=kernel.grid,
            local_size=(kernel.threads, 1, 1),
            globals=places,
            outs=places[: len(kernel.writes)],
            # State is read too: else its old contents would count as free to reuse.
            ins=places[len(fresh) :],
            target=Device[device].renderer.target,
        )
        source = _source(kernel, device)
        parts = [sink, UOp(Ops.LINEAR, src=params), UOp(Ops.SOURCE, arg=source)]
        if target_of(device) is Target.HOPPER:
            parts.append(UOp(Ops.BINARY, arg=_compiled_for_hopper(source, device)))
        return UOp(Ops.PROGRAM, src=tuple(parts), arg=info)

    return tensors[0].custom_kernel(*tensors[1:], fxn=program)[: len(kernel.writes)]


class GuardedBuffer:
    """A buffer with memory of a pattern before and after it, for a look at what a kernel leaves
    there.
    """

    GUARD_BYTES = 4096
    PATTERN = 0xA5

    def __init__(self, contents: np.ndarray, dtype: DType, device: str) -> None:
        guard = np.full(self.GUARD_BYTES, self.PATTERN, np.uint8)
        whole = np.concatenate([guard, np.frombuffer(contents.tobytes(), np.uint8), guard])
        self._contents = contents
        self.memory = empty((whole.size,), dtypes.uint8, device)
        copy_in(self.memory, 0, memoryview(whole))
        view = view_of(self.memory, self.GUARD_BYTES, contents.size, dtype)
        self.tensor = view.reshape(contents.shape)

    def read(self) -> tuple[np.ndarray, bool]:
        """What it holds, and whether the memory around it holds the pattern still."""
        whole = self.memory.numpy()
        inside = whole[self.GUARD_BYTES : -self.GUARD_BYTES]
        around = np.delete(whole, slice(self.GUARD_BYTES, -self.GUARD_BYTES))
        contents = inside.view(self._contents.dtype).reshape(self._contents.shape)
        return contents, bool((around == self.PATTERN).all())


def compile_kernel(kernel: Kernel, device: str) -> None:
    """Has the device's compiler build a kernel's text. Raises tinygrad's CompileError."""
    source = _source(kernel, device)
    if target_of(device) is Target.HOPPER:
        _compiled_for_hopper(source, device)
    else:
        Device[device].compiler.compile(source)


def _source(kernel: Kernel, device: str) -> str:
    """A kernel's text as the device's compiler reads it."""
    return kernel.source if target_of(device) is Target.METAL else translate(kernel)


@cache
def _compiled_for_hopper(source: str, device: str) -> bytes:
    """By tinygrad's compiler for the device, with the instructions that only Hopper has: tinygrad
    itself asks for what later GPUs have too.
    """
    return type(Device[device].compiler)("sm_90a").compile(source)


def _expect_argument(name: str, argument: Argument, tensor: Tensor) -> None:
    found = f"found {tensor.shape} {tensor.dtype.name}"
    if tensor.shape != argument.shape or tensor.dtype != argument.dtype:
        expected = f"{argument.shape} {argument.dtype.name}"
        raise ValueError(f"{name}: {argument.name} must be {expected}, {found}")


def _is_whole(uop: UOp) -> bool:
    """Whether a tensor is a whole buffer, or the state of one after a kernel."""
    while uop.op in (Ops.RESHAPE, Ops.AFTER):
        uop = uop.src[0]
    return uop.op in (Ops.BUFFER, Ops.PARAM)


class Step:
    """A function of tensors, captured once: its kernels compiled, then launched together from fixed
    buffers.

    The inputs are real buffers that stay where they are; what changes between calls is copied into
    them. A captured step pickles without them, so that another process can give it its own.
    """

    def __init__(self, captured: CapturedJit, inputs: list[Tensor]) -> None:
        self._captured = captured
        self._inputs = tuple(tensor.uop.base for tensor in inputs)
        self._commands: CommandList | None = None
        self._bound: UOp | None = None
        self._is_on_cpu = all(tensor.device == "CPU" for tensor in inputs)

    @classmethod
    @disable_gc()
    def capture(cls, function: Callable[[], tuple[Tensor, ...]], inputs: list[Tensor]) -> "Step":
        """Captures `function`, which may use any of `inputs` and no other buffer. Runs nothing."""
        # As TinyJit captures, less the run at the end, which costs seconds where it goes kernel by
        # kernel.
        linears: list[UOp] = []
        capturing.append(
            SimpleNamespace(add_linear=lambda linear, _variables: linears.append(linear))
        )
        try:
            outputs = function()
            Tensor.realize(*outputs)
        finally:
            capturing.clear()
        whole = UOp(Ops.LINEAR, src=tuple(call for linear in linears for call in linear.src))
        tensors = [tensor for reference in list(all_tensors) if (tensor := reference()) is not None]
        held = {uop for tensor in tensors for uop in tensor.uop.toposort() if uop.op is Ops.BUFFER}
        uops = [tensor.uop.base for tensor in inputs]
        # The host launches a graph in one call, however long it is. Of several graphs Metal begins
        # the first while the host is still at the others, which CUDA gains nothing by.
        is_cuda = uops[0].device.startswith("CUDA")
        with Context(JIT_BATCH_SIZE=0 if is_cuda else JIT_BATCH_SIZE.value):
            lowered = jit_lower(whole, set(buffers) | held, uops)
        return cls(CapturedJit(outputs, lowered, [], []), inputs)

    @classmethod
    def loads(cls, pickled: bytes, inputs: list[Tensor]) -> "Step":
        """A step that another process captured, on these inputs, which are of the same shapes in
        the same order.
        """
        captured = pickle.loads(pickled)
        if not isinstance(captured, CapturedJit):
            raise ValueError(f"a captured step expected, found {type(captured).__name__}")
        return cls(_with_own_buffers(captured), inputs)

    def dumps(self) -> bytes:
        """The step as bytes. What its last call computed is lost."""
        self._commands = self._bound = None
        self._captured.free_intermediates()
        return pickle.dumps(self._captured)

    @property
    def launches(self) -> list[str]:
        """The names of the kernels that a call launches, in order."""
        return _names(self._captured.linear)

    def __call__(self) -> tuple[Tensor, ...]:
        """Launches the kernels; the tensors returned hold what they computed until the next
        call.
        """
        if self._is_on_cpu:
            if self._commands is None:
                self._commands = CommandList(self._captured.linear, self._inputs)
            self._commands()
        else:
            if self._bound is None:
                self._bound = _bind(self._captured.linear, self._inputs)
            _run(self._bound)
        return self._captured.ret


def _bind(linear: UOp, inputs: tuple[UOp, ...]) -> UOp:
    """The launches on the inputs themselves, in place of parameters.

    A graph with parameters is written anew, kernel by kernel, with every call: 11 us a kernel on
    CUDA's, measured, which was most of a decode round.
    """

    def bind(call: UOp) -> UOp:
        launched, *arguments = call.src
        if launched.op is Ops.CUSTOM_FUNCTION:
            launched = launched.replace(src=(_bind(launched.src[0], inputs),))
            if target_of(inputs[0].device) is Target.HOPPER and can_chain(launched):
                # tinygrad launches what it finds here, and makes a graph of its own kind else.
                graph_cache[launched] = ChainedGraph(launched)
        found = {uop for argument in arguments for uop in argument.toposort()}
        given = {uop: inputs[uop.arg.slot] for uop in found if uop.op is Ops.PARAM}
        return call.replace(src=(launched, *(argument.substitute(given) for argument in arguments)))

    return linear.replace(src=tuple(map(bind, linear.src)))


def _run(bound: UOp) -> None:
    """Launches what is bound: graphs as they are, because `run_linear` looks at every call anew."""
    if DEBUG < 2 and all(call.src[0].arg == "graph" for call in bound.src):
        for call in bound.src:
            get_graph_runtime(call.src[0], ())((), {})
    else:
        run_linear(bound, jit=True)


def _names(linear: UOp) -> list[str]:
    names = []
    for call in linear.src:
        launched = call.src[0]
        if launched.op is Ops.CUSTOM_FUNCTION:
            # A graph: a linear of its own.
            names += _names(launched.src[0])
        else:
            names.append(launched.arg.name)
    return names


def _with_own_buffers(captured: CapturedJit) -> CapturedJit:
    """A step from a pickle with buffers for its intermediate results that nothing else has.

    tinygrad names a buffer by a number that counts up in each process, and takes two of one number
    for one: those of another process would be taken for any that is here, be it a weight.
    """
    arguments = [argument for call in captured._linear.src for argument in call.src[1:]]
    theirs = [uop for argument in arguments for uop in argument.toposort() if uop.op is Ops.BUFFER]
    ours = {
        uop: UOp.new_buffer(uop.device, uop.max_numel(), uop.dtype) for uop in dict.fromkeys(theirs)
    }
    linear = captured._linear.substitute(ours, walk=True)
    outputs = tuple(Tensor(output.uop.substitute(ours)) for output in captured.ret)
    return CapturedJit(outputs, linear, [], [])


def codegen_settings(device: str) -> list[str]:
    """All that decides what tinygrad generates for a device: versions, the target, its settings."""
    settings = sorted((var.key, var.value) for var in to_program_config)
    return [
        f"tinygrad {version('tinygrad')}, Python {platform.python_version()}",
        f"{device}: {Device[device].renderer.target}",
        repr(settings),
    ]

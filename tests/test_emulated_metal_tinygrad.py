"""tinygrad on the emulated METAL device: kernels that it generates, captured steps, hand-written
kernels in them.
"""

import sys

import numpy as np
import pytest
from tinygrad import Device, Tensor, TinyJit, Variable, dtypes
from tinygrad.device import CompileError
from tinygrad.engine.realize import compile_linear
from tinygrad.renderer.cstyle import MetalRenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo, UOp

from metal_ops.emulated_metal import MetalLaunchError, install

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="emulated on Linux; a Mac has the real METAL"
)

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
# Row i of out is row rows[i] of x, times ten: what a table that changes between calls can drive.
PICK = f"""{HEAD}kernel void pick(device float* out, device const float* x, device const int* rows,
  uint row [[threadgroup_position_in_grid]], uint column [[thread_position_in_threadgroup]]) {{
  out[row * 32 + column] = x[rows[row] * 32 + column] * 10;
}}"""
WIDTH = 32


@pytest.fixture(autouse=True, params=["fifo", "random"])
def emulator(request):
    # Checked: what tinygrad generates is watched for races and bounds too.
    emulator = install(checked=True)
    emulator.order, emulator.seed = request.param, 5
    yield emulator
    emulator.order = "fifo"


def metal(array, dtype=dtypes.float32):
    return Tensor(np.asarray(array, np.float32), device="METAL").cast(dtype).realize()


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def call_kernel(source, name, writes, *reads, grid, threads):
    """A kernel of one's own as a tinygrad program, which carries its source and nothing else."""

    def program(*buffers):
        params = tuple(buffer.base for buffer in buffers)
        sink = UOp.sink(*params, arg=KernelInfo(name=name))
        shape = {"global_size": (grid, 1, 1), "local_size": (threads, 1, 1)}
        uses = {
            "globals": tuple(range(len(params))),
            "outs": (0,),
            "ins": tuple(range(1, len(params))),
        }
        steps = (sink, UOp(Ops.LINEAR, src=sink.src), UOp(Ops.SOURCE, arg=source))
        return UOp(Ops.PROGRAM, src=steps, arg=ProgramInfo(name=name, **shape, **uses))

    return writes.custom_kernel(*reads, fxn=program)[0]


def pick(x, rows):
    out = Tensor.empty(rows.shape[0], WIDTH, device="METAL")
    return call_kernel(PICK, "pick", out, x, rows, grid=rows.shape[0], threads=WIDTH)


def sources(tensor):
    linear = compile_linear(tensor.schedule_linear())
    return "".join(uop.arg for uop in linear.toposort() if uop.op is Ops.SOURCE)


def test_the_device_is_metal_and_not_the_default():
    assert metal([1.0]).device == "METAL"
    assert type(Device["METAL"].renderer) is MetalRenderer
    assert Tensor([1.0]).device != "METAL"


def test_checks_can_be_turned_off_and_on(emulator):
    racy = PICK.replace("row * 32 + column] =", "column] =")

    @TinyJit
    def step(x, rows):
        out = Tensor.empty(4, WIDTH, device="METAL")
        return call_kernel(racy, "pick", out, x, rows, grid=4, threads=WIDTH).realize()

    arguments = metal(normal(0, 4, WIDTH)), metal([0, 1, 2, 3], dtypes.int32)
    assert install(checked=False) is emulator
    for _ in range(3):
        step(*arguments)
    assert install(checked=True) is emulator
    with pytest.raises(MetalLaunchError, match="data race on buffer 0 .* by another threadgroup"):
        step(*arguments)


@pytest.mark.parametrize("dtype, tolerance", [("float", 1e-4), ("half", 0.1), ("bfloat16", 0.5)])
def test_matmul_on_simdgroup_matrix(dtype, tolerance):
    a, b = normal(0, 64, 128), normal(1, 128, 96)

    def product():
        return metal(a, getattr(dtypes, dtype)) @ metal(b, getattr(dtypes, dtype))

    assert "simdgroup_multiply_accumulate" in sources(product())
    np.testing.assert_allclose(product().float().numpy(), a @ b, rtol=0.02, atol=tolerance)


def test_softmax_and_reductions():
    x = normal(0, 7, 300) * 3
    e = np.exp(x - x.max(1, keepdims=True))
    np.testing.assert_allclose(
        metal(x).softmax(-1).numpy(), e / e.sum(1, keepdims=True), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(metal(x).sum(0).numpy(), x.sum(0), rtol=1e-4, atol=1e-4)
    assert metal(x).max().item() == x.max()
    np.testing.assert_array_equal(metal(x).argmax(1).numpy(), x.argmax(1))


def test_reduction_in_threadgroup_memory():
    x = normal(0, 4, 16384)
    assert "threadgroup_barrier" in sources(metal(x).sum(1))
    np.testing.assert_allclose(metal(x).sum(1).numpy(), x.sum(1), rtol=1e-4, atol=1e-3)


def test_tiny_jit_with_a_variable(emulator):
    cache = Tensor.zeros(64, WIDTH, device="METAL").contiguous().realize()
    position, want = Variable("position", 0, 63), np.zeros((64, WIDTH), np.float32)

    @TinyJit
    def step(x, at):
        cache[at : at + 1].assign(x * 2)
        return ((x @ cache[: at + 1].T).softmax(-1) @ cache[: at + 1]).realize()

    for t in range(1, 7):
        x = normal(t, 1, WIDTH)
        before = emulator.num_launches
        ours = step(metal(x), position.bind(t)).numpy()
        want[t] = x * 2
        scores = x @ want[: t + 1].T
        e = np.exp(scores - scores.max())
        np.testing.assert_allclose(ours, e / e.sum() @ want[: t + 1], rtol=1e-4, atol=1e-5)
        assert emulator.num_launches > before


def test_a_kernel_of_ones_own_in_a_tiny_jit_follows_its_table():
    x = normal(0, 16, WIDTH)

    @TinyJit
    def step(x, rows):
        # Between kernels of tinygrad's: x + 1 is its input, the sum its reader.
        return (pick(x + 1, rows) + 0.5).realize()

    for seed in range(5):
        rows = np.random.default_rng(seed).integers(0, 16, 6).astype(np.int32)
        ours = step(metal(x), metal(rows, dtypes.int32)).numpy()
        np.testing.assert_allclose(ours, (x[rows] + 1) * 10 + 0.5, rtol=1e-5)


def test_many_kernels_of_ones_own_in_one_graph(emulator):
    rows = metal(np.arange(4), dtypes.int32)

    @TinyJit
    def step(x):
        for _ in range(6):
            x = pick(x, rows)
        return x.realize()

    for start in range(1, 5):
        before = emulator.num_launches
        ours = step(metal(np.full((4, WIDTH), start))).numpy()
        assert (ours == start * 1e6).all()
    # One of them casts the input.
    assert emulator.num_launches - before in (6, 7)


def test_faults_reach_the_user():
    x, rows = metal(normal(0, 4, WIDTH)), metal([0, 1, 2, 4], dtypes.int32)
    with pytest.raises(
        MetalLaunchError,
        match="pick: out-of-bounds read .* at kernel.metal:5: buffer 1 has 512 bytes",
    ):
        pick(x, rows).realize()
    out = Tensor.empty(4, WIDTH, device="METAL")
    with pytest.raises(CompileError, match="kernel.metal:5:.*undeclared identifier 'y'"):
        call_kernel(PICK.replace("x[", "y["), "pick", out, x, rows, grid=4, threads=32).realize()
    with pytest.raises(CompileError, match="Metal has no double"):
        call_kernel(
            PICK.replace("* 10", "* double(10)"), "pick", out, x, rows, grid=4, threads=32
        ).realize()
    with pytest.raises(MetalLaunchError, match="no kernel 'peck'"):
        call_kernel(PICK, "peck", out, x, rows, grid=4, threads=32).realize()


def test_memory_that_no_one_wrote_is_nan():
    assert np.isnan(Tensor.empty(100, device="METAL").numpy()).all()

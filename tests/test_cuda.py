"""The kernels' texts for NVIDIA GPUs, without one: they are rewritten whole, and compile."""

import re
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tinygrad import dtypes
from tinygrad.device import CompileError
from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler

from metal_ops.contract.report import contracts
from metal_ops.cuda import WAIT, translate, waits
from metal_ops.cuda_graph import MANY_ROWS
from metal_ops.emulated_metal import ToolchainError
from metal_ops.emulated_metal.toolchain import find_toolchain
from metal_ops.kernel import HEAD, OLDEST_CUDA, Argument, Kernel, Target, compose
from metal_ops.matmul import matmul_kernel
from metal_ops.products import WeightKind

CONTRACTS = {contract.name: contract for contract in contracts(Target.CUDA)}
# What only Hopper has.
WIDE = {
    contract.name: wide
    for contract in contracts(Target.HOPPER)
    if (wide := [k for k in contract.kernels if "#define IS_WIDE 1\n" in k.source])
}
ARCHS = {Target.CUDA: f"sm_{OLDEST_CUDA}", Target.HOPPER: "sm_90a"}
FORM = re.compile(r"#define (?:IS_STAGED|ROW_TILES|OUTPUT_TILES|GROUP) .*")
DECLARATIONS = Path(__file__).parent / "cuda_declarations.h"


@cache
def compiler(target=Target.CUDA):
    """Compiles a text, for the oldest GPU of a target: NVRTC where there is one, else clang's front
    end.
    """
    try:
        nvrtc = NVRTCCompiler(ARCHS[target], ptx=False)
        nvrtc.compile("__device__ int x;")
        return nvrtc.compile
    except (AttributeError, OSError, CompileError):
        return clang_compiler(ARCHS[target])


def clang_compiler(arch):
    try:
        clang = find_toolchain().clang
    except ToolchainError as error:
        pytest.skip(f"neither NVRTC nor clang: {error}")
    flags = ("-x", "cuda", f"--cuda-gpu-arch={arch}", "--cuda-device-only")
    alone = ("-nocudainc", "-nocudalib", "-fsyntax-only", "-include", str(DECLARATIONS), "-")

    def check(text: str) -> None:
        done = subprocess.run([*clang, *flags, *alone], input=text, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr)

    return check


def kinds(kernels: list[Kernel]) -> list[Kernel]:
    """The first of those that have the same types and texts."""
    found: dict[tuple, Kernel] = {}
    for kernel in kernels:
        types = (argument.dtype for argument in (*kernel.writes, *kernel.reads))
        texts = FORM.findall(kernel.source)
        found.setdefault((kernel.name.partition("_")[0], *types, *texts), kernel)
    return list(found.values())


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_kernel_compiles(name):
    for kernel in kinds(CONTRACTS[name].kernels):
        compiler()(translate(kernel))


@pytest.mark.parametrize("name", WIDE)
def test_kernels_that_only_hopper_has_compile(name):
    for kernel in kinds(WIDE[name]):
        compiler(Target.HOPPER)(translate(kernel))


def test_a_wrong_text_does_not_compile():
    kernel = CONTRACTS["tap"].kernels[0]
    x, *rest = kernel.reads
    wrong = [
        replace(kernel, reads=(replace(x, dtype=dtypes.int32), *rest)),
        replace(kernel, reads=(x, x, *rest)),
        replace(kernel, source=kernel.source.replace("const uint t", "const uont t")),
    ]
    for one in wrong:
        with pytest.raises(CompileError):
            compiler()(translate(one))


TEXT = (
    HEAD
    + """#define THREADS 64
inline float twice(device const float* x) { return x[0] + 2.0f; }
[[kernel, max_total_threads_per_threadgroup(THREADS)]] void k_64(
    device half* out,
    device const int* x,
    uint2 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float a[4], b[THREADS];
  threadgroup float* p = a;
}
"""
)
SMALL = Kernel(
    "k_64",
    TEXT,
    (1, 1, 1),
    64,
    (Argument("out", (1,), dtypes.float16),),
    (Argument("x", (1,), dtypes.int32),),
    0,
    0,
)


def test_what_is_rewritten():
    text = translate(SMALL)
    for line in (
        "__device__ __forceinline__ float twice(const float* x) { return x[0] + 2.0f; }",
        "__device__ __forceinline__ void k_64(",
        "    half* out,",
        "    uint2 group,",
        "    uint lane) {",
        "  __shared__ float a[4], b[THREADS];",
        "  float* p = a;",
        'extern "C" __global__ void __launch_bounds__(64) k_64(metal::half* out, const int* x) {',
        "  metal::k_64(out, x, metal::uint2(blockIdx.x, blockIdx.y), threadIdx.x % 32);",
    ):
        assert line in text.splitlines(), line


def test_every_thread_waits_for_the_launch_before():
    """Before a text that does not wait, and behind one that does: it may have returned by then."""
    call = "metal::k_64(out, x, metal::uint2(blockIdx.x, blockIdx.y), threadIdx.x % 32);"
    wait = "metal::wait_for_last_launch();"
    own = replace(SMALL, source=TEXT.replace("  threadgroup float* p", f"  {WAIT}\n  float* p"))
    for kernel, body in ((SMALL, [wait, call]), (own, [call, wait])):
        text = translate(kernel)
        assert [line.strip() for line in text.splitlines()[-3:-1]] == body
        assert waits(text)
    assert not waits('extern "C" __global__ void generated(float* out) {}')


@pytest.mark.parametrize("num_rows, is_many", [(1, False), (32, False), (512, True)])
def test_launches_of_many_rows_are_known_by_their_source(num_rows, is_many):
    weight = WeightKind((2048, 2048), dtypes.bfloat16)
    kernel = matmul_kernel(num_rows, weight, dtypes.bfloat16, dtypes.bfloat16, target=Target.HOPPER)
    assert (MANY_ROWS in translate(kernel)) == is_many


@pytest.mark.parametrize(
    "old, new, words",
    [
        (HEAD, "", "does not begin with Metal's headers"),
        ("[[kernel, max_total", "[[max_total", "has 0 kernels, not one"),
        ("uint2 group", "ushort group", "ushort [[threadgroup_position_in_grid]] has no form"),
        ("thread_index_in_simdgroup", "threads_per_grid", "[[threads_per_grid]] has no form"),
    ],
)
def test_what_cannot_be_rewritten(old, new, words):
    with pytest.raises(ValueError) as raised:
        translate(replace(SMALL, source=TEXT.replace(old, new)))
    assert words in str(raised.value)


def test_a_target_has_its_own_lanes():
    metal, cuda, hopper = (compose(("lanes",), "x", "x", target) for target in Target)
    assert metal != cuda == hopper and metal == compose(("lanes",), "x", "x")
    assert compose(("tap",), "x", "x", Target.CUDA) == compose(("tap",), "x", "x")

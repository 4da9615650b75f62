"""A kernel's text for NVIDIA GPUs: the Metal text behind a CUDA header, and a launched function
around its own. Text to text; knows nothing of a device.

What macros can do, `kernels/cuda.cuh` does. Here are signatures, address spaces, `inline` and
literals of half; where a lane stands in a matrix is `compose`'s matter, which takes `lanes`,
`tile` and `places` in their forms for CUDA.
"""

import re
from functools import cache

from tinygrad.dtype import DType, dtypes

from metal_ops.kernel import FOLDER, HEAD, Kernel

# Attributes of a kernel's parameters, by the type of the parameter.
POSITIONS = {
    "thread_index_in_threadgroup": {"uint": "threadIdx.x"},
    "thread_index_in_simdgroup": {"uint": "threadIdx.x % 32"},
    "simdgroup_index_in_threadgroup": {"uint": "threadIdx.x / 32"},
    "threadgroup_position_in_grid": {
        "uint": "blockIdx.x",
        "uint2": "metal::uint2(blockIdx.x, blockIdx.y)",
        "uint3": "metal::uint3(blockIdx.x, blockIdx.y, blockIdx.z)",
    },
}
TYPES = {
    dtypes.float32: "float",
    dtypes.float16: "metal::half",
    dtypes.bfloat16: "metal::bfloat",
    dtypes.int32: "int",
    dtypes.uint32: "unsigned int",
}
KERNEL = re.compile(r"\[\[kernel, max_total_threads_per_threadgroup\(\w+\)\]\] void")
POSITION = re.compile(r"(\w+)( \w+) \[\[(\w+)\]\]")
INLINE = re.compile(r"^inline ", re.MULTILINE)
# Of a statement: parameters and pointers are followed by other things.
THREADGROUP_ARRAY = re.compile(r"^( *)threadgroup (\w+ \w+\[.*;)$", re.MULTILINE)
# NOTE: no macros, because __device__ is one itself, which ends in `device`.
ADDRESS_SPACE = re.compile(r"\b(device|constant|thread|threadgroup) ")
FUNCTION = "__device__ __forceinline__"
WAIT = "wait_for_last_launch();"


def translate(kernel: Kernel) -> str:
    """The CUDA source of a kernel whose text is composed for CUDA.

    Raises ValueError for a text that is not written as those of `kernels/` are.
    """
    if not kernel.source.startswith(HEAD):
        raise ValueError(f"{kernel.name}: its text does not begin with Metal's headers")
    text = kernel.source.removeprefix(HEAD)
    text, num_kernels = KERNEL.subn(f"{FUNCTION} void", text)
    if num_kernels != 1:
        raise ValueError(f"{kernel.name}: its text has {num_kernels} kernels, not one")
    positions = [_position(kernel.name, found[1], found[3]) for found in POSITION.finditer(text)]
    text = POSITION.sub(r"\1\2", text)
    text = INLINE.sub(f"{FUNCTION} ", text)
    text = THREADGROUP_ARRAY.sub(r"\1__shared__ \2", text)
    text = ADDRESS_SPACE.sub("", text)
    return "\n".join(
        [
            _header(),
            "namespace metal {",
            text,
            "}  // namespace metal",
            _entry(kernel, positions, WAIT in text),
        ]
    )


def waits(source: str) -> bool:
    """Whether a CUDA source is one that `translate` made: launches of those wait for the one before
    them, and those of tinygrad's own kernels do not.
    """
    return source.startswith(_header())


def _position(name: str, kind: str, attribute: str) -> str:
    try:
        return POSITIONS[attribute][kind]
    except KeyError:
        raise ValueError(f"{name}: {kind} [[{attribute}]] has no form in CUDA") from None


def _entry(kernel: Kernel, positions: list[str], waits_itself: bool) -> str:
    """The launched function: its parameters are the kernel's buffers, in order.

    Every thread waits for the launch before. A kernel that waits itself may return from some
    threads without, so these do it at the end: the next launch takes this one's end for that of all
    before it.
    """
    # NOTE: no __restrict__: the compiler would move loads ahead of the wait. Nothing else changes.
    parameters = [
        *(f"{_spelled(out.dtype)}* {out.name}" for out in kernel.writes),
        *(f"const {_spelled(read.dtype)}* {read.name}" for read in kernel.reads),
    ]
    passed = [*(argument.name for argument in (*kernel.writes, *kernel.reads)), *positions]
    head = f'extern "C" __global__ void __launch_bounds__({kernel.threads}) {kernel.name}'
    call, wait = f"metal::{kernel.name}({', '.join(passed)});", f"metal::{WAIT}"
    body = (call, wait) if waits_itself else (wait, call)
    return "\n  ".join([f"{head}({', '.join(parameters)}) {{", *body]) + "\n}\n"


def _spelled(dtype: DType) -> str:
    return TYPES[dtype]


@cache
def _header() -> str:
    return (FOLDER / "cuda.cuh").read_text()

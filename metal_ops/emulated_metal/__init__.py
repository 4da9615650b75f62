"""Metal kernels executed on Linux: clang compiles them as C++, one fiber runs each GPU thread,
every access is checked.

    library = compile(source)                        # lint, strict compile, checked build
    run(library["rms_norm"], 4, 256, out, x, weight, np.int32(2048), order="random", seed=3)

    emulator = install(checked=False)                # from here on Device["METAL"] is the emulator
    emulator.order, emulator.seed = "random", 3      # these, and `checked`, may change between
    launches

What it finds: see tests/test_emulated_metal_faults.py for faults of running kernels, each with its
message, and tests/test_emulated_metal_compile.py for sources that are refused. Not emulated:
registers, textures, fast-math, the exact rounding of exp and sin, and memory weaker than the
barriers.

A source goes through `build.py`: preprocessor, `declarations.py`, `lint.py`, `translate.py`, clang
with the Metal library in `msl/`. `launch.py` loads and launches, with the C++ in `runtime/`.
`device.py` is tinygrad's device.
"""

from metal_ops.emulated_metal.bfloat import from_bfloat, to_bfloat
from metal_ops.emulated_metal.device import Emulator, install
from metal_ops.emulated_metal.errors import MetalCompileError, MetalLaunchError, ToolchainError
from metal_ops.emulated_metal.launch import Function, Library, compile, run

__all__ = [
    "Emulator",
    "Function",
    "Library",
    "MetalCompileError",
    "MetalLaunchError",
    "ToolchainError",
    "compile",
    "from_bfloat",
    "install",
    "run",
    "to_bfloat",
]

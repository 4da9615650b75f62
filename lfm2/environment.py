"""What the machine around us decides: the device, the C compiler, the cache folders."""

import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tinygrad.helpers import CACHELEVEL, DEV, PARALLEL

from lfm2.errors import LFM2Error

MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Of the machine's memory; the rest is for the system and for what a step computes.
USABLE_SHARE = 0.9
# The device files of a GPU's driver, and tinygrad's name for its device.
GPUS = {"/dev/nvidia0": "CUDA", "/dev/kfd": "AMD"}
# Compilers that people set CC to for other programs; they lack clang's --target.
NOT_CLANG = re.compile(r"(.*-)?(cc|c99|gcc)(-[\d.]+)?")


def default_device() -> str:
    """tinygrad's DEV if it is set, else METAL on a Mac, else the GPU there is, else CPU.

    tinygrad's own choice opens every kind of device in turn, which takes a second.
    """
    if DEV.device:
        return DEV.device
    if sys.platform == "darwin":
        return "METAL"
    return next((device for path, device in GPUS.items() if os.path.exists(path)), "CPU")


def ensure_compiler(device: str) -> None:
    """Sets CC for tinygrad where `device` needs a C compiler.

    It is CC itself if that can be a clang, else a clang on the PATH, else the one in the `ziglang`
    wheel. Raises LFM2Error if there is none.
    """
    if device != "CPU":
        return
    chosen = os.environ.get("CC", "")
    if chosen and not NOT_CLANG.fullmatch(Path(chosen).name):
        if not shutil.which(chosen):
            raise LFM2Error(
                f"CC is {chosen!r}, which is no program: set it to a clang, or unset it"
            )
        return
    wrapper = Path(sys.executable).parent / "zig-clang"
    if shutil.which("clang"):
        os.environ["CC"] = "clang"
    elif wrapper.exists() and importlib.util.find_spec("ziglang"):
        os.environ["CC"] = str(wrapper)
    else:
        raise LFM2Error(
            "the CPU device needs a C compiler and no clang is on the PATH: run pip install ziglang"
        )


def settle_tinygrad() -> None:
    """Has tinygrad compile in this process, and keep nothing: compiled steps are kept whole.

    tinygrad's own cache of kernels is a file of pickles that nothing guards, and a full disk or a
    damaged entry in it is an error. It would save 0.05 s of a later start.
    """
    CACHELEVEL.value = 0
    if "PARALLEL" not in os.environ:
        # Worker processes cost more than they save on our few kernels: the built-in model's first
        # start took 14.6 s without and 19.2 s with two of them on two busy cores.
        PARALLEL.value = 0


def cache_folder() -> Path:
    """Where compiled steps are kept: one folder a user."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "lfm2"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    try:
        return Path.home() / caches / "lfm2"
    except RuntimeError:
        # A container's made-up user has no home.
        return Path(tempfile.gettempdir()) / f"lfm2-{os.getuid()}"


def machine_memory_bytes() -> int:
    """The machine's memory, or what a container may have of it."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(total, int(MEMORY_LIMIT.read_text()))
    except (OSError, ValueError):
        return total


def codegen_environment() -> list[str]:
    """What decides generated code beside tinygrad's own settings: the processor, and what its
    renderers read.
    """
    names = ("CC", "ALIGNED", "THREADS", "EXPAND_SSA", "TUPLE_ORDER", "HCQ2")
    return [_processor(), repr([(name, os.environ.get(name)) for name in names])]


def _processor() -> str:
    """Code for the CPU is made for this processor, and another of the same family may lack its
    instructions.
    """
    try:
        with open("/proc/cpuinfo") as file:
            lines = file.read().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))

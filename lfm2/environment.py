"""What the machine around us decides: the device, the C compiler, the cache folder."""

import os
import shutil
import sys
from pathlib import Path

from lfm2.errors import LFM2Error

# The device files of a GPU's driver, and tinygrad's name for its device.
GPUS = {"/dev/nvidia0": "CUDA", "/dev/kfd": "AMD"}


def default_device() -> str:
    """tinygrad's DEV if it is set, else METAL on a Mac, else the GPU there is, else CPU.

    tinygrad's own choice opens every kind of device in turn, which takes a second.
    """
    if device := os.environ.get("DEV"):
        return device.split(":")[0].upper()
    if sys.platform == "darwin":
        return "METAL"
    return next((device for path, device in GPUS.items() if os.path.exists(path)), "CPU")


def ensure_compiler(device: str) -> None:
    """Sets CC for tinygrad where `device` needs a C compiler: a clang on the PATH, else the one in the `ziglang` wheel.

    Raises LFM2Error if there is neither.
    """
    if device != "CPU" or "CC" in os.environ or shutil.which("clang"):
        return
    wrapper = Path(sys.executable).parent / "zig-clang"
    if not wrapper.exists():
        raise LFM2Error("the CPU device needs a C compiler and no clang is on the PATH: run pip install ziglang")
    os.environ["CC"] = str(wrapper)


def cache_folder() -> Path:
    """Where compiled steps are kept: one folder a user."""
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "lfm2"
    caches = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path.home() / caches / "lfm2"

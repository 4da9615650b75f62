"""Opens the device that a model computes on. Knows what tinygrad has; nothing of models."""

from collections.abc import Callable
from importlib.metadata import version

from tinygrad import Device

from lfm2.environment import default_device, ensure_compiler
from lfm2.errors import LFM2Error, RequestError

# What tinygrad calls devices too, though nothing is computed there.
STORES = {"DISK", "NPY", "NULL", "RDMA", "TINYFS"}


def opened_device(device: str | None, warn: Callable[[str], None]) -> str:
    """Opens a device; if none was asked for and the likeliest cannot be opened, the CPU.

    Raises RequestError where tinygrad has no such device, LFM2Error where it cannot be opened.
    """
    chosen = (device or default_device()).upper()
    known = sorted(set(Device._devices) - STORES)
    if chosen.split(":")[0] not in known:
        raise RequestError(
            f"there is no device {chosen}; tinygrad {version('tinygrad')} has {', '.join(known)}"
        )
    ensure_compiler(chosen)
    try:
        Device[chosen]
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        fault = f"device {chosen} cannot be opened: {reason}"
        if chosen == "CPU":
            raise LFM2Error(fault) from error
        if device is not None:
            raise LFM2Error(f"{fault}; try --device CPU") from error
        warn(f"{fault}; using the CPU")
        return opened_device("CPU", warn)
    return chosen

"""bfloat16 as numpy lacks it: its bits, in uint16."""

import numpy as np


def to_bfloat(values: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 of each value; of two as near, the even one."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded >> np.uint32(16)).astype(np.uint16)


def from_bfloat(bits: np.ndarray) -> np.ndarray:
    """The float32 values of the bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)

"""Memory that ends where no one may read on, so that even an unchecked kernel faults when it runs
over the end.
"""

import ctypes
import mmap
import os
from functools import cache

import numpy as np

# The ends of buffers stay aligned to the largest vector; so up to 15 bytes beyond an odd end go
# unseen.
ALIGNMENT = 16


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


class GuardedMemory:
    """`size` bytes at `address`, which end at a page without access. All bits set: a NaN of every
    float type.
    """

    def __init__(self, size: int) -> None:
        pages = -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(-1, pages + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        if _libc().mprotect(ctypes.c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0):
            raise OSError(ctypes.get_errno(), f"mprotect: {os.strerror(ctypes.get_errno())}")
        offset = pages - -(-size // ALIGNMENT) * ALIGNMENT
        self.size = size
        self.address = start + offset
        # Keeps the mapping alive, and so does every view of it.
        self._owned = (ctypes.c_ubyte * size).from_buffer(mapped, offset)
        self.bytes[:] = 0xFF

    @property
    def bytes(self) -> np.ndarray:
        return np.asarray(memoryview(self._owned).cast("B"))

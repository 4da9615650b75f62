"""Bytes on a device beside tensors: memory that is given back at once, and copies on one device
that do not go through the host.

Touches tinygrad internals, as `launch` does.
"""

import errno

from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer, BufferSpec

# What a copy goes through on a device that has no other way.
BOUNCE_BYTES = 16 << 20


class Memory:
    """`num_bytes` on a device, with nothing written to them. Freed when nothing refers to this any
    more. Raises MemoryError.
    """

    def __init__(self, num_bytes: int, device: str) -> None:
        self.num_bytes = num_bytes
        # NOTE: by default tinygrad keeps what is freed for requests of exactly the same size.
        self._buffer = Buffer(device, num_bytes, dtypes.uint8, options=BufferSpec(nolru=True))
        try:
            self._buffer.allocate()
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(f"{device}: {num_bytes} bytes") from error

    def store(self, offset: int, tensor: Tensor, first: int, num_bytes: int) -> None:
        """Copies bytes [first, first + num_bytes) of a real tensor to `offset`."""
        source = tensor.uop.buffer
        _copy(part_of(self._buffer, offset, num_bytes), part_of(source, first, num_bytes))

    def load(self, offset: int, tensor: Tensor, first: int, num_bytes: int) -> None:
        """Copies bytes from `offset` on over [first, first + num_bytes) of a real tensor."""
        target = tensor.uop.buffer
        _copy(part_of(target, first, num_bytes), part_of(self._buffer, offset, num_bytes))

    def read(self, offset: int, num_bytes: int) -> bytearray:
        """A copy of some bytes on the host."""
        return _read(self._buffer, offset, num_bytes)

    def write(self, offset: int, data: bytearray) -> None:
        """Copies bytes from the host to `offset`."""
        part = part_of(self._buffer, offset, len(data))
        part.allocator._copyin(part._buf, memoryview(data))
        Device[part.device].synchronize()


def read_tensor(tensor: Tensor, offset: int, num_bytes: int) -> bytearray:
    """A copy of some bytes of a real tensor on the host."""
    return _read(tensor.uop.base.buffer, offset, num_bytes)


def _read(buffer: Buffer, offset: int, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    part = part_of(buffer, offset, num_bytes)
    part.allocator._copyout(memoryview(data), part._buf)
    return data


def part_of(buffer: Buffer, offset: int, num_bytes: int) -> Buffer:
    """Bytes of a buffer, as one of their own."""
    if offset < 0 or offset + num_bytes > buffer.nbytes:
        raise ValueError(f"bytes {offset} to {offset + num_bytes} of {buffer.nbytes}")
    if num_bytes == buffer.nbytes:
        # A view takes some microseconds to make; a decode round would make two.
        return buffer.ensure_allocated()
    return buffer.view(num_bytes, dtypes.uint8, offset).ensure_allocated()


def _copy(target: Buffer, source: Buffer) -> None:
    """Copies all of a buffer to another of its size on its device, after what was launched before
    and before what is launched later.
    """
    allocator = target.allocator
    if hasattr(allocator, "_as_buffer"):
        # Memory that the host sees too.
        Device[target.device].synchronize()
        allocator._as_buffer(target._buf)[:] = allocator._as_buffer(source._buf)
    elif hasattr(allocator, "_transfer") and allocator.supports_transfer:
        device = allocator.dev
        allocator._transfer(target._buf, source._buf, target.nbytes, device, device)
    else:
        for offset in range(0, target.nbytes, BOUNCE_BYTES):
            num_bytes = min(BOUNCE_BYTES, target.nbytes - offset)
            data = memoryview(bytearray(num_bytes))
            allocator._copyout(data, part_of(source, offset, num_bytes)._buf)
            allocator._copyin(part_of(target, offset, num_bytes)._buf, data)
            Device[target.device].synchronize()

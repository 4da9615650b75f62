"""The lines of a file or a pipe, as they come: nobody need wait for the next one."""

import contextlib
import os
import select
import stat
from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 16


class Source:
    """Iterates, once, over the lines of a file, with their ends; None where the next is not there.

    Nothing else may read the file. max_bytes: a line that is longer is cut to more than that; not
    more is ever held. Raises OSError.
    """

    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self.file = file
        self.max_bytes = max_bytes
        # None for what is no file of the system, and can be read at any time.
        self.descriptor = None
        with contextlib.suppress(OSError):
            self.descriptor = file.fileno()
        self._buffer = bytearray()
        self._is_ended = False

    def __iter__(self) -> Iterator[bytes | None]:
        num_searched = 0
        while self._buffer or not self._is_ended:
            end = self._buffer.find(b"\n", num_searched)
            if end < 0 and not self._is_ended:
                del self._buffer[self.max_bytes + 1 :]
                num_searched = len(self._buffer)
                if not self._is_ready():
                    yield None
                    continue
                self._fill()
            else:
                end = len(self._buffer) if end < 0 else end + 1
                line = bytes(self._buffer[:end])
                del self._buffer[:end]
                num_searched = 0
                yield line

    def wait(self) -> None:
        """Waits until there is more to read, or an end of it."""
        if self.descriptor is not None:
            select.select([self.descriptor], [], [])

    def _is_ready(self) -> bool:
        return self.descriptor is None or bool(select.select([self.descriptor], [], [], 0)[0])

    def _fill(self) -> None:
        if self.descriptor is None:
            block = self.file.read(BLOCK_BYTES)
        else:
            block = os.read(self.descriptor, BLOCK_BYTES)
        self._buffer += block
        self._is_ended = not block

    def count(self) -> int | None:
        """How many lines there will be; None if that cannot be told before they are read."""
        if self.descriptor is None or not stat.S_ISREG(os.fstat(self.descriptor).st_mode):
            return None
        position = os.lseek(self.descriptor, 0, os.SEEK_CUR)
        num_lines, last = 0, b"\n"
        while block := os.pread(self.descriptor, BLOCK_BYTES, position):
            num_lines += block.count(b"\n")
            position += len(block)
            last = block
        return num_lines + (not last.endswith(b"\n"))

"""Where the records of `lfm2 batch` go: standard output, or a file that a later run goes on with.

A record is one line of JSON, written whole and at once. Knows nothing of models and requests.
"""

import contextlib
import fcntl
import json
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lfm2.cli.terminal import OutputFailed, Terminal
from lfm2.errors import RequestError

# What every record begins with: a piece of one can be told from the text of another kind of file.
START = b'{"id": '
# A record has an id and one of these.
ANSWER, ERROR = "text", "error"


class ResultStream:
    """Standard output. Nothing is known of what earlier runs wrote there."""

    served: Set[str | int] = frozenset()
    is_regular = False

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.is_ascii = (sys.stdout.encoding or "").lower() not in ("utf-8", "utf8")

    def begin(self) -> None:
        """There is nothing to make ready."""

    def write(self, record: dict) -> None:
        """Raises OutputFailed, and BrokenPipeError where the reader has left."""
        self.terminal.write(encoded(record, self.is_ascii).decode())

    def close(self) -> None:
        """Whoever started the program closes it."""


class ResultFile:
    """A file that no other process writes; closed, it is gone again if nothing was ever in it.

    is_resumed: what earlier runs have written stays; `served` are the ids of their replies. The
    file is changed by `begin` and `write` alone. Raises RequestError for one that holds something
    and is neither to be resumed nor to be replaced.
    """

    def __init__(self, path: Path, is_resumed: bool, is_replaced: bool) -> None:
        self.path = path
        self.is_begun = False
        self.is_made = not os.path.lexists(path)
        try:
            self._file = open_alone(path)
        except OSError as error:
            raise RequestError(f"{path} cannot be written: {error.strerror}") from error
        try:
            self._kept = self._found(is_resumed, is_replaced)
        except BaseException:
            self.close()
            raise
        self.served = self._kept.served

    def _found(self, is_resumed: bool, is_replaced: bool) -> "Kept":
        status = os.fstat(self._file)
        self.is_regular = stat.S_ISREG(status.st_mode)
        if is_resumed and not self.is_regular:
            raise RequestError(f"{self.path} is no file: there is nothing to resume")
        if not self.is_regular or not status.st_size or is_replaced:
            return Kept()
        if not is_resumed:
            raise RequestError(
                f"{self.path} is there already: --resume goes on with it, --force replaces it"
            )
        with open(self.path, "rb") as file:
            return kept_records(file, self.path)

    def begin(self) -> None:
        """Leaves in the file the replies that stay: whole lines, without errors and torn ends."""
        with self._failing():
            if self._kept.num_errors:
                self._rewrite()
            elif self.is_regular:
                os.ftruncate(self._file, self._kept.num_bytes)
                if self._kept.lacks_end:
                    write_all(self._file, b"\n")
        self.is_begun = True
        self.num_bytes = os.fstat(self._file).st_size

    def write(self, record: dict) -> None:
        """Raises OutputFailed where the disk is full; what was written before is whole then."""
        line = encoded(record, is_ascii=False)
        try:
            with self._failing():
                write_all(self._file, line)
        except OutputFailed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self.num_bytes)
            raise
        self.num_bytes += len(line)

    def close(self) -> None:
        is_unused = self.is_made and not self.is_begun
        if is_unused and not os.fstat(self._file).st_size:
            with contextlib.suppress(OSError):
                self.path.unlink()
        os.close(self._file)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputFailed(f"{self.path} cannot be written: {error.strerror}") from error

    def _rewrite(self) -> None:
        """Puts a copy without error records in the file's place; it holds all or is not there."""
        target = self.path.resolve()
        copy, name = tempfile.mkstemp(".new", f"{target.name}.", target.parent)
        try:
            lock(copy, target)
            with open(target, "rb") as old, open(copy, "ab", closefd=False) as new:
                for line, record in records(old, target):
                    if ERROR not in record:
                        new.write(line if line.endswith(b"\n") else line + b"\n")
            os.fchmod(copy, stat.S_IMODE(os.fstat(self._file).st_mode))
            os.fsync(copy)
            os.replace(name, target)
        except BaseException:
            os.close(copy)
            Path(name).unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = copy


@dataclass(frozen=True)
class Kept:
    """What a file holds. num_bytes: of its whole records; lacks_end: the last has no line end."""

    served: Set[str | int] = frozenset()
    num_errors: int = 0
    num_bytes: int = 0
    lacks_end: bool = False


def kept_records(file: BinaryIO, path: Path) -> Kept:
    """Reads records up to the end or to a torn last line. Raises RequestError for other lines."""
    served, num_errors, num_bytes, line = set(), 0, 0, b"\n"
    for line, record in records(file, path):
        num_bytes += len(line)
        if ERROR in record:
            num_errors += 1
        else:
            served.add(record["id"])
    return Kept(served, num_errors, num_bytes, not line.endswith(b"\n"))


def records(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, dict]]:
    """The whole lines with their records."""
    for number, line in enumerate(file, 1):
        record = record_of(line)
        if record is not None:
            yield line, record
        elif line.endswith(b"\n") or not is_piece(line):
            raise RequestError(
                f"line {number} of {path} is no record of lfm2 batch: remove that line, name "
                "another file, or replace this one with --force"
            )


def record_of(line: bytes) -> dict | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_record = isinstance(found, dict) and (ERROR in found or ANSWER in found)
    has_id = is_record and isinstance(found.get("id", 0.0), str | int | None)
    return found if has_id else None


def is_piece(line: bytes) -> bool:
    """Whether a line may be the beginning of a record. A crash of the system can leave zeros."""
    return START.startswith(line.rstrip(b"\0")[: len(START)])


def open_alone(path: Path) -> int:
    """Opens a file for appending, made if it is not there. Raises RequestError if it is locked."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            lock(file, path)
            # Another process may have replaced or removed it before it was locked.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), os.stat(path)):
                    return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def lock(file: int, path: Path) -> None:
    """Locks a regular file until it is closed, were it by the end of the process."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RequestError(
            f"{path} is being written by another lfm2 batch: wait for it, or name another file"
        ) from error
    except OSError as error:
        # Some network file systems have no locks.
        warnings.warn(
            f"{path} cannot be locked ({error.strerror}): let no other process write it",
            stacklevel=2,
        )


def write_all(file: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def encoded(record: dict, is_ascii: bool) -> bytes:
    """A record's line: UTF-8, or with escapes alone where that is needed."""
    if not is_ascii:
        # An id may hold half a surrogate pair, which JSON can spell and UTF-8 cannot.
        with contextlib.suppress(UnicodeEncodeError):
            return (json.dumps(record, ensure_ascii=False) + "\n").encode()
    return (json.dumps(record) + "\n").encode()

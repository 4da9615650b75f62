"""Finds the source line of an address in a shared object: reads the DWARF 4 line table that checked
builds carry.

Written here because the programs that do it (addr2line) do not come with the `ziglang` wheel.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The standard's names of the opcodes that matter (DWARF 4, section 6.2.5).
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, CONST_ADD_PC, FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
END_SEQUENCE, SET_ADDRESS = 1, 2


class Reader:
    """Numbers, one after another, out of bytes."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content = content
        self.at = at

    def number(self, form: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        end = self.content.index(0, self.at)
        found = self.content[self.at : end].decode()
        self.at = end + 1
        return found

    def leb128(self, is_signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return value - (1 << shift) if is_signed and byte & 0x40 else value


def line_at(shared_object: Path, address: int) -> str:
    """ "at file:line" of the code at an address, counted from where the object is loaded; "at ?" if
    the table has none.

    "near file:line" where the compiler joined code of several lines.
    """
    section = _section(shared_object.read_bytes(), ".debug_line")
    best = (-1, "at ?")
    at = 0
    while at < len(section):
        length = struct.unpack_from("<I", section, at)[0]
        # Rows come by rising address within a sequence: the last at or before the address is the
        # one that holds it.
        for start, end, place in _spans(section[at : at + 4 + length]):
            if start <= address < end and start > best[0]:
                best = (start, place)
        at += 4 + length
    return best[1]


def _section(elf: bytes, name: str) -> bytes:
    (headers_at,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, headers_at + i * size) for i in range(count)]
    names_at = headers[names][4]
    for name_at, _, _, _, start, length in headers:
        if Reader(elf, names_at + name_at).text() == name:
            return elf[start : start + length]
    return b""


@dataclass(frozen=True)
class Header:
    """What the rows of a unit's table are coded with."""

    min_length: int
    line_base: int
    line_range: int
    opcode_base: int
    num_operands: list[int]
    files: list[str]

    def advance(self, opcode: int) -> int:
        """How far a special opcode moves the address."""
        return (opcode - self.opcode_base) // self.line_range * self.min_length


@dataclass(frozen=True)
class Row:
    """The first address of a place. Line 0 is code of several lines; the last row only ends the one
    before.
    """

    address: int
    file: int
    line: int
    is_last: bool


def _spans(unit: bytes) -> Iterator[tuple[int, int, str]]:
    """(start, end, place) of each row of one unit's table."""
    reader = Reader(unit, 4)
    header = _header(reader)
    before, known = None, ""
    for row in _rows(reader, header):
        if before and before.line:
            known = f"{Path(header.files[before.file]).name}:{before.line}"
        if before and known:
            yield before.address, row.address, f"{'at' if before.line else 'near'} {known}"
        before = None if row.is_last else row


def _header(reader: Reader) -> Header:
    """Reads the header after its length, and leaves the reader at the first opcode."""
    reader.number("H")
    program_at = reader.number("I") + reader.at
    min_length, _, _ = reader.number("B"), reader.number("B"), reader.number("B")
    line_base, line_range, opcode_base = reader.number("b"), reader.number("B"), reader.number("B")
    num_operands = [reader.number("B") for _ in range(opcode_base - 1)]
    while reader.text():
        pass  # folders
    files = [""]
    while name := reader.text():
        files.append(name)
        for _ in range(3):
            reader.leb128()
    reader.at = program_at
    return Header(min_length, line_base, line_range, opcode_base, num_operands, files)


def _rows(reader: Reader, header: Header) -> Iterator[Row]:
    address, file, line = 0, 1, 1
    while reader.at < len(reader.content):
        opcode = reader.number("B")
        if opcode >= header.opcode_base:
            address += header.advance(opcode)
            line += header.line_base + (opcode - header.opcode_base) % header.line_range
            yield Row(address, file, line, is_last=False)
        elif opcode == 0:
            length = reader.leb128()
            after = reader.at + length
            kind = reader.number("B")
            if kind == SET_ADDRESS:
                address = reader.number("Q")
            if kind == END_SEQUENCE:
                yield Row(address, file, line, is_last=True)
                address, file, line = 0, 1, 1
            reader.at = after
        elif opcode == COPY:
            yield Row(address, file, line, is_last=False)
        elif opcode == ADVANCE_PC:
            address += reader.leb128() * header.min_length
        elif opcode == ADVANCE_LINE:
            line += reader.leb128(is_signed=True)
        elif opcode == SET_FILE:
            file = reader.leb128()
        elif opcode == CONST_ADD_PC:
            address += header.advance(255)
        elif opcode == FIXED_ADVANCE_PC:
            address += reader.number("H")
        else:
            for _ in range(header.num_operands[opcode - 1]):
                reader.leb128()

"""The table of a round: every integer that changes from round to round, in one int32 tensor.

A table of capacity (T rows, S segments, N drawn rows) holds, one after the other:

    the number of segments that have rows
    S + 1 segments of 5 columns   slot, start, first_row, num_rows, base
    T rows of 2 columns           position, base
    N drawn rows                  which of the T rows has its logits computed

`slot` is the state the segment reads and writes, `start` the absolute position of its first row,
`base` where the slot's keys and values start in the pool. Rows beyond those of the round are
padding: they form one more segment, in the scratch slot that nothing reads, and each stands at
position 0 of a scratch token of its own. Spare drawn rows repeat row 0.
"""

from dataclasses import dataclass

from tinygrad import dtypes
from tinygrad.uop.ops import UOp

from metal_ops.loops import Array, Index

SEGMENT_COLUMNS = ("slot", "start", "first_row", "num_rows", "base")
ROW_COLUMNS = ("position", "base")


@dataclass(frozen=True)
class Capacity:
    """The shape of a compiled form: at most this many rows, segments and drawn rows."""

    rows: int
    segments: int
    drawn: int

    @property
    def rows_offset(self) -> int:
        return 1 + (self.segments + 1) * len(SEGMENT_COLUMNS)

    @property
    def drawn_offset(self) -> int:
        return self.rows_offset + self.rows * len(ROW_COLUMNS)

    @property
    def table_size(self) -> int:
        return self.drawn_offset + self.drawn

    @property
    def constants(self) -> dict[str, int]:
        """What kernels/table.metal needs to know of the layout."""
        return {"ROWS_OFFSET": self.rows_offset, "DRAWN_OFFSET": self.drawn_offset}

    def num_segments(self, table: Array) -> UOp:
        """How many segments have rows, at least 1, inside a kernel."""
        return _load(table, 0)

    def segment(self, table: Array, segment: Index, column: str) -> UOp:
        """A column of a segment, inside a kernel."""
        return _load(table, 1 + segment * len(SEGMENT_COLUMNS) + SEGMENT_COLUMNS.index(column))

    def row(self, table: Array, row: Index, column: str) -> UOp:
        """A column of a row, inside a kernel."""
        offset = self.rows_offset + ROW_COLUMNS.index(column)
        return _load(table, offset + row * len(ROW_COLUMNS))

    def drawn_row(self, table: Array, index: Index) -> UOp:
        """The row that drawn row `index` is, inside a kernel."""
        return _load(table, self.drawn_offset + index)


def _load(table: Array, index: Index) -> UOp:
    return table[index].cast(dtypes.weakint)

"""Tiles of a matrix product in the kernels of `reference()`: which rows and outputs are made at
once, and how a weight's rows are read for them.
"""

from collections.abc import Callable

from tinygrad import dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.loops import Array, Index, Loops
from metal_ops.rows import Rows
from metal_ops.sums import largest_divisor, products

# A tile of 4 rows by 4 outputs of 16 lanes is 16 AVX-512 accumulators: measured 72-80 GFLOP/s on
# one Zen 4 core, against 63 for 8 x 2 and 28 for tiles that do not fit the registers.
TILE_SIZES = (4, 2)
# From this many rows on, unpacking a weight's rows to fp32 first costs less than converting them
# for each tile of rows.
NUM_ROWS_TO_UNPACK = 8
# A plain weight is read as fast as it is unpacked: at 8 rows of LFM2-350M's sizes, unpacking it
# first took 6 to 24% longer, at 16 rows as long, at 32 less.
NUM_ROWS_TO_UNPACK_PLAIN = 16
# Rows of x that stay in the second-level cache while the weight passes by are as many as fit into
# this.
CACHED_BYTES = 640 << 10


def swiglu_tile(
    loops: Loops, gate: Array, up: Array, num_rows: int, num_outputs: int, dtype: DType
) -> Array:
    """silu(gate) * up of a tile of fp32 sums, rounded to the compute type at each step."""
    hidden = loops.local(num_rows, num_outputs)
    with loops.over(num_rows) as a, loops.over(num_outputs) as b:
        g = gate[a, b].cast(dtype).cast(dtypes.float)
        silu = (g / (1 + (-g).exp())).cast(dtype).cast(dtypes.float)
        hidden[a, b] = silu * up[a, b].cast(dtype).cast(dtypes.float)
    return hidden


class TileRows:
    """A tile of a weight's rows inside a kernel: converted as they are used, or unpacked to fp32
    first.
    """

    def __init__(
        self, loops: Loops, rows: Rows, first: tuple[Index, ...], tile: int, is_unpacked: bool
    ) -> None:
        self.loops, self.rows, self.first, self.tile = loops, rows, first, tile
        self.run, self.group = (rows.width,) * 2 if is_unpacked else (rows.run, rows.group)
        self.unpacked = loops.local(tile, rows.width) if is_unpacked else None
        if is_unpacked:
            with loops.over(tile) as b:
                rows.unpack(loops, self._index(b), self.unpacked, b)

    def _index(self, b: Index) -> tuple[Index, ...]:
        return (*self.first[:-1], self.first[-1] + b)

    def _value(self, b: Index, k: UOp) -> UOp:
        return self.rows.value(self._index(b), k) if self.unpacked is None else self.unpacked[b, k]

    def products(self, num_rows: int, left: Callable[[Index, UOp], UOp]) -> Array:
        """The sums of left(a, k) times these rows: (num_rows, tile) in fp32."""
        return products(
            self.loops,
            num_rows,
            self.tile,
            self.rows.width,
            left,
            self._value,
            self.run,
            self.group,
        )


def for_each_tile(loops: Loops, num_rows: int, weights: list[Rows], num_outputs: int, tile) -> None:
    """Calls tile(row, output, num_rows, num_outputs, weight tiles) for every tile of a product."""
    num_cached = CACHED_BYTES // (weights[0].width * dtypes.float32.itemsize)
    num_cached = largest_divisor(
        num_rows, tuple(n for n in (256, 128, 64, 32, 16, 8, 4, 2) if n <= num_cached)
    )
    is_plain = all(rows.group == rows.width for rows in weights)
    least_rows = NUM_ROWS_TO_UNPACK_PLAIN if is_plain else NUM_ROWS_TO_UNPACK
    is_unpacked = num_rows >= least_rows or any(rows.is_streamed for rows in weights)
    rows_tile = largest_divisor(num_rows, TILE_SIZES)
    # Few rows wait for memory, which delivers one row of the weight after the other best.
    outputs_tile = largest_divisor(num_outputs, TILE_SIZES) if num_rows >= NUM_ROWS_TO_UNPACK else 1
    with loops.share(num_outputs // outputs_tile) as share:
        with loops.over(num_rows // num_cached) as block, loops.over(share.size) as i:
            output = share[i] * outputs_tile
            tiles = [
                TileRows(loops, rows, (output,), outputs_tile, is_unpacked) for rows in weights
            ]
            with loops.over(num_cached // rows_tile) as t:
                tile(block * num_cached + t * rows_tile, output, rows_tile, outputs_tile, tiles)

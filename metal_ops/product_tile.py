"""What a threadgroup makes of a product of rows with stored weights, chosen by shapes alone: the
constants of kernels/few_rows.metal and kernels/many_rows.metal. No sum depends on it.
"""

from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.kernel import SIMD_WIDTH, Target, divide_up
from metal_ops.products import BLOCK, WeightKind, num_chunks

TILE = 8  # outputs and rows of a simdgroup matrix
OUTPUT_TILES = 2  # of a threadgroup that multiplies few rows
MOST_ROW_TILES = 4  # of few rows
# Rows that are multiplied as many, by many_rows.metal, where outputs are many too.
FEWEST_MANY = MOST_ROW_TILES * TILE + 1
MAX_TURNS = 16
PIECE_BYTES = 16  # of a row, which a thread copies at once
STAGE_VALUES = 64  # of K at least
SPAN = 4  # units of K of a pass of the loop over many rows


@dataclass(frozen=True)
class ManyRows:
    """A threadgroup that multiplies many rows: tiles of rows, SIMD-groups, and tiles of outputs of
    each; how many run at once; stages at most. is_wide: with the products of kernels/wide.cuh.
    """

    row_tiles: int
    simdgroups: int
    output_tiles: int
    at_once: int
    max_stages: int
    is_wide: bool = False

    @property
    def num_rows(self) -> int:
        return TILE * self.row_tiles


# Threadgroups of few rows that run at once: two a core of an M4 Max with 40 cores, and as many
# waiting; two a multiprocessor of an H200, whose registers hold no third one of 256 threads.
AT_ONCE = {Target.METAL: 160, Target.CUDA: 264, Target.HOPPER: 264}
# Those of many rows, the largest first: smaller ones are for when there are too few to go round. On
# NVIDIA's GPUs, whose threads have more registers, a SIMD-group multiplies more outputs with rows
# that it has loaded once, and a threadgroup more rows with weights that it has unpacked once; the
# largest fill the registers of a multiprocessor.
_ON_METAL = (
    ManyRows(row_tiles=4, simdgroups=4, output_tiles=2, at_once=160, max_stages=3),
    ManyRows(row_tiles=4, simdgroups=4, output_tiles=1, at_once=160, max_stages=3),
)
_ON_CUDA = (
    ManyRows(row_tiles=8, simdgroups=8, output_tiles=4, at_once=132, max_stages=4),
    ManyRows(row_tiles=4, simdgroups=4, output_tiles=4, at_once=264, max_stages=4),
    ManyRows(row_tiles=4, simdgroups=4, output_tiles=2, at_once=264, max_stages=4),
)
_WIDE = (
    ManyRows(row_tiles=8, simdgroups=8, output_tiles=4, at_once=132, max_stages=3, is_wide=True),
    ManyRows(row_tiles=8, simdgroups=8, output_tiles=2, at_once=132, max_stages=3, is_wide=True),
)
MANY_ROWS = {
    Target.METAL: _ON_METAL,
    Target.CUDA: _ON_CUDA,
    Target.HOPPER: (*_WIDE, *_ON_CUDA),
}


@dataclass(frozen=True)
class Tile:
    """Tiles of rows and, of each SIMD-group, of outputs of all of num_weights weights, which share
    the threadgroup; as many outputs after them in further turns.

    stages: of rows in threadgroup memory, where many_rows.metal makes the sums, not few_rows.metal.
    """

    row_tiles: int
    output_tiles: int
    simdgroups: int
    num_weights: int
    turns: int = 1
    stages: int = 0
    is_wide: bool = False

    @property
    def is_staged(self) -> bool:
        return self.stages > 0

    @property
    def stems(self) -> tuple[str, ...]:
        """The texts that make its sums."""
        wide = ("wide",) if self.is_wide else ()
        return ("lanes", "tile", "products", *wide, "many_rows" if self.is_staged else "few_rows")

    @property
    def num_rows(self) -> int:
        return TILE * self.row_tiles

    @property
    def num_outputs(self) -> int:
        """Of each weight."""
        side_by_side = self.simdgroups if self.is_staged else 1
        return TILE * self.output_tiles * side_by_side * self.turns // self.num_weights


@dataclass(frozen=True)
class Stage:
    """A stage of K in threadgroup memory: its units, and the values from one row to the next."""

    units: int
    pitch: int
    num_bytes: int

    @classmethod
    def of(cls, weight: WeightKind, dtype: DType, num_rows: int) -> "Stage":
        units = max(1, STAGE_VALUES // weight.unit)
        # So that lanes of different rows and quarters of a unit find their values in different
        # banks.
        padding = PIECE_BYTES // dtype.itemsize * (4 if weight.unit == BLOCK else 1)
        pitch = units * weight.unit + padding
        return cls(units, pitch, num_rows * pitch * dtype.itemsize)


def tile_of(
    weight: WeightKind,
    dtype: DType,
    num_rows: int,
    target: Target,
    num_weights: int = 1,
    num_experts: int = 1,
    takes_turns: bool = True,
    fewest_many: int = FEWEST_MANY,
) -> Tile:
    """The tile for rows in the compute type that all take the weight, or all of num_weights alike.

    num_experts: weights side by side in the launch. takes_turns: whether a threadgroup may take
    outputs one after the other. fewest_many: rows from which on they are staged.
    """
    if num_rows >= fewest_many:
        many = _many_rows(weight, dtype, num_rows, target, num_weights, num_experts)
        if many is not None:
            return many
    # As many tiles as the rows fill: 1, 2 or 4.
    row_tiles = min(MOST_ROW_TILES, 1 << (divide_up(num_rows, TILE) - 1).bit_length())
    tile = Tile(row_tiles, OUTPUT_TILES, num_chunks(weight), num_weights)
    # More rows leave no registers for what is kept from turn to turn.
    is_whole = weight.num_outputs % tile.num_outputs == 0
    if not (takes_turns and row_tiles == 1 and is_whole):
        return tile
    blocks = weight.num_outputs // tile.num_outputs
    turns = [count for count in range(1, MAX_TURNS + 1) if blocks % count == 0]
    # No more than it takes for all to run at once.
    enough = [count for count in turns if blocks * num_experts <= AT_ONCE[target] * count]
    return replace(tile, turns=min(enough, default=max(turns)))


def best_fewest_many(weight: WeightKind, target: Target) -> int:
    """Rows from which on a weight alone is best multiplied as many, measured on an H200: not while
    the threadgroups of few rows are no more than AT_ONCE, whose SIMD-groups have a chunk of K each
    and do not pass through all of it. Weights that share a launch have outputs enough.
    """
    few = Tile(MOST_ROW_TILES, OUTPUT_TILES, num_chunks(weight), num_weights=1)
    side_by_side = divide_up(weight.num_outputs, few.num_outputs)
    return max(FEWEST_MANY, AT_ONCE[target] // side_by_side * few.num_rows + 1)


def _many_rows(
    weight: WeightKind,
    dtype: DType,
    num_rows: int,
    target: Target,
    num_weights: int,
    num_experts: int,
) -> Tile | None:
    """The tile of many rows, if threadgroup memory has room for the stages of one."""
    possible = [
        many
        for many in MANY_ROWS[target]
        if many.output_tiles >= num_weights
        and _num_stages(weight, dtype, many, target) >= 2 + _lead(weight)
        and (_can_be_wide(weight, dtype) or not many.is_wide)
        # Rows that only fill a tile up are copied too.
        and (many.row_tiles <= MOST_ROW_TILES or many.num_rows < 2 * num_rows)
    ]
    if any(many.is_wide for many in possible):
        # Only small tiles of the other kind are ever better.
        possible = [many for many in possible if many.is_wide or many.row_tiles <= MOST_ROW_TILES]
    tile = None
    for many in possible:
        tile = Tile(
            many.row_tiles,
            many.output_tiles,
            many.simdgroups,
            num_weights,
            stages=_num_stages(weight, dtype, many, target),
            is_wide=many.is_wide,
        )
        blocks = divide_up(num_rows, tile.num_rows) * num_experts
        if 2 * blocks * divide_up(weight.num_outputs, tile.num_outputs) > many.at_once:
            break
    return tile


def _can_be_wide(weight: WeightKind, dtype: DType) -> bool:
    """Whether the text of wide products takes it: rows of 16 bits that are dealt, as those of codes
    are.
    """
    return weight.bits > 0 and dtype.itemsize == 2


def _num_stages(weight: WeightKind, dtype: DType, many: ManyRows, target: Target) -> int:
    """As many as there is room for."""
    stage = Stage.of(weight, dtype, many.num_rows)
    # Twice what the rows of a stage add up to, and they themselves as wide products take them.
    beside = _lead(weight) * stage.units * many.num_rows * dtypes.float32.itemsize
    beside += many.is_wide * stage.units * weight.unit * many.num_rows * dtype.itemsize
    return min(many.max_stages, (target.threadgroup_bytes - 2 * beside) // stage.num_bytes)


def _lead(weight: WeightKind) -> int:
    """How many stages before they are multiplied rows must have come: those that codes are
    multiplied with are dealt and added up first.
    """
    return int(weight.bits > 0)


def constants(
    weight: WeightKind, dtype: DType, num_rows: int, tile: Tile, outputs: tuple[int, ...]
) -> dict[str, int | DType]:
    """What the texts of a tile's `stems`, and the kernels on them, take as constants.

    outputs: how many there are, of each weight or of all alike.
    """
    values = {
        "T": dtype,
        "S" if weight.bits else "W": weight.dtype,
        "BITS": weight.bits,
        "STORED_BITS": weight.bits or 8 * weight.dtype.itemsize,
        "GROUP": weight.group_size,
        "IS_HALF": dtype == dtypes.float16,
        "IS_BFLOAT": dtype == dtypes.bfloat16,
        "IS_SAME": dtype == weight.dtype,
        "IS_WHOLE": all(count % tile.num_outputs == 0 for count in outputs),
        "IS_STAGED": tile.is_staged,
        "IS_WIDE": tile.is_wide,
        "DEPTH": weight.depth,
        "CHUNKS": num_chunks(weight),
        "THREADS": SIMD_WIDTH * tile.simdgroups,
        "NUM_ROWS": num_rows,
        "ROW_TILES": tile.row_tiles,
        "OUTPUT_TILES": tile.output_tiles,
        "TURNS": tile.turns,
        "WEIGHTS": tile.num_weights,
    }
    if tile.is_staged:
        stage = Stage.of(weight, dtype, tile.num_rows)
        values |= {
            "STAGES": tile.stages,
            "STAGE_UNITS": stage.units,
            "PITCH": stage.pitch,
            "PIECE": PIECE_BYTES // dtype.itemsize,
            "LEAD": _lead(weight),
            "SPAN": SPAN,
            # Plain weights come further ahead: nothing else of them takes registers.
            "AHEAD": stage.units if weight.bits else SPAN * 2 // weight.dtype.itemsize,
        }
    return values

"""What a threadgroup makes of a product of rows with stored weights, chosen by shapes alone: the
constants of kernels/few_rows.metal and kernels/many_rows.metal. No sum depends on it.
"""

from dataclasses import dataclass, replace

from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.kernel import SIMD_WIDTH, THREADGROUP_BYTES, Target, divide_up
from metal_ops.products import BLOCK, WeightKind, num_chunks

TILE = 8  # outputs and rows of a simdgroup matrix
OUTPUT_TILES = 2  # of a threadgroup that multiplies few rows
MANY_ROW_TILES = 4
MANY_SIMDGROUPS = 4
# Rows that are multiplied as many.
FEWEST_MANY = MANY_ROW_TILES * TILE + 1
MAX_TURNS = 16
PIECE_BYTES = 16  # of a row, which a thread copies at once
STAGE_VALUES = 64  # of K at least
SPAN = 4  # units of K of a pass of the loop over many rows


@dataclass(frozen=True)
class ManyRows:
    """What many rows take on a target: tiles of outputs of a SIMD-group, and stages at most."""

    output_tiles: int
    max_stages: int


# On NVIDIA's GPUs, whose threads have more registers, a SIMD-group multiplies twice the outputs
# with rows that it has loaded once.
MANY_ROWS = {Target.METAL: ManyRows(2, 3), Target.CUDA: ManyRows(4, 4)}
# Threadgroups that run at once: two a core of an M4 Max with 40 cores, and as many waiting; two a
# multiprocessor of an H200, whose registers hold no third one of 256 threads.
AT_ONCE = {Target.METAL: 160, Target.CUDA: 264}


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

    @property
    def is_staged(self) -> bool:
        return self.stages > 0

    @property
    def stems(self) -> tuple[str, ...]:
        """The texts that make its sums."""
        return ("lanes", "tile", "products", "many_rows" if self.is_staged else "few_rows")

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
    def of(cls, weight: WeightKind, dtype: DType) -> "Stage":
        units = max(1, STAGE_VALUES // weight.unit)
        # So that lanes of different rows and quarters of a unit find their values in different
        # banks.
        padding = PIECE_BYTES // dtype.itemsize * (4 if weight.unit == BLOCK else 1)
        pitch = units * weight.unit + padding
        return cls(units, pitch, MANY_ROW_TILES * TILE * pitch * dtype.itemsize)


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
    stages = min(MANY_ROWS[target].max_stages, _room_for_stages(weight, dtype))
    if num_rows >= fewest_many and stages >= 2 + _lead(weight):
        return _many_rows(weight, num_rows, target, num_weights, num_experts, stages)
    # As many tiles as the rows fill: 1, 2 or 4.
    row_tiles = min(MANY_ROW_TILES, 1 << (divide_up(num_rows, TILE) - 1).bit_length())
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


def _many_rows(
    weight: WeightKind,
    num_rows: int,
    target: Target,
    num_weights: int,
    num_experts: int,
    stages: int,
) -> Tile:
    many = MANY_ROWS[target]
    tile = Tile(MANY_ROW_TILES, many.output_tiles, MANY_SIMDGROUPS, num_weights, stages=stages)
    row_blocks = divide_up(num_rows, tile.num_rows)
    blocks = row_blocks * divide_up(weight.num_outputs, tile.num_outputs) * num_experts
    half = many.output_tiles // 2
    # Smaller ones where there are too few to go round.
    is_short = 2 * blocks <= AT_ONCE[target] and half >= num_weights
    return replace(tile, output_tiles=half) if is_short else tile


def _room_for_stages(weight: WeightKind, dtype: DType) -> int:
    stage = Stage.of(weight, dtype)
    # What the rows of a stage add up to, twice.
    sums = _lead(weight) * 2 * stage.units * MANY_ROW_TILES * TILE * dtypes.float32.itemsize
    return (THREADGROUP_BYTES - sums) // stage.num_bytes


def _lead(weight: WeightKind) -> int:
    """How many stages before they are multiplied rows must have come: those that codes are
    multiplied with are added up first.
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
        stage = Stage.of(weight, dtype)
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

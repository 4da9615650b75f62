"""What kernels/products.metal has to know of a weight and of a round: its constants, arguments and
tiles.
"""

from dataclasses import dataclass
from math import prod

from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.kernel import FLOATS, SIMD_WIDTH, Argument, Target, divide_up
from metal_ops.quantized import QuantizedMatrix
from metal_ops.rows import Weight

TILE = 8  # outputs and rows of a simdgroup matrix
BLOCK = 32  # of K
# SIMD-groups that share an output tile, each with a chunk of K: 256 threads, which the pipelines of
# every chip allow.
MAX_CHUNKS = 8
# Of a threadgroup, of all its weights. On NVIDIA's GPUs many rows take wider tiles: with 16
# outputs by 32 rows they waited for the second cache, 11 operations for a byte of it. A prompt of
# 2,048 tokens passed lfm2-350m at 74,000 tok/s so, and at 100,000 with 32 outputs (H200, bf16).
OUTPUT_TILES = 2
WIDE_OUTPUT_TILES = 4
# A tile of rows that reads a weight once.
MAX_ROW_TILES = 4
PACKED_BITS = (4, 8)


@dataclass(frozen=True)
class WeightKind:
    """A stored weight's shape (..., N, K) and type: that of its values, or of its scales where it
    is packed.

    bits and group_size: of a packed one, else 0.
    """

    shape: tuple[int, ...]
    dtype: DType
    bits: int = 0
    group_size: int = 0

    @property
    def num_outputs(self) -> int:
        return self.shape[-2]

    @property
    def depth(self) -> int:
        return self.shape[-1]

    @property
    def suffix(self) -> str:
        """What a kernel's name says of the packing."""
        return f"_q{self.bits}" if self.bits else ""

    @property
    def num_bytes(self) -> int:
        return sum(argument.num_bytes for argument in weight_arguments("weight", self))


def kind_of(weight: Weight) -> WeightKind:
    if isinstance(weight, QuantizedMatrix):
        return WeightKind(weight.shape, weight.scales.dtype, weight.bits, weight.group_size)
    return WeightKind(weight.shape, weight.dtype)


def is_served(weight: WeightKind, dtype: DType) -> bool:
    """Whether kernels multiply rows in the compute type `dtype` with this weight.

    Its depth must be whole blocks. A plain weight's values are rounded to the compute type where
    this holds less, as when a checkpoint is loaded in it; codes are multiplied exactly.
    """
    if dtype not in FLOATS or weight.dtype not in FLOATS:
        return False
    if weight.bits:
        return weight.bits in PACKED_BITS and weight.group_size % BLOCK == 0
    return weight.depth % BLOCK == 0


def num_chunks(weight: WeightKind) -> int:
    """Into how many chunks K is cut: by the weight alone, so that no sum depends on a round."""
    return min(MAX_CHUNKS, weight.depth // (weight.group_size or BLOCK))


def num_row_tiles(num_rows: int) -> int:
    """1, 2 or 4: as many as the rows fill."""
    return min(MAX_ROW_TILES, 1 << (divide_up(num_rows, TILE) - 1).bit_length())


def num_output_tiles(num_rows: int, target: Target) -> int:
    """Tiles of outputs of a threadgroup that multiplies so many rows. No sum depends on it."""
    is_wide = target is Target.CUDA and num_rows > MAX_ROW_TILES * TILE
    return WIDE_OUTPUT_TILES if is_wide else OUTPUT_TILES


def constants(
    weight: WeightKind, dtype: DType, num_rows: int, output_tiles: int
) -> dict[str, int | DType]:
    """What the texts tile and products, and the kernels on them, take as constants."""
    return {
        "T": dtype,
        "S" if weight.bits else "W": weight.dtype,
        "BITS": weight.bits,
        "GROUP": weight.group_size,
        "IS_HALF": dtype == dtypes.float16,
        "IS_BFLOAT": dtype == dtypes.bfloat16,
        "DEPTH": weight.depth,
        "CHUNKS": num_chunks(weight),
        "THREADS": SIMD_WIDTH * num_chunks(weight),
        "NUM_ROWS": num_rows,
        "ROW_TILES": num_row_tiles(num_rows),
        "OUTPUT_TILES": output_tiles,
    }


def weight_arguments(name: str, weight: WeightKind) -> tuple[Argument, ...]:
    """The buffers that WEIGHT_BUFFERS(name) declares, in order; those of `rows.parts`."""
    *outer, depth = weight.shape
    if not weight.bits:
        return (Argument(f"{name}_values", weight.shape, weight.dtype),)
    groups = (*outer, depth // weight.group_size)
    return (
        Argument(f"{name}_codes", (*outer, depth * weight.bits // 32), dtypes.uint32),
        Argument(f"{name}_scales", groups, weight.dtype),
        Argument(f"{name}_biases", groups, weight.dtype),
    )


def num_ops(weight: WeightKind, num_rows: int) -> int:
    return 2 * num_rows * prod(weight.shape[-2:])

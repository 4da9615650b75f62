"""What kernels/products.metal has to know of a weight: its type, chunks of K and arguments."""

from dataclasses import dataclass
from math import prod

from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.kernel import FLOATS, Argument
from metal_ops.quantized import GROUP_SIZES, QuantizedMatrix
from metal_ops.rows import Weight

BLOCK = 32  # of K
# SIMD-groups that share a tile of few rows, each with a chunk of K: 256 threads, which the
# pipelines of every chip allow.
MAX_CHUNKS = 8
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
    def unit(self) -> int:
        """What of K is multiplied before anything is scaled: a block, or a group."""
        return self.group_size or BLOCK

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
        return weight.bits in PACKED_BITS and weight.group_size in GROUP_SIZES
    return weight.depth % BLOCK == 0


def num_chunks(weight: WeightKind) -> int:
    """Into how many chunks K is cut: by the weight alone, so that no sum depends on a round."""
    return min(MAX_CHUNKS, weight.depth // weight.unit)


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

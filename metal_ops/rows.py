"""Rows of a stored weight inside a kernel: a plain matrix, or one packed in groups of 2 to 8
bits.
"""

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from metal_ops.loops import Array, Index, Loops
from metal_ops.quantized import QuantizedMatrix

Weight = Tensor | QuantizedMatrix


def parts(weight: Weight) -> list[Tensor]:
    """The tensors a kernel reads to see this weight."""
    if isinstance(weight, QuantizedMatrix):
        return [weight.codes, weight.scales, weight.biases]
    return [weight]


class Rows:
    """Reads weight[..., n, k] as fp32; `index` is (n,), or (e, n) for stacked experts."""

    def __init__(self, weight: Weight, arrays: list[Array]) -> None:
        self.weight = weight
        self.arrays = arrays
        self.width = weight.shape[-1]

    @property
    def is_streamed(self) -> bool:
        """Whether codes may lie across words, so that a row has to be unpacked before it is
        used.
        """
        return isinstance(self.weight, QuantizedMatrix) and 32 % self.weight.bits != 0

    @property
    def run(self) -> int:
        """How many consecutive elements share a word; of a plain row, as many as one likes."""
        return 32 // self.weight.bits if isinstance(self.weight, QuantizedMatrix) else self.width

    @property
    def group(self) -> int:
        """How many consecutive elements share a scale; of a plain row, all."""
        return self.weight.group_size if isinstance(self.weight, QuantizedMatrix) else self.width

    def value(self, index: tuple[Index, ...], k: Index) -> UOp:
        """Element k of a row, as fp32; not of a streamed one."""
        if not isinstance(self.weight, QuantizedMatrix):
            return self.arrays[0][*index, k].cast(dtypes.float)
        codes, scales, biases = self.arrays
        bits, group = self.weight.bits, k // self.weight.group_size
        shift = (k % self.run * bits).cast(dtypes.uint32)
        code = (codes[*index, k // self.run] >> shift) & ((1 << bits) - 1)
        scale, bias = (
            scales[*index, group].cast(dtypes.float),
            biases[*index, group].cast(dtypes.float),
        )
        return code.cast(dtypes.float) * scale + bias

    def unpack(self, loops: Loops, index: tuple[Index, ...], into: Array, *at: Index) -> None:
        """Writes a whole row, as fp32, to `into[*at, :]`."""
        if self.is_streamed:
            self._unpack_stream(loops, index, into, *at)
            return
        with (
            loops.over(self.width // self.group) as outer,
            loops.over(self.group // self.run) as word,
            loops.over(self.run) as i,
        ):
            k = outer * self.group + word * self.run + i
            into[*at, k] = self.value(index, k)

    def _unpack_stream(
        self, loops: Loops, index: tuple[Index, ...], into: Array, *at: Index
    ) -> None:
        """3, 5 and 6 bits: a code may begin in one word and end in the next."""
        codes, scales, biases = self.arrays
        bits = self.weight.bits
        last_word = self.width * bits // 32 - 1
        with loops.over(self.width) as k:
            group = k // self.weight.group_size
            word = k * bits // 32
            shift = (k * bits % 32).cast(dtypes.uint32)
            low = codes[*index, word] >> shift
            # Two shifts, because a shift by 32 has no meaning.
            high = (codes[*index, (word + 1).minimum(last_word)] << 1) << (31 - shift)
            code = (low | high) & ((1 << bits) - 1)
            scale = scales[*index, group].cast(dtypes.float)
            into[*at, k] = code.cast(dtypes.float) * scale + biases[*index, group].cast(
                dtypes.float
            )

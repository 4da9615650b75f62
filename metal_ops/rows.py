"""Rows of a stored weight inside a kernel: a plain matrix, or one packed in groups of 2 to 8 bits."""

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
    def is_packed(self) -> bool:
        return isinstance(self.weight, QuantizedMatrix)

    def value(self, index: tuple[Index, ...], k: Index) -> UOp:
        """Element k of a row of a plain matrix."""
        return self.arrays[0][*index, k].cast(dtypes.float)

    def unpack(self, loops: Loops, index: tuple[Index, ...], into: Array, *at: Index) -> None:
        """Writes a whole row, as fp32, to `into[*at, :]`."""
        if not self.is_packed:
            with loops.over(self.width) as k:
                into[*at, k] = self.value(index, k)
        elif 32 % self.weight.bits == 0:
            self._unpack_words(loops, index, into, *at)
        else:
            self._unpack_stream(loops, index, into, *at)

    def _unpack_words(self, loops: Loops, index: tuple[Index, ...], into: Array, *at: Index) -> None:
        codes, scales, biases = self.arrays
        bits = self.weight.bits
        per_word = 32 // bits
        words_per_group = self.weight.group_size // per_word
        with loops.over(self.width // self.weight.group_size) as group:
            scale = scales[*index, group].cast(dtypes.float)
            bias = biases[*index, group].cast(dtypes.float)
            with loops.over(words_per_group) as w, loops.over(per_word) as j:
                word = group * words_per_group + w
                code = (codes[*index, word] >> (j * bits).cast(dtypes.uint32)) & ((1 << bits) - 1)
                into[*at, word * per_word + j] = code.cast(dtypes.float) * scale + bias

    def _unpack_stream(self, loops: Loops, index: tuple[Index, ...], into: Array, *at: Index) -> None:
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
            into[*at, k] = code.cast(dtypes.float) * scale + biases[*index, group].cast(dtypes.float)

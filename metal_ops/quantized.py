"""The packed matrix of an MLX affine checkpoint. Knows the packing, nothing of layers or files."""

from dataclasses import dataclass
from math import gcd

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

WORD_BITS = 32
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)


@dataclass(frozen=True)
class QuantizedMatrix:
    """Rows of K unsigned codes; value = code * scale + bias, one scale and bias a group of a row.

    codes (..., N, K * bits / 32) uint32, scales and biases (..., N, K / group_size) in one float
    type. A row is one little-endian bit stream: code i is bits i * bits onwards, so that codes of
    3, 5 and 6 bits may lie across two words. Scales may be negative.
    """

    codes: Tensor
    scales: Tensor
    biases: Tensor
    bits: int
    group_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K): the shape of the matrix that the codes stand for."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    def dequantize(self, dtype: DType | None = None) -> Tensor:
        """The values (..., N, K), rounded as mlx does, as `dtype` (None: that of the scales)."""
        rows = (*self.shape[:-1], self.shape[-1] // self.group_size, self.group_size)
        codes = unpack(self.codes, self.bits).reshape(rows).cast(dtypes.float32)
        stored = self.scales.dtype
        scales = self.scales.unsqueeze(-1).cast(dtypes.float32)
        biases = self.biases.unsqueeze(-1).cast(dtypes.float32)
        # mlx rounds the product and the sum each to the type of the scales.
        product = _round(codes * scales, stored)
        values = _round(product.cast(dtypes.float32) + biases, stored)
        return values.reshape(self.shape).cast(dtype or stored)


def unpack(words: Tensor, bits: int) -> Tensor:
    """The codes (..., W * 32 / bits) uint32 of bit streams of W words, words (..., W) uint32."""
    # The pattern of borders repeats after so many words and codes.
    period_words = bits // gcd(bits, WORD_BITS)
    period_codes = period_words * WORD_BITS // bits
    streams = (*words.shape[:-1], words.shape[-1] // period_words)
    first_bits = Tensor.arange(period_codes, dtype=dtypes.int32) * bits
    shift = (first_bits % WORD_BITS).cast(dtypes.uint32)
    word = first_bits // WORD_BITS
    words = words.reshape(*streams, period_words)
    codes = words[..., word] >> shift
    if period_words > 1:
        after = words[..., (word + 1).minimum(period_words - 1)]
        rest = (shift > WORD_BITS - bits).where(after << ((WORD_BITS - shift) % WORD_BITS), 0)
        codes = codes | rest
    codes = codes & ((1 << bits) - 1)
    return codes.reshape(*streams[:-1], streams[-1] * period_codes)


def _round(values: Tensor, dtype: DType) -> Tensor:
    """float32 `values` as `dtype`, rounded here and now."""
    # NOTE: a detour over the bits, with a term that is zero but for NaN and so is not folded away:
    # else a C compiler contracts multiply and add into one rounding, and tinygrad drops a cast to
    # float16 that is cast back.
    bits = {2: dtypes.uint16, 4: dtypes.uint32}[dtype.itemsize]
    is_nan = (values != values).cast(bits)
    return (values.cast(dtype).bitcast(bits) | is_nan).bitcast(dtype)

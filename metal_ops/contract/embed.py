"""The contract of embed.metal."""

import numpy as np
from tinygrad import dtypes
from tinygrad.dtype import DType

from metal_ops.contract.case import Case, Contract, Control, Expected, SameBits, rounded
from metal_ops.embed import embed_kernel
from metal_ops.kernel import TYPES
from metal_ops.products import PACKED_BITS, WeightKind

F32, F16, BF16 = dtypes.float32, dtypes.float16, dtypes.bfloat16
TYPE_PAIRS = ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), (F32, BF16))
REAL = (10, 300, 2048)
GROUP_SIZES = (32, 64, 128)
PLACE = Control("a row takes the row of its place", "uint(tokens[t])", "t", "rows")
BLOCK = Control("every block takes the first columns", "block.x", "0", "shapes")


def contracts() -> list[Contract]:
    return [plain_contract(), *map(packed_contract, PACKED_BITS)]


def plain_contract() -> Contract:
    small = [(1, 3, 4), (5, 7, 36), (3, 9, 1100)]
    cases = [plain(*shape, *types) for shape in small for types in TYPE_PAIRS]
    cases += [plain(*REAL, *types, gate="reference") for types in TYPE_PAIRS[:2]]
    rows = tuple(same_row(plain, t, 7, 40, 68, BF16, BF16) for t in (1, 6))
    shifted = Control("a value of the next column", "loaded[i]", "loaded[i ^ 1]", "shapes")
    return Contract("embed", tuple(cases), rows, (PLACE, BLOCK, shifted))


def packed_contract(bits: int) -> Contract:
    small = [(1, 3, 128), (5, 7, 384), (3, 9, 2176), (2, 5, 4096)]
    kinds = [(*types, bits, size) for types, size in zip(TYPE_PAIRS, (32, 64, 128, 64, 32))]
    cases = [packed(*shape, *kind) for shape in small for kind in kinds]
    cases += [packed(*REAL, BF16, BF16, bits, size, gate="reference") for size in GROUP_SIZES]
    rows = tuple(same_row(packed, t, 7, 40, 192, BF16, BF16, bits, 64) for t in (1, 6))
    controls = (
        PLACE,
        BLOCK,
        Control(
            "codes from the top of a word", "(first + i)", "(VALUES - 1 - first - i)", "shapes"
        ),
        Control("the bias is left out", "scale, bias)", "scale, 0.0f)", "shapes"),
        Control("scale and bias are swapped", "scale, bias)", "bias, scale)", "shapes"),
        Control("a row's first scale for all", "scales[place", "scales[(place - at)", "reference"),
    )
    return Contract(f"embed {bits}-bit", tuple(cases), rows, controls)


def named(num_rows: int, vocab_size: int) -> np.ndarray:
    """Tokens out of order: the last, the first, then any, some of them twice."""
    tokens = (vocab_size - 1 + 3 * np.arange(num_rows) ** 2) % vocab_size
    tokens[1:2] = 0
    return tokens


def plain(
    num_rows: int,
    vocab_size: int,
    width: int,
    dtype: DType,
    weight_dtype: DType,
    gate: str = "shapes",
    tokens: np.ndarray | None = None,
) -> Case:
    kernel = embed_kernel(num_rows, WeightKind((vocab_size, width), weight_dtype), dtype)
    tokens = named(num_rows, vocab_size) if tokens is None else tokens
    weight = rounded(numbers(vocab_size, width), weight_dtype)
    values = rounded(weight[tokens], dtype)
    shape = f"{num_rows} of {vocab_size}x{width} {TYPES[weight_dtype]} to {TYPES[dtype]}"
    buffers = {"tokens": tokens, "weight_values": weight}
    return Case(shape, (kernel,), buffers, {"out": Expected(values)}, gate)


def packed(
    num_rows: int,
    vocab_size: int,
    width: int,
    dtype: DType,
    scale_dtype: DType,
    bits: int,
    group_size: int,
    gate: str = "shapes",
    tokens: np.ndarray | None = None,
) -> Case:
    weight = WeightKind((vocab_size, width), scale_dtype, bits, group_size)
    kernel = embed_kernel(num_rows, weight, dtype)
    tokens = named(num_rows, vocab_size) if tokens is None else tokens
    words = np.arange(vocab_size * width * bits // 32, dtype=np.uint64) * 2654435761 % 2**32
    words = words.reshape(vocab_size, -1)
    shifts = np.arange(0, 32, bits, dtype=np.uint64)
    codes = (words[:, :, None] >> shifts & (2**bits - 1)).astype(np.float64)
    scales = rounded(numbers(vocab_size, width // group_size) / 64, scale_dtype)
    biases = rounded(numbers(vocab_size, width // group_size, seed=50), scale_dtype)
    groups = codes.reshape(vocab_size, -1, group_size)
    # Exact in float64, so that this is the one rounding of an fma.
    values = (groups * scales[:, :, None] + biases[:, :, None]).astype(np.float32)
    out = rounded(values.reshape(vocab_size, width)[tokens], dtype)
    shape = (
        f"{num_rows} of {vocab_size}x{width} in {bits} bits, groups of {group_size} by "
        f"{TYPES[scale_dtype]}, to {TYPES[dtype]}"
    )
    parts = {"weight_codes": words, "weight_scales": scales, "weight_biases": biases}
    buffers = {"tokens": tokens, **parts}
    return Case(shape, (kernel,), buffers, {"out": Expected(out)}, gate)


def same_row(make, t: int, num_rows: int, vocab_size: int, *kind) -> SameBits:
    """Row t of a round, and the row of its token alone."""
    token = named(num_rows, vocab_size)[t : t + 1]
    return SameBits(
        f"row {t} of {num_rows}",
        (make(num_rows, vocab_size, *kind), make(1, vocab_size, *kind, tokens=token)),
        (lambda found: found["out"][t], lambda found: found["out"][0]),
    )


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of many bits between 1/3 and 4 and their opposites, neighbours far apart."""
    index = np.arange(np.prod(shape)).reshape(shape) + seed
    outer = index // shape[-1]
    return (1 / 3 + (index * 0.618034 + outer * 0.377) % 1 * 3.6) * np.where(index % 3 == 1, -1, 1)

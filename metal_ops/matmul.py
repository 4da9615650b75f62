"""matmul, project, gate_up, embed: products of rows with a stored weight, plain or packed.

    matmul   out[t, n] = round(sum_k x[t, k] * weight[n, k] + bias[n]) + residual[t, n]
    gate_up  out[t, n] = silu(round(sum_k x[t, k] * w1[n, k])) * round(sum_k x[t, k] * w3[n, k])
    embed    out[t, k] = weight[token[t], k]

x (T, K) in the compute type, weights (N, K), out in the compute type unless asked for as fp32. Sums
in fp32. `round` is to the compute type, and so is the result of each further step, as in
transformers and MLX. Weights are read once a pass over the rows, 2 N K bytes in bf16; 2 T N K
operations.
"""

from collections.abc import Callable

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.loops import Array, Index, Loops, loop_kernel
from metal_ops.rows import Rows, Weight, parts
from metal_ops.sums import largest_divisor, products

# A tile of 4 rows by 4 outputs of 16 lanes is 16 AVX-512 accumulators: measured 72-80 GFLOP/s on
# one Zen 4 core, against 63 for 8 x 2 and 28 for tiles that do not fit the registers.
TILE_SIZES = (4, 2)
# From this many rows on, unpacking a weight's rows to fp32 first costs less than converting them
# for each tile of rows.
NUM_ROWS_TO_UNPACK = 8
# Rows of x that stay in the second-level cache while the weight passes by are as many as fit into
# this.
CACHED_BYTES = 640 << 10


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """x (T, K) times the transpose of weight (N, K), plus bias (N) and residual (T, N): (T, N)."""
    num_outputs, width = weight.shape
    expect("matmul", "x", x, (x.shape[0], width))
    if bias is not None:
        expect("matmul", "bias", bias, (num_outputs,))
    if residual is not None:
        expect("matmul", "residual", residual, (x.shape[0], num_outputs), (x.dtype,))
    return matmul_reference(x, weight, bias, residual, dtype or x.dtype)


def project(x: Tensor, weights: list[Weight]) -> list[Tensor]:
    """x (T, K) times each of several weights (N, K): queries, keys and values are one launch where
    a kernel serves them.
    """
    return [matmul(x, weight) for weight in weights]


def gate_up(x: Tensor, w1: Weight, w3: Weight) -> Tensor:
    """SwiGLU of x (T, C) with w1 and w3 (F, C): (T, F)."""
    expect("gate_up", "x", x, (x.shape[0], w1.shape[-1]))
    if w1.shape != w3.shape:
        raise ValueError(f"gate_up: w3 must have the shape of w1, {w1.shape}, found {w3.shape}")
    return gate_up_reference(x, w1, w3)


def embed(tokens: Tensor, weight: Weight, dtype: DType) -> Tensor:
    """The rows of weight (V, C) that tokens (T) name, in `dtype`: (T, C)."""
    expect("embed", "tokens", tokens, (tokens.shape[0],), (dtypes.int32,))
    return embed_reference(tokens, weight, dtype)


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
    is_unpacked = num_rows >= NUM_ROWS_TO_UNPACK or any(rows.is_streamed for rows in weights)
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


def matmul_reference(
    x: Tensor, weight: Weight, bias: Tensor | None, residual: Tensor | None, dtype: DType
) -> Tensor:
    num_rows, width = x.shape
    num_outputs = weight.shape[0]
    compute, extras = x.dtype, [extra for extra in (bias, residual) if extra is not None]

    def body(loops: Loops, out: Array, x: Array, *arrays: Array) -> None:
        rows = Rows(weight, list(arrays[: len(parts(weight))]))
        extra = iter(arrays[len(parts(weight)) :])
        bias_array = next(extra) if bias is not None else None
        residual_array = next(extra) if residual is not None else None

        def tile(
            row: UOp, output: UOp, num_tile_rows: int, num_tile_outputs: int, tiles: list[TileRows]
        ):
            sums = tiles[0].products(num_tile_rows, lambda a, k: x[row + a, k].cast(dtypes.float))
            with loops.over(num_tile_rows) as a, loops.over(num_tile_outputs) as b:
                value = sums[a, b]
                if bias_array is not None:
                    value = value + bias_array[output + b].cast(dtypes.float)
                if residual_array is not None:
                    value = value.cast(compute).cast(dtypes.float)
                    value = value + residual_array[row + a, output + b].cast(dtypes.float)
                out[row + a, output + b] = value

        for_each_tile(loops, num_rows, [rows], num_outputs, tile)

    out = Tensor.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    name = f"matmul_{num_rows}_{num_outputs}_{width}"
    return loop_kernel(name, body, [out], [x, *parts(weight), *extras])[0]


def gate_up_reference(x: Tensor, w1: Weight, w3: Weight) -> Tensor:
    num_rows, width = x.shape
    num_outputs = w1.shape[0]

    def body(loops: Loops, out: Array, x: Array, *arrays: Array) -> None:
        split = len(parts(w1))
        weights = [Rows(w1, list(arrays[:split])), Rows(w3, list(arrays[split:]))]

        def tile(
            row: UOp, output: UOp, num_tile_rows: int, num_tile_outputs: int, tiles: list[TileRows]
        ):
            gate, up = (
                weight.products(num_tile_rows, lambda a, k: x[row + a, k].cast(dtypes.float))
                for weight in tiles
            )
            hidden = swiglu_tile(loops, gate, up, num_tile_rows, num_tile_outputs, out.dtype)
            with loops.over(num_tile_rows) as a, loops.over(num_tile_outputs) as b:
                out[row + a, output + b] = hidden[a, b]

        for_each_tile(loops, num_rows, weights, num_outputs, tile)

    out = Tensor.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    name = f"gate_up_{num_rows}_{num_outputs}_{width}"
    return loop_kernel(name, body, [out], [x, *parts(w1), *parts(w3)])[0]


def embed_reference(tokens: Tensor, weight: Weight, dtype: DType) -> Tensor:
    num_rows, width = tokens.shape[0], weight.shape[1]

    def body(loops: Loops, out: Array, tokens: Array, *arrays: Array) -> None:
        rows = Rows(weight, list(arrays))
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            row = loops.local(width)
            rows.unpack(loops, (tokens[t].cast(dtypes.weakint),), row)
            with loops.over(width) as k:
                out[t, k] = row[k]

    out = Tensor.empty(num_rows, width, dtype=dtype, device=tokens.device)
    return loop_kernel(f"embed_{num_rows}_{width}", body, [out], [tokens, *parts(weight)])[0]

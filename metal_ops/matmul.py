"""matmul, project, gate_up: products of rows with a stored weight, plain or packed.

    matmul   out[t, n] = round(sum_k x[t, k] * weight[n, k] + bias[n])
    gate_up  out[t, n] = silu(round(sum_k x[t, k] * w1[n, k])) * round(sum_k x[t, k] * w3[n, k])

x (T, K) in the compute type, weights (N, K), out in the compute type unless asked for as fp32. Sums
in fp32. `round` is to the compute type, and so is the result of each further step, as in
transformers and MLX. Weights are read once a pass over the rows, 2 N K bytes in bf16; 2 T N K
operations. kernels/products.metal says how the kernels sum.
"""

from dataclasses import replace

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import FLOATS, Argument, Kernel, Target, compose, divide_up, target_of
from metal_ops.launch import inject
from metal_ops.loops import Array, Loops, loop_kernel
from metal_ops.product_tile import Tile, best_fewest_many, constants, tile_of
from metal_ops.products import WeightKind, is_served, kind_of, num_ops, weight_arguments
from metal_ops.rows import Rows, Weight, parts
from metal_ops.tiles import TileRows, for_each_tile, swiglu_tile


def matmul(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    dtype: DType | None = None,
) -> Tensor:
    """x (T, K) times the transpose of weight (N, K), plus bias (N): (T, N)."""
    num_outputs, width = weight.shape
    expect("matmul", "x", x, (x.shape[0], width))
    if bias is not None:
        expect("matmul", "bias", bias, (num_outputs,))
    dtype = dtype or x.dtype
    target = target_of(x.device)
    if target is not None:
        bias_dtype = None if bias is None else bias.dtype
        kernel = matmul_kernel(x.shape[0], kind_of(weight), x.dtype, dtype, bias_dtype, target)
        if kernel is not None:
            return inject(kernel, [x, *parts(weight), *([] if bias is None else [bias])])[0]
    return matmul_reference(x, weight, bias, dtype)


def project(x: Tensor, q: Weight, k: Weight, v: Weight) -> list[Tensor]:
    """x (T, K) times each of three weights (N, K): one launch where a kernel serves them."""
    weights = [q, k, v]
    target = target_of(x.device)
    if target is not None:
        expect("project", "x", x, (x.shape[0], q.shape[1]))
        kernel = project_kernel(x.shape[0], *map(kind_of, weights), x.dtype, target)
        if kernel is not None:
            return inject(kernel, [x, *(part for weight in weights for part in parts(weight))])
    return [matmul(x, weight) for weight in weights]


def gate_up(x: Tensor, w1: Weight, w3: Weight) -> Tensor:
    """SwiGLU of x (T, C) with w1 and w3 (F, C): (T, F)."""
    expect("gate_up", "x", x, (x.shape[0], w1.shape[-1]))
    if w1.shape != w3.shape:
        raise ValueError(f"gate_up: w3 must have the shape of w1, {w1.shape}, found {w3.shape}")
    target = target_of(x.device)
    if target is not None:
        kernel = gate_up_kernel(x.shape[0], kind_of(w1), kind_of(w3), x.dtype, target)
        if kernel is not None:
            return inject(kernel, [x, *parts(w1), *parts(w3)])[0]
    return gate_up_reference(x, w1, w3)


def matmul_kernel(
    num_rows: int,
    weight: WeightKind,
    dtype: DType,
    out_dtype: DType,
    bias_dtype: DType | None = None,
    target: Target = Target.METAL,
    fewest_many: int | None = None,
) -> Kernel | None:
    """matmul of rows in the compute type `dtype`, if a kernel serves the weight.

    fewest_many: rows from which on they are staged; if none, where that is best.
    """
    if not is_served(weight, dtype) or out_dtype not in FLOATS or bias_dtype not in (*FLOATS, None):
        return None
    bias = () if bias_dtype is None else (Argument("bias", (weight.num_outputs,), bias_dtype),)
    return _tiled(
        "matmul",
        num_rows,
        [weight],
        dtype,
        (weight.num_outputs,),
        tile_of(
            weight,
            dtype,
            num_rows,
            target,
            fewest_many=fewest_many or best_fewest_many(weight, target),
        ),
        target,
        writes=(Argument("out", (num_rows, weight.num_outputs), out_dtype),),
        reads=(*weight_arguments("weight", weight), *bias),
        OUT=out_dtype,
        HAS_BIAS=bool(bias),
        **({"B": bias_dtype} if bias else {}),
    )


def gate_up_kernel(
    num_rows: int,
    w1: WeightKind,
    w3: WeightKind,
    dtype: DType,
    target: Target = Target.METAL,
) -> Kernel | None:
    """gate_up, if a kernel serves the weights, which must be stored alike."""
    if w1 != w3 or not is_served(w1, dtype):
        return None
    return _tiled(
        "gate_up",
        num_rows,
        [w1, w3],
        dtype,
        (w1.num_outputs,),
        tile_of(w1, dtype, num_rows, target, num_weights=2),
        target,
        writes=(Argument("out", (num_rows, w1.num_outputs), dtype),),
        reads=(*weight_arguments("w1", w1), *weight_arguments("w3", w3)),
    )


def project_kernel(
    num_rows: int,
    q: WeightKind,
    k: WeightKind,
    v: WeightKind,
    dtype: DType,
    target: Target = Target.METAL,
) -> Kernel | None:
    """project, if a kernel serves the weights, which must be stored alike."""
    is_alike = replace(k, shape=(q.num_outputs, k.depth)) == q
    if k != v or not is_alike or not is_served(q, dtype):
        return None
    kinds = {"q": q, "k": k, "v": v}
    # No turns: what is after a threadgroup's outputs may be another weight's.
    tile = tile_of(q, dtype, num_rows, target, takes_turns=False)
    return _tiled(
        "project",
        num_rows,
        [q, k, v],
        dtype,
        tuple(kind.num_outputs for kind in kinds.values()),
        tile,
        target,
        writes=tuple(
            Argument(name, (num_rows, kind.num_outputs), dtype) for name, kind in kinds.items()
        ),
        reads=tuple(
            part
            for name, kind in kinds.items()
            for part in weight_arguments(f"{name}_weight", kind)
        ),
        Q_OUTPUTS=q.num_outputs,
        KV_OUTPUTS=k.num_outputs,
        Q_TILES=divide_up(q.num_outputs, tile.num_outputs),
        KV_TILES=divide_up(k.num_outputs, tile.num_outputs),
    )


def _tiled(
    op: str,
    num_rows: int,
    weights: list[WeightKind],
    dtype: DType,
    outputs: tuple[int, ...],
    tile: Tile,
    target: Target,
    writes: tuple[Argument, ...],
    reads: tuple[Argument, ...],
    **extra: int | DType,
) -> Kernel:
    """A launch over the tiles of rows and of outputs, of which there are so many after each other;
    x comes first of what it reads.
    """
    depth = weights[0].depth
    x = Argument("x", (num_rows, depth), dtype)
    name = f"{op}{weights[0].suffix}_{num_rows}x{sum(outputs)}x{depth}"
    values = constants(weights[0], dtype, num_rows, tile, outputs)
    stems = (*tile.stems, "rows", op)
    source = compose(stems, op, name, target, **values, NUM_OUTPUTS=sum(outputs), **extra)
    row_blocks = divide_up(num_rows, tile.num_rows)
    return Kernel(
        name,
        source,
        (row_blocks, sum(divide_up(count, tile.num_outputs) for count in outputs), 1),
        values["THREADS"],
        writes,
        (x, *reads),
        num_ops=sum(num_ops(kind, num_rows) for kind in weights),
        num_bytes=row_blocks * sum(kind.num_bytes for kind in weights)
        + sum(argument.num_bytes for argument in (x, *writes)),
    )


def matmul_reference(x: Tensor, weight: Weight, bias: Tensor | None, dtype: DType) -> Tensor:
    num_rows, width = x.shape
    num_outputs = weight.shape[0]

    def body(loops: Loops, out: Array, x: Array, *arrays: Array) -> None:
        rows = Rows(weight, list(arrays[: len(parts(weight))]))
        bias_array = arrays[-1] if bias is not None else None

        def tile(
            row: UOp, output: UOp, num_tile_rows: int, num_tile_outputs: int, tiles: list[TileRows]
        ):
            sums = tiles[0].products(num_tile_rows, lambda a, k: x[row + a, k].cast(dtypes.float))
            with loops.over(num_tile_rows) as a, loops.over(num_tile_outputs) as b:
                value = sums[a, b]
                if bias_array is not None:
                    value = value + bias_array[output + b].cast(dtypes.float)
                out[row + a, output + b] = value

        for_each_tile(loops, num_rows, [rows], num_outputs, tile)

    out = Tensor.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    name = f"matmul_{num_rows}_{num_outputs}_{width}"
    return loop_kernel(name, body, [out], [x, *parts(weight), *([] if bias is None else [bias])])[0]


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

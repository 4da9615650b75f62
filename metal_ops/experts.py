"""expert_ffn: what its chosen experts make of each row.

    outputs[t A + a] = w2[e](silu(w1[e] x[t]) * w3[e] x[t]),  e = choice a of row t

x (T, C) in the compute type; weights (T, A) fp32 and lists as route makes them; w1, w3 (E, I, C),
w2 (E, C, I), plain or packed; outputs (T A, C) fp32, which the next norm sums by the weights. Rows
are grouped by expert, so an expert's weights are read once a pass; a row's own sums are the same in
any company.
"""

from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.kernel import Argument, Kernel, Target, compose, divide_up, target_of
from metal_ops.launch import inject
from metal_ops.loops import Array, Index, Loops, loop_kernel
from metal_ops.norm import Mixture
from metal_ops.product_tile import constants, tile_of
from metal_ops.products import WeightKind, is_served, kind_of, num_ops, weight_arguments
from metal_ops.route import Lists
from metal_ops.rows import Rows, Weight, parts
from metal_ops.sums import largest_divisor
from metal_ops.tiles import NUM_ROWS_TO_UNPACK, TILE_SIZES, TileRows, swiglu_tile

# Members that an expert has on average where they are multiplied as many: half a tile of them on
# Apple's GPUs, as some experts have more.
FEWEST_MANY_MEMBERS = 16


def expert_ffn(
    x: Tensor, weights: Tensor, lists: Tensor, w1: Weight, w3: Weight, w2: Weight
) -> Mixture:
    """What each row's chosen experts make of it, to be summed by `weights`."""
    num_rows, width = x.shape
    num_experts, ffn_size = w1.shape[:2]
    expect("expert_ffn", "weights", weights, (num_rows, weights.shape[1]), (dtypes.float32,))
    layout = Lists(num_experts, num_rows * weights.shape[1]).argument
    expect("expert_ffn", "lists", lists, layout.shape, (layout.dtype,))
    for name, weight, shape in (
        ("w1", w1, (ffn_size, width)),
        ("w3", w3, (ffn_size, width)),
        ("w2", w2, (width, ffn_size)),
    ):
        if weight.shape != (num_experts, *shape):
            raise ValueError(
                f"expert_ffn: {name} must have shape {(num_experts, *shape)}, found {weight.shape}"
            )
    hidden = expert_gate_up(x, lists, weights.shape, w1, w3)
    return Mixture(expert_down(hidden, lists, w2), weights)


def expert_gate_up(
    x: Tensor, lists: Tensor, chosen_shape: tuple[int, ...], w1: Weight, w3: Weight
) -> Tensor:
    """silu(w1 x) * w3 x of every pair: (T A, I) in the compute type."""
    kernel, target = None, target_of(x.device)
    if target is not None:
        kernel = expert_gate_up_kernel(*chosen_shape, kind_of(w1), kind_of(w3), x.dtype, target)
    if kernel is None:
        return expert_gate_up_reference(x, lists, chosen_shape, w1, w3)
    return inject(kernel, [x, lists, *parts(w1), *parts(w3)])[0]


def expert_down(hidden: Tensor, lists: Tensor, w2: Weight) -> Tensor:
    """w2 of every pair's hidden row: (T A, C) fp32."""
    kernel, target = None, target_of(hidden.device)
    if target is not None:
        kernel = expert_down_kernel(hidden.shape[0], kind_of(w2), hidden.dtype, target)
    if kernel is None:
        return expert_down_reference(hidden, lists, w2)
    return inject(kernel, [hidden, lists, *parts(w2)])[0]


def expert_gate_up_kernel(
    num_rows: int,
    num_active: int,
    w1: WeightKind,
    w3: WeightKind,
    dtype: DType,
    target: Target = Target.METAL,
) -> Kernel | None:
    """expert_gate_up, if a kernel serves the weights, which must be stored alike."""
    if w1 != w3 or not is_served(w1, dtype):
        return None
    return _expert_kernel(
        "expert_gate_up",
        {"w1": w1, "w3": w3},
        Argument("x", (num_rows, w1.depth), dtype),
        Argument("hidden", (num_rows * num_active, w1.num_outputs), dtype),
        target,
    )


def expert_down_kernel(
    num_pairs: int, w2: WeightKind, dtype: DType, target: Target = Target.METAL
) -> Kernel | None:
    """expert_down, if a kernel serves the weight."""
    if not is_served(w2, dtype):
        return None
    hidden = Argument("hidden", (num_pairs, w2.depth), dtype)
    outputs = Argument("outputs", (num_pairs, w2.num_outputs), dtypes.float32)
    return _expert_kernel("expert_down", {"w2": w2}, hidden, outputs, target)


def _expert_kernel(
    op: str,
    weights: dict[str, WeightKind],
    rows: Argument,
    out: Argument,
    target: Target,
) -> Kernel:
    """A launch over the tiles of outputs and those of pairs, which are the rows of `out`."""
    weight = next(iter(weights.values()))
    num_experts, num_outputs, depth = weight.shape
    (num_pairs, _), (num_rows, _) = out.shape, rows.shape
    lists = Lists(num_experts, num_pairs)
    # Rows that only fill a tile up cost as much as true ones: a tile of few rows is as high as an
    # expert has members on average, and where it has more, they are another tile.
    tile = tile_of(
        weight,
        rows.dtype,
        divide_up(num_pairs, num_experts),
        target,
        num_weights=len(weights),
        num_experts=lists.most_used,
        fewest_many=FEWEST_MANY_MEMBERS,
    )
    values = constants(weight, rows.dtype, num_rows, tile, (num_outputs,))
    # With no more pairs than experts hardly one has a second tile: its threadgroup then takes both.
    has_one_tile = num_pairs > num_experts
    num_tiles = lists.most_used
    if has_one_tile:
        num_tiles += (num_pairs - lists.most_used) // tile.num_rows
    name = f"{op}{weight.suffix}_{num_pairs}x{num_outputs}x{depth}_{num_experts}"
    source = compose(
        (*tile.stems, "members", op),
        op,
        name,
        target,
        **values,
        **lists.constants,
        HAS_ONE_TILE=has_one_tile,
        NUM_OUTPUTS=num_outputs,
        PAIRS_PER_ROW=num_pairs // num_rows,
    )
    return Kernel(
        name,
        source,
        (divide_up(num_outputs, tile.num_outputs), num_tiles, 1),
        values["THREADS"],
        (out,),
        (
            rows,
            lists.argument,
            *(part for name, kind in weights.items() for part in weight_arguments(name, kind)),
        ),
        num_ops=sum(num_ops(kind, num_pairs) for kind in weights.values()),
        num_bytes=sum(kind.num_bytes for kind in weights.values()) * lists.most_used // num_experts
        + rows.num_bytes
        + out.num_bytes,
    )


def for_each_expert_tile(
    loops: Loops, lists: Array, num_pairs: int, weights: list[Rows], tile
) -> None:
    """Calls tile(pair of tile row, output, num_rows, num_outputs, weight tiles) for every tile of
    every used expert.
    """
    num_experts, num_outputs = weights[0].weight.shape[:2]
    layout = Lists(num_experts, num_pairs)
    is_unpacked = num_pairs >= NUM_ROWS_TO_UNPACK * num_experts or any(
        rows.is_streamed for rows in weights
    )
    # Experts with about one row each would only take it again to fill a tile.
    rows_tile = TILE_SIZES[0] if num_pairs >= 2 * num_experts else 1
    outputs_tile = largest_divisor(num_outputs, TILE_SIZES) if is_unpacked else 1

    def listed(index: Index) -> UOp:
        return lists[index].cast(dtypes.weakint)

    with loops.share(num_outputs // outputs_tile) as share, loops.over(listed(0)) as used:
        expert, first = listed(layout.experts_offset + used), listed(layout.firsts_offset + used)
        count = listed(layout.counts_offset + used)
        with loops.over(share.size) as i:
            output = share[i] * outputs_tile
            tiles = [
                TileRows(loops, rows, (expert, output), outputs_tile, is_unpacked)
                for rows in weights
            ]
            with loops.over((count + rows_tile - 1) // rows_tile) as t:
                # A tile that is not full takes its last pair again, and writes the same values
                # twice.
                def pair_of(a: Index) -> UOp:
                    member = (t * rows_tile + a).minimum(count - 1)
                    return listed(layout.pairs_offset + first + member)

                tile(pair_of, output, rows_tile, outputs_tile, tiles)


def expert_gate_up_reference(
    x: Tensor, lists: Tensor, chosen_shape: tuple[int, ...], w1: Weight, w3: Weight
) -> Tensor:
    """silu(w1 x) * w3 x of every pair: (T A, I) in the compute type."""
    num_pairs, num_active = chosen_shape[0] * chosen_shape[1], chosen_shape[1]
    ffn_size = w1.shape[1]

    def body(loops: Loops, hidden: Array, x: Array, lists: Array, *arrays: Array) -> None:
        split = len(parts(w1))
        weights = [Rows(w1, list(arrays[:split])), Rows(w3, list(arrays[split:]))]

        def tile(
            pair_of, output: UOp, num_tile_rows: int, num_tile_outputs: int, tiles: list[TileRows]
        ) -> None:
            gate, up = (
                weight.products(
                    num_tile_rows, lambda a, k: x[pair_of(a) // num_active, k].cast(dtypes.float)
                )
                for weight in tiles
            )
            activated = swiglu_tile(loops, gate, up, num_tile_rows, num_tile_outputs, hidden.dtype)
            with loops.over(num_tile_rows) as a, loops.over(num_tile_outputs) as b:
                hidden[pair_of(a), output + b] = activated[a, b]

        for_each_expert_tile(loops, lists, num_pairs, weights, tile)

    hidden = Tensor.empty(num_pairs, ffn_size, dtype=x.dtype, device=x.device)
    name = f"expert_gate_up_{num_pairs}_{ffn_size}"
    return loop_kernel(name, body, [hidden], [x, lists, *parts(w1), *parts(w3)])[0]


def expert_down_reference(hidden: Tensor, lists: Tensor, w2: Weight) -> Tensor:
    """w2 of every pair's hidden row: (T A, C) fp32."""
    num_pairs = hidden.shape[0]
    width = w2.shape[1]

    def body(loops: Loops, out: Array, hidden: Array, lists: Array, *arrays: Array) -> None:
        def tile(
            pair_of, output: UOp, num_tile_rows: int, num_tile_outputs: int, tiles: list[TileRows]
        ) -> None:
            sums = tiles[0].products(
                num_tile_rows, lambda a, k: hidden[pair_of(a), k].cast(dtypes.float)
            )
            with loops.over(num_tile_rows) as a, loops.over(num_tile_outputs) as b:
                out[pair_of(a), output + b] = sums[a, b]

        for_each_expert_tile(loops, lists, num_pairs, [Rows(w2, list(arrays))], tile)

    out = Tensor.empty(num_pairs, width, dtype=dtypes.float32, device=hidden.device)
    return loop_kernel(
        f"expert_down_{num_pairs}_{width}", body, [out], [hidden, lists, *parts(w2)]
    )[0]

"""route, expert_ffn: the mixture of experts.

    s = sigmoid(gate x[t]);  chosen: the A largest s + expert_bias, the lower id on ties, largest
    first weight[t, a] = scale * s[chosen] / (sum of the chosen s + 1e-6)            (the division
    only if asked for) out[t] = round(sum_a weight[t, a] * w2[e](silu(w1[e] x[t]) * w3[e] x[t])) +
    residual[t],  e = chosen[t, a]

gate (E, C), expert_bias (E) fp32; x and residual (T, C) in the compute type; w1, w3 (E, I, C), w2
(E, C, I), plain or packed. All of the routing is fp32, and the bias decides the choice alone. Rows
are grouped by expert, so an expert's weights are read once a pass; a row's own sums and the sum
over its experts, in order of choice, are the same in any company.
"""

from tinygrad import Tensor, dtypes
from tinygrad.uop.ops import UOp

from metal_ops.checks import expect
from metal_ops.loops import Array, Index, Loops, loop_kernel
from metal_ops.matmul import NUM_ROWS_TO_UNPACK, TILE_SIZES, TileRows, matmul, swiglu_tile
from metal_ops.rows import Rows, Weight, parts
from metal_ops.sums import largest_divisor


def route(
    x: Tensor,
    gate: Weight,
    expert_bias: Tensor | None,
    num_active: int,
    is_normalised: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The experts chosen for each row of x (T, C) by gate (E, C): (T, A) int32, and their weights
    (T, A) fp32.
    """
    num_experts = gate.shape[0]
    if expert_bias is not None:
        expect("route", "expert_bias", expert_bias, (num_experts,), (dtypes.float32,))
    if not 1 <= num_active <= num_experts:
        raise ValueError(f"route: {num_active} active experts of {num_experts} asked for")
    logits = matmul(x, gate, dtype=dtypes.float32)
    return choose_reference(logits, expert_bias, num_active, is_normalised, scale)


def expert_ffn(
    x: Tensor, chosen: Tensor, weights: Tensor, w1: Weight, w3: Weight, w2: Weight, residual: Tensor
) -> Tensor:
    """residual plus the weighted sum of each row's experts: (T, C)."""
    num_rows, width = x.shape
    num_experts, ffn_size = w1.shape[:2]
    expect("expert_ffn", "chosen", chosen, (num_rows, chosen.shape[1]), (dtypes.int32,))
    expect("expert_ffn", "weights", weights, chosen.shape, (dtypes.float32,))
    expect("expert_ffn", "residual", residual, x.shape, (x.dtype,))
    for name, weight, shape in (
        ("w1", w1, (ffn_size, width)),
        ("w3", w3, (ffn_size, width)),
        ("w2", w2, (width, ffn_size)),
    ):
        if weight.shape != (num_experts, *shape):
            raise ValueError(
                f"expert_ffn: {name} must have shape {(num_experts, *shape)}, found {weight.shape}"
            )
    lists = group_rows(chosen, num_experts)
    hidden = expert_gate_up_reference(x, lists, chosen.shape, w1, w3)
    outputs = expert_down_reference(hidden, lists, w2)
    return combine_reference(outputs, weights, residual)


def choose_reference(
    logits: Tensor, expert_bias: Tensor | None, num_active: int, is_normalised: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The choice from the router's logits (T, E) fp32."""
    num_rows, num_experts = logits.shape

    def body(loops: Loops, chosen: Array, weights: Array, logits: Array, *bias: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i:
            t = share[i]
            biased, sum_chosen = loops.local(num_experts), loops.local(1)
            best, score = loops.local(1, dtype=dtypes.int32), loops.local(1)
            with loops.over(num_experts) as e:
                biased[e] = sigmoid(logits[t, e]) + (bias[0][e] if bias else 0.0)
            sum_chosen[0] = 0.0
            with loops.over(num_active) as a:
                best[0] = 0
                score[0] = -float("inf")
                with loops.over(num_experts) as e:
                    is_better = biased[e] > score[0]
                    best[0] = is_better.where(e.cast(dtypes.int32), best[0])
                    score[0] = is_better.where(biased[e], score[0])
                expert = best[0].cast(dtypes.weakint)
                biased[expert] = -float("inf")
                chosen[t, a] = best[0]
                weights[t, a] = sigmoid(logits[t, expert])
                sum_chosen[0] = sum_chosen[0] + sigmoid(logits[t, expert])
            with loops.over(num_active) as a:
                divisor = sum_chosen[0] + 1e-6 if is_normalised else 1.0
                weights[t, a] = weights[t, a] / divisor * scale

    chosen = Tensor.empty(num_rows, num_active, dtype=dtypes.int32, device=logits.device)
    weights = Tensor.empty(num_rows, num_active, dtype=dtypes.float32, device=logits.device)
    reads = [logits] if expert_bias is None else [logits, expert_bias]
    chosen, weights = loop_kernel(f"route_{num_rows}_{num_experts}", body, [chosen, weights], reads)
    return chosen, weights


def sigmoid(x: UOp) -> UOp:
    return 1 / (1 + (-x).exp())


def group_rows(chosen: Tensor, num_experts: int) -> Tensor:
    """The pairs (row, choice) grouped by expert: (2 + 3 E + T A) int32.

    How many experts have pairs; which they are, in order; for each of those its first pair's place
    in the list and how many it has; then the list, each pair as row * A + choice, in order within
    an expert; and a spare place.
    """
    num_pairs = chosen.shape[0] * chosen.shape[1]
    flat = chosen.reshape(num_pairs)

    def body(loops: Loops, lists: Array, chosen: Array) -> None:
        num_used, num_listed = (
            loops.local(1, dtype=dtypes.int32),
            loops.local(1, dtype=dtypes.int32),
        )
        num_used[0] = 0
        num_listed[0] = 0
        with loops.over(num_experts) as e:
            first = loops.keep(num_listed, 0)
            with loops.over(num_pairs) as pair:
                # Written always, but only a pair of this expert moves the count past what was
                # written.
                place = 1 + 3 * num_experts + num_listed[0].cast(dtypes.weakint)
                lists[place] = pair.cast(dtypes.int32)
                num_listed[0] = num_listed[0] + chosen[pair].cast(dtypes.weakint).eq(e).cast(
                    dtypes.int32
                )
            used = num_used[0].cast(dtypes.weakint)
            lists[1 + used] = e.cast(dtypes.int32)
            lists[1 + num_experts + used] = first
            lists[1 + 2 * num_experts + used] = num_listed[0] - first
            num_used[0] = num_used[0] + (num_listed[0] > first).cast(dtypes.int32)
        lists[0] = num_used[0]

    lists = Tensor.empty(2 + 3 * num_experts + num_pairs, dtype=dtypes.int32, device=chosen.device)
    return loop_kernel(f"group_rows_{num_pairs}_{num_experts}", body, [lists], [flat])[0]


def for_each_expert_tile(
    loops: Loops, lists: Array, num_pairs: int, weights: list[Rows], tile
) -> None:
    """Calls tile(pair of tile row, output, num_rows, num_outputs, weight tiles) for every tile of
    every used expert.
    """
    num_experts, num_outputs = weights[0].weight.shape[:2]
    is_unpacked = num_pairs >= NUM_ROWS_TO_UNPACK * num_experts or any(
        rows.is_streamed for rows in weights
    )
    # Experts with about one row each would only take it again to fill a tile.
    rows_tile = TILE_SIZES[0] if num_pairs >= 2 * num_experts else 1
    outputs_tile = largest_divisor(num_outputs, TILE_SIZES) if is_unpacked else 1

    def listed(index: Index) -> UOp:
        return lists[index].cast(dtypes.weakint)

    with loops.share(num_outputs // outputs_tile) as share, loops.over(listed(0)) as used:
        expert, first = listed(1 + used), listed(1 + num_experts + used)
        count = listed(1 + 2 * num_experts + used)
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
                    return listed(
                        1 + 3 * num_experts + first + (t * rows_tile + a).minimum(count - 1)
                    )

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


def combine_reference(outputs: Tensor, weights: Tensor, residual: Tensor) -> Tensor:
    """The weighted sum of each row's experts, rounded, plus the residual: (T, C)."""
    num_rows, num_active = weights.shape
    width = outputs.shape[1]

    def body(loops: Loops, out: Array, outputs: Array, weights: Array, residual: Array) -> None:
        with loops.share(num_rows) as share, loops.over(share.size) as i, loops.over(width) as c:
            t = share[i]
            mixed = sum(weights[t, a] * outputs[t * num_active + a, c] for a in range(num_active))
            out[t, c] = mixed.cast(out.dtype).cast(dtypes.float) + residual[t, c].cast(dtypes.float)

    out = Tensor.empty(num_rows, width, dtype=residual.dtype, device=residual.device)
    return loop_kernel(f"combine_{num_rows}_{width}", body, [out], [outputs, weights, residual])[0]

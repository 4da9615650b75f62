"""Every op's reference() against the float64 oracle, at real sizes and odd ones, and its rows in
other company.
"""

from types import SimpleNamespace

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from tests import oracle
from lfm2.environment import default_device
from metal_ops.argmax import argmax, argmax_kernel
from metal_ops.attention import attend
from metal_ops.contract.argmax import case, made
from metal_ops.contract.route import grouped
from metal_ops.conv import short_conv
from metal_ops.embed import embed, embed_kernel
from metal_ops.experts import expert_ffn
from metal_ops.launch import copy_in, empty
from metal_ops.loops import loop_kernel
from metal_ops.matmul import gate_up, matmul
from metal_ops.norm import add_rms_norm, rms_norm, rms_norm_drawn
from metal_ops.products import WeightKind
from metal_ops.qk import store_qkv
from metal_ops.quantized import QuantizedMatrix
from metal_ops.route import choose_reference, group_reference, route
from metal_ops.tap import tap, tap_kernel
from lfm2.model import rope_angles
from lfm2.runner import capacity_of, pack, table_start
from scheduler.rounds import Round, Segment

DEVICE = default_device()


def values(seed, *shape, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape) * scale


def tensor(array, dtype=dtypes.float32):
    return Tensor(np.asarray(array, np.float32)).cast(dtype).realize()


def buffer(array):
    """A real buffer with the values of an array, fit to be written in place."""
    array = np.ascontiguousarray(array, np.float32)
    made = empty(array.shape, dtypes.float32, DEVICE)
    copy_in(made, 0, memoryview(array.copy()).cast("B"))
    return made


def assert_same_bits(ours, want):
    """On the CPU to the bit. A GPU's compiler may join a multiply and an add in one kernel and not
    in another.
    """
    if DEVICE == "CPU":
        np.testing.assert_array_equal(ours, want)
    else:
        np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def ragged(segments, num_slots=4, scratch_base=64):
    """The capacity and the table of a round of (slot, base, start, num_rows, num_drawn)."""
    round = Round(
        tuple(
            Segment(slot, base, start, (5,) * rows, drawn)
            for slot, base, start, rows, drawn in segments
        )
    )
    capacity = capacity_of(round, 1)
    packed = pack(round, capacity, num_slots, scratch_base)
    return capacity, Tensor(np.array(packed[table_start(capacity) :]))


@pytest.mark.parametrize("rows, width", [(1, 64), (5, 97), (3, 1024)])
def test_rms_norm(rows, width):
    x, weight = values(0, rows, width), values(1, width)
    ours = rms_norm(tensor(x), tensor(weight), 1e-5).numpy()
    np.testing.assert_allclose(ours, oracle.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=1e-6)


def test_rms_norm_of_large_halves_is_finite():
    x = np.full((1, 64), 300.0)
    ours = rms_norm(tensor(x, dtypes.half), tensor(np.ones(64), dtypes.half), 1e-5).float().numpy()
    np.testing.assert_allclose(ours, 1.0, rtol=1e-3)


def test_rms_norm_drawn_takes_the_rows_of_the_table():
    capacity, table = ragged([(0, 0, 0, 3, 1), (1, 20, 4, 2, 1)])
    x, delta, weight = values(0, capacity.rows, 64), values(2, capacity.rows, 64), values(1, 64)
    ours = rms_norm_drawn(tensor(x), tensor(delta), tensor(weight), 1e-5, table, capacity).numpy()
    want = oracle.rms_norm((x + delta)[[2, 4]], weight, 1e-5)
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-6)


def test_add_rms_norm():
    x, delta, weight = values(0, 5, 97), values(1, 5, 97), values(2, 97)
    sum, normed = add_rms_norm(tensor(x), tensor(delta), tensor(weight), 1e-5)
    np.testing.assert_allclose(sum.numpy(), x + delta, rtol=1e-6, atol=1e-6)
    want = oracle.rms_norm(x + delta, weight, 1e-5)
    np.testing.assert_allclose(normed.numpy(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rows, outputs, width", [(1, 97, 64), (5, 48, 96), (8, 12, 67), (64, 20, 128), (3, 1024, 32)]
)
def test_matmul(rows, outputs, width):
    x, weight, bias = values(0, rows, width), values(1, outputs, width), values(2, outputs)
    ours = matmul(tensor(x), tensor(weight), tensor(bias)).numpy()
    np.testing.assert_allclose(ours, x @ weight.T + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_gate_up(rows):
    x, w1, w3 = values(0, rows, 96), values(1, 40, 96, scale=0.1), values(2, 40, 96, scale=0.1)
    ours = gate_up(tensor(x), tensor(w1), tensor(w3)).numpy()
    np.testing.assert_allclose(ours, oracle.silu(x @ w1.T) * (x @ w3.T), rtol=1e-5, atol=1e-5)


def test_embed():
    weight = values(0, 97, 33)
    ours = embed(Tensor([0, 96, 5], dtype=dtypes.int32), tensor(weight), dtypes.float32).numpy()
    np.testing.assert_allclose(ours, weight[[0, 96, 5]], rtol=1e-6)


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.bfloat16])
@pytest.mark.parametrize("width", [1024, 96])
def test_matmul_rows_do_not_depend_on_their_company(dtype, width):
    x, weight = tensor(values(0, 64, width), dtype), tensor(values(1, 36, width), dtype)
    whole = matmul(x, weight, dtype=dtypes.float32).numpy()
    for rows in (1, 2, 4, 8, 32):
        part = matmul(x[8 : 8 + rows].contiguous().realize(), weight, dtype=dtypes.float32).numpy()
        assert_same_bits(part, whole[8 : 8 + rows])


def packed(seed, bits, group_size, *shape):
    """Random codes with scales of either sign."""
    rng = np.random.default_rng(seed)
    *rows, width = shape
    codes = rng.integers(0, 2**32, (*rows, width * bits // 32), dtype=np.uint32)
    scales, biases = rng.standard_normal((2, *rows, width // group_size)) * 0.1
    return QuantizedMatrix(Tensor(codes), tensor(scales), tensor(biases), bits, group_size)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_packed_matmul_in_any_company(bits):
    weight = packed(bits, bits, 32, 12, 128)
    x = tensor(values(0, 16, 128))
    whole = matmul(x, weight).numpy()
    np.testing.assert_allclose(
        whole, x.numpy() @ weight.dequantize().numpy().T, rtol=1e-5, atol=1e-5
    )
    for rows in (1, 4):
        part = matmul(x[3 : 3 + rows].contiguous().realize(), weight).numpy()
        assert_same_bits(part, whole[3 : 3 + rows])


@pytest.mark.parametrize("bits", [4, 6])
def test_packed_embed(bits):
    weight = packed(0, bits, 64, 9, 128)
    ours = embed(Tensor([8, 0], dtype=dtypes.int32), weight, dtypes.float32).numpy()
    np.testing.assert_allclose(ours, weight.dequantize().numpy()[[8, 0]], rtol=1e-5, atol=1e-6)


def added(mixture, x):
    """x plus a mixture of experts, as the next norm adds it."""
    sum, _ = add_rms_norm(x, mixture, tensor(np.ones(x.shape[1])), 1e-5)
    return sum.numpy()


def lists(chosen, num_experts):
    return group_reference(Tensor(chosen.astype(np.int32)), num_experts)


@pytest.mark.parametrize("bits", [4, 5])
def test_packed_experts_in_any_company(bits):
    """64 rows unpack the experts first, one row converts them as it goes."""
    w1, w3, w2 = (
        packed(0, bits, 32, 4, 32, 64),
        packed(1, bits, 32, 4, 32, 64),
        packed(2, bits, 32, 4, 64, 32),
    )
    x = tensor(values(3, 64, 64))
    chosen = np.argsort(values(5, 64, 4))[:, :2]
    weights = np.abs(values(6, 64, 2))
    whole = added(expert_ffn(x, tensor(weights), lists(chosen, 4), w1, w3, w2), x)
    one = slice(40, 41)
    row = tensor(x.numpy()[one])
    alone = expert_ffn(row, tensor(weights[one]), lists(chosen[one], 4), w1, w3, w2)
    alone = added(alone, row)
    assert_same_bits(alone, whole[one])
    w1, w3, w2 = (weight.dequantize().numpy() for weight in (w1, w3, w2))
    want = x.numpy()[40].copy()
    for a, e in enumerate(chosen[40]):
        want += weights[40, a] * (
            w2[e] @ (oracle.silu(w1[e] @ x.numpy()[40]) * (w3[e] @ x.numpy()[40]))
        )
    np.testing.assert_allclose(whole[40], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_taps, channels", [(3, 64), (3, 97), (4, 6), (2, 32)])
def test_short_conv_over_every_cut(num_taps, channels):
    """Two streams in one round after another, cut around the number of taps; the ring starts as
    NaN.
    """
    length = 9
    taps, bias = values(0, channels, num_taps), values(1, channels)
    bcx = {0: values(2, length, 3 * channels), 3: values(3, length, 3 * channels)}
    want = {slot: oracle.short_conv(rows, taps, bias) for slot, rows in bcx.items()}
    for cut in (1, num_taps - 1, num_taps, num_taps + 1, length):
        ring = buffer(np.full((5, 8, channels), np.nan))
        got = {0: [], 3: []}
        for start in range(0, length, cut):
            end = min(start + cut, length)
            capacity, table = ragged(
                [(0, 0, start, end - start, 0), (3, 20, start, end - start, 0)]
            )
            rows = np.zeros((capacity.rows, 3 * channels))
            rows[: end - start] = bcx[0][start:end]
            rows[end - start : 2 * (end - start)] = bcx[3][start:end]
            y = short_conv(tensor(rows), tensor(taps), tensor(bias), ring, table, capacity)
            y = y.numpy()
            got[0].append(y[: end - start])
            got[3].append(y[end - start : 2 * (end - start)])
        for slot in (0, 3):
            np.testing.assert_allclose(np.concatenate(got[slot]), want[slot], rtol=1e-5, atol=1e-5)


def test_short_conv_rolls_back_by_position():
    """Rows written again at earlier positions read the ring as if the dropped ones had never
    been.
    """
    channels, taps = 8, values(0, 8, 3)
    bcx = values(1, 6, 24)
    want = oracle.short_conv(bcx, taps)
    ring = buffer(np.full((2, 8, channels), np.nan))
    for start, rows in ((0, bcx[:3]), (3, values(2, 3, 24)), (3, bcx[3:6])):
        capacity, table = ragged([(0, 0, start, 3, 0)], num_slots=1)
        padded = np.concatenate([rows, np.zeros((capacity.rows - 3, 24))])
        y = short_conv(tensor(padded), tensor(taps), None, ring, table, capacity).numpy()[:3]
    np.testing.assert_allclose(y, want[3:6], rtol=1e-5, atol=1e-5)


def test_store_qkv_and_attend_over_a_ragged_round():
    """Two streams with history and a fresh one; every pool row that no stream wrote stays as it
    was.
    """
    config = SimpleNamespace(head_dim=16, rope_theta=1e4)
    head_dim, pool = 16, 128
    angles = Tensor(rope_angles(config, 64))
    q_weight, k_weight = values(0, head_dim), values(1, head_dim)
    keys, stored_values = (
        buffer(np.full((pool, 2, 16), np.nan)),
        buffer(np.full((pool, 2, 16), np.nan)),
    )
    done = {(0, 0): 0, (1, 20): 0, (2, 61): 0}
    data = {
        slot: [values(10 + slot + i, 40, width) for i, width in enumerate((96, 32, 32))]
        for slot, _ in done
    }
    for take in ({(0, 0): 4, (1, 20): 33}, {(0, 0): 7, (1, 20): 7, (2, 61): 1}):
        segments = [(slot, base, done[slot, base], rows, 0) for (slot, base), rows in take.items()]
        capacity, table = ragged(segments)
        flat = [np.zeros((capacity.rows, width)) for width in (96, 32, 32)]
        row = 0
        for (slot, base), rows in take.items():
            start = done[slot, base]
            for into, source in zip(flat, data[slot]):
                into[row : row + rows] = source[start : start + rows]
            row += rows
        q, k, v = (tensor(part) for part in flat)
        q, keys_now, values_now = store_qkv(
            q,
            k,
            v,
            tensor(q_weight),
            tensor(k_weight),
            angles,
            1e-5,
            keys,
            stored_values,
            table,
            capacity,
        )
        out = attend(q, keys_now, values_now, 0.25, table, capacity).numpy()
        row = 0
        for (slot, base), rows in take.items():
            want = attention_of(data[slot], q_weight, k_weight, done[slot, base] + rows)
            np.testing.assert_allclose(
                out[row : row + rows], want[done[slot, base] :], rtol=1e-5, atol=1e-5
            )
            row += rows
            done[slot, base] += rows
    written = np.isfinite(keys.numpy()).all(axis=(1, 2))
    assert written[:64].tolist() == [i < 11 or 20 <= i < 60 or i == 61 for i in range(64)]


def attention_of(stream, q_weight, k_weight, length):
    """One stream's attention (length, H D) by the oracle."""
    q, k, v = (part[:length].reshape(length, -1, 16) for part in stream)
    q = oracle.rms_norm(q, q_weight, 1e-5)
    k = oracle.rms_norm(k, k_weight, 1e-5)
    q = np.stack([oracle.rope(row, i, 1e4) for i, row in enumerate(q)])
    k = np.stack([oracle.rope(row, i, 1e4) for i, row in enumerate(k)])
    return np.stack(
        [oracle.attend(q[i], k[: i + 1], v[: i + 1], 0.25).ravel() for i in range(length)]
    )


@pytest.mark.parametrize("is_normalised, scale", [(True, 1.0), (False, 2.5)])
def test_route(is_normalised, scale):
    logits, bias = values(0, 7, 32), values(1, 32)
    chosen, weights = choose_reference(tensor(logits), tensor(bias), 4, is_normalised, scale)
    for t in range(7):
        want_chosen, want_weights = oracle.route(logits[t], bias, 4, is_normalised, scale)
        assert chosen.numpy()[t].tolist() == want_chosen.tolist()
        np.testing.assert_allclose(weights.numpy()[t], want_weights, rtol=1e-5)


def test_route_takes_the_logits_of_its_gate():
    x, gate, bias = values(0, 3, 32), values(1, 8, 32), values(2, 8)
    weights, found = route(tensor(x), tensor(gate), tensor(bias), 2, True, 1.0)
    routed = [oracle.route(gate @ row, bias, 2, True, 1.0) for row in x]
    want = grouped(np.array([chosen for chosen, _ in routed]), 8)
    np.testing.assert_array_equal(found.numpy()[want >= 0], want[want >= 0])
    for t, (_, want_weights) in enumerate(routed):
        np.testing.assert_allclose(weights.numpy()[t], want_weights, rtol=1e-4)


def test_route_by_hand():
    """Sigmoid 0.881, 0.731, 0.5, 0.269; the bias changes the choice and not the weights."""
    chosen, weights = choose_reference(
        tensor([[2, 1, 0, -1]]), tensor([-1, 0, 0.4, 0]), 2, True, 1.0
    )
    assert chosen.tolist() == [[2, 1]]
    np.testing.assert_allclose(weights.numpy(), [[0.4061, 0.5939]], atol=1e-4)


def test_route_ties_go_to_the_lowest_id_in_any_company():
    logits = tensor(np.zeros((3, 8)))
    assert choose_reference(logits, None, 3, True, 1.0)[0].tolist() == [[0, 1, 2]] * 3
    assert choose_reference(tensor(np.zeros((1, 8))), None, 3, True, 1.0)[0].tolist() == [[0, 1, 2]]


def test_route_bias_in_fp32():
    """Biased scores 1e-4 apart around 0.9, where a bf16 step is 0.004."""
    chosen, _ = choose_reference(tensor([[0.0, 0.0]]), tensor([0.4, 0.4001]), 1, True, 1.0)
    assert chosen.tolist() == [[1]]


@pytest.mark.parametrize("rows, experts, active", [(1, 8, 2), (5, 8, 4), (32, 4, 2)])
def test_expert_ffn(rows, experts, active):
    width, ffn = 48, 20
    x = values(0, rows, width)
    w1, w3 = values(2, experts, ffn, width, scale=0.2), values(3, experts, ffn, width, scale=0.2)
    w2 = values(4, experts, width, ffn, scale=0.2)
    chosen = np.argsort(values(5, rows, experts))[:, :active]
    weights = np.abs(values(6, rows, active))
    ours = expert_ffn(
        tensor(x),
        tensor(weights),
        lists(chosen, experts),
        tensor(w1),
        tensor(w3),
        tensor(w2),
    )
    ours = added(ours, tensor(x))
    want = x.copy()
    for t in range(rows):
        for a, e in enumerate(chosen[t]):
            want[t] += weights[t, a] * (w2[e] @ (oracle.silu(w1[e] @ x[t]) * (w3[e] @ x[t])))
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-5)


def test_argmax_ties_and_flags():
    logits = values(0, 6, 100).astype(np.float32)
    logits[0, [40, 7, 99]] = 9.0
    logits[1, 0] = np.nan
    logits[2, 57] = np.inf
    logits[3, 99] = -np.inf
    logits[4, 99] = 9.0
    picks = argmax(tensor(logits)).numpy()
    assert picks[:, 1].tolist() == [1, 0, 0, 0, 1, 1]
    assert (picks[0, 0], picks[4, 0], picks[5, 0]) == (7, 99, logits[5].argmax())


def test_argmax_with_one_lane():
    logits = values(0, 2, 97).astype(np.float32)
    logits[0, [3, 50]] = 9.0
    assert argmax(tensor(logits)).numpy()[:, 0].tolist() == [3, logits[1].argmax()]


@pytest.mark.parametrize("vocab_size", [96, 97])
def test_argmax_of_rows_without_a_largest_logit(vocab_size):
    """As the kernel's contract has it: a NaN counts as -inf, and all -inf is id 0."""
    wanted = case(made(vocab_size)).expected["out"].values
    np.testing.assert_array_equal(argmax(tensor(made(vocab_size))).numpy(), wanted)


@pytest.mark.parametrize("rows", [1, 10])
def test_tap(rows):
    x, before = values(0, rows, 36), values(1, 12, 5 * 36).astype(np.float32)
    scratch = buffer(before)
    tap(tensor(x), scratch, 2).realize()
    before[:rows, 2 * 36 : 3 * 36] = x
    np.testing.assert_array_equal(scratch.numpy(), before)


def test_shapes_that_kernels_leave_to_the_reference():
    half = dtypes.half
    assert [n for n in (3, 4, 97) if argmax_kernel(2, n)] == [4, 97]
    assert [n for n in (36, 37, 38) if tap_kernel(2, 4, n, 5, 0, half)] == [36]
    assert tap_kernel(2, 4, 36, 5, 0, dtypes.int32) is None
    assert [n for n in (36, 37, 38) if embed_kernel(2, WeightKind((9, n), half), half)] == [36]
    packed = {n: WeightKind((9, 64), half, n, 32) for n in (2, 3, 4, 5, 6, 8)}
    assert [n for n, kind in packed.items() if embed_kernel(2, kind, half)] == [4, 8]


def test_loops_keep_the_order_of_the_text():
    """A shift register: each value is loaded before the store that follows it in the text."""

    def body(loops, out, x):
        old, middle = loops.local(1), loops.local(1)
        old[0] = 0.0
        middle[0] = 0.0
        with loops.over(6) as t:
            first, second = loops.keep(old, 0), loops.keep(middle, 0)
            old[0] = second
            middle[0] = x[t]
            out[t] = first * 100 + second * 10 + x[t]

    out = loop_kernel("shift", body, [Tensor.empty(6)], [tensor(np.arange(6))])[0]
    assert out.tolist() == [0, 1, 12, 123, 234, 345]


def test_a_store_that_may_come_before_a_load_is_refused():
    def body(loops, out):
        value = loops.local(1)
        value[0] = 1.0
        before = value[0]
        value[0] = 2.0
        out[0] = before

    with pytest.raises(ValueError, match="keep"):
        loop_kernel("hazard", body, [Tensor.empty(1)], [])


def test_a_loop_may_end_at_a_number_read_from_an_array():
    def body(loops, out, ends, x):
        with loops.over(3) as t:
            total = loops.local(1)
            total[0] = 0.0
            with loops.over(ends[t].cast(dtypes.weakint)) as i:
                total[0] = total[0] + x[i]
            out[t] = total[0]

    ends = Tensor([1, 2, 5], dtype=dtypes.int32)
    out = loop_kernel("ends", body, [Tensor.empty(3)], [ends, tensor([1, 2, 3, 4, 5])])[0]
    assert out.tolist() == [1, 3, 15]


@pytest.mark.parametrize(
    "call, words",
    [
        (
            lambda: rms_norm(tensor(np.ones((2, 8))), tensor(np.ones(7)), 1e-5),
            "weight must have shape (8,), found (7,)",
        ),
        (
            lambda: matmul(tensor(np.ones((2, 8))), tensor(np.ones((4, 9)))),
            "x must have shape (2, 9), found (2, 8)",
        ),
        (lambda: argmax(tensor(np.ones((2, 8)), dtypes.half)), "logits must be float, found half"),
        (
            lambda: tap(tensor(np.ones((3, 8))), buffer(np.ones((2, 24))), 0),
            "scratch must have shape (3, 24), found (2, 24)",
        ),
        (
            lambda: tap(tensor(np.ones((2, 8))), buffer(np.ones((2, 24))), 3),
            "index must be below 3, found 3",
        ),
        (
            lambda: route(tensor(np.ones((2, 8))), tensor(np.ones((4, 8))), None, 5, True, 1.0),
            "5 active experts of 4",
        ),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)

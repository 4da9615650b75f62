"""Mixtures of experts on emulated METAL, by their kernels and by reference() where these refuse."""

import sys

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from metal_ops.contract.route import grouped
from metal_ops.emulated_metal import compile, install
from metal_ops.experts import expert_down_kernel, expert_ffn, expert_gate_up_kernel
from metal_ops.kernel import THREADGROUP_BYTES
from metal_ops.matmul import matmul_kernel
from metal_ops.product_tile import FEWEST_MANY
from metal_ops.products import WeightKind, kind_of
from metal_ops.quantized import QuantizedMatrix
from metal_ops.route import route, route_kernels
from tests import oracle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")

F32, BF16 = dtypes.float32, dtypes.bfloat16


@pytest.fixture(autouse=True)
def emulator():
    emulator = install()
    emulator.checked, emulator.order = False, "fifo"


def values(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * 0.1


def tensor(array):
    return Tensor(array, device="METAL").realize()


def packed(seed, bits, *shape):
    *rows, width = shape
    words = (*rows, width * bits // 32)
    codes = np.random.default_rng(seed).integers(0, 2**32, words, dtype=np.uint32)
    scales, biases = values(seed, 2, *rows, width // 32) / 2 ** (bits - 2)
    return QuantizedMatrix(tensor(codes), tensor(scales), tensor(biases), bits, 32)


def numbers(weight):
    return (weight if isinstance(weight, Tensor) else weight.dequantize()).numpy()


@pytest.mark.parametrize(
    "experts, width, ffn, bits, has_kernels",
    [
        (6, 64, 96, 4, [True, True, True, True]),
        (6, 96, 80, 0, [True, True, True, False]),
        (6, 36, 64, 0, [False, True, False, True]),
        (6, 64, 64, 5, [False, True, False, False]),
        (300, 32, 32, 8, [True, False, True, True]),
    ],
)
def test_a_mixture_piece_by_piece(experts, width, ffn, bits, has_kernels):
    """What a kernel does not serve runs by reference(), between others that do run."""
    rows, active = 5, 3

    def weight(seed, *shape):
        return packed(seed, bits, *shape) if bits else tensor(values(seed, *shape))

    gate, w1, w3 = (
        weight(1, experts, width),
        weight(2, experts, ffn, width),
        weight(3, experts, ffn, width),
    )
    w2, bias, x = weight(4, experts, width, ffn), values(5, experts), 10 * values(6, rows, width)
    kernels = [
        matmul_kernel(rows, kind_of(gate), F32, F32),
        *(route_kernels(rows, experts, active, True, True, 1.5) or [None]),
        expert_gate_up_kernel(rows, active, kind_of(w1), kind_of(w3), F32),
        expert_down_kernel(rows * active, kind_of(w2), F32),
    ]
    assert [kernel is not None for kernel in kernels] == has_kernels
    weights, lists = route(tensor(x), gate, tensor(bias), active, True, 1.5)
    outputs = expert_ffn(tensor(x), weights, lists, w1, w3, w2).outputs.numpy()
    gate, w1, w3, w2 = map(numbers, (gate, w1, w3, w2))
    routed = [oracle.route(gate @ row, bias, active, True, 1.5) for row in x]
    want_lists = grouped(np.array([chosen for chosen, _ in routed]), experts)
    np.testing.assert_array_equal(lists.numpy()[want_lists >= 0], want_lists[want_lists >= 0])
    for t, (chosen, want_weights) in enumerate(routed):
        np.testing.assert_allclose(weights.numpy()[t], want_weights, rtol=1e-5)
        for a, e in enumerate(chosen):
            want = w2[e] @ (oracle.silu(w1[e] @ x[t]) * (w3[e] @ x[t]))
            np.testing.assert_allclose(outputs[t * active + a], want, rtol=1e-4, atol=1e-5)


def test_the_largest_choice_fills_the_memory_of_a_threadgroup():
    (kernel,) = route_kernels(128, 256, 96, True, True, 1.0)
    compiled = compile(kernel.source, kernel.name)[kernel.name]
    assert compiled.threadgroup_bytes == THREADGROUP_BYTES
    assert route_kernels(128, 256, 97, True, True, 1.0) == ()


@pytest.mark.parametrize("dtype", [BF16, dtypes.float32])
@pytest.mark.parametrize("bits, group_size", [(0, 0), (4, 32), (8, 64), (4, 128)])
def test_rows_of_a_prompt_fit_the_memory_of_a_threadgroup(dtype, bits, group_size):
    weight = WeightKind((64, 1024), BF16, bits, group_size)
    kernel = matmul_kernel(512, weight, dtype, dtype, fewest_many=FEWEST_MANY)
    compiled = compile(kernel.source, kernel.name)[kernel.name]
    assert compiled.threadgroup_bytes <= THREADGROUP_BYTES


def test_weights_that_no_kernel_serves():
    served = WeightKind((4, 32, 64), BF16)
    assert expert_gate_up_kernel(1, 1, served, served, BF16) is not None
    for weight in (
        WeightKind((4, 32, 64), BF16, 6, 64),
        WeightKind((4, 32, 64), BF16, 4, 16),
        WeightKind((4, 32, 80), BF16),
    ):
        assert expert_gate_up_kernel(1, 1, weight, weight, BF16) is None
        assert expert_down_kernel(1, weight, BF16) is None
    assert expert_gate_up_kernel(1, 1, served, WeightKind((4, 32, 64), BF16, 4, 32), BF16) is None
    assert expert_down_kernel(1, served, dtypes.int32) is None


def test_a_gate_that_holds_more_than_the_rows_is_not_rounded():
    """Logits of experts a 1/1000 apart, around 1, where bf16 has steps of 1/128."""
    gate = np.zeros((8, 32), np.float32)
    gate[:, 0] = 1 + np.array([3, 1, 4, 0, 5, 2, 6, 7]) / 1000
    x = tensor(np.ones((2, 32), np.float32)).cast(BF16)
    weights, lists = route(x, tensor(gate), None, 3, True, 1.0)
    assert lists.numpy()[:4].tolist() == [3, 4, 6, 7]
    scores = 1 / (1 + np.exp(-gate[[7, 6, 4], 0]))
    np.testing.assert_allclose(weights.numpy(), [scores / scores.sum()] * 2, rtol=1e-5)

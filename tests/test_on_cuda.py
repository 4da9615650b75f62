"""The whole model through lfm2/ on an NVIDIA GPU: right, and a row the same in any company.

The tests of rounds are those of the CPU, on another device. `python -m metal_ops.contract --device
CUDA` proves the kernels one by one.
"""

import os
from dataclasses import replace

import numpy as np
import pytest
from tinygrad import Tensor, dtypes

from lfm2.convert import convert
from lfm2.weights import load_weights
from metal_ops import launch
from metal_ops.cuda_graph import ChainedGraph
from metal_ops.kernel import Target, target_of
from metal_ops.launch import Step, copy_in, empty
from metal_ops.matmul import matmul
from metal_ops.memory import read_tensor
from metal_ops.quantized import QuantizedMatrix
from tests import build
from tests.build import DEMO, build_runner, chunked, run, segment
from tests.test_model import (
    SPELLINGS,
    TOLERANCE,
    Golden,
    distance,
    greedy_tokens,
    prompt_logits,
    rms,
)
from tests.tiny import dense_config, moe_config, write_checkpoint

# Collected here too, with this module's cases.
from tests.test_rounds import (  # noqa: F401
    STREAMS,
    cases_on,
    test_a_round_writes_its_own_rows_and_the_scratch_only,
    test_a_slot_let_again_starts_afresh,
    test_dropped_rows_leave_no_trace,
    test_order_slots_and_extents_do_not_matter,
    test_random_schedules,
    test_streams_of_any_length_start_in_one_round_and_go_on,
    test_windows_of_every_width_give_the_logits_of_single_rows,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not os.path.exists("/dev/nvidia0"), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def cases(steps, tmp_path_factory):
    return cases_on("CUDA", steps, tmp_path_factory)


@pytest.mark.parametrize("name", ["dense", "moe", "moe_plain", "odd", "demo"])
def test_logits_and_greedy_tokens_equal_the_engines(name, steps, tmp_path):
    golden = Golden.read(name)
    folder = DEMO if name == "demo" else write_checkpoint(tmp_path, SPELLINGS[name])
    runner = build_runner(folder, steps, device="CUDA")
    logits = prompt_logits(runner, golden)
    assert distance(logits, golden.logits) <= TOLERANCE
    assert distance(logits, golden.mlx_logits) <= TOLERANCE
    tokens = greedy_tokens(runner, golden, logits, num_tokens=32)
    assert tokens == {length: ids.tolist() for length, ids in golden.greedy.items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_model_equals_its_values(bits, steps, tmp_path, monkeypatch):
    """The built-in model in 4 and 8 bits: the logits of a plain model of the same values."""
    convert(DEMO, tmp_path / "packed", bits=bits, group_size=64)
    golden = Golden.read("demo")
    ours = prompt_logits(build_runner(tmp_path / "packed", steps, device="CUDA"), golden)

    def values(weight):
        # The kernels round nothing; dequantize rounds to the type of scales and biases.
        parts = {"scales": weight.scales.float(), "biases": weight.biases.float()}
        return replace(weight, **parts).dequantize().contiguous().realize()

    def load_values(*arguments):
        weights = load_weights(*arguments)
        packed = {n: w for n, w in weights.items() if isinstance(w, QuantizedMatrix)}
        assert packed
        return weights | {name: values(weight) for name, weight in packed.items()}

    monkeypatch.setattr(build, "load_weights", load_values)
    wanted = prompt_logits(build_runner(tmp_path / "packed", steps, device="CUDA"), golden)
    # Two fp32 sums, each in an order of its own, of logits around 20.
    assert distance(ours, wanted) <= 3 * TOLERANCE


def test_bfloat16_stays_within_the_spread_of_the_engines(steps):
    golden = Golden.read("demo_bfloat16")
    ours = prompt_logits(build_runner(DEMO, steps, "bfloat16", device="CUDA"), golden)
    normal = rms(golden.logits, golden.mlx_logits)
    assert rms(ours, golden.logits) <= 1.3 * normal
    assert rms(ours, golden.mlx_logits) <= 1.3 * normal


@pytest.fixture
def chained(monkeypatch):
    """How many launches each graph has that was chained."""
    if target_of("CUDA") is not Target.HOPPER:
        pytest.skip("graphs are chained on Hopper only")
    lengths = []

    class Counted(ChainedGraph):
        def __init__(self, graph):
            super().__init__(graph)
            lengths.append(len(self.nodes))

    monkeypatch.setattr(launch, "ChainedGraph", Counted)
    return lengths


def test_chained_launches_see_what_the_last_one_wrote(chained, monkeypatch):
    """Products of products, as a chained graph and as tinygrad's own make them."""
    width, depth = 2048, 24
    random = np.random.default_rng(1)
    values = random.standard_normal((width, width), np.float32) / width**0.5
    weight = Tensor(values, device="CUDA").cast(dtypes.bfloat16).contiguous().realize()
    x = empty((1, width), dtypes.bfloat16, "CUDA")
    inputs = random.standard_normal((50, width), np.float32).view(np.uint32) >> 16

    def function():
        y = x
        for _ in range(depth):
            y = matmul(y, weight)
        return (y,)

    def outputs():
        step = Step.capture(function, [x, weight])
        found = []
        for bits in inputs.astype(np.uint16):
            copy_in(x, 0, memoryview(bits).cast("B"))
            found.append(step()[0].bitcast(dtypes.uint16).numpy())
        return np.concatenate(found)

    early = outputs()
    assert chained == [depth]
    monkeypatch.setattr(launch, "can_chain", lambda graph: False)
    assert np.array_equal(early, outputs()) and chained == [depth]


@pytest.mark.parametrize("config", [dense_config(), moe_config()], ids=["dense", "moe"])
def test_chained_rounds_equal_others(config, chained, steps, tmp_path, monkeypatch):
    """Prompts, single rows, windows and shared rounds: every logit and all that is kept, to the
    bit.
    """
    folder = write_checkpoint(tmp_path, config, dtype="bfloat16")

    def logits_and_state():
        runner = build_runner(folder, steps, "bfloat16", device="CUDA")
        rows = [
            chunked(runner, slot, 100 * slot, STREAMS[slot], (20 + slot, *(1,) * 20, 3, 8))
            for slot in range(3)
        ]
        for i in range(10):
            segments = [segment(s, 100 * s, 51 + s + i, STREAMS[s][:1]) for s in range(3)]
            rows += run(runner, *segments)
        state = [bytes(read_tensor(kept, 0, kept.nbytes())) for kept in runner.state.tensors]
        return np.concatenate(rows), state, runner.forms.values()

    early, early_state, forms = logits_and_state()
    assert chained == [len(form.step.launches) for form in forms] and len(chained) == 5
    monkeypatch.setattr(launch, "can_chain", lambda graph: False)
    late, late_state, _ = logits_and_state()
    assert len(chained) == 5
    np.testing.assert_array_equal(early, late)
    assert early_state == late_state

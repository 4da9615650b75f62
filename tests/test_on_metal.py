"""The whole model through lfm2/ on emulated METAL: right, and a row the same in any company.

The tests of rounds are those of the CPU, on another device.
"""

import re
import sys

import numpy as np
import pytest

from lfm2.convert import convert
from metal_ops.emulated_metal import install
from tests.build import DEMO, build_runner, chunked
from tests.packed import write_packed_pair
from tests.test_model import (
    SPELLINGS,
    TOLERANCE,
    Golden,
    distance,
    greedy_tokens,
    prompt_logits,
    rms,
)
from tests.tiny import write_checkpoint

# Collected here too, with this module's cases.
from tests.test_rounds import (  # noqa: F401
    KINDS,
    Case,
    test_a_round_writes_its_own_rows_and_the_scratch_only,
    test_a_slot_let_again_starts_afresh,
    test_dropped_rows_leave_no_trace,
    test_order_slots_and_extents_do_not_matter,
    test_random_schedules,
    test_streams_of_any_length_start_in_one_round_and_go_on,
    test_windows_of_every_width_give_the_logits_of_single_rows,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")


@pytest.fixture(autouse=True)
def emulator():
    emulator = install()
    emulator.checked, emulator.order = False, "fifo"
    return emulator


@pytest.fixture(scope="module")
def cases(steps, tmp_path_factory):
    """name, dtype -> Case on METAL, made when first asked for."""
    made = {}

    def case(name: str = "moe", dtype: str = "float32") -> Case:
        if (name, dtype) not in made:
            folder = tmp_path_factory.mktemp(name)
            if name == "packed":
                folder, _ = write_packed_pair(folder, KINDS["moe"], [4, 8])
            else:
                write_checkpoint(folder, KINDS[name], dtype=dtype)
            made[name, dtype] = case = Case(folder, steps, dtype, "METAL")
            launched = [name for form in case.runner.forms.values() for name in form.step.launches]
            generated = [name for name in launched if not re.search(r"\dx\d", name)]
            assert generated == [], "a kernel that is not hand-written proves nothing here"
        return made[name, dtype]

    return case


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_packed_rows_are_the_same_in_any_company(num_rows, dtype, cases):
    def packed(name="packed", dtype=dtype):
        return cases(name, dtype)

    test_order_slots_and_extents_do_not_matter(dtype, packed)
    test_a_slot_let_again_starts_afresh(num_rows, packed)


def golden_runs(folder, steps, golden, device="METAL", num_tokens=32):
    """The logits of all prompts of a golden, from one round, and the picks of their streams."""
    runner = build_runner(folder, steps, device=device)
    logits = prompt_logits(runner, golden)
    return logits, greedy_tokens(runner, golden, logits, num_tokens)


@pytest.mark.parametrize("order", ["fifo", "random"])
@pytest.mark.parametrize("name", ["dense", "moe_plain", "odd"])
def test_checked_golden_logits(emulator, steps, tmp_path, name, order):
    """A prompt in two chunks and a padded round, watched for races, bounds and undefined reads."""
    emulator.checked, emulator.order = True, order
    golden = Golden.read(name)
    runner = build_runner(write_checkpoint(tmp_path, SPELLINGS[name]), steps, device="METAL")
    logits = chunked(runner, 3, 17, golden.prompts[9].tolist(), (5, 4))
    np.testing.assert_allclose(logits, golden.logits[9], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["dense", "moe", "moe_plain", "odd", "demo"])
def test_logits_and_greedy_tokens_equal_the_engines(name, steps, tmp_path):
    golden = Golden.read(name)
    folder = DEMO if name == "demo" else write_checkpoint(tmp_path, SPELLINGS[name])
    logits, tokens = golden_runs(folder, steps, golden)
    assert distance(logits, golden.logits) <= TOLERANCE
    assert distance(logits, golden.mlx_logits) <= TOLERANCE
    assert tokens == {length: ids.tolist() for length, ids in golden.greedy.items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_model_equals_reference(bits, steps, tmp_path):
    """The built-in model in 4 and 8 bits: fp32 logits and tokens of the CPU."""
    folder = tmp_path / "packed"
    convert(DEMO, folder, bits=bits, group_size=64)
    golden = Golden.read("demo")
    ours, ours_drawn = golden_runs(folder, steps, golden, num_tokens=12)
    wanted, wanted_drawn = golden_runs(folder, steps, golden, device="CPU", num_tokens=12)
    assert distance(ours, wanted) <= TOLERANCE
    assert ours_drawn == wanted_drawn


def test_bfloat16_stays_within_the_spread_of_the_engines(steps):
    """As far from reference() as two engines are from each other, and as far from each of them."""
    golden = Golden.read("demo_bfloat16")
    ours, reference = (
        prompt_logits(build_runner(DEMO, steps, "bfloat16", device=device), golden)
        for device in ("METAL", "CPU")
    )
    normal = rms(golden.logits, golden.mlx_logits)
    for other in (reference, golden.logits, golden.mlx_logits):
        assert rms(ours, other) <= 1.3 * normal

"""The model through tinygrad's METAL renderer, on the emulated device: right, without a race."""

import sys

import numpy as np
import pytest

from tests import tiny
from tests.build import GOLDENS, build_runner, chunked
from metal_ops.emulated_metal import install

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")


@pytest.fixture(scope="module")
def emulator():
    return install()


@pytest.mark.parametrize("is_checked, order", [(False, "fifo"), (True, "random")])
def test_golden_logits_on_metal(emulator, tmp_path, is_checked, order):
    """M over a prompt in two chunks and a padded round; checked: races, bounds, undefined reads."""
    emulator.checked, emulator.order = is_checked, order
    golden = np.load(GOLDENS / "moe.npz")
    runner = build_runner(tiny.write_checkpoint(tmp_path, tiny.moe_config()), device="METAL")
    prompt = golden["prompt_9"].tolist()
    logits = chunked(runner, 3, 17, prompt, (5, 4))
    np.testing.assert_allclose(logits, golden["logits_9"], rtol=0, atol=1e-4)

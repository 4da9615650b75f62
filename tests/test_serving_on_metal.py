"""Requests served together on emulated METAL: the tests of the CPU, on another device."""

import sys

import pytest

from metal_ops.emulated_metal import install
from tests.build import DEMO
from tests.test_serving import KINDS, Case, serve
from tests.tiny import write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the emulator runs on Linux only")


@pytest.fixture(autouse=True)
def emulator():
    emulator = install()
    emulator.checked, emulator.order = False, "fifo"
    return emulator


@pytest.mark.parametrize(
    "name, dtype, seeds, num_asked",
    [("moe", "float32", (1, 3), 18), ("demo", "bfloat16", (7, 9), 6)],
)
def test_random_schedules(name, dtype, seeds, num_asked, steps, tmp_path):
    folder = DEMO if name == "demo" else write_checkpoint(tmp_path, KINDS[name])
    case = Case(folder, steps, dtype, "METAL", num_asked=num_asked)
    num_hits = 0
    for seed in seeds:
        desk = serve(case, seed)
        num_hits += desk.cache.counts.hits if desk.cache else 0
    assert num_hits

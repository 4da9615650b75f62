"""Many requests through 16 slots, with cancels and kept states: nothing is lost, nothing grows."""

import gc
import resource

import numpy as np
import pytest
from tinygrad.helpers import GlobalCounters

from lfm2.runner import Runner
from metal_ops.table import Capacity
from tests.build import build_runner
from tests.desk import Asked, Desk
from tests.test_serving import SAMPLINGS, tokens
from tests.tiny import moe_config, write_checkpoint

NUM_SLOTS = 16
NUM_REQUESTS = 300
NUM_PROMPTS = 40
GROWTH_KIB = 4096


def long_run(runner: Runner, num_requests: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """Serves requests with random cancels; at each tenth of them memory of the device, of the
    process (KiB) and the number of tracked objects. All free lists are whole at the end.
    """
    rng = np.random.default_rng(seed)
    size = Desk(runner).runner.copier.size
    desk = Desk(runner, num_slots=NUM_SLOTS, chunk=24, budget=20 * size.num_bytes(30))
    samples = []
    for number in range(num_requests):
        prompt = tokens(int(rng.integers(NUM_PROMPTS)), int(rng.integers(1, 40)))
        options = {"marks": (len(prompt),), "keeps_reply": bool(rng.random() < 0.3)}
        sampling = SAMPLINGS[number % len(SAMPLINGS)]
        last = desk.submit(Asked(prompt, int(rng.integers(1, 9)), sampling, options))
        if rng.random() < 0.2:
            desk.scheduler.cancel(last - int(rng.integers(min(last, NUM_SLOTS))))
        while desk.scheduler.counts().queued > NUM_SLOTS:
            desk.turn()
        desk.turn(int(rng.integers(2)))
        if number % (num_requests // 10) == num_requests // 10 - 1:
            desk.draws, desk.endings = {n: desk.draws[n] for n in desk.draws if n > last - 200}, {}
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            samples.append((GlobalCounters.mem_used, peak, len(gc.get_objects())))
    desk.finish()
    assert desk.cache.num_bytes <= desk.cache.budget_bytes
    kept = desk.cache.num_bytes
    before = GlobalCounters.mem_used
    desk.cache.clear()
    assert before - GlobalCounters.mem_used == kept
    return samples


@pytest.fixture(scope="module")
def runner(steps, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("moe"), moe_config())
    form = (Capacity(64, 16, 16),)
    return build_runner(folder, steps, capacities=form, num_slots=NUM_SLOTS)


def test_nothing_is_lost_and_nothing_grows(runner):
    size = Desk(runner).runner.copier.size
    samples = long_run(runner, NUM_REQUESTS)
    device, peaks, objects = zip(*samples[len(samples) // 2 :])
    # Kept states come and go within their budget.
    assert max(device) - min(device) <= 20 * size.num_bytes(30)
    assert peaks[-1] - peaks[0] <= GROWTH_KIB
    assert objects[-1] <= 1.1 * objects[0]

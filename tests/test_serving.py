"""Requests served together by the real model: each reply is that of the request alone, draw for
draw, whatever company, cuts, cancels, kept states and slots it had.
"""

import numpy as np
import pytest

from lfm2.runner import Runner
from lfm2.sampling import Sampling
from lfm2.serving import DrawingRunner
from metal_ops.table import Capacity
from tests.build import DEMO, build_runner, poison
from tests.desk import Asked, Desk, alone
from tests.tiny import moe_config, odd_config, write_checkpoint

KINDS = {"moe": moe_config(), "odd": odd_config()}
SAMPLINGS = [
    Sampling(num_logprobs=3),
    Sampling(),
    Sampling(temperature=1.0, num_logprobs=3),
    Sampling(temperature=0.7, top_p=0.9, seed=5),
    Sampling(temperature=1.5, top_k=20, repetition_penalty=1.3, seed=6, num_logprobs=2),
    Sampling(repetition_penalty=1.5, repetition_window=4, logit_bias=((3, 2.0), (4, -np.inf))),
]
NUM_ASKED = 18
# Forms for single rows, for a row of each stream, and for all else.
FEW = (Capacity(1, 1, 1), Capacity(4, 4, 4), Capacity(64, 16, 16))


def tokens(number: int, length: int) -> tuple[int, ...]:
    """Closed form; another number, another text from the first token on."""
    return tuple((37 * i + 11 * number * i + 29 * number + 5) % 97 for i in range(length))


def asked_of(seed: int) -> list[Asked]:
    """Requests of all kinds, many of which begin alike."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(NUM_ASKED):
        shared = tokens(int(rng.integers(3)), int(rng.integers(1, 25)))
        prompt = shared + tokens(number, int(rng.integers(0, 12)))
        max_tokens = int(rng.integers(1, 9))
        found.append(Asked(prompt, max_tokens, SAMPLINGS[number % len(SAMPLINGS)]))
    return found


class Case:
    """A model, requests, and their replies alone."""

    def __init__(
        self,
        folder,
        steps,
        dtype: str = "float32",
        device: str = "CPU",
        capacities=FEW,
        num_asked: int = NUM_ASKED,
    ) -> None:
        self.runner = build_runner(folder, steps, dtype, capacities, device=device)
        self.asked = asked_of(0)[:num_asked]
        self.alone = [alone(self.fresh(), asked) for asked in self.asked]

    def fresh(self) -> Runner:
        poison(self.runner.state)
        return self.runner


@pytest.fixture(scope="module")
def cases(steps, tmp_path_factory):
    """name, dtype -> Case, made when first asked for."""
    made = {}

    def case(name: str = "moe", dtype: str = "float32") -> Case:
        if (name, dtype) not in made:
            folder = DEMO
            if name != "demo":
                folder = write_checkpoint(tmp_path_factory.mktemp(name), KINDS[name])
            capacities = () if (name, dtype) == ("moe", "float32") else FEW
            made[name, dtype] = Case(folder, steps, dtype, capacities=capacities)
        return made[name, dtype]

    return case


def serve(case: Case, seed: int) -> Desk:
    """A random schedule: requests come at random turns, some are cancelled, some keep their states
    or are cut where others are.
    """
    rng = np.random.default_rng(seed)
    size = DrawingRunner(case.runner).copier.size
    desk = Desk(
        case.fresh(),
        num_slots=int(rng.integers(1, 5)),
        chunk=int(rng.integers(1, 17)),
        budget=size.num_bytes(20) * int(rng.choice([0, 3, 1000])),
        is_mixing=bool(rng.random() < 0.8),
    )
    served = {}
    for index in rng.permutation(len(case.asked)):
        asked = case.asked[index]
        length = len(asked.prompt)
        options = {
            "keeps_reply": bool(rng.random() < 0.3),
            "is_background": bool(rng.random() < 0.3),
            "starts": tuple(map(int, rng.integers(0, length + 1, 2))),
            "marks": tuple(map(int, rng.integers(0, length + 1, int(rng.integers(3))))),
        }
        number = desk.submit(Asked(asked.prompt, asked.max_tokens, asked.sampling, options))
        served[number] = index
        desk.turn(int(rng.integers(4)))
        if rng.random() < 0.2:
            desk.scheduler.cancel(int(rng.choice(list(served))))
    desk.finish()
    for number, index in served.items():
        draws, wanted = desk.draws[number], case.alone[index]
        if desk.endings[number].reason == "cancelled":
            wanted = wanted[: len(draws)]
        assert draws == wanted, f"seed {seed}, request {number} ({index})"
    return desk


@pytest.mark.parametrize(
    "name, dtype, seeds",
    [
        ("moe", "float32", range(12)),
        ("odd", "float32", range(12, 15)),
        ("moe", "bfloat16", range(15, 18)),
        ("demo", "float32", range(18, 21)),
    ],
)
def test_random_schedules(name, dtype, seeds, cases):
    num_hits = num_cancelled = 0
    for seed in seeds:
        desk = serve(cases(name, dtype), seed)
        num_hits += desk.cache.counts.hits if desk.cache else 0
        num_cancelled += sum(one.reason == "cancelled" for one in desk.endings.values())
    # Else nothing of what is tested happened.
    assert num_hits and num_cancelled

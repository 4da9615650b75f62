"""Rounds of every make-up: a row's logits are those of its stream alone in one pass, to the bit, in
poisoned memory.
"""

from itertools import permutations, product

import numpy as np
import pytest

import oracle
from lfm2.runner import Runner
from lfm2.state import MAX_WINDOW, State
from scheduler.rounds import Round, Segment
from tests.build import NUM_SLOTS, NUM_TOKENS, build_runner, chunked, poison, run, segment
from tests.tiny import moe_config, odd_config, random_tensors, write_checkpoint

LENGTH = 64
NUM_STREAMS = 6
# An extent is longer than its stream, so that extents do not touch.
EXTENT = 100
KINDS = {"moe": moe_config(), "odd": odd_config()}


def stream(number: int) -> tuple[int, ...]:
    """The tokens of a stream, closed form."""
    return tuple((37 * i + 11 * number * i + 29 * number + 5) % 97 for i in range(LENGTH))


STREAMS = [stream(number) for number in range(NUM_STREAMS)]


class Case:
    """A model and the logits of its streams, each run alone in one pass."""

    def __init__(self, folder, steps, dtype: str, device: str = "CPU") -> None:
        self.runner = build_runner(folder, steps, dtype, device=device)
        self.alone = [chunked(self.runner, 0, 0, tokens, (LENGTH,)) for tokens in STREAMS]

    def fresh(self) -> Runner:
        """The runner as in a new process: whatever its state held is NaN."""
        poison(self.runner.state)
        return self.runner


def cases_on(device, steps, tmp_path_factory):
    """name, dtype -> Case on a device, made when first asked for."""
    made = {}

    def case(name: str = "moe", dtype: str = "float32") -> Case:
        if (name, dtype) not in made:
            folder = write_checkpoint(tmp_path_factory.mktemp(name), KINDS[name])
            made[name, dtype] = Case(folder, steps, dtype, device)
        return made[name, dtype]

    return case


@pytest.fixture(scope="module")
def cases(steps, tmp_path_factory):
    return cases_on("CPU", steps, tmp_path_factory)


def splits(length: int) -> list[tuple[int, ...]]:
    """Every way to cut so many tokens into chunks."""
    found = []
    for cuts in product((False, True), repeat=length - 1):
        ends = [i + 1 for i, is_cut in enumerate(cuts) if is_cut] + [length]
        found.append(tuple(np.diff([0, *ends]).tolist()))
    return found


@pytest.mark.parametrize(
    "name, dtype, sizes",
    [
        ("moe", "float32", splits(9)),
        ("moe", "bfloat16", [(1,) * 9, (1, 8), (1, 1, 7), (8, 1), (7, 1, 1)]),
        (
            "odd",
            "float32",
            [
                (1,) * 9,
                (3, 1, 3, 1, 1),
                (1, 4, 4),
                (4, 4, 1),
                (4, 1, 4),
                (3, 3, 3),
                (1, 1, 1, 3, 3),
            ],
        ),
    ],
)
def test_every_cut_of_a_prompt_gives_the_same_logits(name, dtype, sizes, cases):
    case = cases(name, dtype)
    for cut in sizes:
        rows = chunked(case.fresh(), 3, 500, STREAMS[1], cut)
        np.testing.assert_array_equal(rows, case.alone[1][:9], err_msg=f"chunks of {cut}")


def test_windows_of_every_width_give_the_logits_of_single_rows(cases):
    case = cases()
    for width in range(1, MAX_WINDOW + 1):
        tokens = STREAMS[2][: 10 + width]
        rows = chunked(case.fresh(), 1, 40, tokens, (8, 2, width))
        np.testing.assert_array_equal(
            rows, case.alone[2][: 10 + width], err_msg=f"window of {width}"
        )


def test_streams_of_any_length_start_in_one_round_and_go_on(cases):
    """Lengths below, at and above what the convolution looks back; nothing is padded to the
    longest.
    """
    case = cases()
    runner, lengths = case.fresh(), (1, 2, 6, 7)
    first = run(
        runner,
        *(segment(i, i * EXTENT, 0, STREAMS[i][:length]) for i, length in enumerate(lengths)),
    )
    for i, length in enumerate(lengths):
        np.testing.assert_array_equal(first[i], case.alone[i][:length])
    for step in range(3):
        rows = run(
            runner,
            *(
                segment(i, i * EXTENT, n + step, STREAMS[i][n + step : n + step + 1])
                for i, n in enumerate(lengths)
            ),
        )
        for i, length in enumerate(lengths):
            np.testing.assert_array_equal(rows[i][0], case.alone[i][length + step])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_order_slots_and_extents_do_not_matter(dtype, cases):
    """A chunk in the middle of a prompt, a decode step and a prompt's start, in every order; then
    all slots exchanged.
    """
    case = cases(dtype=dtype)
    for order in permutations((0, 1, 2)):
        for slots, extents in (((0, 1, 2), (0, 1, 2)), ((9, 4, 0), (3, 0, 8))):
            runner, bases = case.fresh(), [extent * EXTENT for extent in extents]
            for i in (0, 1):
                chunked(runner, slots[i], bases[i], STREAMS[i][:5], (5,))
            segments = [
                segment(slots[0], bases[0], 5, STREAMS[0][5:11]),
                segment(slots[1], bases[1], 5, STREAMS[1][5:6]),
                segment(slots[2], bases[2], 0, STREAMS[2][:4]),
            ]
            rows = dict(zip(order, run(runner, *(segments[i] for i in order))))
            np.testing.assert_array_equal(rows[0], case.alone[0][5:11])
            np.testing.assert_array_equal(rows[1], case.alone[1][5:6])
            np.testing.assert_array_equal(rows[2], case.alone[2][:4])


class Tenant:
    """A stream in a slot of a random schedule, and how far it got."""

    def __init__(self, slot: int, base: int, number: int) -> None:
        self.slot, self.base, self.number, self.position = slot, base, number, 0

    def next_segment(self, rng: np.random.Generator, is_all_drawn: bool) -> Segment:
        """One to four rows, now and then after a step back."""
        if rng.random() < 0.15:
            self.position -= int(rng.integers(min(self.position, MAX_WINDOW) + 1))
        start = self.position
        self.position = min(start + int(rng.integers(1, 5)), LENGTH)
        tokens = STREAMS[self.number][start : self.position]
        return segment(self.slot, self.base, start, tokens, len(tokens) if is_all_drawn else 1)


@pytest.mark.parametrize("dtype, seeds", [("float32", range(20)), ("bfloat16", range(20, 25))])
def test_random_schedules(dtype, seeds, cases):
    """Chunks and decode rows of four streams mixed, with steps back, streams that leave early and
    slots let again.
    """
    case = cases(dtype=dtype)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        runner, tenants = case.fresh(), {}
        slots, extents = rng.permutation(NUM_SLOTS)[:4], rng.permutation(NUM_TOKENS // EXTENT)[:4]
        for round_number in range(20):
            is_all_drawn = dtype == "bfloat16" or rng.random() < 0.5
            segments, expected = [], []
            for i in rng.permutation(4):
                if i not in tenants or tenants[i].position == LENGTH or rng.random() < 0.05:
                    tenants[i] = Tenant(
                        int(slots[i]), int(extents[i]) * EXTENT, int(rng.integers(NUM_STREAMS))
                    )
                made = tenants[i].next_segment(rng, is_all_drawn)
                end = tenants[i].position
                segments.append(made)
                expected.append(case.alone[tenants[i].number][end - made.num_drawn : end])
            for made, rows, wanted in zip(segments, run(runner, *segments), expected):
                np.testing.assert_array_equal(
                    rows, wanted, err_msg=f"seed {seed}, round {round_number}, {made}"
                )


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_slot_let_again_starts_afresh(num_rows, cases):
    """The former tenant left in the middle, or at its end; the new one begins with a few rows, or
    with one.
    """
    case = cases()
    for left_at in (1, 2, 9, LENGTH):
        runner = case.fresh()
        chunked(runner, 2, 300, STREAMS[0][:left_at], (left_at,))
        rows = chunked(runner, 2, 300, STREAMS[3][:9], (num_rows, 9 - num_rows))
        np.testing.assert_array_equal(rows, case.alone[3][:9])


def test_slots_drift_apart_from_the_order_of_streams(cases):
    """Streams 0, 1, 2 start; 0 leaves; 3 takes its slot, and another extent; all go on."""
    case = cases()
    runner = case.fresh()
    run(runner, *(segment(i, i * EXTENT, 0, STREAMS[i][:5]) for i in range(3)))
    first = run(
        runner, segment(1, EXTENT, 5, STREAMS[1][5:9]), segment(2, 2 * EXTENT, 5, STREAMS[2][5:6]),
        segment(0, 5 * EXTENT, 0, STREAMS[3][:4]),
    )  # fmt: skip
    np.testing.assert_array_equal(first[0], case.alone[1][5:9])
    np.testing.assert_array_equal(first[1], case.alone[2][5:6])
    np.testing.assert_array_equal(first[2], case.alone[3][:4])


@pytest.mark.parametrize("num_dropped", [1, 2, 3, 17, MAX_WINDOW])
def test_dropped_rows_leave_no_trace(num_dropped, cases):
    """Wrong tokens up to the widest window, then the right ones from the same position: one by one,
    and as a chunk.
    """
    case = cases()
    wrong = STREAMS[5][:num_dropped]
    for start in (1, 2, 8):
        for sizes in ((1, 1, 1, 1), (4,)):
            runner = case.fresh()
            chunked(runner, 1, 200, STREAMS[4][:start], (start,))
            run(runner, segment(1, 200, start, wrong))
            got = []
            position = start
            for size in sizes:
                got += run(
                    runner, segment(1, 200, position, STREAMS[4][position : position + size])
                )
                position += size
            np.testing.assert_array_equal(np.concatenate(got), case.alone[4][start:position])


def test_a_round_writes_its_own_rows_and_the_scratch_only(cases):
    """Five rows in a form of eight, from position 6 on: all other state keeps its bytes."""
    case = cases()
    runner = case.fresh()
    chunked(runner, 4, 350, STREAMS[0][:6], (6,))
    pools, rings = stored_bytes(runner.state)
    run(runner, segment(4, 350, 6, STREAMS[0][6:11]))
    new_pools, new_rings = stored_bytes(runner.state)
    for layer, pool in pools.items():
        changed = np.flatnonzero((pool != new_pools[layer]).any(axis=1))
        assert changed.tolist() == [*range(356, 361)], layer
    for layer, ring in rings.items():
        changed = np.argwhere((ring != new_rings[layer]).any(axis=2))
        assert changed.tolist() == [[4, position] for position in range(6, 11)], layer


def stored_bytes(state: State) -> tuple[dict, dict]:
    """The bits of all state but the scratch: pools (tokens, K D) and rings (slots, R, C)."""
    pools = {("keys", i): pool for i, pool in state.keys.items()} | {
        ("values", i): pool for i, pool in state.values.items()
    }
    return (
        {
            name: pool.numpy().view(np.uint32)[:NUM_TOKENS].reshape(NUM_TOKENS, -1).copy()
            for name, pool in pools.items()
        },
        {
            layer: ring.numpy().view(np.uint32)[:NUM_SLOTS].copy()
            for layer, ring in state.rings.items()
        },
    )


@pytest.mark.parametrize("name", ["moe", "odd"])
def test_rings_after_single_rows_are_those_after_chunks(name, cases):
    case = cases(name)
    chunked(case.fresh(), 0, 0, STREAMS[0][:16], (4,) * 4)
    _, expected = stored_bytes(case.runner.state)
    chunked(case.fresh(), 0, 0, STREAMS[0][:16], (1,) * 16)
    _, found = stored_bytes(case.runner.state)
    for layer, ring in expected.items():
        np.testing.assert_array_equal(found[layer], ring)
        assert np.isfinite(ring[0, :16].view(np.float32)).all()


def test_the_ring_holds_the_gated_input_of_each_position(cases):
    """u = B * x of the first layer, from the definition."""
    case = cases()
    chunked(case.fresh(), 0, 0, STREAMS[0][:16], (4,) + (1,) * 12)
    weights = random_tensors(KINDS["moe"])
    embedded = weights["model.embed_tokens.weight"][list(STREAMS[0][:16])].astype(np.float64)
    normed = oracle.rms_norm(embedded, weights["model.layers.0.operator_norm.weight"], 1e-5)
    b, _, x = np.split(normed @ weights["model.layers.0.conv.in_proj.weight"].T, 3, axis=1)
    np.testing.assert_allclose(
        case.runner.state.rings[0].numpy()[0, :16], b * x, rtol=1e-4, atol=1e-5
    )


def test_picks_and_flags_are_those_of_the_drawn_rows(cases):
    """The last row of one segment, none of the next, two of the third; spare rows of the form are
    not handed out.
    """
    case = cases()
    drawn = case.fresh().run(
        Round(
            (
                segment(0, 0, 0, STREAMS[0][:5], 1),
                segment(1, 100, 0, STREAMS[1][:4], 0),
                segment(2, 200, 0, STREAMS[2][:3], 2),
            )
        )
    )
    wanted = np.concatenate([case.alone[0][4:5], case.alone[2][1:3]])
    np.testing.assert_array_equal(drawn.logits(), wanted)
    assert drawn.tokens.tolist() == wanted.argmax(axis=1).tolist()
    assert drawn.is_finite.tolist() == [True] * 3

"""What rounds cost, and the chunks planned from it."""

import json
from dataclasses import replace

import pytest
from tinygrad import dtypes

from lfm2 import round_cost
from lfm2.config import Config
from lfm2.errors import LFM2Error, RequestError
from lfm2.loading import Room, check_serving, load
from lfm2.round_cost import gap_chunk, line_above, measure
from lfm2.runner import capacity_of, mixed_capacity
from lfm2.state import MAX_ROWS
from metal_ops.table import Capacity
from scheduler.chunks import RoundCost
from scheduler.rounds import Round, Segment
from tests.build import DEMO, build_runner
from tests.tiny import dense_config, write_checkpoint

GB = 10**9


@pytest.fixture
def runner(steps, tmp_path, tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("dense"), dense_config())
    runner = build_runner(folder, steps, capacities=(Capacity(MAX_ROWS, 16, 16),))
    # A folder of its own for what is kept: it must not be that of another test.
    runner.artifacts.folder = tmp_path
    return runner


def test_no_measured_time_is_above_the_line():
    for times in ({16: 2.0, 128: 3.0, 512: 20.0}, {16: 2.0, 128: 15.0, 512: 20.0}):
        cost = line_above(times)
        assert all(cost.seconds(rows) >= seconds - 1e-9 for rows, seconds in times.items())
        assert min(abs(cost.seconds(rows) - seconds) for rows, seconds in times.items()) < 1e-9
    assert line_above({16: 1.0, 512: 0.5}) == RoundCost(1.0, 0.0)
    assert line_above({16: 1.0, 512: 62.0}).fixed_s == 0.0
    assert line_above({16: 2.0}) == RoundCost(2.0, 0.0)


def test_the_cost_is_measured_once(runner, monkeypatch):
    cost = round_cost.round_cost(runner)
    assert cost.seconds(MAX_ROWS) > 0
    (note,) = runner.artifacts.folder.glob("*.note")
    monkeypatch.setattr(round_cost, "measure", None)
    assert round_cost.round_cost(runner) == cost
    monkeypatch.undo()
    for damaged in ("", "{}", "[]", '{"fixed_s": "a", "row_s": 1}'):
        note.write_text(damaged)
        assert round_cost.round_cost(runner).seconds(MAX_ROWS) > 0
        assert json.loads(note.read_text())["row_s"] >= 0
    runner.artifacts.folder = None
    assert round_cost.round_cost(runner).seconds(MAX_ROWS) > 0


def test_rounds_of_every_size_are_timed(runner, monkeypatch):
    """A chunk and a row of each other stream, at the deepest positions that there are."""
    rounds, run = [], runner.run
    monkeypatch.setattr(runner, "run", lambda round: rounds.append(round) or run(round))
    assert set(measure(runner)) == {16, 128, 512}
    for round in rounds:
        assert round.num_rows in (16, 128, 512)
        assert len(round.segments) == (8 if round.num_rows == 16 else 10)
        assert len({segment.slot for segment in round.segments}) == len(round.segments)
        assert round.segments[0].start + len(round.segments[0].tokens) <= 1024


def test_no_round_is_timed_that_the_context_has_no_room_for(runner, monkeypatch):
    """As with the larger rounds of a GPU and a short context."""
    runner.state = replace(runner.state, max_rows=4096)
    rounds = []
    monkeypatch.setattr(runner, "run", rounds.append)
    assert set(measure(runner)) == {16, 128, 1024}
    for round in rounds:
        chunk = round.segments[0]
        assert round.num_rows in (16, 128, 1024) and chunk.start + len(chunk.tokens) <= 1024
    runner.model.context = 9
    assert set(measure(runner)) == {16}


def test_chunks_are_planned_from_the_gap(runner, monkeypatch):
    monkeypatch.setattr(round_cost, "round_cost", lambda _: RoundCost(0.010, 0.001))
    warned = []
    assert gap_chunk(runner, 4, 80, warned.append) == 64 - 4
    assert gap_chunk(runner, 4, 10_000, warned.append) == 512 - 4
    assert not warned
    assert gap_chunk(runner, 4, 20, warned.append) == 16 - 4
    assert warned == ["a gap of 20 ms is too short here: the smallest takes 26 ms"]


def test_few_forms_serve_all_rounds():
    """Single rows and single segments have forms of their own size, all else one for each size."""

    def capacity(*lengths, num_drawn=1):
        segments = [Segment(i, 0, 0, (1,) * rows, num_drawn) for i, rows in enumerate(lengths)]
        return capacity_of(Round(tuple(segments)), 6)

    assert capacity(1) == Capacity(1, 1, 1) and capacity(17) == Capacity(32, 1, 1)
    assert capacity(1, 1, 1) == Capacity(4, 4, 4)
    assert capacity(2, 1) == capacity(9, 1, 1, 1) == mixed_capacity(2, 6) == Capacity(16, 8, 8)
    assert capacity(20, 1, 1) == Capacity(32, 8, 8)
    assert capacity(4, 4, 4, num_drawn=4) == Capacity(16, 8, 16)


@pytest.fixture
def room(monkeypatch):
    """Makes the room for the built-in model in a machine with so much memory."""

    def room(memory_bytes: int, streams: int, cache_bytes: int = 0, device: str = "CPU") -> Room:
        monkeypatch.setattr("lfm2.loading.machine_memory_bytes", lambda: memory_bytes)
        config = Config.from_folder(DEMO)
        return Room(DEMO, config, dtypes.bfloat16, device, streams, cache_bytes)

    return room


def test_memory_that_is_not_there_is_refused(room):
    """Weights of 10 MB, 1,536 bytes a token, rings of 131 kB a stream."""
    small = room(200_000_000, 4, 10_000_000)
    small.check(100_000)
    with pytest.raises(LFM2Error, match="0.18[0-9] GB are needed and 0.18 GB can be had") as error:
        small.check(105_000)
    assert "weights 0.0101, 4 streams of 105000 tokens together 0.16" in str(error.value)
    room(1000, 4, device="CUDA").check(10**9)


def test_several_streams_share_a_quarter_of_the_memory(room):
    assert room(16 * GB, 1).default_tokens(32768) == 32768
    assert room(16 * GB, 8).default_tokens(32768) == 8 * 32768
    assert room(GB, 8).default_tokens(32768) == GB // 4 // 1536
    assert room(GB // 100, 8).default_tokens(32768) == 32768
    assert room(1000, 8, device="CUDA").default_tokens(100) == 800


def test_what_is_asked_for_is_refused_before_work(monkeypatch):
    monkeypatch.setattr("lfm2.loading.load_weights", None)
    monkeypatch.setattr("lfm2.loading.machine_memory_bytes", lambda: GB)
    for options in ({"streams": 10_000}, {"pool_tokens": 10**6}):
        with pytest.raises(LFM2Error, match="GB are needed and 0.9 GB can be had"):
            load(device="CPU", **options)


@pytest.mark.parametrize(
    "given, words",
    [
        ((0, None, None, 0), "streams is 0"),
        ((1, 0, None, 0), "pool_tokens is 0"),
        ((1, None, 0, 0), "max_gap_ms is 0"),
        ((1, None, "soon", 0), "max_gap_ms is 'soon'"),
        ((1, None, float("nan"), 0), "max_gap_ms is nan"),
        ((1, None, None, -1), "prompt_cache_bytes is -1"),
    ],
)
def test_numbers_that_make_no_sense(given, words):
    with pytest.raises(RequestError, match=words):
        check_serving(*given)


def test_a_small_pool_is_the_context(steps):
    model = load(device="CPU", context=300, pool_tokens=200, streams=2, cache=steps)
    with pytest.raises(RequestError, match="do not fit a context of 200"):
        model.stream("Hi", max_tokens=250)

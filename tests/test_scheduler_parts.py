"""The parts of the scheduler one by one: allocators, cuts, turns, the queue."""

import random

import pytest

from scheduler.chunks import Plan, RoundCost, chunk_end, keys_at, planned_chunk, spaced
from scheduler.options import Options
from scheduler.request import Request, RequestRefused
from scheduler.runner import Drawn
from scheduler.slots import Extent, Extents, Slots
from scheduler.stream import Stream
from scheduler.turns import accept, chunk_order, is_mixed, next_chunks, next_windows
from scheduler.waiting import Waiting, WaitingQueue
from tests.fake_runner import tokens

OPTIONS = Options(
    num_slots=8, num_tokens=500, chunk=8, max_rows=40, round_rows=8, min_gap=1, max_window=4
)


def stream(number: int, length: int = 20, held: int = 0, made: int = 0, **fields) -> Stream:
    """A stream of a prompt of `length` tokens, of which `held` are done; `made` of the reply."""
    request = Request(tokens(number, length), max_tokens=30)
    plan = Plan.of(request, OPTIONS.chunk, OPTIONS.min_gap)
    extent = Extent(60 * number, 60)
    made_stream = Stream(number, request, plan, number, extent, submitted_s=0, admitted_s=0)
    made_stream.tokens += [1] * made
    made_stream.held = length + made - 1 if made else held
    for name, value in fields.items():
        setattr(made_stream, name, value)
    return made_stream


def numbers(windows) -> list[int]:
    return [window.stream.number for window in windows]


def test_slots_are_taken_lowest_first_and_given_back_once():
    slots = Slots(2)
    assert (slots.take(), slots.take(), slots.take()) == (0, 1, None)
    slots.give_back(0)
    assert slots.take() == 0
    slots.give_back(1)
    for wrong in (1, 2):
        with pytest.raises(ValueError, match=f"slot {wrong} of 2 is not taken"):
            slots.give_back(wrong)
    slots.give_back(0)
    assert slots.is_whole


def test_extents_never_overlap_and_join_again():
    rng = random.Random(3)
    extents, taken = Extents(100), []
    for _ in range(3000):
        if rng.random() < 0.55:
            extent = extents.take(rng.randint(1, 30))
            if extent is not None:
                taken.append(extent)
        elif taken:
            extents.give_back(taken.pop(rng.randrange(len(taken))))
        cells = [cell for extent in taken for cell in range(extent.base, extent.end)]
        assert len(set(cells)) == len(cells) and all(0 <= cell < 100 for cell in cells)
    assert not extents.is_whole
    for extent in taken:
        extents.give_back(extent)
    assert extents.is_whole
    assert extents.take(100) == Extent(0, 100)


def test_an_extent_is_not_given_back_twice():
    extents = Extents(10)
    extents.take(4)
    for wrong in (Extent(4, 1), Extent(3, 2), Extent(0, 5)):
        with pytest.raises(ValueError, match="is not taken"):
            extents.give_back(wrong)


@pytest.mark.parametrize(
    "at, starts, marks, end",
    [
        (0, (), (), 8),
        (16, (), (), 20),
        (0, (5, 7), (), 5),
        (5, (5, 7), (), 7),
        (0, (5,), (3,), 3),
        (8, (5,), (3, 30), 16),
    ],
)
def test_a_chunk_ends_where_the_first_of_its_limits_is(at, starts, marks, end):
    assert chunk_end(at, 20, 8, starts, marks) == end


def test_a_plan_has_the_cuts_of_a_walk_along_the_prompt():
    request = Request(tokens(1, 30), 4, starts=(17, 5), marks=(11, 30, 99))
    plan = Plan.of(request, 8, min_gap=1)
    assert plan.cuts == (0, 5, 11, 17, 25)
    assert [plan.end(cut) for cut in plan.cuts] == [5, 11, 17, 25, 30]
    assert list(plan.keys) == [5, 11, 17, 25, 30]


def test_a_key_stands_for_all_tokens_before_it():
    ours, theirs = tokens(1, 30), (*tokens(1, 12), 3, *tokens(1, 30)[13:])
    assert keys_at(ours, [4, 12])[12] == keys_at(theirs, [12])[12]
    assert keys_at(ours, [20])[20] != keys_at(theirs, [20])[20]
    assert keys_at((1, 2), [2])[2] != keys_at((2, 1), [2])[2]


def test_planned_starts_close_to_the_one_before_are_skipped():
    assert spaced([300, 100, 255, 256, 600, 511], min_gap=256) == [256, 600]


def test_the_chunk_is_the_largest_that_keeps_the_gap():
    cost = RoundCost(fixed_s=0.010, row_s=0.001)
    # 128 rows take 138 ms, 256 rows 266 ms; 8 streams decode beside the chunk.
    assert planned_chunk(0.200, cost, num_streams=8, max_rows=512) == 120
    assert planned_chunk(0.266, cost, num_streams=8, max_rows=512) == 248
    assert planned_chunk(60.0, cost, num_streams=8, max_rows=512) == 504
    for max_gap_s in (0.05, 0.2, 0.5):
        chunk = planned_chunk(max_gap_s, cost, num_streams=8, max_rows=512)
        assert cost.seconds(chunk + 8) <= max_gap_s


def test_a_gap_that_no_round_keeps_still_gives_a_chunk():
    cost = RoundCost(fixed_s=1.0, row_s=0.1)
    assert planned_chunk(0.001, cost, num_streams=32, max_rows=512) == 8
    assert planned_chunk(0.001, cost, num_streams=4, max_rows=1) == 1


def test_the_shortest_rest_goes_first_and_then_who_came_first():
    filling = [stream(1, 40), stream(2, 20, held=8), stream(3, 12)]
    assert [s.number for s in chunk_order(filling, 8)] == [2, 3, 1]


def test_a_prompt_passed_over_eight_times_goes_first():
    filling = [stream(1, 40, passed_over=7), stream(2, 12)]
    assert numbers(next_chunks(filling, OPTIONS)) == [2]
    filling = [stream(1, 40, passed_over=8), stream(2, 12), stream(3, 40, passed_over=9)]
    assert [s.number for s in chunk_order(filling, 8)] == [3, 1, 2]


def test_short_prompts_share_a_chunk_as_long_as_they_fit():
    filling = [stream(1, 3), stream(2, 2), stream(3, 4), stream(4, 5)]
    chunks = next_chunks(filling, OPTIONS)
    # 2 + 3 rows; the 4 of the third would make 9 of 8.
    assert numbers(chunks) == [2, 1]
    assert [chunk.segment.num_drawn for chunk in chunks] == [1, 1]


def test_a_prompt_whose_round_failed_is_alone_in_its_next():
    first, last = stream(1, 2, is_alone=True), stream(3, 4, is_alone=True)
    assert numbers(next_chunks([first, stream(2, 3)], OPTIONS)) == [1]
    assert numbers(next_chunks([stream(2, 3), last], OPTIONS)) == [2]
    assert not is_mixed(next_chunks([first], OPTIONS), OPTIONS)


def test_only_the_last_row_of_a_prompt_is_drawn():
    (first,) = next_chunks([stream(1, 20)], OPTIONS)
    (last,) = next_chunks([stream(1, 20, held=16)], OPTIONS)
    assert (first.segment.start, first.num_rows, first.segment.num_drawn) == (0, 8, 0)
    assert (last.segment.start, last.num_rows, last.segment.num_drawn) == (16, 4, 1)


def test_the_least_recently_served_are_taken_first():
    served = {1: 5, 2: 3, 3: 0, 4: 4}
    decoding = [stream(n, made=2, last_served=turn) for n, turn in served.items()]
    options = Options(num_slots=8, num_tokens=500, chunk=8, max_rows=40, round_streams=3)
    assert numbers(next_windows(decoding, options)) == [3, 2, 4]


def test_the_first_window_that_does_not_fit_closes_the_round():
    decoding = [stream(n, made=2) for n in (1, 2, 3, 4)]
    wanted = {1: 3, 2: 2, 3: 3, 4: 0}

    def draft(stream, limit):
        return [9] * wanted[stream.number]

    # 4 + 3 rows of 8; the third wants 4, and the fourth, of one row, does not go before it.
    assert numbers(next_windows(decoding, OPTIONS, draft)) == [1, 2]


def test_a_window_is_the_pending_token_and_drafts_that_can_still_matter():
    near_end = stream(1, made=28)
    (window,) = next_windows([near_end], OPTIONS, lambda stream, limit: [7] * 9)
    assert window.segment.tokens == (near_end.tokens[-1], 7)
    assert (window.segment.start, window.segment.num_drawn) == (20 + 27, 2)
    (window,) = next_windows([stream(1, made=2)], OPTIONS, lambda stream, limit: [7] * 9)
    assert window.num_rows == OPTIONS.max_window


def test_chunks_and_streams_share_a_round_that_has_room_for_both():
    chunks = next_chunks([stream(1, 20)], OPTIONS)
    sizes = dict(num_slots=8, num_tokens=500, chunk=8, round_rows=8)
    assert is_mixed(chunks, Options(max_rows=16, **sizes))
    assert not is_mixed(chunks, Options(max_rows=15, **sizes))
    assert not is_mixed(chunks, Options(max_rows=16, is_mixing=False, **sizes))


@pytest.mark.parametrize(
    "drafts, drawn, accepted",
    [
        ((), (5,), [5]),
        ((5, 6), (5, 6, 7), [5, 6, 7]),
        ((5, 6), (5, 9, 7), [5, 9]),
        ((5, 6), (4, 6, 7), [4]),
    ],
)
def test_drafts_stand_up_to_the_first_that_is_not_drawn(drafts, drawn, accepted):
    assert [d.token for d in accept(drafts, [Drawn(token) for token in drawn])] == accepted


def waiting(number: int, is_background: bool) -> Waiting:
    request = Request((1, 2), 3, is_background=is_background)
    return Waiting(number, request, Plan.of(request, 8, 1), submitted_s=0)


def test_foreground_goes_before_background_each_as_it_came():
    queue = WaitingQueue(patience=64)
    for number, is_background in ((1, True), (2, False), (3, True), (4, False)):
        queue.add(waiting(number, is_background))
    assert [w.number for w in queue] == [2, 4, 1, 3]


def test_background_is_next_once_enough_went_before_it():
    queue = WaitingQueue(patience=3)
    queue.add(waiting(1, True))
    queue.add(waiting(2, True))
    order = []
    for number in range(3, 11):
        queue.add(waiting(number, False))
        first = next(iter(queue))
        queue.take(first)
        order.append(first.number)
    assert order == [3, 4, 5, 1, 6, 7, 8, 2]


@pytest.mark.parametrize("prompt, max_tokens, text", [((), 1, "no tokens"), ((1,), 0, "is 0")])
def test_a_request_for_nothing_is_refused(prompt, max_tokens, text):
    with pytest.raises(RequestRefused, match=text):
        Request(prompt, max_tokens)


@pytest.mark.parametrize("wrong", [{"chunk": 41}, {"round_rows": 41}, {"num_slots": 0}])
def test_sizes_that_do_not_go_together_are_refused(wrong):
    sizes = dict(num_slots=8, num_tokens=500, chunk=8, max_rows=40)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Options(**(sizes | wrong))

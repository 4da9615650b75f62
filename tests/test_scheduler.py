"""The loop, rule by rule, on a fake runner whose tokens depend on all that was fed."""

import threading

import pytest

from scheduler.chunks import RoundCost, planned_chunk
from scheduler.request import RequestRefused
from tests.fake_runner import BAD_CHUNK, BAD_LOGIT, RoundFailed, tokens
from tests.served import Served

MIXING = pytest.mark.parametrize("is_mixing", [False, True])


def check_replies(served: Served, prompts: dict, max_tokens: int = 4, **options) -> None:
    """Every reply is that of the prompt alone."""
    for number, prompt in prompts.items():
        assert served.reply(number) == served.expected(prompt, max_tokens, **options), number


def decoding(served: Served, *prompts, max_tokens: int = 40) -> list[int]:
    """Streams that decode by now."""
    started = [served.submit(prompt, max_tokens) for prompt in prompts]
    while any(not served.reply(number) for number in started):
        served.step()
    return started


@MIXING
def test_cuts_and_replies_are_those_of_the_whole_pass_whatever_else_runs(is_mixing):
    served = Served(is_mixing=is_mixing, is_cut_sensitive=True)
    decoding(served, tokens(1, 3), tokens(2, 5))
    prompts = {
        served.submit(tokens(n, length)): tokens(n, length) for n, length in ((3, 30), (4, 17))
    }
    served.finish()
    check_replies(served, prompts)
    long, short = prompts
    assert served.chunks(long, 30) == [(0, 8), (8, 8), (16, 8), (24, 6)]
    assert served.chunks(short, 17) == [(0, 8), (8, 8), (16, 1)]
    served.check_whole()


def test_a_round_runs_between_two_chunks():
    served = Served(is_mixing=False)
    (talking,) = decoding(served, tokens(1, 3))
    filling = served.submit(tokens(2, 24))
    before = len(served.runner.rounds)
    served.step(3)
    kinds = [[number for number, _, _ in round] for round in served.runner.rounds[before:]]
    assert kinds == [[filling], [talking], [filling], [talking], [filling], [talking, filling]]


def test_a_chunk_and_the_decoding_streams_share_a_round():
    served = Served()
    talking = decoding(served, tokens(1, 3), tokens(2, 3))
    filling = served.submit(tokens(3, 24))
    before = len(served.runner.rounds)
    served.step(3)
    rounds = served.runner.rounds[before:]
    assert [[number for number, _, _ in round] for round in rounds] == [[filling, *talking]] * 3


def test_a_chunk_leaves_out_nobody_who_decodes():
    served = Served()
    talking = decoding(served, tokens(1, 3), tokens(2, 3), tokens(3, 3))
    made = [len(served.reply(number)) for number in talking]
    served.submit(tokens(4, 40))
    served.step(5)
    assert [len(served.reply(number)) for number in talking] == [count + 5 for count in made]


def worst_gap(chunk: int, cost: RoundCost, **sizes) -> float:
    """The longest time between two tokens of 4 streams while 2,048 tokens of a prompt fill."""
    served = Served(num_tokens=9000, num_slots=5, chunk=chunk, round_rows=4, **sizes)
    talking = decoding(served, *(tokens(n, 3) for n in range(4)), max_tokens=90)
    times = {number: [0.0] for number in talking}
    inner, now = served.runner.run, 0.0

    def run(windows):
        nonlocal now
        num_rows = sum(window.num_rows for window in windows)
        now += cost.seconds(1 << (num_rows - 1).bit_length())
        for window in windows:
            times.get(window.stream.number, []).append(now)
        return inner(windows)

    served.runner.run = run
    served.submit(tokens(5, 2048), 1)
    served.finish()
    return max(later - now for each in times.values() for now, later in zip(each, each[1:]))


def test_the_worst_gap_is_that_which_the_chunk_was_planned_for():
    cost = RoundCost(fixed_s=0.020, row_s=0.002)
    chunk = planned_chunk(0.300, cost, num_streams=4, max_rows=512)
    mixed = worst_gap(chunk, cost, max_rows=512)
    apart = worst_gap(chunk, cost, max_rows=512, is_mixing=False)
    whole = worst_gap(2048, cost, max_rows=4096)
    assert mixed <= 0.300 < whole / 5
    assert apart == pytest.approx(cost.seconds(128) + cost.seconds(4))


@MIXING
@pytest.mark.parametrize("at", [0, 10, 19])
def test_a_chunk_that_fails_fails_its_request_only(is_mixing, at):
    served = Served(is_mixing=is_mixing)
    others = {number: tokens(n, 3) for n, number in enumerate(decoding(served, tokens(0, 3)))}
    bad = served.submit((*tokens(1, at), BAD_CHUNK, *tokens(1, 19 - at)))
    others |= {served.submit(tokens(n, 3), 40): tokens(n, 3) for n in (2, 3)}
    served.finish()
    check_replies(served, others, max_tokens=40)
    assert served.ending(bad).reason == "error" and not served.reply(bad)
    assert isinstance(served.ending(bad).error, RoundFailed)
    served.check_whole()


def test_short_prompts_that_shared_a_failed_round_run_again_by_themselves():
    served = Served(is_cut_sensitive=True)
    bad = served.submit((4, BAD_CHUNK))
    good = {served.submit(tokens(n, 2)): tokens(n, 2) for n in (1, 2)}
    served.finish()
    assert len(served.runner.rounds[0]) == 3
    check_replies(served, good)
    assert served.ending(bad).reason == "error"


def test_a_round_of_decoding_streams_that_fails_fails_them_with_its_error():
    served = Served()
    first, second = decoding(served, tokens(1, 3), tokens(2, 3))
    run, served.runner.run = served.runner.run, None
    served.step()
    served.runner.run = run
    for number in (first, second):
        assert isinstance(served.ending(number).error, TypeError)
    later = served.submit(tokens(3, 9))
    served.finish()
    check_replies(served, {later: tokens(3, 9)})
    served.check_whole()


def test_a_logit_that_is_not_finite_ends_its_own_stream():
    served = Served()
    (talking,) = decoding(served, tokens(1, 3))
    bad = served.submit((1, 2, BAD_LOGIT))
    served.finish()
    check_replies(served, {talking: tokens(1, 3)}, max_tokens=40)
    assert isinstance(served.ending(bad).error, ArithmeticError)


@pytest.mark.parametrize("when", [0, 2])
def test_cancel_between_chunks_ends_prompt_work_and_keeps_what_is_done(when):
    served = Served(budget=10_000, is_cut_sensitive=True)
    prompt = tokens(1, 30)
    number = served.submit(prompt)
    served.step(when)
    served.scheduler.cancel(number)
    served.finish()
    assert served.ending(number).reason == "cancelled"
    assert served.chunks(number, 30) == [(0, 8), (8, 8)][:when]
    assert served.runner.left == [0] * (when > 0)
    assert served.scheduler.is_whole
    again = served.submit(prompt)
    served.finish()
    check_replies(served, {again: prompt})
    assert served.chunks(again, 30)[0] == (8 * when, 8)
    assert served.num_cached(again) == 8 * when
    served.check_whole()


def test_cancel_during_the_last_chunk_draws_nothing():
    for is_mixing in (False, True):
        served = Served(is_mixing=is_mixing)
        number = served.submit(tokens(1, 12))
        served.step()
        inner = served.runner.prefill_step

        def prefill_step(chunks):
            served.scheduler.cancel(number)
            return inner(chunks)

        served.runner.prefill_step = prefill_step
        served.finish()
        assert served.reply(number) == [] and len(served.rows(number)) == 2
        assert served.ending(number).reason == "cancelled"
        served.check_whole()


def test_cancel_during_a_round_delivers_nothing_of_it():
    served = Served()
    (number,) = decoding(served, tokens(1, 3))
    inner = served.runner.run

    def run(windows):
        served.scheduler.cancel(number)
        return inner(windows)

    served.runner.run = run
    served.finish()
    assert len(served.reply(number)) == 1
    assert served.ending(number).reason == "cancelled"


def test_cancel_of_a_decoding_stream_keeps_the_tokens_so_far():
    served = Served()
    (number,) = decoding(served, tokens(1, 3))
    served.step(3)
    served.scheduler.cancel(number)
    served.finish()
    assert served.reply(number) == served.expected(tokens(1, 3), 40)[:4]
    served.scheduler.cancel(number)
    served.step()
    assert served.ending(number).reason == "cancelled"


def test_who_takes_over_a_slot_in_mid_pass_starts_anew():
    served = Served(num_slots=1)
    first = served.submit(tokens(1, 30))
    second = served.submit(tokens(2, 1))
    served.step(2)
    served.scheduler.cancel(first)
    served.finish()
    assert served.rows(second)[0] == (0, 1)
    check_replies(served, {second: tokens(2, 1)})


def test_slots_and_extents_change_hands_in_any_order():
    served = Served(num_slots=3, num_tokens=60)
    first = {served.submit(tokens(n, 6), count): (n, count) for n, count in enumerate((2, 9, 9))}
    served.step(4)
    later = {served.submit(tokens(n, 5), 12): (n, 12) for n in range(3, 9)}
    served.finish()
    for number, (n, count) in (first | later).items():
        length = 6 if number in first else 5
        assert served.reply(number) == served.expected(tokens(n, length), count)
    served.check_whole()


def test_everyone_is_served_in_turn_when_a_round_has_not_room_for_all():
    served = Served(round_rows=3, round_streams=3)
    talking = decoding(served, *(tokens(n, 2) for n in range(4)))
    before = len(served.runner.rounds)
    served.step(8)
    served_in = [number for round in served.runner.rounds[before:] for number, _, _ in round]
    assert [served_in.count(number) for number in talking] == [6] * 4
    orders = [[number for number, _, _ in round] for round in served.runner.rounds[before:]]
    assert all(order == sorted(order) for order in orders)


def test_a_long_prompt_is_not_starved_by_short_ones():
    served = Served(num_slots=2)
    long = served.submit(tokens(1, 32), 1)
    for turn in range(40):
        served.submit(tokens(turn + 2, 8), 1)
        served.step()
        if served.reply(long):
            break
    chunks = served.chunks(long, 32)
    assert len(chunks) == 4 and turn < 4 * 9
    assert served.reply(long) == served.expected(tokens(1, 32), 1)


def test_a_large_request_is_not_starved_by_small_ones_that_would_fit():
    served = Served(num_tokens=60)
    (talking,) = decoding(served, tokens(1, 2), max_tokens=30)
    large = served.submit(tokens(2, 30), 20)
    small = [served.submit(tokens(n, 2), 2) for n in range(3, 9)]
    while len(served.reply(talking)) < 30:
        assert not any(served.rows(number) for number in (large, *small))
        served.step()
    served.step()
    assert served.rows(large) or served.scheduler.fill_progress(large)
    served.finish()
    assert all(served.ending(number).reason == "length" for number in (large, *small))


def test_foreground_goes_first_and_background_is_not_forgotten():
    served = Served(num_slots=1, background_patience=3)
    first = served.submit(tokens(0, 2), 1)
    back = served.submit(tokens(1, 2), 1, is_background=True)
    fronts = [served.submit(tokens(n, 2), 1) for n in range(2, 8)]
    served.finish()
    order = [event.number for event in served.events if hasattr(event, "num_cached")]
    assert order == [first, *fronts[:2], back, *fronts[2:]]


def test_memory_is_asked_for_only_beside_others():
    asked = []

    def fits(num_prompt, max_tokens):
        asked.append((num_prompt, max_tokens))
        return False

    served = Served(fits=fits)
    prompts = {served.submit(tokens(n, 5), 3): tokens(n, 5) for n in (1, 2)}
    served.step()
    assert asked == [(5, 3)]
    assert served.scheduler.counts().queued == 1
    served.finish()
    check_replies(served, prompts, max_tokens=3)


def test_a_request_that_never_fits_is_refused_with_the_numbers():
    served = Served(num_tokens=40)
    served.submit(tokens(1, 30), 10)
    with pytest.raises(RequestRefused, match="30 tokens and a reply of 11 .* 41; .* room for 40"):
        served.submit(tokens(1, 30), 11)


def test_a_reply_ends_at_a_stop_token_or_where_its_text_does():
    served = Served()
    whole = served.expected(tokens(1, 3), 10)
    heard = []

    def ends(token):
        heard.append(token)
        return len(heard) == 5

    by_token = served.submit(tokens(1, 3), 10, stop_tokens=frozenset([whole[6]]))
    by_text = served.submit(tokens(1, 3), 10, ends=ends)
    by_count = served.submit(tokens(1, 3), 10)
    served.finish()
    assert served.reply(by_token) == whole[: whole.index(whole[6]) + 1]
    assert served.reply(by_text) == whole[:5] == heard
    assert served.reply(by_count) == whole
    reasons = [served.ending(number).reason for number in (by_token, by_text, by_count)]
    assert reasons == ["stop", "stop", "length"]


def test_a_request_whose_text_cannot_be_made_fails_alone():
    served = Served()
    other = served.submit(tokens(1, 3))
    bad = served.submit(tokens(2, 3), ends=lambda token: 1 / 0)
    served.finish()
    assert isinstance(served.ending(bad).error, ZeroDivisionError)
    check_replies(served, {other: tokens(1, 3)})
    served.check_whole()


@pytest.mark.parametrize("period", [1, 3, 0])
def test_drafts_change_the_number_of_rounds_and_not_the_reply(period):
    """Always right, right one time in three, always wrong."""
    expected = {}

    def draft(stream, limit):
        ahead = expected[stream.number][stream.num_made :][:limit]
        first = stream.num_made
        is_right = [period > 0 and (first + i) % period == 0 for i in range(len(ahead))]
        return [token if right else token + 1 for token, right in zip(ahead, is_right)]

    served = Served(draft=draft, max_window=4)
    for n in (1, 2):
        expected[served.submit(tokens(n, 11), 24, sampling=n)] = None
    for n, number in enumerate(expected, start=1):
        expected[number] = served.expected(tokens(n, 11), 24, sampling=n)
    served.finish()
    for number, reply in expected.items():
        stats = served.ending(number).stats
        assert served.reply(number) == reply
        assert stats.num_rounds + stats.num_accepted == 23
        assert stats.num_rounds == {1: 6, 0: 23}.get(period, stats.num_rounds)
    served.check_whole()


def test_a_stop_inside_a_window_drops_what_was_accepted_after_it():
    served = Served(max_window=4)
    whole = served.expected(tokens(1, 3), 20)
    served = Served(max_window=4, draft=lambda stream, limit: whole[stream.num_made :][:limit])
    stop = whole[5]
    number = served.submit(tokens(1, 3), 20, stop_tokens=frozenset([stop]))
    served.finish()
    assert served.reply(number) == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("interrupted", [1, 2, 3, 4, 5])
def test_an_interrupt_costs_a_round_and_no_token(interrupted):
    served = Served(is_cut_sensitive=True)
    served.runner.interrupted = {interrupted}
    prompts = {
        served.submit(tokens(n, length)): tokens(n, length) for n, length in ((1, 20), (2, 3))
    }
    with pytest.raises(KeyboardInterrupt):
        served.finish()
    served.finish()
    check_replies(served, prompts)
    served.check_whole()


def test_an_interrupt_between_two_commits_loses_no_prompt():
    served = Served(is_cut_sensitive=True)
    calls = []

    def ends(token):
        calls.append(token)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return False

    first = served.submit(tokens(1, 3), ends=ends)
    others = {
        served.submit(tokens(n, length)): tokens(n, length) for n, length in ((2, 5), (3, 20))
    }
    with pytest.raises(KeyboardInterrupt):
        served.finish()
    served.finish()
    check_replies(served, others | {first: tokens(1, 3)})
    served.check_whole()


def test_a_runner_that_answers_for_too_few_fails_the_round():
    served = Served()
    first, second = decoding(served, tokens(1, 3), tokens(2, 3))
    inner, served.runner.run = served.runner.run, lambda windows: inner(windows)[:1]
    served.finish()
    assert {served.ending(number).reason for number in (first, second)} == {"error"}
    served.check_whole()


def test_progress_and_counts_tell_how_far_everything_is():
    served = Served(num_slots=1)
    first, second = served.submit(tokens(1, 20)), served.submit(tokens(2, 3))
    assert served.scheduler.fill_progress(first) is None
    served.step()
    progress = served.scheduler.fill_progress(first)
    assert (progress.done, progress.total) == (8, 20)
    counts = served.scheduler.counts()
    assert (counts.queued, counts.filling, counts.decoding) == (1, 1, 0)
    served.step(2)
    assert served.scheduler.fill_progress(first).done == 20
    assert served.scheduler.counts().decoding == 1
    served.finish()
    assert served.scheduler.fill_progress(first) is None
    stats = served.ending(second).stats
    assert (stats.num_prompt, stats.num_cached, stats.num_tokens, stats.num_rounds) == (3, 0, 4, 3)


def test_two_threads_cannot_step_at_once():
    served = Served()
    served.submit(tokens(1, 3))
    inner, errors = served.runner.prefill_step, []

    def prefill_step(chunks):
        def other():
            try:
                served.scheduler.step()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return inner(chunks)

    served.runner.prefill_step = prefill_step
    served.finish()
    assert len(errors) == 1 and "one thread owns" in str(errors[0])


def test_requests_and_cancels_from_many_threads_are_all_answered():
    served = Served(num_slots=3, num_tokens=90, budget=3000)
    numbers: dict[int, tuple] = {}
    is_done = threading.Event()

    def ask(thread: int) -> None:
        for turn in range(60):
            prompt = tokens(thread, 3 + turn % 12)
            number = served.submit(prompt)
            numbers[number] = prompt
            if turn % 5 == 0:
                served.scheduler.cancel(number)

    owner = threading.Thread(
        target=served.scheduler.serve, args=(served.events.append, is_done.is_set)
    )
    owner.start()
    askers = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    while not served.scheduler.is_idle:
        is_done.wait(0.01)
    is_done.set()
    owner.join()
    assert len(numbers) == 240
    for number, prompt in numbers.items():
        if served.ending(number).reason == "length":
            assert served.reply(number) == served.expected(prompt)
    served.check_whole()

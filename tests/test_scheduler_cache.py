"""Kept states: what is resumed, where states are kept, and which one goes when room is short."""

import pytest

from tests.fake_runner import tokens
from tests.served import SIZE, Served

TRUNK = tokens(1, 20)


def serve(served: Served, prompt, max_tokens: int = 4, **options) -> int:
    """Serves one request to its end and checks its reply; how many tokens it had from a state."""
    number = served.submit(prompt, max_tokens, **options)
    served.finish()
    assert served.reply(number) == served.expected(prompt, max_tokens, **options)
    chunks = served.chunks(number, len(prompt))
    assert sum(count for _, count in chunks) == len(prompt) - served.num_cached(number)
    served.check_whole()
    return served.num_cached(number)


def positions(served: Served) -> list[int]:
    """Of the kept states, the least recently used first."""
    return [state.at for state in served.cache.states]


def served_with(budget: int = 10**6, **sizes) -> Served:
    """Keeps at the marks of requests alone: no prompt is long enough for others."""
    served = Served(budget=budget, **sizes)
    served.cache.min_prompt = 1000
    return served


def test_a_state_is_resumed_only_where_one_was_kept():
    """States at 4 and 8; of the second prompt 7 tokens are the same."""
    served = served_with(chunk=4)
    serve(served, TRUNK[:10], marks=(4, 8))
    assert positions(served) == [4, 8]
    assert serve(served, (*TRUNK[:7], 90, 91, 92)) == 4


@pytest.mark.parametrize("length", [1, 2, 8, 9, 16, 20])
def test_the_same_prompt_again_leaves_at_least_a_row(length):
    served = Served(budget=10**6, is_cut_sensitive=True)
    prompt = TRUNK[:length]
    assert serve(served, prompt) == 0
    assert serve(served, prompt) == (length - 1) // 8 * 8
    assert serve(served, prompt) == (length - 1) // 8 * 8


def test_a_mark_before_the_last_token_leaves_one_row():
    served = served_with()
    assert serve(served, TRUNK, marks=(19,)) == 0
    assert serve(served, TRUNK, marks=(19,)) == 19


def test_prompts_that_part_each_resume_what_they_share():
    served = Served(budget=10**6, is_cut_sensitive=True)
    ends = [(90, 91), (92, 93), (90, 91)]
    assert [serve(served, (*TRUNK, *end)) for end in ends] == [0, 16, 16]


def test_an_edited_middle_resumes_what_is_before_the_edit():
    served = served_with()
    serve(served, TRUNK, marks=(4, 8, 16))
    assert serve(served, (*TRUNK[:10], 90, *TRUNK[11:]), marks=(4, 8)) == 8
    assert serve(served, (90, *TRUNK[1:]), marks=(4, 8)) == 0


def test_a_turn_that_is_asked_again_resumes_before_it():
    """Three turns of a chat, the last of them twice with another question."""
    served = served_with()
    chat, starts = TRUNK[:9], ()
    for question in (tokens(2, 5), tokens(3, 5), tokens(4, 5)):
        number = served.submit(chat, starts=starts, keeps_reply=True)
        served.finish()
        assert served.num_cached(number) == (starts[-1] if starts else 0)
        assert served.reply(number) == served.expected(chat, starts=starts)
        # All of the reply is held but its last token.
        chat = (*chat, *served.reply(number))
        starts = (*starts, len(chat) - 1)
        chat += question
    again = (*chat[: starts[1] + 1], *tokens(5, 7))
    assert serve(served, again, starts=starts[:2]) == starts[1]


def test_a_reply_that_ends_inside_a_window_is_kept_up_to_there():
    chat, question = TRUNK[:9], tokens(2, 5)
    whole = served_with().expected(chat, 20)

    def draft(stream, limit):
        return whole[stream.num_made :][:limit] if stream.request.prompt == chat else ()

    served = served_with(max_window=4, draft=draft)
    # The first token comes of the prompt, then one window has four more.
    number = served.submit(chat, 20, stop_tokens=frozenset([whole[3]]), keeps_reply=True)
    served.finish()
    reply = served.reply(number)
    assert reply == whole[:4] and served.ending(number).stats.num_rounds == 1
    at = len(chat) + len(reply) - 1
    assert serve(served, (*chat, *reply, *question), starts=(at,)) == at


def test_a_reply_of_one_token_is_kept_and_tells_what_was_cached():
    served = served_with()
    served.submit(TRUNK, 1, keeps_reply=True)
    served.finish()
    assert positions(served)[-1] == len(TRUNK) and served.runner.left == []
    number = served.submit((*TRUNK, *tokens(2, 5)), 1, starts=(len(TRUNK),))
    served.finish()
    assert served.ending(number).stats.num_cached == len(TRUNK)


def test_a_resumed_pass_cuts_as_the_whole_pass_from_there():
    served = served_with(is_cut_sensitive=True)
    prompt, points = tokens(1, 40), dict(starts=(11, 30), marks=(19,))
    number = served.submit(prompt, **points)
    served.finish()
    whole = served.chunks(number, 40)
    assert [start for start, _ in whole] == [0, 8, 11, 19, 27, 30, 38]
    number = served.submit(prompt, **points)
    served.finish()
    assert served.chunks(number, 40) == [chunk for chunk in whole if chunk[0] >= 19]
    assert served.reply(number) == served.expected(prompt, **points)


def test_a_state_that_cannot_be_restored_is_dropped_and_computed():
    served = Served(budget=10**6)
    assert serve(served, TRUNK) == 0
    served.runner.fails_restore = True
    number = served.submit(TRUNK)
    served.step()
    assert served.rows(number)[0] == (0, 8)
    assert served.cache.counts.failed == 1 and positions(served) == []
    served.finish()
    assert served.ending(number).stats.has_reuse_failed
    assert served.reply(number) == served.expected(TRUNK)
    served.runner.fails_restore = False
    assert serve(served, TRUNK) == 16


def test_a_resumed_pass_that_is_interrupted_counts_nothing_as_cached():
    served = Served(budget=10**6)
    serve(served, TRUNK)
    served.runner.interrupted = {len(served.runner.rounds) + 1}
    number = served.submit(TRUNK)
    with pytest.raises(KeyboardInterrupt):
        served.step()
    served.finish()
    assert [start for start, _ in served.chunks(number, 20)] == [16, 0, 8, 16]
    assert served.num_cached(number) == 0
    assert served.reply(number) == served.expected(TRUNK)


def test_a_pass_cut_short_by_an_interrupt_is_not_kept():
    served = Served(budget=10**6)
    served.runner.interrupted = {2}
    number = served.submit(TRUNK)
    with pytest.raises(KeyboardInterrupt):
        served.finish()
    served.scheduler.cancel(number)
    served.finish()
    assert positions(served) == [] and serve(served, TRUNK) == 0


def test_a_reply_that_failed_is_not_kept():
    served = served_with()
    number = served.submit(TRUNK, ends=lambda token: 1 / 0, keeps_reply=True)
    served.finish()
    assert served.ending(number).reason == "error" and positions(served) == []


def test_a_state_that_cannot_be_copied_costs_no_reply():
    served = Served(budget=10**6)
    served.runner.fails_keep = True
    assert serve(served, TRUNK) == serve(served, TRUNK) == 0
    assert served.cache.counts.failed == 2 and served.cache.num_bytes == 0


@pytest.mark.parametrize("num_slots", [2, 4, 8])
def test_prompts_that_arrive_together_compute_what_they_share_once(num_slots):
    served = served_with(num_slots=num_slots, is_cut_sensitive=True)
    prompts = [(*TRUNK, 70 + n, *tokens(n, 4)) for n in range(7)]
    numbers = {served.submit(prompt): prompt for prompt in prompts}
    served.finish()
    for number, prompt in numbers.items():
        assert served.reply(number) == served.expected(prompt)
    computed = sorted(chunk for n in numbers for chunk in served.chunks(n, 25) if chunk[0] < 16)
    assert computed == [(0, 8), (8, 8)]
    assert [served.num_cached(number) for number in numbers] == [0] + [16] * 6
    served.check_whole()


def test_others_pass_those_who_wait_for_a_prefix():
    served = Served(budget=10**6)
    served.submit((*TRUNK, 1))
    second = served.submit((*TRUNK, 2))
    other = served.submit(tokens(9, 3))
    served.step(2)
    assert served.reply(other) and not served.rows(second)
    served.finish()
    assert served.num_cached(second) == 16


@pytest.mark.parametrize("end", ["cancelled", "error"])
def test_who_waited_for_a_prefix_goes_on_when_it_does_not_come(end):
    served = Served(budget=10**6)
    served.cache.min_gap = 16
    first, second = served.submit((*TRUNK, 1)), served.submit((*TRUNK, 2))
    served.step()
    if end == "cancelled":
        served.scheduler.cancel(first)
    else:
        served.runner.prefill_step, inner = None, served.runner.prefill_step
        served.step()
        served.runner.prefill_step = inner
    served.finish()
    assert served.ending(first).reason == end
    assert served.num_cached(second) == 0
    assert served.reply(second) == served.expected((*TRUNK, 2))
    served.check_whole()


def test_nobody_waits_for_a_few_tokens_more_than_are_kept():
    served = served_with()
    serve(served, TRUNK, marks=(8,))
    served.cache.min_gap = 9
    served.submit((*TRUNK, 1)), served.submit((*TRUNK, 2))
    served.step()
    assert served.scheduler.counts().filling == 2
    served.finish()
    assert served.cache.counts.hits == 2


def test_nobody_waits_for_a_state_that_the_budget_cannot_hold():
    served = Served(budget=SIZE.num_bytes(4))
    served.submit((*TRUNK, 1)), served.submit((*TRUNK, 2))
    served.step()
    assert served.scheduler.counts().filling == 2
    served.finish()


def test_a_queued_prompt_has_its_prefix_kept_by_the_one_that_runs():
    served = Served(budget=10**6, num_slots=1)
    first = served.submit((*TRUNK, *tokens(2, 12)))
    served.submit(tokens(4, 9))
    second = served.submit((*TRUNK, *tokens(3, 9)))
    served.finish()
    assert (served.num_cached(first), served.num_cached(second)) == (0, 16)
    assert served.cache.states[0].at == 24 and served.cache.states[0].prompt[:20] == TRUNK


def test_marks_need_a_prompt_and_gaps_of_some_length():
    served = Served(budget=10**6)
    served.cache.min_prompt, served.cache.min_gap = 20, 17
    serve(served, tokens(2, 19))
    assert positions(served) == []
    # The last cut is at 19.
    serve(served, TRUNK, marks=(3,))
    assert positions(served) == [3]
    served.cache.min_gap = 16
    serve(served, TRUNK, marks=(3,))
    assert positions(served) == [3, 19]


def test_marks_beyond_the_budget_are_refused_up_front():
    served = served_with(budget=SIZE.num_bytes(10))
    number = served.submit(TRUNK, marks=(8, 12))
    served.step()
    assert served.cache.counts.refused == 1
    served.finish()
    assert positions(served) == [8] and served.reply(number)


def test_room_for_all_marks_is_made_before_the_pass():
    served = served_with(budget=2 * SIZE.num_bytes(8) + SIZE.num_bytes(4))
    serve(served, tokens(2, 12), marks=(8,))
    serve(served, tokens(3, 12), marks=(8,))
    served.submit(tokens(4, 30), marks=(4, 8))
    served.step()
    assert served.runner.rounds[-1] == [(3, 0, 4)]
    assert [state.prompt[:12] for state in served.cache.states][0] == tokens(3, 12)
    assert served.cache.counts.evicted == 1
    served.finish()


def test_what_a_longer_prompt_extends_goes_before_what_is_older():
    served = served_with(budget=4 * SIZE.num_bytes(8))
    old = tokens(2, 12)
    serve(served, old, marks=(8,))
    serve(served, TRUNK[:12], marks=(8,))
    serve(served, TRUNK, marks=(8, 9), starts=(8,))
    assert [state.is_extended for state in served.cache.states] == [False, True, False]
    serve(served, tokens(3, 12), marks=(8,))
    assert [state.prompt for state in served.cache.states][0] == old
    assert serve(served, old, marks=(8,)) == 8


def test_a_prompt_cut_short_shares_nothing_with_the_whole():
    served = served_with()
    for prompt, is_shared in ((TRUNK, False), (TRUNK[:12], False), ((*TRUNK[:12], 90), True)):
        serve(served, TRUNK, marks=(8,))
        serve(served, prompt, marks=(8,))
        assert served.cache.states[0].is_shared == is_shared


def test_what_different_prompts_share_is_not_given_up_for_being_extended():
    served = served_with(budget=3 * SIZE.num_bytes(8))
    system = TRUNK[:8]
    serve(served, (*system, 1, 2), marks=(8,))
    serve(served, (*system, 3, 4, 5), marks=(8,))
    serve(served, (*system, 3, 4, 5, 6, 7), marks=(8,))
    (state,) = served.cache.states
    assert state.is_shared and state.is_extended
    serve(served, tokens(4, 12), marks=(8,))
    serve(served, (*tokens(4, 12), 5), marks=(8,))
    serve(served, tokens(5, 12), marks=(8,))
    serve(served, tokens(6, 12), marks=(8,))
    assert served.cache.states[0].prompt[:8] == system
    serve(served, tokens(7, 12), marks=(8,))
    assert all(state.prompt[:8] != system for state in served.cache.states)


def test_the_resumed_state_goes_only_for_want_of_others():
    served = served_with(budget=SIZE.num_bytes(8) + SIZE.num_bytes(16))
    serve(served, TRUNK, marks=(8,))
    serve(served, tokens(2, 12), marks=(8,))
    number = served.submit(TRUNK, marks=(8, 16))
    served.step()
    assert served.scheduler.fill_progress(number).done == 16
    assert positions(served) == [8, 16]
    served.finish()
    assert served.num_cached(number) == 8
    tight = served_with(budget=SIZE.num_bytes(16))
    serve(tight, TRUNK, marks=(8,))
    assert serve(tight, TRUNK, marks=(8, 16)) == 8
    assert positions(tight) == [16]


def test_the_resumed_state_outlives_those_used_after_it():
    served = served_with(budget=3 * SIZE.num_bytes(8))
    serve(served, TRUNK, marks=(8,))
    other = tokens(2, 9)
    serve(served, other, marks=(8,))
    number = served.submit(TRUNK, keeps_reply=True)
    served.step()
    served.submit(other)
    served.finish()
    assert served.num_cached(number) == 8
    assert positions(served) == [8, 23]
    assert served.cache.states[0].prompt == TRUNK


def test_the_same_state_is_kept_once():
    served = served_with()
    serve(served, TRUNK, marks=(8,))
    serve(served, tokens(2, 9), marks=(8,))
    assert serve(served, TRUNK, marks=(8,)) == 8
    assert served.cache.counts.kept == 2 and positions(served) == [8, 8]
    assert served.cache.states[-1].prompt == TRUNK


def test_a_state_from_elsewhere_is_taken_over_and_resumed():
    served = served_with()
    serve(served, TRUNK, marks=(8,))
    (state,) = served.cache.states
    other = served_with()
    other.runner.copies.add(id(state.copy))
    assert other.cache.adopt(TRUNK[:8], state.copy)
    assert serve(other, TRUNK) == 8
    small = served_with(budget=10)
    assert not small.cache.adopt(TRUNK[:8], state.copy)
    assert small.cache.counts.refused == 1


def test_clearing_frees_every_copy():
    served = served_with()
    serve(served, TRUNK, marks=(4, 8))
    served.cache.clear()
    assert served.cache.num_bytes == 0 and not served.runner.copies
    assert serve(served, TRUNK) == 0


def test_what_is_used_is_counted():
    served = Served(budget=10**6)
    for _ in range(3):
        serve(served, TRUNK)
    counts = served.cache.counts
    assert (counts.hits, counts.misses, counts.kept, counts.evicted) == (2, 1, 1, 0)


def test_prefixes_drafts_and_shared_rounds_together():
    """Reuse, drafting and company each alone and at once: the replies are the same."""
    prompts = [(*TRUNK, n, *tokens(n, 3)) for n in range(3)]
    expected = {p: Served().expected(p, 16, sampling=3) for p in prompts}

    def draft(stream, limit):
        ahead = expected[stream.request.prompt][stream.num_made :][:limit]
        return [token + (stream.num_made + i) % 2 for i, token in enumerate(ahead)]

    for budget in (0, 10**6):
        for drafting in (None, draft):
            for num_slots in (1, 3):
                served = Served(
                    budget=budget, draft=drafting, num_slots=num_slots, max_window=4, round_rows=12
                )
                numbers = {served.submit(p, 16, sampling=3): p for p in prompts * 2}
                served.finish()
                for number, prompt in numbers.items():
                    assert served.reply(number) == expected[prompt]
                assert (served.runner.num_restored > 0) == (budget > 0)

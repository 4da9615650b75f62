"""An interrupt in the middle of what ends a stream."""

import pytest

from scheduler.cache import PromptCache, StateSize
from scheduler.events import Finished
from scheduler.loop import Scheduler
from scheduler.options import Options
from scheduler.request import Request
from tests.fake_runner import FakeRunner


class KeepInterrupted(FakeRunner):
    """An interrupt comes while a state is copied, once."""

    is_armed = True

    def keep(self, slot, base, at):
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt
        return super().keep(slot, base, at)


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_an_interrupt_while_an_ending_streams_state_is_kept(is_cancelled):
    """Both streams end all the same, and nothing is left taken."""
    runner = KeepInterrupted(4, 256)
    cache = PromptCache(runner, 10**6, StateSize(1, 1), min_prompt=1, min_gap=1)
    options = Options(num_slots=4, num_tokens=256, chunk=8, max_rows=32)
    scheduler = Scheduler(runner, options, cache)
    max_tokens = 40 if is_cancelled else 3
    numbers = [
        scheduler.submit(Request(prompt, max_tokens, keeps_reply=True))
        for prompt in ((1, 2, 3), (4, 5, 6))
    ]
    finished, num_interrupts = [], 0
    for turn in range(60):
        if is_cancelled and turn == 2:
            for number in numbers:
                scheduler.cancel(number)
        try:
            events = scheduler.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        finished += [event for event in events if isinstance(event, Finished)]
        if scheduler.is_idle:
            break
    assert num_interrupts == 1
    assert [event.reason for event in finished] == ["cancelled" if is_cancelled else "length"] * 2
    assert scheduler.is_idle and scheduler.is_whole

"""The command line with a model that needs no weights, for tests of `lfm2 batch`.

A reply is its prompt in capitals, and as many tokens as the request allows.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import lfm2
from lfm2.cli import main
from lfm2.request import ContextFull
from lfm2.stream import Reply

CONTEXT = 1000
END = object()


class StandIn:
    """Serves up to `streams` requests at once, all of them a token further every `step_s`.

    A prompt that begins with "break" brings the model down.
    """

    def __init__(self, streams: int = 1, step_s: float = 0.0, **_) -> None:
        self.streams = streams
        self.step_s = step_s
        self.asked: list[dict] = []

    def batch(self, requests: Iterable[dict], *, ordered: bool = False) -> Iterator:
        done = self._finishing(iter(requests))
        if not ordered:
            yield from done
            return
        early, following = {}, 0
        for answer in done:
            early[answer.index] = answer
            while following in early:
                yield early.pop(following)
                following += 1

    def load_prompt_cache(self, path: str) -> int:
        raise lfm2.LFM2Error(f"{path} is damaged")

    def save_prompt_cache(self, path: str) -> int:
        Path(path).write_text("states")
        return 1

    def _finishing(self, requests: Iterator[dict]) -> Iterator:
        running: dict[int, int] = {}
        request = None
        while running or request is not END:
            while len(running) < self.streams and (request := next(requests, END)):
                if request is END:
                    break
                self.asked.append(request)
                running[len(self.asked) - 1] = 0
            time.sleep(self.step_s)
            for index in list(running):
                running[index] += 1
                if running[index] == self.asked[index].get("max_tokens", 1):
                    yield answered(index, self.asked[index])
                    del running[index]


def answered(index: int, request: dict) -> SimpleNamespace:
    prompt = str(request.get("prompt", request.get("messages")))
    if prompt.startswith("break"):
        raise lfm2.LFM2Error("the device is gone")
    if len(prompt) > CONTEXT:
        error = ContextFull(len(prompt), CONTEXT)
        return SimpleNamespace(index=index, reply=None, error=error)
    num_tokens = request.get("max_tokens", 1)
    reply = Reply(
        text=prompt.upper(),
        tokens=tuple(range(num_tokens)),
        ended_by="max_tokens",
        draws=(),
        num_prompt_tokens=len(prompt),
        num_reused_tokens=0,
        prefill_s=0.5,
        decode_s=0.25,
    )
    return SimpleNamespace(index=index, reply=reply, error=None)


def run() -> None:
    """`python -m tests.batch_stand_in STEP_S ARGUMENTS`: `lfm2 ARGUMENTS` with the stand-in."""
    step_s = float(sys.argv.pop(1))
    lfm2.load = lambda name, **given: StandIn(given["streams"], step_s)
    main()


if __name__ == "__main__":
    run()

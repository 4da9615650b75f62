"""A model of random weights at a published shape, and how fast its rounds are.

Knows nothing of the table and of transformers.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean, median
from unittest.mock import patch

from tinygrad import Device, Tensor, dtypes

from lfm2.artifacts import Artifacts
from lfm2.config import Config
from lfm2.model import LFM2
from lfm2.runner import Form, Runner, read
from lfm2.state import State
from metal_ops.launch import empty
from metal_ops.memory import Memory
from metal_ops.route import route
from metal_ops.rows import Weight, parts
from scheduler.rounds import Round, Segment
from scripts.gpu.counts import AFTER, NUM_PROMPTS, NUM_ROUNDS, NUM_WARM_UPS, rates
from scripts.gpu.weights import random_weights


@dataclass(frozen=True)
class Figure:
    """tok_s with the middle half of its rounds. num_launches: of a round. num_experts: distinct
    ones that a round chose in a layer, on average; host_share: of the time until the last launch
    was handed over, where the device is another.
    """

    what: str
    tok_s: float
    spread: tuple[float, float]
    num_launches: int
    num_experts: float | None = None
    bytes_s: float | None = None
    host_share: float | None = None


class Watched(LFM2):
    """A model whose step also gives out the lists of the experts that each layer chose."""

    def __call__(self, *arguments: object) -> tuple[Tensor, ...]:
        kept: list[Tensor] = []

        def keep(*arguments: object) -> tuple[Tensor, Tensor]:
            weights, lists = route(*arguments)
            kept.append(lists)
            return weights, lists

        # What is given out is not overwritten by later launches, and costs none: so these are the
        # very rounds that are timed.
        with patch("lfm2.model.route", keep):
            outputs = super().__call__(*arguments)
        return *outputs, *kept


class Bench:
    """A model of one shape on a device, and rounds of its streams."""

    def __init__(self, config: Config, bits: int, device: str, streams: int, context: int) -> None:
        self.config, self.context = config, context
        self.is_on_host = device.startswith("CPU")
        weights = random_weights(config, bits, device)
        self.sizes = {name: _num_bytes(weight) for name, weight in weights.items()}
        model = Watched(config, weights, dtypes.bfloat16, device, context)
        state = State.create(config, streams, streams * context, dtypes.bfloat16, device)
        self.runner = Runner(model, state, device, Artifacts(None, "", print))

    def run(self, segments: list[Segment]) -> tuple[float, float, Form]:
        """Runs a round as Runner.run does, its picks read. Seconds, those until all launches were
        handed over, and the form that ran.
        """
        start = time.perf_counter()
        form, (_, picks, *self.lists) = self.runner.launch(Round(tuple(segments)))
        host_s = time.perf_counter() - start
        read(picks)
        return time.perf_counter() - start, host_s, form

    def token(self, slot: int, position: int) -> int:
        """Another one for each stream, so that their rows choose experts of their own."""
        return 8 + (37 * position + 101 * slot) % (self.config.vocab_size - 8)

    def prefill(self, num_tokens: int, slot: int = 0) -> tuple[float, Form]:
        """Seconds until the first token of a prompt, and the form of its last chunk."""
        seconds, chunk = 0.0, self.runner.state.max_rows
        for at in range(0, num_tokens, chunk):
            end = min(at + chunk, num_tokens)
            tokens = tuple(self.token(slot, i) for i in range(at, end))
            segment = Segment(slot, slot * self.context, at, tokens, int(end == num_tokens))
            chunk_s, _, form = self.run([segment])
            seconds += chunk_s
        return seconds, form

    def prefill_figure(self, num_tokens: int) -> Figure:
        self.prefill(num_tokens)
        times = []
        for _ in range(NUM_PROMPTS):
            seconds, form = self.prefill(num_tokens)
            times.append(seconds)
        return _figure(f"prefill {num_tokens}", num_tokens, times, form)

    def decode_figure(self, streams: int) -> Figure:
        for slot in range(streams):
            self.prefill(AFTER, slot)
        times, host_shares, counts = [], [], []
        for i in range(NUM_WARM_UPS + NUM_ROUNDS):
            segments = [
                Segment(slot, slot * self.context, AFTER + i, (self.token(slot, AFTER + i),), 1)
                for slot in range(streams)
            ]
            seconds, host_s, form = self.run(segments)
            times.append(seconds)
            host_shares.append(host_s / seconds)
            # How many experts have rows comes first.
            counts += [int(read(lists)[0]) for lists in self.lists]
        figure = _figure(f"decode {streams}", streams, times[NUM_WARM_UPS:], form)
        num_experts = mean(counts) if counts else None
        return replace(
            figure,
            num_experts=num_experts,
            bytes_s=self.decode_bytes(streams, num_experts) * figure.tok_s / streams,
            host_share=None if self.is_on_host else median(host_shares[NUM_WARM_UPS:]),
        )

    def decode_bytes(self, streams: int, num_experts: float | None) -> float:
        """What a round must read: weights, of so many experts a layer, and keys and values."""
        experts = sum(size for name, size in self.sizes.items() if ".experts." in name)
        weights = sum(self.sizes.values())
        if num_experts is not None:
            weights -= experts * (1 - num_experts / self.config.num_experts)
        return weights + streams * AFTER * self.config.kv_bytes_per_token(dtypes.bfloat16.itemsize)


def _num_bytes(weight: Weight) -> int:
    return sum(part.nbytes() for part in parts(weight))


def _figure(what: str, num_tokens: int, times: list[float], form: Form) -> Figure:
    return Figure(what, *rates(num_tokens, times), len(form.step.launches))


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes read and written a second by a large copy on the device."""
    source, target = empty((num_bytes,), dtypes.uint8, device), Memory(num_bytes, device)
    times = []
    for _ in range(6):
        Device[device].synchronize()
        start = time.perf_counter()
        target.store(0, source, 0, num_bytes)
        Device[device].synchronize()
        times.append(time.perf_counter() - start)
    return 2 * num_bytes / median(times[1:])


def measure(
    config: Config, bits: int, device: str, prompts: list[int], streams: list[int]
) -> Iterator[Figure]:
    """The figures of a model, each as soon as it is known."""
    context = max(*prompts, AFTER + NUM_WARM_UPS + NUM_ROUNDS)
    bench = Bench(config, bits, device, max(streams), context)
    for count in prompts:
        yield bench.prefill_figure(count)
    for count in streams:
        yield bench.decode_figure(count)

"""transformers at a published shape, random bf16 weights: eager, and compiled with a static cache.

    python -m scripts.peer_gpu lfm2-350m
    python -m scripts.peer_gpu lfm2-8b-a1b --device cpu --layers 3 --prompt 64 --streams 2

Prints a figure to standard error as it comes, and to standard output a JSON object of all so far:
of a run that was killed, the last line is still whole. What does not run has a reason in place of a
figure. Needs torch and transformers. Started by bench_gpu.py in a process of its own.
"""

import argparse
import json
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache, StaticCache
    from transformers.utils import logging
except ImportError as error:
    sys.exit(f"peer_gpu: torch and transformers are needed: {error}")

from scripts.gpu.counts import AFTER, NUM_PROMPTS, NUM_ROUNDS, NUM_WARM_UPS, add_counts, rates
from scripts.make_checkpoint import SHAPES, config_of

# Of a static cache; a multiple of what the attention of one query likes.
ROOM = AFTER + 64
# A longer prompt has nothing to gain from fewer launches, and costs a compilation.
MAX_COMPILED_PROMPT = 2048
REASON_SIZE = 120


class OutOfTime(BaseException):
    """Of a limit; no Exception, because a compiler may take those for errors of its own."""


@dataclass(frozen=True)
class Figure:
    """tok_s with the middle half of its rounds. experts: how transformers multiplies by them."""

    tok_s: float
    spread: tuple[float, float]
    experts: str | None = None


class Peer:
    """A model of a shape; a step is a forward pass to the greedy tokens (S, 1) of its rows."""

    def __init__(self, config: dict, device: str) -> None:
        self.device = device
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=torch.bfloat16
            )
        self.model = model.eval()
        self.vocab_size = config["vocab_size"]
        self.experts = None
        if "num_experts" in config:
            self.experts = model.get_experts_implementation()[""]

    def step(self, tokens: torch.Tensor, cache: Cache) -> torch.Tensor:
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True)

    def compiled_step(self) -> Callable:
        """The step as `generate` has it compiled with a static cache, for one shape."""
        torch.compiler.reset()
        compiled = torch.compile(self.step, mode="reduce-overhead", dynamic=False)
        # The next replay of the graph overwrites what it gave out.
        return lambda tokens, cache: compiled(tokens, cache).clone()

    def prompts(self, streams: int, num_tokens: int) -> torch.Tensor:
        """(S, T): another one for each stream, so that their rows choose experts of their own."""
        place = torch.arange(num_tokens, device=self.device)
        stream = torch.arange(streams, device=self.device)[:, None]
        return 8 + (37 * place + 101 * stream) % (self.vocab_size - 8)

    def prefill(self, num_tokens: int) -> Figure:
        prompt = self.prompts(1, num_tokens)
        seconds = [
            self._timed(lambda: self.step(prompt, self._dynamic()))
            for _ in range(NUM_WARM_UPS + NUM_PROMPTS)
        ]
        return self._figure(num_tokens, seconds[NUM_WARM_UPS:])

    def compiled_prefill(self, num_tokens: int) -> Figure:
        prompt, step = self.prompts(1, num_tokens), self.compiled_step()
        cache = StaticCache(config=self.model.config, max_cache_len=num_tokens)
        # Buffers that are made inside a compiled step keep it from being a graph.
        self.step(prompt, cache)
        seconds = []
        for _ in range(NUM_WARM_UPS + NUM_PROMPTS):
            cache.reset()
            seconds.append(self._timed(lambda: step(prompt, cache)))
        return self._figure(num_tokens, seconds[NUM_WARM_UPS:])

    def decode(self, streams: int) -> Figure:
        """By the better of the two ways to multiply by experts: `generate` itself changes from one
        to the other for decoding, which does not always pay.
        """
        figures = []
        for experts in (self.experts,) if self.experts is None else (self.experts, "batched_mm"):
            figures.append(self._decode(streams, self.step, self._dynamic(), experts))
        return max(figures, key=lambda figure: figure.tok_s)

    def compiled_decode(self, streams: int, experts: str | None) -> Figure:
        cache = StaticCache(config=self.model.config, max_cache_len=ROOM)
        return self._decode(streams, self.compiled_step(), cache, experts)

    def _decode(self, streams: int, step: Callable, cache: Cache, experts: str | None) -> Figure:
        tokens = self.step(self.prompts(streams, AFTER), cache)
        with self._multiplying(experts):
            seconds = []
            for _ in range(NUM_WARM_UPS + NUM_ROUNDS):
                start = self._now()
                tokens = step(tokens, cache)
                seconds.append(self._now() - start)
        return self._figure(streams, seconds[NUM_WARM_UPS:], experts)

    @contextmanager
    def _multiplying(self, experts: str | None) -> Iterator[None]:
        if experts is None:
            yield
            return
        self.model.set_experts_implementation(experts)
        try:
            yield
        finally:
            self.model.set_experts_implementation(self.experts)

    def _dynamic(self) -> Cache:
        return DynamicCache(config=self.model.config)

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _timed(self, act: Callable) -> float:
        start = self._now()
        act()
        return self._now() - start

    def _figure(self, num_tokens: int, seconds: list[float], experts: str | None = None) -> Figure:
        return Figure(*rates(num_tokens, seconds), experts)


class Results:
    """Figures by way ("eager", "compiled") and by what they are of; reasons of what has none."""

    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.figures: dict[str, dict[str, Figure]] = {"eager": {}, "compiled": {}}
        self.reasons: dict[str, dict[str, str]] = {"eager": {}, "compiled": {}}

    def add(self, way: str, what: str, measure: Callable[[], Figure]) -> None:
        try:
            figure = measure()
        except Exception as error:
            self.refuse(way, what, f"{type(error).__name__}: {error}")
            return
        self.figures[way][what] = figure
        low, high = figure.spread
        text = f"{figure.tok_s:,.1f} tok/s  ({low:,.1f}-{high:,.1f})  {figure.experts or ''}"
        self._print(way, what, text)

    def refuse(self, way: str, what: str, reason: str) -> None:
        self.reasons[way][what] = " ".join(reason.split())[:REASON_SIZE]
        self._print(way, what, self.reasons[way][what])

    def _print(self, way: str, what: str, text: str) -> None:
        print(f"{self.shape:14} transformers {way:8} {what:14} {text}", file=sys.stderr, flush=True)
        found = {
            way: {what: asdict(figure) for what, figure in figures.items()}
            for way, figures in self.figures.items()
        }
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps(found | {"reasons": self.reasons, "versions": versions}), flush=True)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises OutOfTime inside after so many seconds, until one gets through."""

    def stop(signal_number: int, frame: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGALRM, stop)
    # What is raised in a callback of foreign code is lost: raised again each second.
    signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def measure_compiled(
    peer: Peer, results: Results, prompts: list[int], streams: list[int], limit_s: int
) -> None:
    """Adds figures until the time is over, those of the decoding first."""
    plan = {f"decode {count}": (peer.compiled_decode, count) for count in streams}
    short = [count for count in prompts if count <= MAX_COMPILED_PROMPT]
    plan |= {f"prefill {count}": (peer.compiled_prefill, count) for count in short}
    try:
        with time_limit(limit_s):
            for what, (measure, count) in plan.items():
                eager = results.figures["eager"].get(what)
                ways = [eager.experts if eager else peer.experts] if "decode" in what else []
                results.add("compiled", what, lambda: measure(count, *ways))
    except OutOfTime:
        done = results.figures["compiled"].keys() | results.reasons["compiled"].keys()
        for what in [what for what in plan if what not in done]:
            results.refuse("compiled", what, f"given up after {limit_s} s for all compiled figures")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", default="cuda", help="of torch (cuda)")
    add_counts(parser)
    return parser.parse_args()


# No inference_mode: `generate` has compiled steps under no_grad alone.
@torch.no_grad()
def main() -> None:
    options = parse_options()
    # Of the libraries about each other, between the figures.
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    shape = SHAPES[options.shape]
    try:
        torch.empty(1, device=options.device)
    except (AssertionError, RuntimeError) as error:
        sys.exit(f"peer_gpu: device {options.device} cannot be used: {str(error).splitlines()[0]}")
    peer = Peer(config_of(shape, options.layers, None, "bfloat16"), options.device)
    results = Results(options.shape)
    for count in options.prompt:
        results.add("eager", f"prefill {count}", lambda: peer.prefill(count))
    for count in options.streams:
        results.add("eager", f"decode {count}", lambda: peer.decode(count))
    if options.compile_limit > 0:
        measure_compiled(peer, results, options.prompt, options.streams, options.compile_limit)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)

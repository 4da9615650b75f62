"""Measures the engine at published shapes on a GPU, beside transformers in the same run.

    python scripts/bench_gpu.py --device CUDA --shape lfm2-350m --bits 16 --bits 4
    python scripts/bench_gpu.py --shape lfm2-24b-a2b --bits 4 --peer

Weights are random and made on the device. Prefill: a prompt in chunks, to its first token. Decode:
rounds of one row a stream, after a prompt each. A figure is the median of rounds; the spread is
that of their middle half. The copy bandwidth is measured in the same run, and is what the bytes of
a decode round are held against: its weights (of the experts, those that the round's rows chose) and
its keys and values. A table for people; the last line is one JSON object.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from math import prod
from importlib.metadata import version
from pathlib import Path
from statistics import median, quantiles

from tinygrad import Device, Tensor, dtypes
from tinygrad.dtype import DType

from lfm2.artifacts import Artifacts
from lfm2.cli.costs import decode_bytes
from lfm2.config import Config
from lfm2.environment import ensure_compiler, settle_tinygrad
from lfm2.model import LFM2
from lfm2.runner import Runner, capacity_of, pack, read
from lfm2.shapes import can_quantize, weight_shapes
from lfm2.state import MAX_ROWS, State
from lfm2.weights import Weights
from metal_ops.launch import copy_in, empty
from metal_ops.memory import Memory
from metal_ops.quantized import QuantizedMatrix
from scheduler.rounds import Round, Segment
from scripts.make_checkpoint import SHAPES, config_of

GROUP_SIZE = 64
ROUTER_BITS = 8
NUM_ROUNDS = 33
COPY_BYTES = 4 << 30


@dataclass(frozen=True)
class Figure:
    """tok_s with the middle half of its rounds; bytes_s is none where no bytes are reckoned.

    num_launches: of a round. host_share: of the time until the last launch was handed over.
    """

    what: str
    tok_s: float
    spread: tuple[float, float]
    num_launches: int
    bytes_s: float | None = None
    host_share: float | None = None


def random_weights(config: Config, bits: int, device: str) -> Weights:
    """Every tensor of the architecture: bf16, or its matrices in codes of so many bits."""
    weights: Weights = {}
    for seed, (name, shape) in enumerate(weight_shapes(config).items()):
        is_matrix = can_quantize(name, shape)
        if ".experts." in name:
            # The model knows the stacked ones by their path.
            name = name.removesuffix(".weight")
        if name.endswith("expert_bias"):
            weights[name] = _made(Tensor.zeros(*shape), shape, dtypes.float32, device)
        elif bits < 16 and is_matrix:
            width = ROUTER_BITS if name.endswith("gate.weight") else bits
            weights[name] = _random_codes(shape, width, seed, device)
        else:
            scale = shape[-1] ** -0.5 if is_matrix else 1.0
            weights[name] = _random(shape, seed, scale, dtypes.bfloat16, device)
    return weights


def _hash(count: int, seed: int) -> Tensor:
    """Numbers that look random, uint32."""
    x = Tensor.arange(count, dtype=dtypes.uint32) * 2654435761 + seed * 40503
    x = (x ^ (x >> 15)) * 2246822519
    return (x ^ (x >> 13)) * 3266489917


def _made(values: Tensor, shape: tuple[int, ...], dtype: DType, device: str) -> Tensor:
    """A real buffer of these values, computed on the device."""
    # NOTE: a tensor of constants alone has no device, and would be computed anew where it is used.
    made = empty(shape, dtype, device)
    return made.assign(values.cast(dtype).reshape(shape).to(device)).realize()


def _random(shape: tuple[int, ...], seed: int, scale: float, dtype: DType, device: str) -> Tensor:
    uniform = (_hash(prod(shape), seed) >> 8).cast(dtypes.float32) * (2.0**-23) - 1
    return _made(uniform * scale, shape, dtype, device)


def _random_codes(shape: tuple[int, ...], bits: int, seed: int, device: str) -> QuantizedMatrix:
    *rows, depth = shape
    words, groups = (*rows, depth * bits // 32), (*rows, depth // GROUP_SIZE)
    step = 2 * depth**-0.5 / 2**bits
    codes = _made(_hash(prod(words), seed), words, dtypes.uint32, device)
    scales, biases = (
        _made(Tensor.ones(*groups) * value, groups, dtypes.bfloat16, device)
        for value in (step, -step * 2 ** (bits - 1))
    )
    return QuantizedMatrix(codes, scales, biases, bits, GROUP_SIZE)


class Bench:
    """A model of one shape on a device, and rounds of its streams."""

    def __init__(self, config: Config, bits: int, device: str, streams: int, context: int) -> None:
        self.config, self.device, self.context = config, device, context
        weights = random_weights(config, bits, device)
        self.sizes = {name: _num_bytes(weight) for name, weight in weights.items()}
        model = LFM2(config, weights, dtypes.bfloat16, device, context)
        state = State.create(config, streams, streams * context, dtypes.bfloat16, device)
        self.runner = Runner(model, state, device, Artifacts(None, "", print))

    def run(self, segments: list[Segment]) -> float:
        """Seconds of one round, its picks read, as Runner.run does it; keeps how many were ours."""
        start = time.perf_counter()
        round = Round(tuple(segments))
        form = self.runner.form(capacity_of(round, self.runner.state.num_slots))
        state = self.runner.state
        tokens, table = pack(round, form.capacity, state.num_slots, state.num_tokens)
        copy_in(form.tokens, 0, memoryview(tokens).cast("B"))
        copy_in(form.table, 0, memoryview(table).cast("B"))
        _, picks, *_ = form.step()
        self.host_s = time.perf_counter() - start
        read(picks)
        return time.perf_counter() - start

    def prefill(self, num_tokens: int, slot: int = 0) -> float:
        """Seconds until the first token of a prompt."""
        start = time.perf_counter()
        for at in range(0, num_tokens, MAX_ROWS):
            tokens = tuple(8 + 37 * i % 4000 for i in range(at, min(at + MAX_ROWS, num_tokens)))
            is_last = at + len(tokens) == num_tokens
            self.run([Segment(slot, slot * self.context, at, tokens, int(is_last))])
        return time.perf_counter() - start

    def prefill_figure(self, num_tokens: int) -> Figure:
        self.prefill(num_tokens)
        times = [self.prefill(num_tokens) for _ in range(5)]
        launches = max(len(form.step.launches) for form in self.runner.forms.values())
        return _figure(f"prefill {num_tokens}", num_tokens, times, launches)

    def decode_figure(self, streams: int, after: int) -> Figure:
        for slot in range(streams):
            self.prefill(after, slot)
        times, host = [], []
        for i in range(NUM_ROUNDS + 3):
            segments = [
                Segment(slot, slot * self.context, after + i, (11 + slot * 5 + i,), 1)
                for slot in range(streams)
            ]
            times.append(self.run(segments))
            host.append(self.host_s / times[-1])
        form = next(
            form for capacity, form in self.runner.forms.items() if capacity.segments == streams
        )
        num_bytes = self.decode_bytes(streams, after) if streams == 1 else None
        launches = len(form.step.launches)
        figure = _figure(f"decode {streams}", streams, times[3:], launches, num_bytes)
        return replace(figure, host_share=median(host[3:]))

    def decode_bytes(self, streams: int, after: int) -> int:
        """What a round of one row must read: weights that it uses, keys and values."""
        keys = self.config.kv_bytes_per_token(dtypes.bfloat16.itemsize) * after * streams
        return decode_bytes(self.sizes, self.config) + keys


def _num_bytes(weight: Tensor | QuantizedMatrix) -> int:
    if isinstance(weight, QuantizedMatrix):
        return sum(part.nbytes() for part in (weight.codes, weight.scales, weight.biases))
    return weight.nbytes()


def _figure(
    what: str, num_tokens: int, times: list[float], launches: int, num_bytes: int | None = None
) -> Figure:
    low, _, high = quantiles([num_tokens / t for t in times], n=4)
    middle = median(times)
    bytes_s = None if num_bytes is None else num_bytes / middle
    return Figure(what, num_tokens / middle, (low, high), launches, bytes_s)


def copy_bandwidth(device: str) -> float:
    """Bytes read and written a second by a large copy on the device."""
    source, target = empty((COPY_BYTES,), dtypes.uint8, device), Memory(COPY_BYTES, device)
    times = []
    for _ in range(6):
        Device[device].synchronize()
        start = time.perf_counter()
        target.store(0, source, 0, COPY_BYTES)
        Device[device].synchronize()
        times.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / median(times[1:])


def peer_figures(shape: str, python: str) -> dict | None:
    """transformers on the same GPU, in a process of its own; none if it fails."""
    command = [python, "-m", "scripts.peer_gpu", shape]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True)
    if done.returncode:
        print(f"transformers failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="CUDA")
    parser.add_argument("--shape", action="append", choices=SHAPES, required=True)
    parser.add_argument("--bits", action="append", type=int, choices=(4, 8, 16))
    parser.add_argument("--prompt", action="append", type=int, help="tokens; 512 2048 16384")
    parser.add_argument("--streams", action="append", type=int, help="1 8 32")
    parser.add_argument("--after", type=int, default=512, help="tokens before the decoding")
    parser.add_argument("--layers", type=int, help="of a shortened model")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with transformers")
    options = parser.parse_args()
    ensure_compiler(options.device)
    settle_tinygrad()
    bandwidth = copy_bandwidth(options.device)
    print(f"copy {bandwidth / 1e9:,.0f} GB/s")
    results = []
    for shape in options.shape:
        config = Config.from_dict(config_of(SHAPES[shape], options.layers, None, "bfloat16"))
        peer = peer_figures(shape, options.peer) if options.peer else None
        for bits in options.bits or [16, 4]:
            prompts, streams = options.prompt or [512, 2048, 16384], options.streams or [1, 8, 32]
            context = max(*prompts, options.after + NUM_ROUNDS + 8)
            bench = Bench(config, bits, options.device, max(streams), context)
            figures = [bench.prefill_figure(count) for count in prompts]
            figures += [bench.decode_figure(count, options.after) for count in streams]
            for figure in figures:
                _print(shape, bits, figure, bandwidth, peer)
            results.append({"shape": shape, "bits": bits, "figures": list(map(asdict, figures))})
            results[-1]["peer"] = peer
            del bench
    about = {"tinygrad": version("tinygrad"), "python": platform.python_version()}
    about |= {"device": str(Device[options.device].renderer.target), "copy_bytes_s": bandwidth}
    print(json.dumps(about | {"results": results}))


def _print(shape: str, bits: int, figure: Figure, bandwidth: float, peer: dict | None) -> None:
    low, high = figure.spread
    line = f"{shape:14} {bits:2} bit  {figure.what:14} {figure.tok_s:10,.1f} tok/s"
    line += f"  ({low:,.1f}-{high:,.1f})  {figure.num_launches} launches"
    if figure.host_share is not None:
        line += f"  host {figure.host_share:.0%}"
    if figure.bytes_s is not None:
        line += f"  {figure.bytes_s / 1e9:,.0f} GB/s = {figure.bytes_s / bandwidth:.0%} of a copy"
    if peer and figure.what in peer["tok_s"]:
        theirs = peer["tok_s"][figure.what]
        line += f"  transformers {theirs:,.1f}: {figure.tok_s / theirs:.2f}x"
    print(line, flush=True)


if __name__ == "__main__":
    main()

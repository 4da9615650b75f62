"""The measurements of `lfm2 bench`: rounds of a loaded model, the memory's bandwidth, whole starts
of the program.
"""

import os
import subprocess
import sys
import time
from dataclasses import dataclass

import numpy as np

import lfm2
from lfm2.engine import RunSegment
from lfm2.errors import LFM2Error

BANDWIDTH_BYTES = 256 << 20
BANDWIDTH_RUNS = 5
SHORT_PROMPT_TOKENS = 16
COLD_PROMPT = "Once upon a time"
COLD_TOKENS = 8


@dataclass(frozen=True)
class Run:
    """Seconds of one run: the prompt with its first token, the tokens after it, a short prompt with
    its first token.
    """

    prefill_s: float
    decode_s: float
    first_token_s: float


def prompt_ids(num_tokens: int, vocab_size: int) -> list[int]:
    """Closed form; scripts/bench_worker.py gives the peers the same."""
    return [(8 + 37 * i % 4000) % vocab_size for i in range(num_tokens)]


def num_short_prompt(num_prompt: int) -> int:
    """Tokens of the prompt whose first token is timed: no more than was asked for."""
    return min(SHORT_PROMPT_TOKENS, num_prompt)


def run(model: "lfm2.Model", num_prompt: int, num_decoded: int) -> Run:
    ids = prompt_ids(num_prompt, model.config.vocab_size)
    start = time.perf_counter()
    feed, chunk = model.feed(), model.service.options.chunk
    token = feed_prompt(feed, ids, chunk)
    prefilled = time.perf_counter()
    for _ in range(num_decoded):
        token = int(feed([token], 1).tokens[0])
    decoded = time.perf_counter()
    feed_prompt(model.feed(), ids[: num_short_prompt(num_prompt)], chunk)
    return Run(prefilled - start, decoded - prefilled, time.perf_counter() - decoded)


def feed_prompt(feed: RunSegment, ids: list[int], chunk: int) -> int:
    """Runs a prompt as a stream does, in chunks of at most `chunk`; returns the likeliest next
    token.
    """
    for start in range(0, len(ids), chunk):
        drawn = feed(ids[start : start + chunk], 1)
    return int(drawn.tokens[0])


def memory_bytes_per_s() -> float:
    """The best rate of several at which numpy's dot product, on all cores, reads an array that no
    cache holds.
    """
    values = np.ones(BANDWIDTH_BYTES // 4, np.float32)
    times_s = []
    for _ in range(BANDWIDTH_RUNS):
        start = time.perf_counter()
        values.dot(values)
        times_s.append(time.perf_counter() - start)
    return values.nbytes / min(times_s)


def start_to_text_s(arguments: list[str], cache_home: str) -> float:
    """Seconds from the start of a process to its first text; compiled steps are kept in
    `cache_home`.
    """
    asked = ["--raw", "-n", str(COLD_TOKENS), COLD_PROMPT]
    command = [sys.executable, "-m", "lfm2", "generate", *arguments, *asked]
    environment = {**os.environ, "XDG_CACHE_HOME": cache_home}
    start = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(1)
        elapsed_s = time.perf_counter() - start
        errors = process.communicate()[1].decode(errors="replace").strip().splitlines()
    if process.returncode:
        raise LFM2Error(f"lfm2 generate failed: {errors[-1] if errors else process.returncode}")
    return elapsed_s

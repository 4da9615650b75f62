"""The comparisons of scripts/bench_rounds.py: cases that take turns, run by run."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count

import lfm2
from lfm2.round_cost import gap_chunk
from lfm2.service import Service
from scheduler.chunks import MIN_CAPACITY
from scripts.bench_peers import ratios, summarise
from scripts.rounds.trial import (
    NUM_AFTER,
    SHORT_PROMPT,
    SUFFIX,
    Sharing,
    Stall,
    most_turns,
    run_reuse,
    run_stall,
    run_streams,
    stall_tokens,
)

# Rows of a round with a chunk if --max-gap-ms does not say: a prompt of 2,048 is 17 chunks or so.
ROUND_ROWS = 128
MODES = ("whole", "chunks", "mixed")
# What a case gives: figures by name.
Case = Callable[[], dict[str, float]]
# Figures of each case, one a run.
Results = dict[str, list[dict[str, float]]]


def note(message: str) -> None:
    print(message, file=sys.stderr)


def load_model(options: argparse.Namespace) -> lfm2.Model:
    """The model with slots and room for every case. Raises LFM2Error."""
    # However small the chunks come to be.
    chunk = MIN_CAPACITY // 2
    most = max(options.streams)
    reply = options.gen_tokens + most_turns(most, options.prompt_tokens, chunk)
    lengths = [options.prompt_tokens + reply, options.shared_tokens + SUFFIX + 1]
    totals = [most * lengths[0], lengths[1]]
    for num_prompt in options.long_prompts:
        for num_streams in options.stall_streams:
            decoding = SHORT_PROMPT + stall_tokens(num_streams, num_prompt, chunk)
            prompt = num_prompt + NUM_AFTER + 1
            lengths += [decoding, prompt]
            totals.append(num_streams * decoding + prompt)
    return lfm2.load(
        options.model,
        device=options.device,
        dtype=options.dtype,
        context=max(lengths),
        streams=max(most, 1 + max(options.stall_streams, default=0)),
        pool_tokens=max(totals),
        compiling=lambda capacity: note(f"compiling for {capacity.rows} rows"),
        warn=note,
    )


def without_kept_states(model: lfm2.Model) -> lfm2.Model:
    """The same model, whose prompts all run from their beginning."""
    service = Service(model.runner, model.service.options.num_slots, cache_bytes=0)
    return lfm2.Model(model.config, model.tokenizer, service, model.sampling, model.context)


def run_in_turns(name: str, cases: dict[str, Case], num_runs: int) -> tuple[Results, float]:
    """Figures of each case, and the seconds of the warm-up."""
    began = time.perf_counter()
    results: Results = {label: [] for label in cases}
    for i in range(num_runs + 1):
        if i == 1:
            warm_up_s = time.perf_counter() - began
        for label, case in cases.items():
            note(f"{name}, {label}: {f'run {i} of {num_runs}' if i else 'warm-up'}")
            figures = case()
            if i:
                results[label].append(figures)
    return results, warm_up_s


def sharings(num_prompt: int, chunk: int) -> dict[str, Sharing]:
    """How each of MODES runs a prompt of so many tokens."""
    return dict(
        zip(MODES, (Sharing(num_prompt, False), Sharing(chunk, False), Sharing(chunk, True)))
    )


def planned_chunk(model: lfm2.Model, num_streams: int, max_gap_ms: float | None) -> int:
    """Rows of a chunk beside so many streams."""
    if max_gap_ms is None:
        return max(ROUND_ROWS - num_streams - 1, ROUND_ROWS // 2)
    return gap_chunk(model.runner, num_streams + 1, max_gap_ms, note)


def measure_streams(model: lfm2.Model, options: argparse.Namespace) -> dict:
    def case(num_streams: int) -> Case:
        return lambda: run_streams(model, num_streams, options.prompt_tokens, options.gen_tokens)

    cases = {str(num): case(num) for num in options.streams}
    results, warm_up_s = run_in_turns("streams", cases, options.runs)
    first = next(iter(results))
    return {
        "warm_up_s": warm_up_s,
        "cases": {label: summarise(figures) for label, figures in results.items()},
        "base": first,
        "over_base": {
            label: ratios(figures, results[first], "tok_s") for label, figures in results.items()
        },
    }


def measure_stall(
    model: lfm2.Model, num_streams: int, num_prompt: int, options: argparse.Namespace
) -> tuple[dict, dict[str, Stall]]:
    """The figures, and of each mode the run whose worst gap is the median one."""
    chunk = planned_chunk(model, num_streams, options.max_gap_ms)
    stalls: dict[str, list[Stall]] = {mode: [] for mode in MODES}

    def case(mode: str, sharing: Sharing) -> Case:
        def run() -> dict[str, float]:
            stalls[mode].append(run_stall(model, num_streams, num_prompt, sharing))
            return stalls[mode][-1].figures

        return run

    cases = {mode: case(mode, sharing) for mode, sharing in sharings(num_prompt, chunk).items()}
    name = f"{num_streams} streams and a prompt of {num_prompt}"
    results, warm_up_s = run_in_turns(name, cases, options.runs)
    found = {
        "streams": num_streams,
        "prompt_tokens": num_prompt,
        "chunk": chunk,
        "warm_up_s": warm_up_s,
        "cases": {mode: summarise(figures) for mode, figures in results.items()},
        "whole_over": {
            mode: ratios(results["whole"], results[mode], "worst_gap_s") for mode in MODES[1:]
        },
    }
    # Without the warm-up.
    return found, {mode: middle(stalls[mode][1:]) for mode in MODES}


def middle(stalls: Sequence[Stall]) -> Stall:
    return sorted(stalls, key=lambda stall: max(stall.gaps))[len(stalls) // 2]


def measure_reuse(model: lfm2.Model, options: argparse.Namespace) -> dict:
    # No two runs have a prefix in common.
    numbers = count(1)
    models = {"off": without_kept_states(model), "on": model}

    def case(one: lfm2.Model) -> Case:
        return lambda: run_reuse(one, options.shared_tokens, next(numbers))

    cases = {label: case(one) for label, one in models.items()}
    results, warm_up_s = run_in_turns("reuse", cases, options.runs)
    return {
        "warm_up_s": warm_up_s,
        "cases": {label: summarise(figures) for label, figures in results.items()},
        "off_over_on": ratios(results["off"], results["on"], "second_s"),
    }

"""Compares our engine with transformers and mlx-lm on one checkpoint, on the CPU.

    python scripts/make_checkpoint.py --shape lfm2-350m /tmp/350m
    python scripts/bench_peers.py /tmp/350m --python-peers PEERS/bin/python

PEERS is an environment with the peers (1.2 GB with torch for the CPU alone); --engines leaves out
those that are not wanted:

    python3 -m venv PEERS
    PEERS/bin/pip install torch transformers              (for transformers-*)
    PEERS/bin/pip install mlx-lm "mlx[cpu]"               (for mlx-*; on a Mac: mlx-lm)

Every figure comes from a process of its own, after a warm-up in it; the engines take turns, round
by round, so that a slow moment of the machine hits all. A table for people; the last line is one
JSON object.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUM_CPU_THREADS")
OURS = "lfm2"
PEERS = {
    "transformers-bfloat16": ("transformers", "bfloat16"),
    "transformers-float32": ("transformers", "float32"),
    "mlx-bfloat16": ("mlx", "bfloat16"),
}
# What an interpreter must be able to import for an engine, and what installs it.
NEEDS = {
    "lfm2": (("lfm2", "tinygrad"), "run scripts/setup and use .venv/bin/python"),
    "transformers": (("torch", "transformers"), "pip install torch transformers"),
    "mlx": (("mlx", "mlx_lm"), 'pip install mlx-lm "mlx[cpu]"'),
}
LIST_MISSING = """
import importlib.util, sys
print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))
"""


@dataclass(frozen=True)
class Work:
    """Tokens of the prompt, and tokens generated after it."""

    prompt_tokens: int
    gen_tokens: int


class EngineFailed(Exception):
    """An engine's process ended without its JSON line."""


def command_of(engine: str, work: Work, options: argparse.Namespace) -> list[str]:
    """Returns the command whose last line of stdout is one measurement as JSON."""
    tokens = ["--prompt-tokens", str(work.prompt_tokens), "--gen-tokens", str(work.gen_tokens)]
    folder = str(options.folder.resolve())
    if engine == OURS:
        ours = [options.python_ours, "-m", "lfm2", "bench", "-m", folder]
        return ours + tokens + ["--runs", "1"]
    peer, dtype = PEERS[engine]
    worker = [options.python_peers, "-m", "scripts.bench_worker", peer, folder]
    return worker + tokens + ["--dtype", dtype]


def check_installed(options: argparse.Namespace) -> str | None:
    """Returns what an engine that is to be measured lacks, and how to get it."""
    for engine in options.engines:
        is_ours = engine == OURS
        python = options.python_ours if is_ours else options.python_peers
        modules, remedy = NEEDS[OURS if is_ours else PEERS[engine][0]]
        command = [python, "-c", LIST_MISSING, *modules]
        try:
            result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        except OSError as error:
            return f"{python} cannot be run: {error.strerror}"
        missing = result.stdout.split()
        if missing or result.returncode:
            return f"{engine}: {python} lacks {', '.join(missing or modules)}: {remedy}"
    return None


def run_once(command: list[str], threads: int) -> dict:
    """Runs a measuring process and returns its figures."""
    environment = os.environ | {name: str(threads) for name in THREAD_VARIABLES}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise EngineFailed(lines[-1])
    try:
        return json.loads(result.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise EngineFailed("its last line of output is not JSON") from None


def measure_all(options: argparse.Namespace) -> tuple[dict[str, list[dict]], dict[str, str]]:
    """Returns each engine's figures, one per round, and the reasons of those that failed."""
    rounds = {engine: [] for engine in options.engines}
    failures = {}
    for i in range(options.rounds):
        for engine in options.engines:
            if engine in failures:
                continue
            print(f"round {i + 1} of {options.rounds}: {engine}", file=sys.stderr)
            command = command_of(engine, work_of(engine, options), options)
            try:
                rounds[engine].append(run_once(command, options.threads))
            except EngineFailed as error:
                failures[engine] = str(error)
    return {engine: rounds[engine] for engine in rounds if engine not in failures}, failures


def work_of(engine: str, options: argparse.Namespace) -> Work:
    """Returns what an engine is given: mlx on the CPU is too slow for the full work."""
    whole = Work(options.prompt_tokens, options.gen_tokens)
    if not engine.startswith("mlx"):
        return whole
    prompt_tokens, gen_tokens = options.mlx_tokens
    return Work(min(prompt_tokens, whole.prompt_tokens), min(gen_tokens, whole.gen_tokens))


def summarise(figures: list[dict]) -> dict:
    """Returns median, least and greatest of every number that all rounds of an engine gave."""
    names = [n for n, v in figures[0].items() if isinstance(v, (int, float))]
    values = {name: [round_[name] for round_ in figures if name in round_] for name in names}
    return {n: {"median": median(v), "min": min(v), "max": max(v)} for n, v in values.items()}


def ratios(base: list[dict], other: list[dict], name: str) -> dict:
    """Returns base over other: of the medians, and the spread of the rounds taken in pairs."""
    pairs = [a[name] / b[name] for a, b in zip(base, other)]
    of_medians = median(a[name] for a in base) / median(b[name] for b in other)
    return {"ratio": of_medians, "min": min(pairs), "max": max(pairs)}


def print_table(summary: dict, versus: dict, base: str, options: argparse.Namespace) -> None:
    print(
        f"{'engine, tokens':32}{'prefill tok/s':>24}{'decode tok/s':>24}{'peak MB':>9}{'load s':>8}"
    )
    for engine, figures in summary.items():
        cells = []
        for name in ("prefill_tok_s", "decode_tok_s"):
            figure = figures[name]
            cells.append(f"{figure['median']:.1f} ({figure['min']:.1f}..{figure['max']:.1f})")
        memory_mb = figures["peak_memory_bytes"]["median"] / 1e6
        load_s = figures["load_s"]["median"]
        work = work_of(engine, options)
        label = f"{engine}, {work.prompt_tokens} + {work.gen_tokens}"
        print(f"{label:32}{cells[0]:>24}{cells[1]:>24}{memory_mb:9.0f}{load_s:8.1f}")
    for engine, figures in versus.items():
        text = ", ".join(
            f"{name.split('_')[0]} {r['ratio']:.2f} ({r['min']:.2f}..{r['max']:.2f})"
            for name, r in figures.items()
        )
        print(f"{base} over {engine}: {text}")


def machine() -> dict[str, object]:
    """Returns what the figures depend on outside the engines."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = lines[0].split(":", 1)[1].strip() if lines else model
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_average": os.getloadavg()[0],
        "commit": commit,
    }


def parse_options() -> argparse.Namespace:
    engines = [OURS, *PEERS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="checkpoint, e.g. made by make_checkpoint.py")
    parser.add_argument(
        "--engines", nargs="+", default=engines, choices=engines, help="which (all of these)"
    )
    parser.add_argument(
        "--python-peers", default=sys.executable, help="interpreter with the peers (this one)"
    )
    parser.add_argument(
        "--python-ours", default=sys.executable, help="interpreter with lfm2 (this one)"
    )
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of the prompt (512)")
    parser.add_argument("--gen-tokens", type=int, default=64, help="generated after it (64)")
    parser.add_argument(
        "--mlx-tokens",
        type=int,
        nargs=2,
        default=(64, 8),
        metavar="N",
        help="prompt and generated tokens at most for mlx, which is slow on a CPU (64 8)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="figures of each engine (5)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of each engine (2)")
    options = parser.parse_args()
    if not (options.folder / "config.json").exists():
        parser.error(f"{options.folder} holds no config.json")
    counts = ("prompt_tokens", "gen_tokens", "rounds", "threads")
    if min(getattr(options, name) for name in counts) < 1 or min(options.mlx_tokens) < 1:
        parser.error("all counts must be at least 1")
    if lack := check_installed(options):
        parser.error(lack)
    return options


def main() -> None:
    options = parse_options()
    conditions = machine()
    rounds, failures = measure_all(options)
    summary = {engine: summarise(figures) for engine, figures in rounds.items()}
    base = next(iter(rounds), None)
    versus = {
        engine: {n: ratios(rounds[base], f, n) for n in ("prefill_tok_s", "decode_tok_s")}
        for engine, f in rounds.items()
        if engine != base
    }
    if rounds:
        print_table(summary, versus, base, options)
    for engine, reason in failures.items():
        print(f"{engine} failed: {reason}")
    versions = {n: v for f in rounds.values() for n, v in f[0].get("versions", {}).items()}
    print(
        json.dumps(
            {
                "machine": conditions,
                "date": date.today().isoformat(),
                "versions": versions,
                "folder": options.folder.name,
                "threads": options.threads,
                "rounds": options.rounds,
                "work": {engine: asdict(work_of(engine, options)) for engine in rounds},
                "engines": summary,
                "base": base,
                "base_over": versus,
                "failures": failures,
            }
        )
    )
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

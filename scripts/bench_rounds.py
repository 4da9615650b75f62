"""Measures how streams share a model: total tokens/s, waits while a long prompt comes, reuse.

    python -m scripts.bench_rounds --quick                    (the built-in model, a minute or two)
    python -m scripts.bench_rounds -m 350m --streams 1 8 --plot stalls.png

Three comparisons, each of cases that take turns, run by run, in one process:

streams   so many prompts come together and decode in shared rounds: tokens/s of all, time to
          first token, and what a round costs outside the model (scheduling).
stall     streams decode and a long prompt comes. "whole": it runs at once, in as few forwards as
          can be, and all wait. "chunks": a round of theirs after each chunk. "mixed": chunk and
          round in one forward. The worst gap between tokens is what a user sees as a stall.
reuse     two prompts that begin alike, one after the other, with and without kept states.

Every case runs once before the times count, which compiles what it needs. Figures are medians, with
the least and the greatest in brackets. The last line of stdout is one JSON object.
"""

import argparse
import importlib.util
import json
import sys
from datetime import date
from importlib import import_module
from pathlib import Path

import lfm2
from lfm2.cli.bench import surroundings
from scripts.bench_peers import machine
from scripts.rounds.cases import load_model, measure_reuse, measure_stall, measure_streams
from scripts.rounds.table import print_reuse, print_stall, print_streams
from scripts.rounds.trial import Stall

QUICK = {
    "streams": [1, 4],
    "gen_tokens": 8,
    "stall_streams": [2],
    "long_prompts": [640],
    "shared_tokens": 256,
    "runs": 1,
}


def at_least(least: float, kind: type = int):
    """A type for argparse: a number not below `least`."""

    def convert(text: str) -> float:
        value = kind(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is below {least}")
        return value

    convert.__name__ = "number"
    return convert


def parser() -> argparse.ArgumentParser:
    count = at_least(1)
    made = argparse.ArgumentParser(
        prog="bench_rounds", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = made.add_argument
    add("-m", "--model", metavar="NAME", help="folder or hub name (the built-in model)")
    add("--device", metavar="NAME", help="a tinygrad device (as lfm2 chooses)")
    add("--dtype", metavar="NAME", help="the type to compute in (the checkpoint's)")
    add(
        "--streams",
        type=count,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="N",
        help="streams at once; the others are compared with the first (1 2 4 8 16 32)",
    )
    add("--prompt-tokens", type=count, default=64, metavar="N", help="of their prompts (64)")
    add("--gen-tokens", type=count, default=32, metavar="N", help="rounds that are timed (32)")
    add(
        "--stall-streams",
        type=count,
        nargs="*",
        default=[4, 8],
        metavar="N",
        help="streams that decode when a long prompt comes, none to leave this out (4 8)",
    )
    add(
        "--long-prompts",
        type=at_least(2),
        nargs="+",
        default=[2048],
        metavar="N",
        help="tokens of that prompt (2048)",
    )
    add(
        "--max-gap-ms",
        type=at_least(0.001, float),
        metavar="MS",
        help="plans the chunk, as lfm2.load does (what makes a round of 128 rows)",
    )
    add(
        "--shared-tokens",
        type=at_least(0),
        default=1500,
        metavar="N",
        help="of the prompts that begin alike, 0 to leave this out (1500)",
    )
    add("--runs", type=count, default=5, metavar="N", help="of every case (5)")
    add("--quick", action="store_true", help="one small run of each, unless options say more")
    add("--plot", type=Path, metavar="FILE", help="a picture of the first stall's tokens")
    return made


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    made = parser()
    options = made.parse_args(arguments)
    if options.quick:
        made.set_defaults(**QUICK)
        options = made.parse_args(arguments)
    if options.plot is not None:
        if not options.stall_streams:
            made.error("--plot shows a stall: give --stall-streams a number")
        if not importlib.util.find_spec("matplotlib"):
            made.error("--plot needs matplotlib: pip install 'lfm2[plots]', or matplotlib alone")
        if not options.plot.absolute().parent.is_dir():
            made.error(f"--plot: there is no folder {options.plot.parent}")
    return options


def measure(model: lfm2.Model, options: argparse.Namespace) -> tuple[dict, list[dict[str, Stall]]]:
    """All figures, told as they come, and the runs of each stall that a picture can show."""
    found = {"streams": measure_streams(model, options), "stalls": []}
    print_streams(found["streams"])
    pictured = []
    for num_prompt in options.long_prompts:
        for num_streams in options.stall_streams:
            figures, runs = measure_stall(model, num_streams, num_prompt, options)
            print_stall(figures)
            found["stalls"].append(figures)
            pictured.append(runs)
    if options.shared_tokens:
        found["reuse"] = measure_reuse(model, options)
        print_reuse(found["reuse"], options.shared_tokens)
    return found, pictured


def run(options: argparse.Namespace) -> None:
    # Before the work, whose own load is none of the machine's.
    conditions = machine()
    model = load_model(options)
    found, pictured = measure(model, options)
    if options.plot is not None:
        import_module("scripts.rounds.plot").save(pictured[0], options.plot)
    settings = {
        name: value for name, value in vars(options).items() if name not in ("model", "plot")
    }
    about = surroundings(model, options.model, settings)
    about["machine"] = conditions
    print(json.dumps(about | {"date": date.today().isoformat()} | found))


def main() -> None:
    try:
        run(parse_options())
    except lfm2.LFM2Error as error:
        print(f"bench_rounds: error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()

"""Measures the engine at published shapes on a GPU, beside transformers in the same run.

    python -m scripts.bench_gpu --peer python3 --out scripts/results/bench_gpu_h200.txt
    python -m scripts.bench_gpu --shape lfm2-24b-a2b --bits 4 --prompt 2048 --streams 1 8 32

Weights are random and made on the device. Prefill: a prompt in chunks, to its first token. Decode:
rounds of one row a stream, after a prompt each. A figure is the median of rounds; the spread is
that of their middle half. The copy bandwidth is measured in the same run, and is what the bytes of
a decode round are held against: its weights (of the experts, those that the round's rows chose) and
its keys and values. A table for people, a line as soon as it is known; the last line is one JSON
object.
"""

import argparse
import gc
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path

from tinygrad import Device

from lfm2.config import Config
from lfm2.environment import ensure_compiler, settle_tinygrad
from lfm2.errors import LFM2Error
from scripts.gpu.bench import copy_bandwidth, measure
from scripts.gpu.counts import add_counts
from scripts.gpu.table import our_line, peer_lines
from scripts.make_checkpoint import SHAPES, config_of

COPY_BYTES = 4 << 30
# Of transformers without the compilations, whose limit is an option: it takes about a minute.
PEER_LIMIT_S = 300


def give_back(device: str) -> None:
    """Frees what tinygrad keeps for reuse, which transformers and the next model want."""
    gc.collect()
    allocator = Device[device].allocator
    if hasattr(allocator, "free_cache"):
        allocator.free_cache()


def peer_figures(shape: str, options: argparse.Namespace) -> dict | str:
    """What transformers does on the same GPU, in a process of its own; a reason if it fails."""
    command = [options.peer, "-m", "scripts.peer_gpu", shape]
    command += ["--device", options.device.partition(":")[0].lower()]
    command += ["--prompt", *map(str, options.prompt), "--streams", *map(str, options.streams)]
    command += ["--compile-limit", str(options.compile_limit)]
    if options.layers:
        command += ["--layers", str(options.layers)]
    limit_s = PEER_LIMIT_S + max(0, options.compile_limit)
    root = Path(__file__).parents[1]
    try:
        # A line of output holds all figures so far: the last one is good whatever comes after it.
        done = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, timeout=limit_s)
        output, reason = done.stdout, f"exit code {done.returncode}"
    except subprocess.TimeoutExpired as error:
        output, reason = error.stdout or b"", f"more than {limit_s} s"
    except OSError as error:
        return str(error)
    *lines, _ = output.decode().split("\n")
    return json.loads(lines[-1]) if lines else reason


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["lfm2-350m", "lfm2-1.2b", "lfm2-8b-a1b", "lfm2-24b-a2b"]
    parser.add_argument("--device", default="CUDA", metavar="NAME", help="of tinygrad (CUDA)")
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=shapes, help=f"({' '.join(shapes)})"
    )
    parser.add_argument(
        "--bits", type=int, nargs="+", choices=(4, 8, 16), default=[16, 4], help="(16 4)"
    )
    add_counts(parser)
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with transformers")
    parser.add_argument("--out", type=Path, help="a file that gets all lines too, at its end")
    return parser.parse_args()


def run(options: argparse.Namespace) -> int:
    """Measures and prints; 1 if transformers was asked for and gave nothing."""

    def say(line: str) -> None:
        print(line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                print(line, file=file)

    ensure_compiler(options.device)
    settle_tinygrad()
    try:
        target = str(Device[options.device].renderer.target)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise LFM2Error(f"device {options.device} cannot be opened: {reason}") from error
    # Of a shortened model, on a machine that may be a small one, nothing is worth measuring.
    bandwidth = copy_bandwidth(options.device, COPY_BYTES >> (4 if options.layers else 0))
    say(f"{date.today()}: python -m scripts.bench_gpu {shlex.join(sys.argv[1:])}")
    say(f"copy {bandwidth / 1e9:,.0f} GB/s")
    results, code = [], 0
    for shape in options.shape:
        give_back(options.device)
        peer = peer_figures(shape, options) if options.peer else None
        if isinstance(peer, str):
            say(f"{shape:14} transformers gave no figures: {peer}")
            peer, code = None, 1
        for line in peer_lines(shape, peer) if peer else ():
            say(line)
        config = Config.from_dict(config_of(SHAPES[shape], options.layers, None, "bfloat16"))
        for bits in options.bits:
            figures = []
            for figure in measure(config, bits, options.device, options.prompt, options.streams):
                say(our_line(shape, bits, figure, bandwidth, peer))
                figures.append(asdict(figure))
            give_back(options.device)
            results.append({"shape": shape, "bits": bits, "figures": figures, "peer": peer})
    about = {"tinygrad": version("tinygrad"), "python": platform.python_version()}
    about |= {"date": str(date.today()), "device": target}
    say(json.dumps(about | {"copy_bytes_s": bandwidth, "results": results}))
    return code


def main() -> None:
    options = parse_options()
    try:
        sys.exit(run(options))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # What is left of the output cannot be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (LFM2Error, OSError, MemoryError) as error:
        sys.exit(f"bench_gpu: {error}")


if __name__ == "__main__":
    main()

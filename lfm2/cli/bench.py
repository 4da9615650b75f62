"""`lfm2 bench`: speed and memory of a model on this machine, as a table and as one JSON object."""

import json
import os
import platform
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import median

import click

import lfm2
from lfm2.cli.costs import decode_bytes
from lfm2.cli.loading import Stopwatch, load_model, peak_memory_bytes
from lfm2.cli.measure import (
    Run,
    memory_bytes_per_s,
    num_short_prompt,
    run,
    start_to_text_s,
)
from lfm2.cli.options import COUNT, loading_options, no_cache_option, options
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.errors import RequestError
from metal_ops.rows import parts

WARM_UP_TOKENS = 2


@click.command()
@options(
    loading_options("Tokens to have room for; at least prompt and generated ones together"),
    no_cache_option,
    click.option(
        "--prompt-tokens",
        type=COUNT,
        default=512,
        show_default=True,
        metavar="N",
        help="Tokens of the prompt that is read.",
    ),
    click.option(
        "--gen-tokens",
        type=COUNT,
        default=64,
        show_default=True,
        metavar="N",
        help="Tokens generated after it.",
    ),
    click.option(
        "--runs",
        type=COUNT,
        default=5,
        show_default=True,
        metavar="N",
        help="How many times; the medians count.",
    ),
    click.option(
        "--cold",
        is_flag=True,
        help="Measure whole starts too: one with nothing compiled, then RUNS with everything.",
    ),
)
@click.pass_obj
def bench(
    terminal: Terminal, prompt_tokens: int, gen_tokens: int, runs: int, cold: bool, **given
) -> None:
    """Measures prefill and decode, the time to a first token, and memory.

    Medians of several runs after a warm-up. The last line is one JSON object.
    """
    name = given["model"]
    arguments = generate_arguments(given)
    settings = {
        "prompt_tokens": prompt_tokens,
        "gen_tokens": gen_tokens,
        "first_token_prompt_tokens": num_short_prompt(prompt_tokens),
        "runs": runs,
        "dtype": given["dtype"],
    }
    watch = Stopwatch()
    model = load_model(terminal, given, needs_text=False)
    times = {"load_s": watch.lap_s()}
    if prompt_tokens + gen_tokens > model.context:
        raise RequestError(
            f"{prompt_tokens} + {gen_tokens} tokens do not fit a context of {model.context}"
        )
    run(model, prompt_tokens, WARM_UP_TOKENS)
    times["warm_up_s"] = watch.lap_s()
    taken = []
    for i in range(runs):
        terminal.show(f"run {i + 1} of {runs}")
        taken.append(run(model, prompt_tokens, gen_tokens))
    terminal.wipe()
    found = times | figures(model, taken, prompt_tokens, gen_tokens)
    if cold:
        found |= cold_figures(terminal, arguments, runs)
    terminal.write(table(found, settings))
    terminal.write(json.dumps(found | surroundings(model, name, settings)) + "\n")


def generate_arguments(given: dict) -> list[str]:
    """The loading options again, for another process."""
    names = ("model", "device", "dtype", "context")
    named = [(f"--{name}", str(given[name])) for name in names if given[name] is not None]
    return [text for pair in named for text in pair]


def figures(model: "lfm2.Model", taken: list[Run], num_prompt: int, num_decoded: int) -> dict:
    """The medians of the runs, each run's own figures, and decoding's share of what memory can."""
    runs = {
        "prefill_tok_s": [num_prompt / one.prefill_s for one in taken],
        "decode_tok_s": [num_decoded / one.decode_s for one in taken],
        "first_token_s": [one.first_token_s for one in taken],
    }
    found = {name: median(values) for name, values in runs.items()}
    # Taken before the bandwidth is measured, which needs memory of its own.
    found |= {
        "peak_memory_bytes": peak_memory_bytes(),
        "state_bytes": model.runner.state.num_bytes,
        "runs": runs,
    }
    per_token = bytes_per_decode(model, num_prompt + num_decoded // 2)
    found |= {"bytes_per_decode": per_token, "decode_gb_s": found["decode_tok_s"] * per_token / 1e9}
    if model.runner.device == "CPU":
        limit = memory_bytes_per_s() / 1e9
        found |= {"memory_gb_s": limit, "decode_memory_share": found["decode_gb_s"] / limit}
    return found


def bytes_per_decode(model: "lfm2.Model", position: int) -> int:
    """What the decode step at a position reads: weights, and the keys and values before it."""
    weights = model.runner.model.weights
    sizes = {name: sum(part.nbytes() for part in parts(weight)) for name, weight in weights.items()}
    itemsize = model.runner.model.dtype.itemsize
    return decode_bytes(sizes, model.config) + position * model.config.kv_bytes_per_token(itemsize)


def cold_figures(terminal: Terminal, arguments: list[str], runs: int) -> dict:
    """Seconds from process start to first text: once with nothing compiled, then with all."""
    with tempfile.TemporaryDirectory(prefix="lfm2-bench-") as cache_home:
        terminal.show(f"start 1 of {runs + 1}, with nothing compiled before")
        first_s = start_to_text_s(arguments, cache_home)
        later_s = []
        for i in range(runs):
            terminal.show(f"start {i + 2} of {runs + 1}")
            later_s.append(start_to_text_s(arguments, cache_home))
        terminal.wipe()
    return {"first_start_s": first_s, "later_start_s": median(later_s), "later_starts_s": later_s}


def surroundings(model: "lfm2.Model", name: str | None, settings: dict) -> dict:
    """What the figures depend on."""
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {
            "lfm2": lfm2.__version__,
            "tinygrad": version("tinygrad"),
            "numpy": version("numpy"),
            "python": platform.python_version(),
        },
        "model": {
            "name": "built-in" if name is None else Path(name).name,
            "parameters": model.config.num_params,
            "active_parameters": model.config.num_active_params,
        },
        "settings": {
            **settings,
            "device": model.runner.device,
            "dtype": settings["dtype"] or model.config.dtype,
            "context": model.context,
        },
    }


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(found: dict, settings: dict) -> str:
    runs = found["runs"]
    read = f"{bytes_text(found['bytes_per_decode'])} a token, {found['decode_gb_s']:.1f} GB/s"
    if "decode_memory_share" in found:
        share, limit = found["decode_memory_share"], found["memory_gb_s"]
        read += f", {share:.0%} of the {limit:.1f} that a numpy dot product reads"
    rows = {
        f"prefill of {settings['prompt_tokens']}": spread(
            runs["prefill_tok_s"], "{:.1f}", "tokens/s"
        ),
        f"decode of {settings['gen_tokens']}": spread(runs["decode_tok_s"], "{:.1f}", "tokens/s"),
        "  memory read": read,
        f"first token of {settings['first_token_prompt_tokens']}": spread(
            runs["first_token_s"], "{:.3f}", "s"
        ),
        "before that": f"load {found['load_s']:.2f} s, warm-up {found['warm_up_s']:.2f} s",
        "peak memory": bytes_text(found["peak_memory_bytes"]),
    }
    if "first_start_s" in found:
        rows["first start"] = (
            f"{found['first_start_s']:.2f} s to the first text, nothing compiled before"
        )
        rows["later starts"] = spread(found["later_starts_s"], "{:.2f}", "s to the first text")
    return "".join(f"{name:18}{value}\n" for name, value in rows.items())


def spread(values: list[float], form: str, unit: str) -> str:
    least, middle, most = (
        form.format(value) for value in (min(values), median(values), max(values))
    )
    return f"{middle} {unit} ({least} to {most})"

"""The options that commands share, each defined once.

Their names are those of `lfm2.load` and `Model.stream`.
"""

from collections.abc import Callable

import click

from lfm2.cli.terminal import Terminal


class TokenBias(click.ParamType):
    """`ID=BIAS`, a token id and what is added to its logit."""

    name = "ID=BIAS"

    def convert(self, value, param, context) -> tuple[int, float]:
        token, _, bias = value.partition("=")
        try:
            return int(token), float(bias)
        except ValueError:
            self.fail(
                f"{value!r} is not of the form ID=BIAS, such as 42=-1.5 or 42=-inf", param, context
            )


def _be_verbose(context: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        context.find_object(Terminal).is_verbose = True


verbose_option = click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_be_verbose,
    help="Say more on standard error; show the traceback of an unexpected error.",
)
model_option = click.option(
    "-m",
    "--model",
    metavar="NAME",
    help="A folder, or a hub name org/name[@revision]. Without it: the built-in model.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")

DTYPES = ("bfloat16", "float16", "float32")
COUNT = click.IntRange(min=1)

device_option = click.option(
    "--device",
    metavar="NAME",
    help="A tinygrad device: CPU, METAL, CUDA, ... (DEV if set, METAL on a Mac, the GPU there is, "
    "else CPU).",
)
dtype_option = click.option(
    "--dtype", type=click.Choice(DTYPES), help="The type to compute in (the checkpoint's)."
)


def loading_options(context: str) -> tuple[Callable, ...]:
    """The options of `lfm2.load`; `context` says what its length means to the command."""
    context_option = click.option(
        "-c",
        "--context",
        type=COUNT,
        metavar="N",
        help=f"{context} (what the model can, at most 32768).",
    )
    return model_option, device_option, dtype_option, context_option


no_cache_option = click.option("--no-cache", is_flag=True, help="Compile anew and keep nothing.")


def serving_options(streams: int) -> tuple[Callable, ...]:
    """What decides how replies share rounds; `streams` unless told otherwise."""
    streams_option = click.option(
        "--streams",
        type=COUNT,
        default=streams,
        show_default=True,
        metavar="N",
        help="Most requests to serve at once.",
    )
    max_gap_option = click.option(
        "--max-gap-ms",
        type=click.FloatRange(min=0, min_open=True),
        metavar="MS",
        help="Longest pause of the other replies while a prompt is read (no limit).",
    )
    return streams_option, max_gap_option


prompt_cache_option = click.option(
    "--prompt-cache",
    metavar="FILE",
    help="Go on from the states of earlier prompts that this file holds, and add this one's.",
)
REPLYING = (
    click.option(
        "-n",
        "--max-tokens",
        type=COUNT,
        metavar="N",
        help="Most tokens of a reply (512, or what fits).",
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End the reply before this text. Repeatable."
    ),
    click.option("-sys", "--system", metavar="TEXT", help="A system prompt."),
)
SAMPLING = (
    click.option(
        "--temp",
        "--temperature",
        "temperature",
        type=float,
        metavar="T",
        help="Temperature; 0 takes the likeliest token (the checkpoint's, else 0).",
    ),
    click.option(
        "--top-k",
        type=int,
        metavar="K",
        help="Keep the K likeliest tokens (the checkpoint's, else 0 = all).",
    ),
    click.option(
        "--top-p",
        type=float,
        metavar="P",
        help="Keep the likeliest tokens that make up P (the checkpoint's, else 1 = all).",
    ),
    click.option(
        "--min-p",
        type=float,
        metavar="P",
        help="Keep tokens P times as likely as the likeliest (the checkpoint's, else 0 = all).",
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Weaken tokens that were there (the checkpoint's, else 1 = off).",
    ),
    click.option(
        "--repetition-window",
        type=int,
        metavar="N",
        help="How many tokens back that looks (0 = all).",
    ),
    click.option(
        "--logit-bias",
        type=TokenBias(),
        multiple=True,
        help="Add to a token's logit, -inf to ban it. Repeatable.",
    ),
    click.option(
        "--seed", type=int, metavar="N", help="Decides the draws (a number made from the prompt)."
    ),
)


def options(*groups: tuple[Callable, ...] | Callable) -> Callable:
    """Gives a command groups of options, and --verbose."""

    def decorate(function: Callable) -> Callable:
        function = verbose_option(function)
        for group in reversed(groups):
            for option in reversed(group if isinstance(group, tuple) else (group,)):
                function = option(function)
        return function

    return decorate

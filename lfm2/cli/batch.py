"""`lfm2 batch`: many requests from a file, served together; a record for each in another file."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import click

from lfm2.cli import INTERRUPTED
from lfm2.cli.batch_lines import MAX_LINE_BYTES, Lines
from lfm2.cli.batch_progress import Progress, count_text
from lfm2.cli.batch_results import ResultFile, ResultStream
from lfm2.cli.batch_run import Run
from lfm2.cli.batch_source import Source
from lfm2.cli.loading import kept_states, load_model, request_of
from lfm2.cli.options import (
    REPLYING,
    SAMPLING,
    loading_options,
    no_cache_option,
    options,
    prompt_cache_option,
    serving_options,
)
from lfm2.cli.terminal import Terminal
from lfm2.errors import LFM2Error, RequestError
from lfm2.request import check_request

STREAMS = 8


@click.command()
@click.argument("path", required=False, metavar="[IN]")
@click.option(
    "-o",
    "--out",
    default="-",
    metavar="OUT",
    help="The file to write (- = standard output, which is the default).",
)
@click.option(
    "--ordered",
    "is_ordered",
    is_flag=True,
    help="Write records in the order of IN; an interrupt loses those that wait for one before them.",
)
@click.option(
    "--resume",
    "is_resumed",
    is_flag=True,
    help="Go on with OUT: skip the ids that have a reply there, try error records again.",
)
@click.option("--force", "is_replaced", is_flag=True, help="Replace OUT if it is there.")
@options(
    loading_options("Tokens that each prompt and its reply may have together"),
    no_cache_option,
    prompt_cache_option,
    serving_options(STREAMS),
    REPLYING,
    SAMPLING,
    click.option(
        "--raw", is_flag=True, help="Go on with the prompts as they are: no chat template."
    ),
    click.option(
        "--logprobs",
        "num_logprobs",
        type=int,
        metavar="N",
        help="Log-probabilities of each token and of the N likeliest.",
    ),
)
@click.pass_obj
def batch(
    terminal: Terminal,
    path: str | None,
    out: str,
    is_ordered: bool,
    is_resumed: bool,
    is_replaced: bool,
    **given,
) -> None:
    """Serves the requests in IN (- = standard input), and writes a record for each to OUT.

    A line of IN is a JSON object: "prompt" (a text or token ids) or "messages", and if you like
    "id" (else it is the line's number), "max_tokens", "temperature", "seed", "stop" and the other
    options of Model.stream, which count before those given here. A line that cannot be served
    becomes a record with "error", and the exit code is 1. Records are written as requests finish.
    """
    check_outcome(out, is_resumed, is_replaced)
    defaults = defaults_of(given)
    with opened(path) as (file, name), contextlib.ExitStack() as stack:
        refuse_same_file(file, out)
        refuse_as_cache(given["prompt_cache"], path, out)
        if out == "-":
            results = ResultStream(terminal)
        else:
            results = ResultFile(Path(out), is_resumed, is_replaced)
        stack.callback(results.close)
        model = load_model(terminal, given)
        stack.enter_context(kept_states(terminal, model, given["prompt_cache"]))
        results.begin()
        source = Source(file, MAX_LINE_BYTES)
        num_lines = source.count() if terminal.is_terminal else None
        lines = Lines(source, name, defaults, results.served)
        progress = Progress(terminal, lines, num_lines, given["streams"])
        run = Run(model, lines, results, progress, is_ordered)
        serve(terminal, run, out)


def check_outcome(out: str, is_resumed: bool, is_replaced: bool) -> None:
    """Raises UsageError for what can be told to be wrong from the options alone."""
    if is_resumed and is_replaced:
        raise click.UsageError("--resume keeps OUT and --force replaces it: give one of them")
    if is_resumed and out == "-":
        raise click.UsageError("--resume needs -o FILE: what standard output had is not known")


def defaults_of(given: dict) -> dict:
    """The options of `Model.stream` that were given. Raises RequestError for a wrong one."""
    asked = request_of(given)
    # False is a flag that was not set; a temperature of 0, which equals it, is given.
    defaults = {
        name: value
        for name, value in asked.items()
        if value not in (None, ()) and value is not False
    }
    check_request("any prompt", **defaults)
    return defaults


@contextlib.contextmanager
def opened(path: str | None) -> Iterator[tuple[BinaryIO, str]]:
    """The file of requests and what errors call it."""
    if path is None and sys.stdin.isatty():
        raise click.UsageError("no requests: name a file, or - to read standard input")
    if path in (None, "-"):
        yield sys.stdin.buffer, "standard input"
        return
    try:
        file = open(path, "rb")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield file, path


def refuse_same_file(file: BinaryIO, out: str) -> None:
    """Raises RequestError if a run would read what it writes."""
    with contextlib.suppress(OSError):
        ours = os.fstat(sys.stdout.fileno()) if out == "-" else os.stat(out)
        theirs = os.fstat(file.fileno())
        if stat.S_ISREG(ours.st_mode) and os.path.samestat(ours, theirs):
            raise RequestError("IN and OUT are the same file: name another OUT")


def refuse_as_cache(cache: str | None, *others: str | None) -> None:
    """Raises RequestError if the file of kept states would be written over another one."""
    for other in others:
        if (
            cache is not None
            and other is not None
            and os.path.realpath(cache) == os.path.realpath(other)
        ):
            raise RequestError(f"--prompt-cache {cache} is IN or OUT: name a file of its own")


def serve(terminal: Terminal, run: Run, out: str) -> None:
    """Finishes a run and says what came of it. Raises LFM2Error if a line was refused."""
    can_resume = run.results.is_regular
    hint = f"what is finished is in {out}: --resume goes on from there"
    try:
        run.finish()
    except KeyboardInterrupt:
        terminal.break_off()
        terminal.note(f"interrupted; {hint}" if can_resume else "interrupted")
        click.get_current_context().exit(INTERRUPTED)
    except BaseException:
        if can_resume:
            terminal.note(hint)
        raise
    progress = run.progress
    terminal.note(progress.summary())
    if progress.num_refused:
        again = "; --resume tries them again" if can_resume else ""
        raise LFM2Error(
            f"{count_text(progress.num_refused, 'line')} became error records, "
            f'whose "error" says why{again}'
        )

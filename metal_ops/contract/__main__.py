"""python -m metal_ops.contract"""

import contextlib
import os
import shutil
import sys
from collections.abc import Sequence

import click

from metal_ops.contract.errors import ContractError
from metal_ops.contract.report import choose, num_processors, open_device, verify
from metal_ops.kernel import target_of

NAME = "python -m metal_ops.contract"
INTERRUPTED = 130  # as shells count: 128 and the number of the signal
NO_READER = 141
# To the start of the line, which is cleared.
WIPE = "\r\x1b[K"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--only",
    multiple=True,
    metavar="NAME",
    help="One kernel, as --list names them; may be given more than once.",
)
@click.option("--list", "is_list", is_flag=True, help="Print the names of the kernels, and end.")
@click.option("--device", default="METAL", show_default=True, help="Where the kernels run.")
@click.option(
    "--order",
    type=click.Choice(["fifo", "reverse", "random"]),
    default="random",
    show_default=True,
    help="Of the threads of emulated Metal.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random order.")
def contract(only: tuple[str, ...], is_list: bool, device: str, order: str, seed: int) -> None:
    """Proves the hand-written kernels on a device: every gate, every planted fault.

    On a Mac METAL is the real one; on Linux it is emulated, with every access to memory checked.
    Exits with 1 if a kernel fails or a planted fault is missed.
    """
    named = choose(only)
    if is_list:
        for one in named:
            say(one.name)
        return
    device = open_device(device, say, order, seed)
    chosen = choose(only, target_of(device))
    is_proved = verify(chosen, device, say, progress, num_processors())
    progress("")
    if not is_proved:
        raise click.exceptions.Exit(1)


def say(line: str) -> None:
    progress("")
    try:
        click.echo(line)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ContractError(f"the output cannot be written: {error.strerror}") from error


def progress(what: str) -> None:
    if is_terminal():
        width = shutil.get_terminal_size().columns - 1
        tell(WIPE + what[:width])


def is_terminal() -> bool:
    """Whether someone sees progress: standard error is None where it was closed."""
    return sys.stderr is not None and sys.stderr.isatty()


def tell(text: str) -> None:
    """Standard error that cannot be written is no reason to stop."""
    with contextlib.suppress(OSError):
        click.echo(text, err=True, nl=False)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    try:
        sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
    finally:
        drop_output()


def run(arguments: list[str]) -> int:
    """The exit code of a command line. What goes wrong is told in one line on standard error."""
    try:
        with contract.make_context(NAME, arguments) as context:
            contract.invoke(context)
        return 0
    except click.exceptions.Exit as stopped:
        return stopped.exit_code
    except KeyboardInterrupt:
        # The terminal itself has put ^C there.
        tell("\n" if is_terminal() else "")
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER
    except click.UsageError as error:
        return fail(f"{error.format_message().rstrip('.')} (see {NAME} --help)", error.exit_code)
    except ContractError as error:
        return fail(str(error), error.exit_code)
    except OSError as error:
        return fail(str(error), 1)


def fail(message: str, exit_code: int) -> int:
    progress("")
    tell(f"Error: {' '.join(message.split())}\n")
    return exit_code


def drop_output() -> None:
    """Drops what is left of an output that cannot be written, so that Python does not fail to at
    exit.
    """
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

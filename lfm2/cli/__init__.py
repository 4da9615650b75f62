"""The command line: the list of commands, and the one place where an error becomes a line and an
exit code.

Loads a command's module, and with it tinygrad, only when that command is called.
"""

import importlib
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence

import click

from lfm2 import __version__
from lfm2.cli.terminal import Terminal
from lfm2.errors import LFM2Error

INTERRUPTED = 130  # as shells count: 128 and the number of the signal
NO_READER = 141
INTERRUPT_DELAY_S = 0.01
COMMANDS = {
    "generate": "Write the reply to a prompt.",
    "chat": "Talk with a model.",
    "batch": "Serve the requests of a file, many at once.",
    "info": "Show what a checkpoint is and what it takes, without loading it.",
    "compile": "Compile ahead of time what generate and chat need.",
    "convert": "Write a quantised copy of a checkpoint.",
    "score": "Measure the perplexity of a text.",
    "bench": "Measure speed and memory.",
    "verify": "Prove the Metal kernels on this machine.",
}


class Commands(click.Group):
    """The commands by name; each lives in the module of its name."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        return getattr(importlib.import_module(f"lfm2.cli.{name}"), name)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the list without importing the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.command(
    cls=Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="lfm2")
@click.pass_context
def lfm2(context: click.Context) -> None:
    """Runs LFM2, LFM2.5 and LFM2-MoE language models on tinygrad.

    Text goes to standard output, everything else to standard error.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code."""
    open_missing_streams()
    # An output that cannot show a character gets a question mark, not a traceback.
    sys.stdout.reconfigure(errors="replace")
    sys.unraisablehook = interrupt_again
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments), Terminal()))


def interrupt_again(ignored: "sys.UnraisableHookArgs") -> None:
    """Raises an interrupt anew that came inside a finalizer, where Python drops what is raised.

    Other faults there are of objects that an interrupt left half made: nothing to tell a user.
    """
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        # Later, and from elsewhere: here it would be dropped once more.
        again = (threading.main_thread().ident, signal.SIGINT)
        threading.Timer(INTERRUPT_DELAY_S, signal.pthread_kill, again).start()


def open_missing_streams() -> None:
    """Gives a program that was started with a closed standard stream one.

    Nothing is read there, notes are lost, and writing the output fails as it would without.
    """
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.open(os.devnull, os.O_RDONLY), "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


def run(arguments: list[str], terminal: Terminal) -> int:
    """The exit code of a command line. What goes wrong is told in one line on standard error."""
    warnings.showwarning = lambda message, *_, **__: terminal.warn(str(message))
    try:
        with lfm2.make_context("lfm2", arguments, obj=terminal) as context:
            lfm2.invoke(context)
        return 0
    except click.exceptions.Exit as stopped:
        return stopped.exit_code
    except (KeyboardInterrupt, click.Abort):
        terminal.break_off()
        return INTERRUPTED
    except BrokenPipeError:
        return NO_READER
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "lfm2"
        return fail(
            terminal, f"{error.format_message().rstrip('.')} (see {path} --help)", error.exit_code
        )
    except click.ClickException as error:
        return fail(terminal, error.format_message(), error.exit_code)
    except LFM2Error as error:
        return fail(terminal, str(error), error.exit_code)
    except MemoryError:
        return fail(
            terminal,
            "out of memory: take a smaller --context or a quantised copy (lfm2 convert)",
            1,
        )
    except Exception as error:
        return fail_unexpectedly(terminal, error)
    finally:
        flush_output()


def fail(terminal: Terminal, message: str, exit_code: int) -> int:
    terminal.end_line()
    terminal.note(f"Error: {' '.join(message.split())}")
    return exit_code


def fail_unexpectedly(terminal: Terminal, error: Exception) -> int:
    """A fault of ours, or of the machine: the traceback is for those who ask for it."""
    if terminal.is_verbose:
        terminal.end_line()
        traceback.print_exception(error)
    reason = (str(error).splitlines() or [""])[0]
    hint = "" if terminal.is_verbose else " (run with --verbose for the traceback)"
    return fail(terminal, f"unexpected {type(error).__name__}: {reason}{hint}", 1)


def flush_output() -> None:
    """Writes out what is left, or drops what cannot be, so that Python does not fail to at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

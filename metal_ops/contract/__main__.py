"""python -m metal_ops.contract"""

import sys

import click

from metal_ops.contract.report import choose, open_device, verify

INTERRUPTED = 130  # as shells count: 128 and the number of the signal


@click.command()
@click.option(
    "--only", multiple=True, metavar="NAME", help="One kernel; may be given more than once."
)
@click.option("--device", default="METAL", show_default=True, help="Where the kernels run.")
@click.option(
    "--order",
    type=click.Choice(["fifo", "reverse", "random"]),
    default="random",
    show_default=True,
    help="Of the threads of emulated Metal.",
)
@click.option("--seed", default=0, show_default=True, help="Of the random order.")
def main(only: tuple[str, ...], device: str, order: str, seed: int) -> None:
    """Proves the hand-written kernels on a device: every gate, every planted fault.

    On a Mac METAL is the real one; on Linux it is emulated, with every access to memory checked.
    Exits with 1 if a kernel fails or a planted fault is missed.
    """
    is_terminal = sys.stderr.isatty()

    def progress(what: str) -> None:
        if is_terminal:
            click.echo(f"\r\x1b[K{what}", err=True, nl=False)

    def say(line: str) -> None:
        progress("")
        click.echo(line)

    try:
        chosen = choose(only, device)
        is_proved = verify(chosen, open_device(device, say, order, seed), say, progress)
    except KeyboardInterrupt:
        # The terminal itself has put ^C there.
        click.echo("\n" if is_terminal else "", err=True, nl=False)
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(0 if is_proved else 1)


if __name__ == "__main__":
    main()

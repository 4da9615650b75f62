"""`lfm2 verify`: runs the contract of the hand-written kernels on this machine."""

import click

from lfm2.cli.options import options
from lfm2.cli.terminal import Terminal
from lfm2.environment import settle_tinygrad
from lfm2.errors import LFM2Error, RequestError
from metal_ops.contract import report
from metal_ops.contract.errors import ContractError, Refused
from metal_ops.kernel import target_of


@click.command()
@options(
    click.option(
        "--only",
        multiple=True,
        metavar="NAME",
        help="Just this kernel, as --list names them. Repeatable (all of them).",
    ),
    click.option("--list", "is_list", is_flag=True, help="Print the names of the kernels."),
    click.option(
        "--device",
        default="METAL",
        show_default=True,
        metavar="NAME",
        help="Where the kernels run.",
    ),
)
@click.pass_obj
def verify(terminal: Terminal, only: tuple[str, ...], is_list: bool, device: str) -> None:
    """Proves the hand-written Metal kernels on this machine.

    Compiles every kernel, compares what it computes with its contract to the bound or the bit, and
    plants faults that the comparison must see. Needs no model. On a Mac the kernels run on the GPU
    there is; elsewhere Metal is emulated on the processor, for which a clang or the ziglang package
    has to be there. Takes some minutes.

    The last line, SUMMARY, is the result. To report it, open an issue with all that was printed, or
    at least the line that names the GPU, the SUMMARY line and those that begin with FAIL or MISSED.
    Exits with 1 if there are any of these.
    """
    settle_tinygrad()

    def say(line: str) -> None:
        terminal.write(line + "\n")

    try:
        named = report.choose(only)
        if is_list:
            say("\n".join(contract.name for contract in named))
            return
        device = report.open_device(device, say)
        chosen = report.choose(only, target_of(device))
        num_processes = report.num_processors()
        is_proved = report.verify(chosen, device, say, terminal.show, num_processes)
    except Refused as error:
        raise RequestError(str(error)) from error
    except ContractError as error:
        raise LFM2Error(str(error)) from error
    terminal.wipe()
    if not is_proved:
        raise click.exceptions.Exit(1)

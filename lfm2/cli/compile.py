"""`lfm2 compile`: fills the cache of compiled steps ahead of time."""

import click

from lfm2.cli.loading import Compilation, Stopwatch, load_model
from lfm2.cli.options import loading_options, options, serving_options
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.environment import cache_folder
from lfm2.errors import LFM2Error, RequestError
from lfm2.runner import bucket, mixed_capacity
from lfm2.service import MAX_ROUND_STREAMS
from metal_ops.table import Capacity


class Rows(click.ParamType):
    """Numbers of rows, separated by commas."""

    name = "N,N,..."

    def convert(self, value, param, context) -> list[int]:
        try:
            rows = [int(part) for part in value.split(",")]
        except ValueError:
            rows = [0]
        if min(rows) < 1:
            self.fail(
                f"{value!r} is no list of numbers from 1 on, such as 1,16,512", param, context
            )
        return rows


def forms(sizes: list[int], streams: int) -> list[Capacity]:
    """The capacities of rounds of so many rows: of one stream, of a row of each of several, of
    several with a piece of a prompt.
    """
    found = [Capacity(size, 1, 1) for size in sizes]
    if streams > 1:
        most = min(bucket(streams), MAX_ROUND_STREAMS)
        found += [Capacity(size, size, size) for size in sizes if 1 < size <= most]
        found += [mixed_capacity(size, streams) for size in sizes]
    return list(dict.fromkeys(found))


@click.command("compile")
@options(
    loading_options("The context that generate, chat or batch will be given"),
    serving_options(streams=1),
    click.option(
        "--rows",
        type=Rows(),
        show_default="all powers of two up to 512, on CUDA 2048",
        help="Tokens at once to compile for: 1 to decode, more for a prompt or a piece of it. "
        "Rounded up to powers of two.",
    ),
)
@click.pass_obj
def compile(terminal: Terminal, rows: list[int] | None, **given) -> None:
    """Compiles ahead of time what generate and chat would else compile when they first need it;
    with --streams what batch would.

    Holds for one model, device, type, context and number of streams: give the same options as
    later.
    """
    compilation = Compilation(terminal)
    model = load_model(terminal, given, compilation, needs_text=False)
    artifacts, most = model.runner.artifacts, model.runner.state.max_rows
    rows = rows or [1 << power for power in range(most.bit_length())]
    if max(rows) > most:
        raise RequestError(f"--rows: a round holds at most {most} rows here, found {max(rows)}")
    watch = Stopwatch()
    # What cannot be kept shows at the latest when the first step is saved.
    capacities = []
    sizes = sorted({bucket(num_rows) for num_rows in rows})
    wanted = forms(sizes, given["streams"])
    for i, capacity in enumerate(wanted, 1):
        if artifacts.folder is None:
            break
        compilation.count = f"{i} of {len(wanted)}, "
        capacities.append(model.runner.form(capacity).capacity)
    terminal.wipe()
    if artifacts.folder is None:
        raise LFM2Error(f"nothing is kept: {cache_folder()} cannot be used")
    compile_s = watch.lap_s()
    num_bytes = sum(artifacts.path(capacity).stat().st_size for capacity in capacities)
    num_compiled = compilation.num_steps
    num_found = len(capacities) - num_compiled
    terminal.write(
        f"compiled {num_compiled} step{'s' * (num_compiled != 1)} in {compile_s:.1f} s, "
        f"{num_found} {'was' if num_found == 1 else 'were'} there; "
        f"{bytes_text(num_bytes)} in {artifacts.folder}\n"
    )

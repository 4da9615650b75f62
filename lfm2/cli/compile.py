"""`lfm2 compile`: fills the cache of compiled steps ahead of time."""

import click

import lfm2
from lfm2.cli.loading import Compilation, Stopwatch, load_model
from lfm2.cli.options import LOADING, options
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.environment import cache_folder
from lfm2.errors import LFM2Error

MAX_ROWS = 512


class Rows(click.ParamType):
    """Numbers of rows, separated by commas."""

    name = "N,N,..."

    def convert(self, value, param, context) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            rows = [int(part) for part in value.split(",")]
        except ValueError:
            rows = [0]
        if min(rows) < 1 or max(rows) > MAX_ROWS:
            self.fail(f"{value!r} is no list of numbers from 1 to {MAX_ROWS}, such as 1,16,512", param, context)
        return rows


ALL_ROWS = [1 << power for power in range(MAX_ROWS.bit_length())]


@click.command("compile")
@options(
    LOADING,
    click.option(
        "--rows",
        type=Rows(),
        default=ALL_ROWS,
        show_default="all powers of two up to 512",
        help="Sizes to compile for: 1 is decoding, others are pieces of a prompt, rounded up to a power of two.",
    ),
)
@click.pass_obj
def compile(terminal: Terminal, rows: list[int], **given) -> None:
    """Compiles ahead of time what generate and chat would else compile when they first need it.

    Holds for one model, device, type and context: give the same options as later.
    """
    compilation = Compilation(terminal)
    model = load_model(terminal, given, compilation)
    watch = Stopwatch()
    forms = {model.form(num_rows).capacity: None for num_rows in sorted(rows)}
    compile_s = watch.lap_s()
    artifacts = model.runner.artifacts
    if artifacts.folder is None:
        raise LFM2Error(f"nothing is kept: {cache_folder()} cannot be used")
    num_bytes = sum(artifacts.path(capacity).stat().st_size for capacity in forms)
    num_found = len(forms) - compilation.num_forms
    terminal.write(
        f"compiled {compilation.num_forms} forms in {compile_s:.1f} s, {num_found} were there; "
        f"{bytes_text(num_bytes)} in {artifacts.folder}\n"
    )

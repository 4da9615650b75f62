"""`lfm2 compile`: fills the cache of compiled steps ahead of time."""

import click

import lfm2
from lfm2.cli.loading import Compilation, Stopwatch, load_model
from lfm2.cli.options import LOADING, options
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.environment import cache_folder
from lfm2.engine import CHUNK
from lfm2.errors import LFM2Error


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
        if min(rows) < 1 or max(rows) > CHUNK:
            self.fail(
                f"{value!r} is no list of numbers from 1 to {CHUNK}, such as 1,16,512",
                param,
                context,
            )
        return rows


ALL_ROWS = [1 << power for power in range(CHUNK.bit_length())]


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
    artifacts = model.runner.artifacts
    watch = Stopwatch()
    # What cannot be kept shows at the latest when the first form is saved.
    forms = set()
    for num_rows in sorted(rows):
        if artifacts.folder is None:
            break
        forms.add(model.form(num_rows).capacity)
    if artifacts.folder is None:
        raise LFM2Error(f"nothing is kept: {cache_folder()} cannot be used")
    compile_s = watch.lap_s()
    num_bytes = sum(artifacts.path(capacity).stat().st_size for capacity in forms)
    num_found = len(forms) - compilation.num_forms
    terminal.write(
        f"compiled {compilation.num_forms} forms in {compile_s:.1f} s, {num_found} were there; "
        f"{bytes_text(num_bytes)} in {artifacts.folder}\n"
    )

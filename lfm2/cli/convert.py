"""`lfm2 convert`: a quantised copy of a checkpoint."""

from pathlib import Path

import click

from lfm2.cli.loading import Stopwatch
from lfm2.cli.options import model_option, options
from lfm2.cli.terminal import Bar, Terminal, bytes_text
from lfm2.config import Config
from lfm2.convert import convert as write_converted
from lfm2.hub import resolve


@click.command()
@options(
    model_option,
    click.option(
        "-o",
        "--out",
        required=True,
        type=click.Path(path_type=Path),
        metavar="FOLDER",
        help="Where to write the copy: a new or an empty folder.",
    ),
    click.option(
        "--bits",
        type=int,
        default=4,
        show_default=True,
        metavar="4|8",
        help="Bits a weight: 4 for the smallest copy, 8 for the closest.",
    ),
    click.option(
        "--group-size",
        type=int,
        default=64,
        show_default=True,
        metavar="32|64|128",
        help="Weights that share a scale: fewer are closer to the original and take more.",
    ),
)
@click.pass_obj
def convert(terminal: Terminal, model: str | None, out: Path, bits: int, group_size: int) -> None:
    """Writes a quantised copy of a checkpoint, which mlx-lm loads too.

    A router keeps 8 bits, norms and convolution taps their type.
    """
    folder = resolve(model)
    watch = Stopwatch()
    write_converted(folder, out, bits, group_size, Bar(terminal, "quantising", bytes_text))
    terminal.wipe()
    num_bytes = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    bits_each = 8 * num_bytes / Config.from_folder(out).num_params
    terminal.write(
        f"wrote {out}: {bytes_text(num_bytes)}, {bits_each:.2f} bits a weight, "
        f"{watch.lap_s():.1f} s\n"
    )

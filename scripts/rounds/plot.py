"""The picture of scripts/bench_rounds.py: when each token of each stream came. Needs matplotlib."""

from pathlib import Path

import matplotlib

from scripts.rounds.trial import Stall

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

PANEL_INCHES = (10, 2)


def save(stalls: dict[str, Stall], path: Path) -> None:
    """A panel for each way to run the long prompt, a row of dots for each stream; shaded while the
    prompt fills. The format is that of the file's name.
    """
    width, height = PANEL_INCHES
    figure, panels = pyplot.subplots(
        len(stalls), sharex=True, squeeze=False, figsize=(width, height * len(stalls))
    )
    for panel, (mode, stall) in zip(panels[:, 0], stalls.items()):
        draw(panel, mode, stall)
    panels[-1, 0].set_xlabel("seconds since the prompt came")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def draw(panel: "pyplot.Axes", mode: str, stall: Stall) -> None:
    panel.axvspan(0, stall.first_token, color="0.9")
    for row, tokens in enumerate(stall.tokens, 1):
        panel.plot(tokens, [row] * len(tokens), ".", markersize=4)
    panel.set_ylim(0.5, len(stall.tokens) + 0.5)
    panel.set_yticks(range(1, len(stall.tokens) + 1))
    panel.set_ylabel("stream")
    panel.set_title(f"{mode}: worst gap {max(stall.gaps):.3g} s", loc="left", fontsize=10)

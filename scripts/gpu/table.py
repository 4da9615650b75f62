"""Lines of a table of figures: ours, and those of transformers."""

from collections.abc import Iterator

from scripts.gpu.bench import Figure


def peer_lines(shape: str, peer: dict) -> Iterator[str]:
    """The table's lines of transformers; a reason where there is no figure."""
    for way in ("eager", "compiled"):
        for what, figure in peer[way].items():
            line = f"{shape:14} {way:8} {what:14} {_rate(figure['tok_s'], figure['spread'])}"
            yield f"{line}  {figure['experts'] or ''}".rstrip()
        for what, reason in peer["reasons"][way].items():
            yield f"{shape:14} {way:8} {what:14} {reason}"


def our_line(shape: str, bits: int, figure: Figure, bandwidth: float, peer: dict | None) -> str:
    line = f"{shape:14} {bits:2} bits  {figure.what:14} {_rate(figure.tok_s, figure.spread)}"
    line += f"  {figure.num_launches} launches"
    if figure.host_share is not None:
        line += f"  host {figure.host_share:.0%}"
    if figure.num_experts is not None:
        line += f"  {figure.num_experts:.1f} experts"
    if figure.bytes_s is not None:
        line += f"  {figure.bytes_s / 1e9:,.0f} GB/s = {figure.bytes_s / bandwidth:.0%} of a copy"
    for way in ("eager", "compiled"):
        if peer and figure.what in peer[way]:
            line += f"  {figure.tok_s / peer[way][figure.what]['tok_s']:.2f}x {way}"
    return line


def _rate(tok_s: float, spread: tuple[float, float]) -> str:
    low, high = spread
    return f"{tok_s:10,.1f} tok/s  ({low:,.1f}-{high:,.1f})"

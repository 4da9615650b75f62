"""The tables of scripts/bench_rounds.py, for people."""

from scripts.rounds.trial import SUFFIX


def cell(figure: dict[str, float], scale: float = 1, digits: int = 1) -> str:
    """A median with its spread."""
    middle, least, most = (
        f"{figure[name] * scale:.{digits}f}" for name in ("median", "min", "max")
    )
    return f"{middle} ({least}..{most})"


def ratio_text(figure: dict[str, float]) -> str:
    return f"{figure['ratio']:.2f} ({figure['min']:.2f}..{figure['max']:.2f})"


def print_row(label: object, *cells: str) -> None:
    print(f"{label!s:10}" + "".join(f"{one:>25}" for one in cells))


def print_streams(found: dict) -> None:
    print_row("streams", "tokens/s", "last first token s", "round ms", "scheduling ms")
    for label, figures in found["cases"].items():
        print_row(
            label,
            cell(figures["tok_s"]),
            cell(figures["last_first_token_s"], digits=2),
            cell(figures["round_s"], 1000),
            cell(figures["scheduling_s"], 1000, 3),
        )
    for label, ratio in found["over_base"].items():
        if label != found["base"]:
            print(f"tokens/s of {label} over {found['base']}: {ratio_text(ratio)}")


def print_stall(found: dict) -> None:
    print(
        f"\n{found['streams']} streams decode, a prompt of {found['prompt_tokens']} tokens comes; "
        f"chunks of {found['chunk']}"
    )
    print_row("", "median gap ms", "worst gap ms", "prompt's first token s", "worst gap / chunk")
    for mode, figures in found["cases"].items():
        print_row(
            mode,
            cell(figures["median_gap_s"], 1000, 0),
            cell(figures["worst_gap_s"], 1000, 0),
            cell(figures["first_token_s"], digits=2),
            cell(figures["worst_gap_over_chunk"], digits=2),
        )
    print(f"median gap before it comes: {cell(figures['before_s'], 1000)} ms")
    for mode, ratio in found["whole_over"].items():
        print(f"worst gap, whole over {mode}: {ratio_text(ratio)}")


def print_reuse(found: dict, num_shared: int) -> None:
    print(f"\ntwo prompts of {num_shared + SUFFIX} tokens, {num_shared} of them shared")
    print_row("kept", "first: first token s", "second: first token s", "tokens reused")
    for label, figures in found["cases"].items():
        print_row(
            label,
            cell(figures["first_s"], digits=3),
            cell(figures["second_s"], digits=3),
            f"{figures['reused_tokens']['median']:.0f}",
        )
    print(f"second's first token, off over on: {ratio_text(found['off_over_on'])}")

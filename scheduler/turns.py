"""Which streams take part in the next round, and with which rows. Pure functions."""

from collections.abc import Callable, Iterable, Sequence

from scheduler.options import Options
from scheduler.rounds import Segment
from scheduler.runner import Drawn, Window
from scheduler.stream import Stream

# Proposes at most so many tokens that may follow a stream's; fewer or none will do. It must not
# raise, and may be asked in vain.
Draft = Callable[[Stream, int], Sequence[int]]


def chunk_order(filling: Iterable[Stream], patience: int) -> list[Stream]:
    """The prompts in the order they go on: those passed over `patience` times, the most first; then
    the fewest rows left; then as admitted.
    """

    def rank(stream: Stream) -> tuple[int, int, int]:
        is_due = stream.passed_over >= patience
        return (-stream.passed_over if is_due else 0, stream.num_left, stream.number)

    return sorted(filling, key=rank)


def next_chunks(filling: Sequence[Stream], options: Options) -> list[Window]:
    """The next chunk of the first prompt, and of those after it as long as all have no more rows
    than one chunk may.
    """
    chunks, num_rows = [], 0
    for stream in chunk_order(filling, options.patience):
        chunk = chunk_of(stream)
        num_rows += chunk.num_rows
        is_apart = stream.is_alone or num_rows > options.chunk
        if chunks and (is_apart or len(chunks) == options.round_streams):
            break
        chunks.append(chunk)
        if stream.is_alone:
            break
    return chunks


def chunk_of(stream: Stream) -> Window:
    """The next chunk of a prompt, as planned; the last row of the last one is drawn."""
    end = stream.plan.end(stream.held)
    tokens = stream.request.prompt[stream.held : end]
    is_last = end == len(stream.request.prompt)
    return Window(
        stream, Segment(stream.slot, stream.extent.base, stream.held, tokens, int(is_last))
    )


def is_mixed(chunks: Sequence[Window], options: Options) -> bool:
    """Whether decoding streams share the round of these chunks."""
    num_rows = sum(chunk.num_rows for chunk in chunks) + options.round_rows
    is_alone = any(chunk.stream.is_alone for chunk in chunks)
    return options.is_mixing and not is_alone and num_rows <= options.max_rows


def next_windows(
    decoding: Iterable[Stream], options: Options, draft: Draft | None = None
) -> list[Window]:
    """The windows of the streams whose turn it is: the least recently served first, until one does
    not fit.
    """
    windows, num_rows = [], 0
    for stream in sorted(decoding, key=lambda stream: (stream.last_served, stream.number)):
        window = window_of(stream, options, draft)
        num_rows += window.num_rows
        if len(windows) == options.round_streams or (windows and num_rows > options.round_rows):
            break
        windows.append(window)
    return windows


def window_of(stream: Stream, options: Options, draft: Draft | None) -> Window:
    """The pending token of a stream and what is drafted to follow it, all rows drawn. No draft is
    longer than the reply may become.
    """
    num_after = stream.request.max_tokens - stream.num_made - 1
    limit = min(options.max_window - 1, options.round_rows - 1, num_after)
    drafts = draft(stream, limit)[:limit] if draft is not None and limit > 0 else ()
    tokens = (stream.tokens[-1], *drafts)
    return Window(
        stream, Segment(stream.slot, stream.extent.base, stream.held, tokens, len(tokens))
    )


def accept(drafts: Sequence[int], drawn: Sequence[Drawn]) -> list[Drawn]:
    """The drawn tokens that stand: row after row while the next row was of the token drawn."""
    accepted = []
    for index, token in enumerate(drawn):
        accepted.append(token)
        if index == len(drafts) or drafts[index] != token.token:
            break
    return accepted

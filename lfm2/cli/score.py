"""`lfm2 score`: how well a model foretells a text."""

import json
import math

import click
import numpy as np

import lfm2
from lfm2.cli.loading import load_model, read_text
from lfm2.cli.options import json_option, loading_options, no_cache_option, options
from lfm2.cli.terminal import Bar, Terminal
from lfm2.errors import NonFiniteLogits, RequestError


@click.command()
@click.argument("file")
@options(
    loading_options("Tokens of a window, which the model reads at a time"),
    no_cache_option,
    json_option,
)
@click.pass_obj
def score(terminal: Terminal, file: str, as_json: bool, **given) -> None:
    """Measures the perplexity of the text in FILE (- = standard input).

    The text is cut into windows of the context's length, each of which opens with the model's BOS
    token.
    """
    text = read_text(file)
    if not text.strip():
        raise RequestError("the text is empty")
    model = load_model(terminal, given)
    found = measure(terminal, model, text)
    terminal.write(json.dumps(found) + "\n" if as_json else table(found))


def measure(terminal: Terminal, model: "lfm2.Model", text: str) -> dict:
    """The mean negative log-likelihood of all tokens, in nats, and what follows from it."""
    cuts = windows(model, text)
    num_tokens = sum(len(window) - 1 for window in cuts)
    if num_tokens < 1:
        raise RequestError(
            "the text has a single token and nothing foretells it: give a longer one"
        )
    bar = Bar(terminal, "scoring", "{} tokens".format)
    total, num_done = 0.0, 0
    for window in cuts:
        for start, logits in model.logits_by_chunk(window[:-1]):
            total += negative_log_likelihood(logits, window[start + 1 : start + 1 + len(logits)])
            num_done += len(logits)
            bar(num_done, num_tokens)
    mean = total / num_tokens
    return {
        "perplexity": math.exp(mean) if mean < 700 else math.inf,
        "negative_log_likelihood": mean,
        "tokens": num_tokens,
        "windows": len(cuts),
        "window_tokens": model.context,
    }


def windows(model: "lfm2.Model", text: str) -> list[list[int]]:
    """The text in windows whose first token is given and whose others are to be foretold."""
    ids = model.tokenizer.encode(text)
    size = model.context - 1
    if size < 1:
        raise RequestError("a context of 1 token leaves nothing to foretell")
    opening = ids[:1] if model.tokenizer.bos_token_id is not None else None
    cuts = []
    for start in range(1, len(ids), size):
        # Without a BOS each window opens with the token before it.
        cuts.append((opening or ids[start - 1 : start]) + ids[start : start + size])
    return cuts


def negative_log_likelihood(logits: np.ndarray, targets: list[int]) -> float:
    """The sum over rows of -log softmax(logits)[target], in float64. logits: (N, V)."""
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise NonFiniteLogits(
            "the model gave a logit that is not finite; this text cannot be scored"
        )
    peaks = logits.max(axis=1)
    sums = np.log(np.exp(logits - peaks[:, None]).sum(axis=1))
    return float((peaks + sums - logits[np.arange(len(targets)), targets]).sum())


def table(found: dict) -> str:
    num_windows = found["windows"]
    windows = f"{num_windows} window{'s' * (num_windows > 1)} of up to {found['window_tokens']:,}"
    return (
        f"perplexity                {found['perplexity']:.4f}\n"
        f"negative log-likelihood   {found['negative_log_likelihood']:.6f} nats a token\n"
        f"tokens                    {found['tokens']:,} in {windows}\n"
    )

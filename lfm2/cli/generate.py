"""`lfm2 generate`: one prompt, one reply, as text or as a JSON object."""

import json
import sys

import click

import lfm2
from lfm2.cli.loading import (
    Compilation,
    Stopwatch,
    kept_states,
    load_model,
    peak_memory_bytes,
    read_text,
    request_of,
)
from lfm2.cli.options import (
    REPLYING,
    SAMPLING,
    json_option,
    loading_options,
    no_cache_option,
    options,
    prompt_cache_option,
)
from lfm2.cli.terminal import Terminal, bytes_text
from lfm2.request import check_request
from lfm2.sampling import Draw

ENDINGS = {
    "end token": "ended by an end token",
    "stop text": "ended by a stop text",
    "max_tokens": "ended by max_tokens",
    "context": "ended because the context is full (-c N gives more room)",
}


@click.command()
@click.argument("prompt", required=False)
@click.option(
    "-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, in place of PROMPT."
)
@options(
    loading_options("Tokens that prompt and reply may have together"),
    no_cache_option,
    prompt_cache_option,
    REPLYING,
    SAMPLING,
    click.option("--raw", is_flag=True, help="Go on with the prompt as it is: no chat template."),
    json_option,
    click.option(
        "--logprobs",
        "num_logprobs",
        type=int,
        default=0,
        metavar="N",
        help="With --json: log-probabilities of each token and of the N likeliest.",
    ),
)
@click.pass_obj
def generate(
    terminal: Terminal, prompt: str | None, prompt_option: str | None, as_json: bool, **given
) -> None:
    """Writes the reply to PROMPT as it is made.

    A PROMPT of - is read from standard input; so is a missing one, unless that is a terminal.
    """
    if given["num_logprobs"] and not as_json:
        raise click.UsageError("--logprobs needs --json")
    prompt = chosen_prompt(prompt, prompt_option)
    request = request_of(given)
    check_request(prompt, **request)
    watch = Stopwatch()
    compilation = Compilation(terminal)
    model = load_model(terminal, given, compilation)
    times = {"load_s": watch.lap_s()}
    with kept_states(terminal, model, given["prompt_cache"]):
        stream = model.stream(prompt, **request)
        model.prepare(stream)
        times["compile_s"] = watch.lap_s() if compilation.num_steps else 0.0
        for piece in stream:
            if not as_json:
                terminal.write(piece)
        reply = stream.reply
        times |= {"first_token_s": reply.prefill_s, "decode_s": reply.decode_s}
        # Before the states are written: what goes wrong there must not lose the reply.
        terminal.write(json_line(model, reply, times) if as_json else "\n")
    for line in report(reply, times):
        terminal.detail(line)


def chosen_prompt(argument: str | None, option: str | None) -> str:
    """The prompt: an argument, -p, or standard input without one trailing line end."""
    if argument is not None and option is not None:
        raise click.UsageError("the prompt is given twice, as an argument and with -p")
    prompt = option if argument is None else argument
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("no prompt: give one as an argument, or - to read standard input")
    if prompt is None or prompt == "-":
        return read_text("-").removesuffix("\n").removesuffix("\r")
    return prompt


def report(reply: "lfm2.Reply", times: dict[str, float]) -> list[str]:
    """What --verbose tells of a reply."""
    rates = speeds(reply)
    num_tokens = len(reply.tokens)
    lines = [
        f"prompt: {reply.num_prompt_tokens} tokens, {reply.num_reused_tokens} reused, "
        f"{rates['prefill_tok_s']:.1f} tokens/s",
        f"reply: {num_tokens} token{'s' * (num_tokens != 1)}, "
        f"{rates['decode_tok_s']:.1f} tokens/s, {ENDINGS[reply.ended_by]}",
        f"first token: after {times['first_token_s']:.2f} s",
    ]
    if "load_s" in times:
        lines.append(
            f"before that: loading {times['load_s']:.2f} s, compiling {times['compile_s']:.2f} s"
        )
    return [*lines, f"peak memory: {bytes_text(peak_memory_bytes())}"]


def speeds(reply: "lfm2.Reply") -> dict[str, float]:
    num_run = reply.num_prompt_tokens - reply.num_reused_tokens
    num_decoded = len(reply.tokens) - 1
    return {
        "prefill_tok_s": num_run / reply.prefill_s,
        "decode_tok_s": num_decoded / reply.decode_s if num_decoded else 0.0,
    }


def json_line(model: "lfm2.Model", reply: "lfm2.Reply", times: dict[str, float]) -> str:
    """All of a reply as one line of JSON."""
    record = {
        "text": reply.text,
        "tokens": reply.tokens,
        "finish_reason": reply.finish_reason,
        "ended_by": reply.ended_by,
        "prompt_tokens": reply.num_prompt_tokens,
        "timings": times | speeds(reply),
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if reply.draws:
        record["logprobs"] = [logprobs(model, draw) for draw in reply.draws]
    return json.dumps(record, ensure_ascii=False) + "\n"


def logprobs(model: "lfm2.Model", draw: Draw) -> dict:
    """A drawn token's log-probability, and the likeliest ones' beside it."""

    def entry(token: int, logprob: float) -> dict:
        return {
            "token": token,
            "text": model.tokenizer.decode([token], skip_special=False),
            "logprob": logprob,
        }

    return entry(draw.token, draw.logprob) | {"top": [entry(*pair) for pair in draw.top]}

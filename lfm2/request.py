"""What may be asked of a model, as far as no model is needed to tell.

The command line refuses with it before anything is loaded, `Model.stream` before any work.
"""

from collections.abc import Sequence
from dataclasses import fields
from numbers import Integral

from lfm2.errors import RequestError
from lfm2.sampling import Sampling
from lfm2.template import checked_messages
from lfm2.text_stream import StopText

# A text, chat messages, or token ids.
Prompt = str | Sequence[dict] | Sequence[int]
# Beside those of `Sampling`.
REPLY_OPTIONS = ("max_tokens", "stop", "system", "tools", "raw")


class ContextFull(RequestError):
    """A prompt of `num_tokens` that leaves no room for a reply, or none for one of `max_tokens`."""

    def __init__(self, num_tokens: int, context: int, max_tokens: int | None = None) -> None:
        self.num_tokens = num_tokens
        self.context = context
        self.max_tokens = max_tokens
        if num_tokens >= context:
            message = f"the prompt has {num_tokens} tokens and the context holds {context}, "
            message += "reply included"
        else:
            message = f"a prompt of {num_tokens} tokens and a reply of {max_tokens} do not fit a "
            message += f"context of {context}: ask for at most {context - num_tokens} tokens"
        super().__init__(message)


def is_token_ids(prompt: object) -> bool:
    """Whether a prompt is a list of numbers."""
    is_list = isinstance(prompt, list | tuple) and len(prompt) > 0
    return is_list and all(isinstance(token, Integral) for token in prompt)


def check_prompt(
    prompt: Prompt,
    *,
    system: str | None = None,
    tools: list[dict] | None = None,
    raw: bool = False,
) -> None:
    """Raises RequestError for a prompt that is none, or not of the kind that the options want."""
    if raw and (system is not None or tools is not None):
        raise RequestError("a raw prompt is text, without system prompt and tools")
    if is_token_ids(prompt):
        if system is not None or tools is not None:
            raise RequestError("token ids are a whole prompt, without system prompt and tools")
        return
    if raw and not isinstance(prompt, str):
        raise RequestError(f"a raw prompt is text, got {type(prompt).__name__}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RequestError("the prompt is empty")
    elif isinstance(prompt, list | tuple):
        checked_messages(prompt)
    else:
        kind = type(prompt).__name__
        raise RequestError(f"a prompt is a text, messages or token ids, got {kind}")
    if system is not None and not isinstance(system, str):
        raise RequestError(f"a system prompt is text, got {type(system).__name__}")


def check_options(
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    **sampling,
) -> None:
    """Raises RequestError for an option of a reply that is unknown or out of range."""
    known = [field.name for field in fields(Sampling)]
    for name in sampling:
        if name not in known:
            listed = ", ".join([*REPLY_OPTIONS, *known])
            raise RequestError(f"unknown sampling option {name!r}; all options: {listed}")
    Sampling().override(**sampling)
    if max_tokens is not None:
        check_count("max_tokens", max_tokens)
    if stop is not None:
        if not isinstance(stop, str | Sequence):
            raise RequestError(f"stop is a text or a list of texts, got {type(stop).__name__}")
        StopText(stop)


def check_count(name: str, value: object) -> None:
    """Raises RequestError unless a value is a whole number of at least 1."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_whole or value < 1:
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")


def check_request(
    prompt: Prompt,
    *,
    system: str | None = None,
    tools: list[dict] | None = None,
    raw: bool = False,
    **options,
) -> None:
    """Raises RequestError for a prompt or an option that no model could serve."""
    check_prompt(prompt, system=system, tools=tools, raw=raw)
    check_options(**options)

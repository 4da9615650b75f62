"""The errors a user can meet and act on. Each message names the thing, what was found and what to
do.
"""


class LFM2Error(Exception):
    """Base of every error that the command line prints as one line instead of a traceback."""

    exit_code = 1


class RequestError(LFM2Error):
    """A prompt, an option or a limit that cannot be served as asked."""

    exit_code = 2


class ModelNotFound(LFM2Error):
    """No such folder, no such hub name, or the hub cannot be reached."""

    exit_code = 2


class ConfigError(LFM2Error):
    """A `config.json` that is missing, damaged, contradictory or of another architecture."""


class WeightsError(LFM2Error):
    """A checkpoint whose tensors are missing, left over, mis-shaped, damaged or of an unknown
    form.
    """


class TokenizerError(LFM2Error):
    """A tokenizer or chat template that is missing, damaged or refuses its input."""


class NonFiniteLogits(LFM2Error):
    """The model produced a NaN or an infinity where a token had to be drawn."""


class PromptCacheError(LFM2Error):
    """A file of kept states that is damaged, of another model or of another version."""

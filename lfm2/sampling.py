"""The draw: one logits row in, one token out, decided by nothing but its arguments.

Owns the sampling options, the order of the filters and the keyed noise. Knows nothing about
requests, rounds or devices: there is no random stream, so batching, chunking and drafting cannot
shift one.

Order of the filters (Hugging Face's; llama.cpp and mlx-lm apply the temperature after them):
  1. logit bias is added; the repetition penalty divides a positive and multiplies a negative logit
     of every token seen in the last `repetition_window` tokens (0 = all, prompt included).
  2. temperature 0: the highest logit wins, the lowest id on ties, and nothing below applies.
  3. order by (logit descending, id ascending); keep the first top_k.
  4. multiply by 1 / max(temperature, 1e-6).
  5. top_p: probabilities over what is kept; keep those whose running sum is below top_p, plus one.
  6. min_p: keep a probability of at least min_p times the best one's.
  7. the Gumbel race: highest scaled logit + noise of (seed, position, id), first in the order on
     ties.

Steps 1 and 4-7 are computed in float64. Equal logits are ties as given, in float32, or in float64
where step 1 changed them.
"""

import hashlib
import math
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Callable, Mapping, Sequence

import numpy as np

from lfm2.errors import ConfigError, NonFiniteLogits, RequestError

WORD = (1 << 64) - 1
MAX_BIAS = 1e9  # with the other limits no finite float32 logit can overflow float64
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e9  # a whole number can be beyond every float


@dataclass(frozen=True)
class Rule:
    """What one number among the options may be; `accepts` must be False for NaN."""

    kind: type
    accepts: Callable[[float], bool]
    allowed: str

    def admits(self, value: object) -> bool:
        """True for a number of the right kind (no boolean is) and within the limits."""
        is_kind = isinstance(value, self.kind) and not isinstance(value, bool)
        return is_kind and self.accepts(value)


RULES = {
    "temperature": Rule(
        Real,
        lambda v: 0 <= v <= MAX_TEMPERATURE,
        f"a number from 0 (greedy) to {MAX_TEMPERATURE:g}",
    ),
    "top_k": Rule(Integral, lambda v: v >= 0, "a whole number of at least 0 (0 = all tokens)"),
    "top_p": Rule(Real, lambda v: 0 < v <= 1, "a number above 0 and at most 1 (1 = off)"),
    "min_p": Rule(Real, lambda v: 0 <= v <= 1, "a number from 0 to 1 (0 = off)"),
    "repetition_penalty": Rule(
        Real, lambda v: 0.01 <= v <= 100, "a number from 0.01 to 100 (1 = off)"
    ),
    "repetition_window": Rule(
        Integral, lambda v: v >= 0, "a whole number of at least 0 (0 = the whole text)"
    ),
    "num_logprobs": Rule(Integral, lambda v: v >= 0, "a whole number of at least 0 (0 = none)"),
    "seed": Rule(Integral, lambda v: 0 <= v <= WORD, "a whole number from 0 to 2**64 - 1"),
}
TOKEN = Rule(Integral, lambda v: v >= 0, "a token id")
BIAS = Rule(
    Real,
    lambda v: v == -math.inf or -MAX_BIAS <= v <= MAX_BIAS,
    f"a bias from {-MAX_BIAS:g} to {MAX_BIAS:g} (-inf = never this token)",
)


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are drawn; RequestError names an option that is out of range.

    `logit_bias` holds (token id, bias) pairs, a bias of -inf bans its token. `seed` None stands for
    `seed_of(prompt)`. `num_logprobs` N >= 1 reports the drawn token's log-probability and the N
    best ones; 0 reports none.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    num_logprobs: int = 0

    def __post_init__(self):
        for name, rule in RULES.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if not rule.admits(value):
                raise RequestError(f"{name} is {value!r}; it must be {rule.allowed}")
        check_bias(self.logit_bias)

    @classmethod
    def from_generation_config(cls, found: Mapping) -> "Sampling":
        """The defaults that a model's `generation_config.json` asks for; ConfigError on bad values.

        A null counts as missing, and what is missing is off. Temperature: 0 if `do_sample` is
        false, else the file's own, else 1 if `do_sample` is true, else 0. The filters are kept
        even then, for a user who sets only a temperature.
        """
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"generation_config.json holds a {type(found).__name__}; it must be an object"
            )
        do_sample = found.get("do_sample")
        if do_sample is not None and not isinstance(do_sample, bool):
            raise ConfigError(
                f"generation_config.json: do_sample is {do_sample!r}; it must be true or false"
            )
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: found[name] for name in names if found.get(name) is not None}
        given.setdefault("temperature", 1.0 if do_sample else 0.0)
        try:
            defaults = cls(**given)
        except RequestError as error:
            raise ConfigError(f"generation_config.json: {error}") from None
        return replace(defaults, temperature=0.0) if do_sample is False else defaults

    def override(self, **options) -> "Sampling":
        """These options with a user's own put over them, field by field; None means not given.

        A mapping of token id to bias will do for `logit_bias`.
        """
        known = [field.name for field in fields(self)]
        for name in options:
            if name not in known:
                raise RequestError(f"unknown sampling option {name!r}; known: {', '.join(known)}")
        given = {name: value for name, value in options.items() if value is not None}
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = tuple(given["logit_bias"].items())
        return replace(self, **given)

    def check_vocabulary(self, vocab_size: int) -> None:
        """RequestError if a biased token does not exist."""
        for token, _ in self.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {token}; this model's ids end at {vocab_size - 1}"
                )

    @property
    def is_greedy(self) -> bool:
        """True if the device's argmax of an unflagged row is the answer and no row need be read."""
        is_plain = self.repetition_penalty == 1 and not self.logit_bias
        return self.temperature <= 0 and is_plain and self.num_logprobs == 0


@dataclass(frozen=True)
class Draw:
    """A drawn token; `logprob` is None and `top`, (id, logprob) best first, empty unless asked for.

    Log-probabilities are the model's own: log-softmax of the logits as given, before bias, penalty,
    temperature and filters (as llama.cpp and vLLM report them; mlx-lm applies bias and penalty).
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def draw(
    logits: np.ndarray,
    sampling: Sampling,
    seed: int,
    position: int,
    context_ids: Sequence[int] = (),
) -> Draw:
    """The token at absolute index `position`, from float32 `logits` (V,).

    `context_ids` are all tokens before `position`, prompt included (read only for the penalty; an
    integer array saves a conversion). NonFiniteLogits if any logit is NaN or infinite, -inf
    included, or if the bias bans every token.
    """
    if logits.ndim != 1 or logits.dtype != np.float32 or logits.size == 0:
        raise ValueError(f"logits are {logits.dtype} {logits.shape}; expected float32 (V,), V > 0")
    check_finite(logits, position)
    values = adjusted(logits, sampling, context_ids)
    best = int(values.argmax())  # the first of equals, so the lowest id
    if values[best] == -math.inf:
        raise NonFiniteLogits(
            f"no token is left at position {position}: logit_bias bans the whole vocabulary"
        )
    token = best if sampling.temperature <= 0 else race(values, sampling, seed, position)
    if sampling.num_logprobs == 0:
        return Draw(token)
    return with_logprobs(token, logits, sampling.num_logprobs)


def seed_of(prompt_ids: Sequence[int], salt: int = 0) -> int:
    """The seed of a request that names none: 63 bits of its prompt's SHA-256.

    By design the same prompt gives the same reply; another `salt` gives another one.
    """
    text = ",".join(str(int(token)) for token in prompt_ids) + f"|{salt}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & (WORD >> 1)


def uniform(seed: int, position: int, ids: np.ndarray) -> np.ndarray:
    """A double in (0, 1] for each id of `ids` (N,), keyed by (seed, position, id) and nothing else.

    Three rounds of the splitmix64 finaliser. The first two have one value a row, so they run on
    Python integers; numpy's uint64 arrays wrap as wanted, its scalars would warn.
    """
    key = mix((seed + 0x9E3779B97F4A7C15) & WORD)
    key = mix(key ^ (position * 0xD1B54A32D192ED03 & WORD))
    bits = mix(ids.astype(np.uint64) ^ np.uint64(key))
    return (bits >> 11).astype(np.float64) * 2.0**-53 + 2.0**-54


def mix(x):
    """The splitmix64 finaliser of 64-bit `x`, a Python integer or a uint64 array."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def adjusted(logits: np.ndarray, sampling: Sampling, context_ids: Sequence[int]) -> np.ndarray:
    """`logits` after bias and repetition penalty: float64, or the row itself if both are off."""
    has_penalty = sampling.repetition_penalty != 1 and len(context_ids) > 0
    if not sampling.logit_bias and not has_penalty:
        return logits
    sampling.check_vocabulary(logits.size)
    values = logits.astype(np.float64)
    for token, bias in sampling.logit_bias:
        values[token] += bias
    if has_penalty:
        # Gathered before it is stored, so a token that occurs twice is penalised once.
        seen = np.asarray(context_ids[-sampling.repetition_window :], np.int64)  # -0 is all
        old = values[seen]
        penalty = sampling.repetition_penalty
        values[seen] = np.where(old > 0, old / penalty, old * penalty)
    return values


def race(values: np.ndarray, sampling: Sampling, seed: int, position: int) -> int:
    """The winner among `values` (V,) that pass top_k, top_p and min_p.

    Ids stay ascending and nothing is put in order unless top_p needs the running sum: the order
    matters elsewhere only at a cut and on ties, and both are settled there.
    """
    inverse = 1.0 / max(sampling.temperature, MIN_TEMPERATURE)
    ids = leading(values, sampling.top_k or values.size)
    if sampling.top_p < 1:
        ids = ids[nucleus(values[ids], inverse, sampling.top_p)]
    scaled = values[ids].astype(np.float64) * inverse
    floor = scaled.max() + math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    # Banned tokens leave here even without min_p: beside infinite noise (u = 1) they would be NaN.
    passed = (scaled >= floor) & (scaled > -math.inf)
    if not passed.all():
        ids, scaled = ids[passed], scaled[passed]
    with np.errstate(divide="ignore"):
        scores = scaled - np.log(-np.log(uniform(seed, position, ids)))
    winners = ids[scores == scores.max()]
    return int(winners[values[winners].argmax()])


def leading(values: np.ndarray, count: int) -> np.ndarray:
    """Ascending indices of the first `count` of `values` by (value descending, index ascending)."""
    if count >= values.size:
        return np.arange(values.size)
    border = values.size - count
    return down_to(values, np.partition(values, border)[border], count)


def down_to(values: np.ndarray, cut: float, count: int) -> np.ndarray:
    """`leading` for a known value `cut` of the last one in: among its equals the lowest indices."""
    is_in = values > cut
    tied = np.flatnonzero(values == cut)
    is_in[tied[: count - np.count_nonzero(is_in)]] = True
    return np.flatnonzero(is_in)


def nucleus(values: np.ndarray, inverse: float, top_p: float) -> np.ndarray:
    """Ascending indices of those whose running probability sum is below `top_p`, plus one.

    Only the values are sorted, not their ids: equal values add up the same in any order.
    """
    ordered = -np.sort(-values)
    scaled = ordered.astype(np.float64) * inverse
    weights = np.exp(scaled - scaled[0])
    sums = np.cumsum(weights / weights.sum())
    count = min(int(np.searchsorted(sums, top_p)) + 1, values.size)
    return down_to(values, ordered[count - 1], count)


def with_logprobs(token: int, logits: np.ndarray, count: int) -> Draw:
    """`token` with its log-probability and those of the `count` best tokens."""
    shifted = logits.astype(np.float64) - float(logits.max())
    logprobs = shifted - math.log(np.exp(shifted).sum())
    best = leading(logits, count)
    best = best[np.argsort(-logits[best], kind="stable")]
    return Draw(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in best))


def check_finite(logits: np.ndarray, position: int) -> None:
    """NonFiniteLogits naming the first NaN or infinity among `logits` (V,)."""
    is_bad = ~np.isfinite(logits)
    if is_bad.any():
        first = int(is_bad.argmax())
        raise NonFiniteLogits(
            f"the model gave {logits[first]} as logit of token {first} at position {position} "
            f"({np.count_nonzero(is_bad)} of {logits.size} are not finite); the reply ends here"
        )


def check_bias(pairs: object) -> None:
    """RequestError unless `pairs` is a tuple of (token id, bias), each id once."""
    allowed = f"it must hold pairs of {TOKEN.allowed} and {BIAS.allowed}, each token once"
    if not isinstance(pairs, tuple):
        raise RequestError(f"logit_bias is {pairs!r}; {allowed}")
    seen = set()
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not is_pair or not TOKEN.admits(pair[0]) or not BIAS.admits(pair[1]) or pair[0] in seen:
            raise RequestError(f"logit_bias holds {pair!r}; {allowed}")
        seen.add(pair[0])

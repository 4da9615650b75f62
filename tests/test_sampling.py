"""The draw against its definition in plain Python, and rows and options that are wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest

from lfm2.errors import ConfigError, NonFiniteLogits, RequestError
from lfm2.sampling import Draw, Sampling, draw, mix, seed_of, uniform

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
STRIDE = 0xD1B54A32D192ED03

pytestmark = pytest.mark.filterwarnings("error")


# The oracle: integers and `math` only, one token at a time.


def finalise(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def noise_of(seed: int, position: int, token: int) -> float:
    x = finalise((seed + GOLDEN) % WORD)
    x = finalise(x ^ (position * STRIDE % WORD))
    x = finalise(x ^ token)
    return (x >> 11) * 2.0**-53 + 2.0**-54


def oracle_values(logits: np.ndarray, sampling: Sampling, context: list[int]) -> list[float]:
    values = [float(logit) for logit in logits]
    for token, bias in sampling.logit_bias:
        values[token] += bias
    for token in set(context[-sampling.repetition_window or None :]):
        if values[token] > 0:
            values[token] /= sampling.repetition_penalty
        else:
            values[token] *= sampling.repetition_penalty
    return values


def oracle_draw(logits, sampling: Sampling, seed: int, position: int, context=()) -> int:
    values = oracle_values(logits, sampling, list(context))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    if sampling.temperature <= 0:
        return order[0]
    order = order[: sampling.top_k or None]
    scaled = [values[i] * (1 / max(sampling.temperature, 1e-6)) for i in order]
    if sampling.top_p < 1:
        weights = [math.exp(value - scaled[0]) for value in scaled]
        total = math.fsum(weights)
        running, count = 0.0, 0
        while count < len(order) and running + weights[count] / total < sampling.top_p:
            running += weights[count] / total
            count += 1
        order = order[: count + 1]
    if sampling.min_p > 0:
        floor = scaled[0] + math.log(sampling.min_p)
        order = [token for token, value in zip(order, scaled) if value >= floor]
    scores = [
        value - math.log(-math.log(noise_of(seed, position, token)))
        for token, value in zip(order, scaled)
    ]
    return order[scores.index(max(scores))]


def row(*logits: float) -> np.ndarray:
    return np.array(logits, np.float32)


def random_row(size: int, seed: int, step: float = 1 / 64) -> np.ndarray:
    """Seeded logits on a grid of `step`, so that many of them are equal."""
    normal = np.random.default_rng(seed).normal(0, 3, size)
    return (np.round(normal / step) * step).astype(np.float32)


def support(logits: np.ndarray, sampling: Sampling, num_draws: int = 300) -> set[int]:
    """All tokens drawn at `num_draws` positions; `logits` are to be of similar size."""
    return {draw(logits, sampling, 1, position).token for position in range(num_draws)}


# The noise.


def test_finaliser_gives_the_published_splitmix64_stream():
    assert mix(GOLDEN) == 0xE220A8397B1DCDAF  # first two outputs of splitmix64 seeded with 0
    assert mix(2 * GOLDEN % WORD) == 0x6E789E6AA1B965F4


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 4095, 131_071, 2**40])
def test_noise_equals_the_integer_definition(seed, position):
    ids = np.array([0, 1, 2, 7, 65_535, 127_999, 2**31])
    want = [noise_of(seed, position, int(token)) for token in ids]
    assert uniform(seed, position, ids).tolist() == want


def test_noise_of_an_id_does_not_depend_on_its_neighbours():
    ids = np.random.default_rng(0).permutation(1000)
    shuffled = uniform(5, 9, ids)
    assert (uniform(5, 9, np.arange(1000))[ids] == shuffled).all()
    assert uniform(5, 9, ids[333:334])[0] == shuffled[333]


@pytest.mark.parametrize(
    "ids, salt, digest_start",  # printf '1,5,9|0' | sha256sum
    [
        ([1, 5, 9], 0, "ca31213148a583cc"),
        ([1, 5, 9], 7, "0619f03933bc02a9"),
        ([], 0, "ef12efbd765f9ad3"),
    ],
)
def test_default_seed_is_63_bits_of_the_prompts_sha256(ids, salt, digest_start):
    want = int.from_bytes(bytes.fromhex(digest_start), "little") % 2**63
    assert seed_of(ids, salt) == want
    assert seed_of(np.array(ids, np.int32), salt) == want


# The draw equals the oracle's.

SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=1e-9),
    Sampling(temperature=0.3, min_p=0.15, repetition_penalty=1.05),
    Sampling(temperature=0.1, top_k=50, repetition_penalty=1.05),
    Sampling(temperature=2.0, top_k=7),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.5, top_p=0.6, repetition_penalty=1.3, repetition_window=4),
    Sampling(temperature=1.5, top_k=40, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.2, top_p=0.9, logit_bias=((3, 4.0), (5, -math.inf), (96, -2.5))),
    Sampling(repetition_penalty=1.7, logit_bias=((3, 4.0),)),
]


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("step", [2.0, 1 / 64])
def test_draw_equals_the_definition(sampling, step):
    context = [3, 9, 9, 4, 50, 96, 8, 3]
    for position in range(40):
        logits = random_row(97, position, step)
        seed = position * 0x1234567 % 7 - 3 + 2**63
        want = oracle_draw(logits, sampling, seed, position, context)
        assert draw(logits, sampling, seed, position, context).token == want


@pytest.mark.parametrize("sampling", SETTINGS)
def test_draw_equals_the_definition_at_a_real_vocabulary(sampling):
    logits = random_row(65_536, 1, 1 / 8)  # about 8 bits of a bf16 row, so every cut falls on ties
    context = list(range(0, 9000, 3))
    want = oracle_draw(logits, sampling, 11, 3000, context)
    assert draw(logits, sampling, 11, 3000, context).token == want
    assert draw(logits, sampling, 11, 3000, np.array(context)).token == want


def test_frequencies_over_positions_follow_the_softmax():
    logits = row(1.0, 0.0, -1.0, 2.0, 0.5, -2.0)
    num_draws = 6000
    sampling = Sampling(temperature=0.7)
    tokens = [draw(logits, sampling, 42, position).token for position in range(num_draws)]
    weights = np.exp(logits.astype(np.float64) / 0.7)
    expected = num_draws * weights / weights.sum()
    counts = np.bincount(tokens, minlength=6)
    # chi-square with 5 degrees of freedom: above 20.5 once in a thousand fair samples
    assert ((counts - expected) ** 2 / expected).sum() < 20.5


def test_other_seeds_and_positions_give_other_tokens():
    logits = np.zeros(65_536, np.float32)
    tokens = {
        draw(logits, Sampling(temperature=1.0), seed, position).token
        for seed in range(5)
        for position in range(5)
    }
    assert len(tokens) == 25  # any two equal: about one chance in 200 for a fair noise


# Filters on rows small enough to work out by hand.


def test_top_k_keeps_the_best_and_the_lowest_ids_among_equals():
    sampling = Sampling(temperature=1.0, top_k=2)
    assert support(row(1, 3, 2, 0), sampling) == {1, 2}
    assert support(row(1, 2, 2, 2), sampling) == {1, 2}
    assert support(row(2, 1, 1, 1), sampling) == {0, 1}
    assert support(row(1, 1), replace(sampling, top_k=9)) == {0, 1}


@pytest.mark.parametrize(
    "top_p, num_kept", [(0.1, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)]
)
def test_top_p_keeps_running_sums_below_it_plus_one(top_p, num_kept):
    kept = support(row(0, 0, 0, 0), Sampling(temperature=1.0, top_p=top_p))
    assert kept == set(range(num_kept))


def test_top_p_looks_at_probabilities_after_temperature_and_top_k():
    logits = row(*np.log([0.4, 0.3, 0.2, 0.1]))
    assert support(logits, Sampling(temperature=1.0, top_p=0.75)) == {0, 1, 2}
    assert support(logits, Sampling(temperature=0.25, top_p=0.75)) == {0, 1}  # 0.72, 0.23, ...
    assert support(logits, Sampling(temperature=1.0, top_k=2, top_p=0.55)) == {0}  # 4/7, 3/7


def test_min_p_is_relative_to_the_best_after_temperature():
    logits = row(-1, 0, -2, -1)
    assert support(logits, Sampling(temperature=1.0, min_p=0.2)) == {0, 1, 3}  # e^-1 = 0.37
    assert support(logits, Sampling(temperature=0.5, min_p=0.2)) == {1}  # e^-2 = 0.14
    assert support(row(3, 3, 2), Sampling(temperature=1.0, min_p=1.0)) == {0, 1}


def test_greedy_takes_the_lowest_id_among_equals_as_float32():
    assert draw(row(1, 5, 5, 5), Sampling(), 0, 0) == Draw(1)
    assert draw(row(-0.0, 0.0), Sampling(), 0, 0).token == 0
    step = np.spacing(np.float32(5))  # equal in bf16, not in float32
    assert draw(row(5, 5 + step, 5), Sampling(top_k=1), 0, 0).token == 1


def test_a_drawn_race_goes_to_the_first_in_the_order():
    # So large that the noise is lost: equal scores. Bias makes id 1 the better one by its last
    # bit, which this temperature rounds away.
    high, bit = 1.75 * 2.0**69, 2.0**17
    logits = row(high, high, high)
    assert draw(logits, Sampling(temperature=0.3), 0, 0).token == 0
    assert high < high + bit and high * (1 / 0.3) == (high + bit) * (1 / 0.3)
    assert draw(logits, Sampling(temperature=0.3, logit_bias=((1, bit),)), 0, 0).token == 1


def test_temperature_is_held_at_a_millionth():
    assert support(row(0, 1e-6), Sampling(temperature=1e-9)) == {0, 1}


def test_repetition_penalty_lowers_seen_logits_of_either_sign_once():
    sampling = Sampling(repetition_penalty=2.0)
    assert draw(row(4, 1.5, 3), sampling, 0, 3, [0, 0, 0]).token == 2
    assert draw(row(4, 1.5, 1.9), sampling, 0, 3, [0, 0, 0]).token == 0  # 4 / 2, not 4 / 8
    assert draw(row(-1, -1.5, -3), sampling, 0, 1, [0]).token == 1
    assert draw(row(-1, -2.5, -3), sampling, 0, 2, [0, 0]).token == 0
    assert draw(row(4, 3, 1), sampling, 0, 0, []).token == 0


def test_repetition_window_counts_the_last_tokens_only():
    logits = row(4, 3, 1)
    assert draw(logits, Sampling(repetition_penalty=2.0), 0, 4, [0, 2, 2, 2]).token == 1
    for window, want in [(3, 0), (4, 1), (9, 1)]:
        sampling = Sampling(repetition_penalty=2.0, repetition_window=window)
        assert draw(logits, sampling, 0, 4, [0, 2, 2, 2]).token == want


def test_bias_comes_before_the_penalty():
    sampling = Sampling(repetition_penalty=2.0, logit_bias=((0, 2.0),))
    assert draw(row(-1, 0.7), sampling, 0, 1, [0]).token == 1  # (-1 + 2) / 2; the other way 0


def test_bias_bans_and_promotes():
    ban = Sampling(temperature=1.0, logit_bias=((0, -math.inf), (2, -math.inf)))
    assert support(row(9, 1, 9, 1), ban) == {1, 3}
    assert draw(row(1, 2, 3), Sampling(logit_bias=((0, 2.5),)), 0, 0).token == 0


def undo(x: int) -> int:
    """The number that `finalise` turns into `x`."""
    for shift, factor in [(31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)]:
        x ^= x >> shift ^ x >> 2 * shift
        x = x * pow(factor, -1, WORD) % WORD
    return x


def test_infinite_noise_wins_but_not_for_a_banned_token():
    position, token = 5, 3
    key = undo(undo(WORD - 1) ^ token) ^ (position * STRIDE % WORD)
    seed = (undo(key) - GOLDEN) % WORD
    assert uniform(seed, position, np.array([token])).tolist() == [1.0]
    logits = row(9, 8, 7, -30)
    assert draw(logits, Sampling(temperature=1.0), seed, position).token == token
    ban = Sampling(temperature=1.0, logit_bias=((token, -math.inf),))
    assert draw(logits, ban, seed, position).token < token


# Log-probabilities.


def test_logprobs_are_the_models_own_and_best_first():
    logits = row(*np.log([0.1, 0.4, 0.1, 0.4]))
    sampling = Sampling(temperature=0.2, num_logprobs=3, logit_bias=((0, 50.0),))
    drawn = draw(logits, sampling, 0, 0)
    assert drawn.token == 0
    assert drawn.logprob == pytest.approx(math.log(0.1))
    assert [token for token, _ in drawn.top] == [1, 3, 0]
    assert [value for _, value in drawn.top] == pytest.approx(np.log([0.4, 0.4, 0.1]))
    assert len(draw(logits, replace(sampling, num_logprobs=99), 0, 0).top) == 4


def test_logprobs_of_huge_logits_are_finite():
    drawn = draw(row(3e38, -3e38), Sampling(temperature=1e-9, num_logprobs=1), 0, 0)
    assert drawn == Draw(0, 0.0, ((0, 0.0),))


# Rows that cannot be drawn from.


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, top_k=3)])
@pytest.mark.parametrize("bad, name", [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
@pytest.mark.parametrize("index", [0, 33, 96])
def test_a_logit_that_is_not_finite_ends_the_reply(sampling, bad, name, index):
    logits = random_row(97, 0)
    logits[index] = bad
    with pytest.raises(NonFiniteLogits) as caught:
        draw(logits, sampling, 0, 1234)
    assert f" {name} as logit of token {index} at position 1234 " in str(caught.value)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7)])
def test_nothing_to_draw_from_ends_the_reply(sampling):
    for logits in (np.full(5, np.nan, np.float32), np.full(5, -np.inf, np.float32)):
        with pytest.raises(NonFiniteLogits, match="5 of 5"):
            draw(logits, sampling, 0, 9)
    ban_all = replace(sampling, logit_bias=tuple((token, -math.inf) for token in range(5)))
    with pytest.raises(NonFiniteLogits, match="no token is left at position 9"):
        draw(np.zeros(5, np.float32), ban_all, 0, 9)


def test_a_bias_beyond_the_vocabulary_is_refused():
    with pytest.raises(RequestError, match="token 5; this model's ids end at 4"):
        draw(np.zeros(5, np.float32), Sampling(logit_bias=((5, 1.0),)), 0, 0)


# Options.


@pytest.mark.parametrize(
    "option, value",
    [
        *[("temperature", value) for value in (-0.1, math.nan, math.inf, 10**400, "1", True)],
        *[("top_k", value) for value in (-1, 2.0, math.nan, False, None)],
        *[("top_p", value) for value in (0, -0.5, 1.01, math.nan, "0.9")],
        *[("min_p", value) for value in (-0.01, 1.01, math.nan)],
        *[("repetition_penalty", value) for value in (0, -1.0, 1e-9, 101, math.inf, math.nan)],
        *[("repetition_window", value) for value in (-1, 1.5, None)],
        *[("seed", value) for value in (-1, 2**64, 1.5, "7", True)],
        *[("num_logprobs", value) for value in (-1, 1.5, True)],
        *[("logit_bias", value) for value in ({}, [(1, 1.0)], (1, 2), ((1,),), ((-1, 1.0),))],
        *[("logit_bias", ((1, bias),)) for bias in (math.nan, math.inf, 1e10, "1", True, None)],
        *[("logit_bias", value) for value in (((1.0, 1.0),), ((1, 1.0), (1, 2.0)))],
    ],
)
def test_an_option_out_of_range_is_named_with_its_range(option, value):
    with pytest.raises(RequestError) as caught:
        Sampling(**{option: value})
    assert str(caught.value).startswith(option)
    assert "must" in str(caught.value)


def test_the_ends_of_every_range_are_allowed():
    Sampling(temperature=0, top_k=0, top_p=1, min_p=0, repetition_penalty=0.01, seed=0)
    bias = ((0, -math.inf), (1, 1e9), (2, -1e9))
    Sampling(min_p=1, repetition_penalty=100, seed=2**64 - 1, logit_bias=bias)
    Sampling(temperature=np.float32(0.5), top_k=np.int64(5))


@pytest.mark.parametrize(
    "found, want",
    [
        ({}, Sampling()),
        ({"do_sample": False, "temperature": 0.3, "top_k": 5}, Sampling(top_k=5)),
        ({"do_sample": True}, Sampling(temperature=1.0)),
        ({"do_sample": None, "temperature": None, "top_p": None}, Sampling()),
        ({"min_p": 0.15}, Sampling(min_p=0.15)),
        (
            {"temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05, "eos_token_id": 7},
            Sampling(temperature=0.3, min_p=0.15, repetition_penalty=1.05),
        ),
        (
            {"do_sample": True, "temperature": 0.1, "top_k": 50, "top_p": 0.9},
            Sampling(temperature=0.1, top_k=50, top_p=0.9),
        ),
    ],
)
def test_generation_config_gives_the_defaults(found, want):
    assert Sampling.from_generation_config(found) == want


@pytest.mark.parametrize(
    "found, named",
    [
        ([], "list"),
        ({"do_sample": "yes"}, "do_sample is 'yes'"),
        ({"do_sample": False, "temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 50.5}, "top_k is 50.5"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"min_p": True}, "min_p is True"),
    ],
)
def test_a_bad_generation_config_is_named(found, named):
    with pytest.raises(ConfigError) as caught:
        Sampling.from_generation_config(found)
    assert str(caught.value).startswith("generation_config.json")
    assert named in str(caught.value)


def test_a_user_overrides_field_by_field():
    defaults = Sampling(temperature=0.3, min_p=0.15, repetition_penalty=1.05)
    changed = defaults.override(temperature=None, min_p=0.0, seed=5, logit_bias={3: -1.0})
    assert changed == replace(defaults, min_p=0.0, seed=5, logit_bias=((3, -1.0),))
    assert defaults.override(temperature=0).temperature == 0
    with pytest.raises(RequestError, match="top_p is 2; it must"):
        defaults.override(top_p=2)
    with pytest.raises(RequestError, match="'temp'.*known: temperature"):
        defaults.override(temp=1.0)


def test_only_a_plain_greedy_request_may_skip_the_row():
    assert Sampling(top_k=5, top_p=0.5, min_p=0.1, seed=3, repetition_window=8).is_greedy
    assert not Sampling(temperature=0.1).is_greedy
    assert not Sampling(repetition_penalty=1.1).is_greedy
    assert not Sampling(logit_bias=((1, 0.5),)).is_greedy
    assert not Sampling(num_logprobs=1).is_greedy

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.errors import ConfigurationError
from gleaner.models.statistics import (
    Interval,
    area_under_curve,
    bootstrap_interval,
    compare_paired,
    mean_interval,
    pass_at_k,
    pass_at_k_interval,
    sign_flip_p,
    success_interval,
    wilson_interval,
)


def test_pass_at_k_by_hand():
    # 4 rollouts, 2 right, draw 2: 1 - C(2,2)/C(4,2) = 1 - 1/6.
    assert pass_at_k(2, 4, 2) == pytest.approx(5 / 6, abs=1e-15)
    assert pass_at_k(1, 4, 1) == 0.25
    assert pass_at_k(0, 8, 8) == 0.0
    assert pass_at_k(1, 8, 8) == 1.0
    assert pass_at_k(3, 10, 5) == pytest.approx(1 - math.comb(7, 5) / math.comb(10, 5), abs=1e-15)


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_success(case):
    n, c, k = case
    draws = list(combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(c, n, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_is_finite_for_huge_counts():
    assert pass_at_k(1, 1_000_000, 500_000) == pytest.approx(0.5, abs=1e-9)


def test_more_draws_than_rollouts_are_refused_with_the_fix():
    with pytest.raises(
        ConfigurationError, match=r"pass@8 needs at least 8 .* there are 4: raise evaluation.samples to 8"
    ):
        pass_at_k(1, 4, 8)
    with pytest.raises(ConfigurationError, match="pass@0"):
        pass_at_k(1, 4, 0)
    with pytest.raises(ConfigurationError, match="5 successes among 4"):
        pass_at_k(5, 4, 2)


def test_wilson_by_hand():
    # z = 1.959964: centre (0.5 + z^2/20) / (1 + z^2/10) = 0.5, half z/(1+z^2/10) * sqrt(0.025 + z^2/400) = 0.2634.
    interval = wilson_interval(5, 10)
    assert (interval.low, interval.high) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    # 0 of n: [0, z^2 / (n + z^2)].
    assert wilson_interval(0, 100).high == pytest.approx(1.959964**2 / (100 + 1.959964**2), abs=1e-6)


def test_one_rollout_per_prompt_is_a_plain_proportion():
    assert success_interval([1, 0, 0, 1], [1, 1, 1, 1]) == wilson_interval(2, 4)


def test_all_solved_keeps_the_width_that_its_prompts_allow():
    many_rollouts = success_interval([8] * 20, [8] * 20)
    assert many_rollouts == wilson_interval(20, 20)
    assert many_rollouts.low < 0.85  # 160 independent trials would claim 0.977


def test_equal_shares_in_between_have_wilsons_width_over_prompts():
    equal, plain = success_interval([4] * 10, [8] * 10), wilson_interval(5, 10)
    assert (equal.estimate, equal.low, equal.high) == pytest.approx((0.5, plain.low, plain.high), abs=1e-12)


def test_the_interval_respects_clusters():
    # Each prompt is solved always or never: 10 prompts of 100 rollouts say no more than 10 prompts of 1.
    successes, samples = [100, 0] * 5, [100] * 10
    assert success_interval(successes, samples) == wilson_interval(5, 10)
    # Nearly so, by bootstrap: about as wide as the t interval over the ten rates, far wider than over 1,000 rollouts.
    nearly = success_interval([99, 1] * 5, samples)
    assert nearly.method == "bootstrap"
    assert nearly.high - nearly.low > 5 * (wilson_interval(500, 1000).high - wilson_interval(500, 1000).low)


def test_bootstrap_agrees_with_the_normal_interval_for_many_prompts():
    rates = np.random.default_rng(1).binomial(8, 0.3, size=1000) / 8
    interval = bootstrap_interval(rates)
    half = 1.96 * rates.std() / math.sqrt(1000)
    assert interval.estimate == pytest.approx(rates.mean())
    assert (interval.low, interval.high) == pytest.approx(
        (rates.mean() - half, rates.mean() + half), abs=0.1 * half
    )
    assert bootstrap_interval(rates) == interval, "the same seed gives the same interval"


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(2)
    truth, covered = 0.3, 0
    for _ in range(60):
        chances = generator.beta(0.6, 1.4, size=80)  # prompts of very different difficulty, mean 0.3
        interval = success_interval(generator.binomial(4, chances).tolist(), [4] * 80)
        covered += interval.low <= truth <= interval.high
    assert covered >= 52  # 57 expected


def test_pass_at_k_interval_averages_over_prompts():
    interval = pass_at_k_interval([2, 0, 4], [4, 4, 4], 2)
    assert interval.estimate == pytest.approx((5 / 6 + 0 + 1) / 3)
    with pytest.raises(ConfigurationError, match="1 success counts for 2 prompts"):
        pass_at_k_interval([1], [1, 1], 1)
    with pytest.raises(ConfigurationError, match="at least one prompt"):
        pass_at_k_interval([], [], 1)


def test_t_interval_by_hand():
    # Differences 1, 2, 3: mean 2, sd 1, se 1/sqrt(3), t(0.975, 2) = 4.302653.
    comparison = compare_paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)
    assert comparison.differences_S == (1.0, 2.0, 3.0)
    assert comparison.difference.estimate == pytest.approx(2.0)
    assert (comparison.difference.low, comparison.difference.high) == pytest.approx(
        (2 - half, 2 + half), abs=1e-6
    )
    assert comparison.p_sign_flip == 0.25  # +++ and --- of 8


def test_a_single_seed_has_no_interval():
    assert mean_interval([0.4]) == Interval(0.4, 0.4, 0.4, "t")
    with pytest.raises(ConfigurationError, match="at least two seeds"):
        compare_paired([0.5], [0.4])
    with pytest.raises(ConfigurationError, match="same seeds"):
        compare_paired([0.5, 0.6], [0.4])


@given(st.lists(st.floats(-1, 1, allow_nan=False).map(lambda x: round(x, 3)), min_size=2, max_size=8))
def test_sign_flip_equals_enumeration(differences):
    observed = abs(sum(differences))
    flips = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((1, -1), repeat=len(differences))
    ]
    assert sign_flip_p(differences) == pytest.approx(sum(f >= observed - 1e-12 for f in flips) / len(flips))


def test_sign_flip_with_five_seeds_cannot_reach_five_percent():
    assert sign_flip_p([0.1, 0.2, 0.3, 0.4, 0.5]) == 2 / 32


def test_sign_flip_is_drawn_beyond_twelve_seeds_and_repeats_with_its_seed():
    differences = np.linspace(-0.2, 0.6, 20)
    first = sign_flip_p(differences, seed=3)
    assert first == sign_flip_p(differences, seed=3)
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(20))
    assert t > 2
    assert 0.0005 < first < 0.01  # the t test says 0.0016
    assert sign_flip_p(np.ones(13)) == pytest.approx(2 / 2**13, abs=2e-4)


def test_area_by_hand():
    assert area_under_curve([0, 10, 20], [0.0, 0.5, 0.5]) == pytest.approx((2.5 + 5.0) / 20)
    assert area_under_curve([0, 10, 20], [0.0, 0.5, 0.5], until=15) == pytest.approx((2.5 + 2.5) / 15)
    assert area_under_curve([0, 10, 20], [0.0, 0.5, 0.1], until=5) == pytest.approx(0.125)
    assert area_under_curve([5, 9], [0.3, 0.3]) == pytest.approx(0.3)


def test_curves_without_an_area_are_refused():
    with pytest.raises(ConfigurationError, match="does not rise"):
        area_under_curve([0, 10, 10], [0, 1, 1])
    with pytest.raises(ConfigurationError, match="shared budget"):
        area_under_curve([0, 10], [0, 1], until=11)
    with pytest.raises(ConfigurationError, match="at least twice"):
        area_under_curve([0], [0])

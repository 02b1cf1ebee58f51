"""Contrasts and gaps, with numbers worked by hand."""

import math

import pytest
from scipy import stats

from gleaner.models.comparison import (
    Outcome,
    Trained,
    arm_result,
    contrasts,
    gap_points,
    gap_slope,
    late_mean,
    measures,
    shared_budget,
)


def trained(final: float, success_N: list[float], rollouts_N=(0.0, 10.0, 20.0)) -> Trained:
    return Trained(list(rollouts_N), success_N, final)


GRPO = [Outcome(trained(0.4, [0.0, 0.2, 0.4])), Outcome(trained(0.5, [0.1, 0.3, 0.5]))]
WIDE = [
    Outcome(trained(0.5, [0.0, 0.4, 0.5]), budget={"rollouts": 20.0, "forward_tokens/teacher": 8.0}),
    Outcome(trained(0.7, [0.1, 0.5, 0.7]), budget={"rollouts": 24.0}, recovered=0.5),
]


def test_an_arms_figures_are_means_over_seeds():
    result = arm_result(WIDE, 20)
    assert result.final["policy"].estimate == pytest.approx(0.6)
    assert result.budget == {"rollouts": 22.0, "forward_tokens/teacher": 4.0}
    assert result.recovered == 0.25
    assert list(result.final) == ["policy"]


def test_differences_are_paired_by_seed():
    (found,) = contrasts({"grpo": GRPO, "wide": WIDE}, [("wide", "grpo")], {}, 20)
    assert found.final.differences_S == pytest.approx((0.1, 0.2))
    # Area, by hand: seed 0 (0.2 + 0.45) / 2 = 0.325 against 0.2; seed 1 (0.3 + 0.6) / 2 = 0.45 against 0.3.
    assert found.area.differences_S == pytest.approx((0.125, 0.15))
    # t interval: 0.15 +- t(0.975, 1) * 0.0707107 / sqrt(2), with t = 12.706
    assert found.final.difference.low == pytest.approx(0.15 - 12.7062 * 0.05, abs=1e-4)
    assert found.final.difference.high == pytest.approx(0.15 + 12.7062 * 0.05, abs=1e-4)
    assert found.final.p_sign_flip == 0.5, "two signs of four are as far from zero"


def test_areas_end_where_the_common_budget_does():
    refilled = [
        Outcome(trained(0.4, [0.0, 0.8], (0.0, 40.0))),
        Outcome(trained(0.4, [0.0, 0.4], (0.0, 40.0))),
    ]
    (found,) = contrasts({"a": refilled, "grpo": GRPO}, [("a", "grpo")], {}, 20)
    # At 20 of 40 rollouts the lines stand at 0.4 and 0.2: areas 0.2 and 0.1 against 0.2 and 0.3.
    assert found.area.differences_S == pytest.approx((0.0, -0.2))


def test_areas_end_where_the_shortest_curve_does():
    short = [Outcome(trained(0.4, [0.0, 0.8], (0.0, 16.0)), peer=trained(0.4, [0.0, 0.8], (0.0, 12.0)))]
    assert shared_budget({"grpo": GRPO}, 19) == 19
    assert shared_budget({"grpo": GRPO, "short": short}, 19) == 12


def test_a_peer_is_compared_with_its_own_baseline_and_the_mean_with_both():
    graft = [
        Outcome(trained(0.6, [0.0, 0.3, 0.6]), peer=trained(0.9, [0.2, 0.6, 0.9])),
        Outcome(trained(0.6, [0.1, 0.3, 0.6]), peer=trained(0.7, [0.2, 0.5, 0.7])),
    ]
    other = [Outcome(trained(0.8, [0.2, 0.6, 0.8])), Outcome(trained(0.8, [0.2, 0.6, 0.8]))]
    arms = {"graft": graft, "grpo": GRPO, "grpo_other": other}
    found = contrasts(arms, [("graft", "grpo")], {"graft": "grpo_other"}, 20)
    assert [(c.member, c.against) for c in found] == [
        ("policy", "grpo"),
        ("peer", "grpo_other"),
        ("mean", "grpo + grpo_other"),
    ]
    assert found[0].final.differences_S == pytest.approx((0.2, 0.1))
    assert found[1].final.differences_S == pytest.approx((0.1, -0.1))
    assert found[2].final.differences_S == pytest.approx((0.15, 0.0))
    result = arm_result(graft, 20)
    assert result.final["mean"].estimate == pytest.approx((0.75 + 0.65) / 2)
    assert [c.against for c in contrasts(arms, [("graft", "graft")], {}, 20)][1] == "graft (peer)"
    assert len(contrasts(arms, [("graft", "grpo")], {}, 20)) == 1, "a peer without a baseline has no contrast"


def test_one_seed_has_no_interval():
    (found,) = contrasts({"grpo": GRPO[:1], "wide": WIDE[:1]}, [("wide", "grpo")], {}, 20)
    assert found.final is None


def test_the_gain_of_guidance_by_the_gap_at_the_start():
    def guided(final: float, teacher: float, start: float) -> Outcome:
        return Outcome(trained(final, [start, 0.4], (0.0, 20.0)), teacher=teacher)

    arms = {
        "grpo": GRPO,  # ends at 0.4 and 0.5
        "strong": [guided(0.6, 0.8, 0.1), guided(0.7, 0.9, 0.1)],  # gaps 0.7, 0.8; gains 0.2, 0.2
        "fair": [guided(0.5, 0.4, 0.1), guided(0.6, 0.4, 0.1)],  # gaps 0.3, 0.3; gains 0.1, 0.1
        "weak": [guided(0.3, 0.0, 0.1), guided(0.4, 0.05, 0.1)],  # gaps -0.1, -0.05; gains -0.1, -0.1
    }
    pairs = [("strong", "grpo"), ("fair", "grpo"), ("weak", "grpo"), ("strong", "weak")]
    points = gap_points(arms, pairs)
    assert [(point.arm, point.against) for point in points] == pairs[:3], "a pair of guided arms has no gap"
    assert points[0].gaps_S == pytest.approx((0.7, 0.8))
    assert points[0].gains_S == pytest.approx((0.2, 0.2))
    assert points[2].gap.estimate == pytest.approx(-0.075)
    slopes = [
        stats.linregress([0.7, 0.3, -0.1], [0.2, 0.1, -0.1]).slope,
        stats.linregress([0.8, 0.3, -0.05], [0.2, 0.1, -0.1]).slope,
    ]
    # By hand, the first: covariance (0.4 * 0.3) / 3 over variance (2 * 0.16) / 3 is 0.375.
    assert slopes[0] == pytest.approx(0.375)
    assert gap_slope(points).estimate == pytest.approx(math.fsum(slopes) / 2)
    assert gap_slope(points[:2]) is None


def test_a_measure_is_the_mean_of_the_later_half_of_the_steps_that_have_it():
    steps = [{"m": 9.0}, {"m": 9.0}, {"m": 1.0}, {}, {"m": 2.0}]
    assert late_mean(steps, "m") == 1.5
    assert math.isnan(late_mean(steps, "other"))
    assert math.isnan(late_mean([], "m"))


def test_measures_are_compared_by_seed_among_the_arms_that_have_them():
    def runs(*values):
        return [Outcome(trained(0.4, [0.0, 0.4]), measured={"m": value}) for value in values]

    outcomes = {"new": runs(0.3, 0.5), "old": runs(0.1, 0.2), "none": runs(math.nan, math.nan)}
    (found,) = measures(outcomes, [("new", "old"), ("new", "none")], ["m"])
    assert found.arms.keys() == {"new", "old"}
    assert found.arms["new"].estimate == pytest.approx(0.4)
    assert found.differences.keys() == {("new", "old")}
    assert found.differences["new", "old"].difference.estimate == pytest.approx(0.25)

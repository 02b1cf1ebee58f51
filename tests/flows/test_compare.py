"""Comparison: paired by seed at an equal budget."""

import json
from pathlib import Path

import pytest

from gleaner.conf.compose import compose
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import CompareSettings
from gleaner.flows.compare import Curve, arm_result, compare, report_markdown


def curve(final: float, success_N: list[float]) -> Curve:
    return Curve([0.0, 10.0, 20.0], success_N, final, 0.0, {"rollouts": 20.0})


CURVES = {
    "grpo": [curve(0.4, [0.0, 0.2, 0.4]), curve(0.5, [0.1, 0.3, 0.5])],
    "wide": [curve(0.5, [0.0, 0.4, 0.5]), curve(0.7, [0.1, 0.5, 0.7])],
}


def test_differences_are_paired_by_seed():
    result = arm_result(CURVES, "wide", "grpo")
    assert result.final.estimate == pytest.approx(0.6)
    assert result.final_difference.differences_S == pytest.approx((0.1, 0.2))
    # Area, by hand: seed 0 (0.2 + 0.45) / 2 = 0.325 against 0.2; seed 1 (0.3 + 0.6) / 2 = 0.45 against 0.3.
    assert result.area_difference.differences_S == pytest.approx((0.125, 0.15))
    assert result.best_validation.estimate == pytest.approx(0.6)


def test_the_baseline_has_no_difference_to_itself():
    assert arm_result(CURVES, "grpo", "grpo").final_difference is None


def test_few_seeds_are_called_mechanics():
    settings = CompareSettings(arms={"grpo": [], "wide": []}, seeds=[0, 1], budget_rollouts=20)
    text = report_markdown(settings, {arm: arm_result(CURVES, arm, "grpo") for arm in CURVES})
    assert "show mechanics, not a gain" in text
    assert "| wide | 0.600" in text


def test_arms_that_are_never_validated_are_refused_before_any_runs():
    settings = CompareSettings(arms={"grpo": [], "wide": []}, seeds=[0, 1], budget_rollouts=128)
    with pytest.raises(ConfigurationError, match=r"set evaluation\.every"):
        compare(settings)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_spends_an_equal_budget_on_every_arm(prefect_api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = compose(["compare=smoke"], CompareSettings)
    report = compare(settings)
    assert set(report) == set(settings.arms)
    for arm in report.values():
        assert arm["budget"]["rollouts"] >= settings.budget_rollouts
    folder = Path(".gleaner/runs/compare-smoke")
    assert (folder / "compare.png").stat().st_size > 10_000
    stored = json.loads((folder / "report.json").read_text())
    assert stored.keys() == report.keys()
    assert "p (sign flip)" in (folder / "report.md").read_text()

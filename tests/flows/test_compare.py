"""Comparison: a search, then a test that is paired by seed at an equal budget; killed, and resumed."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from gleaner.conf.compose import compose
from gleaner.conf.schema import CompareSettings, Tuned
from gleaner.flows.compare import (
    Outcome,
    Trained,
    arm_result,
    compare,
    contrasts,
    report_markdown,
    tuning_markdown,
    validation_success,
)
from gleaner.models.comparison import gap_points, measures
from gleaner.tasks import context as context_module


@pytest.fixture(autouse=True)
def stores_of_this_folder():
    """Stores and journals are kept by their settings, where a relative path may mean another test's folder."""
    context_module._store.cache_clear()
    context_module._journal.cache_clear()


def outcome(final: float, **rest) -> Outcome:
    return Outcome(Trained([0.0, 20.0], [0.0, final], final), **rest)


def test_the_report_shows_budgets_contrasts_and_gaps():
    settings = CompareSettings(arms={"grpo": [], "gats": []}, seeds=[0, 1], budget_rollouts=20)
    spent = {"rollouts": 20.0, "generated_tokens": 1500.0, "seconds": 3.0}
    outcomes = {
        "grpo": [outcome(0.4, budget=spent), outcome(0.5, budget=spent)],
        "gats": [
            outcome(
                final,
                budget=spent | {"forward_tokens/teacher": 4000.0, "forward_tokens/old": 70.0},
                needed={"rollouts": 5000.0},
                recovered=1.0,
                teacher=0.5,
            )
            for final in (0.6, 0.7)
        ],
    }
    arms = {arm: arm_result(members, 20) for arm, members in outcomes.items()}
    pairs = contrasts(outcomes, settings.pairs, {}, 20)
    text = report_markdown(settings, arms, pairs, gap_points(outcomes, settings.pairs), None, 16)
    lines = text.splitlines()
    (row,) = [line for line in lines if line.startswith("| gats | policy")]
    assert row.endswith("| 20 | 1,500 | 4,000 | 70 | 3 | 5,000 | 100% |")
    assert "| gats - grpo | 0.200 [0.200, 0.200] | 0.500 | 0.100 [0.100, 0.100] | 0.500 |" in lines
    assert "| gats | grpo | 0.500 [0.500, 0.500] | 0.200 [0.200, 0.200] |" in lines
    assert "2 seeds show mechanics, not a gain: a claim needs at least 8." in lines
    assert "16 test episodes a run: a claim needs at least 1,000." in lines


def test_the_report_shows_measures_of_the_arms_that_have_them():
    settings = CompareSettings(
        arms={"grpo": [], "pippo": [], "ppo": []},
        contrasts=[("pippo", "ppo"), ("pippo", "grpo")],
        measures=["value/error"],
        seeds=[0, 1],
        budget_rollouts=20,
    )
    outcomes = {
        "grpo": [outcome(0.4, measured={"value/error": math.nan})] * 2,
        "pippo": [outcome(0.4, measured={"value/error": value}) for value in (0.1, 0.2)],
        "ppo": [outcome(0.4, measured={"value/error": value}) for value in (0.3, 0.4)],
    }
    arms = {arm: arm_result(members, 20) for arm, members in outcomes.items()}
    measured = measures(outcomes, settings.pairs, settings.measures)
    lines = report_markdown(settings, arms, [], [], None, 0, (), measured).splitlines()
    assert "value/error, mean over the second half of the steps:" in lines
    assert "| pippo - ppo | -0.200 [-0.200, -0.200] | 0.500 |" in lines
    assert not any("pippo - grpo" in line for line in lines)


def test_tuning_looks_at_the_last_versions_validation_and_at_a_peers_beside_it():
    alone = {"validated": {"validation/success": 0.4}, "after": {"test/success": 0.9}}
    assert validation_success(alone) == 0.4
    together = {"validated": {"validation/success": 0.4, "peer/validation/success": 0.8}}
    assert validation_success(together) == pytest.approx(0.6)


def test_every_candidate_is_shown_and_the_chosen_one_is_bold():
    searched = [
        {"overrides": ["update.lr=0.1"], "validation": [0.2, 0.4]},
        {"overrides": ["update.lr=0.2"], "validation": [0.5, 0.4]},
    ]
    arms = {"grpo": {"overrides": ["update.lr=0.2"], "searched": searched}}
    lines = tuning_markdown(
        Tuned(comparison="c", settings="d", seeds=[8, 9], arms=arms)
    ).splitlines()  # fmt: skip
    assert "| grpo | update.lr=0.1 | 0.300 | 0.200, 0.400 |" in lines
    assert "| grpo | **update.lr=0.2** | 0.450 | 0.500, 0.400 |" in lines


def test_the_smoke_comparison_runs_its_arms_on_equal_budgets_and_reports_them(
    prefect_api, tmp_path, monkeypatch
):
    """Three real runs in processes of their own, one building on another. A second seed, the search before it, a kill
    and the resume are the slow test's."""
    monkeypatch.chdir(tmp_path)
    settings = compose(["compare=gats_smoke"], CompareSettings).model_copy(
        update={"tune": None, "seeds": [0]}
    )
    found = compare(settings)
    arms = found["arms"]
    assert (
        arms["grpo"]["budget"]["rollouts"] == arms["gats"]["budget"]["rollouts"] == settings.budget_rollouts
    )
    assert arms["gats"]["budget"]["forward_tokens/teacher"] > 0
    assert arms["gats"]["needed"]["rollouts"] == 16  # the teacher's one step of 4 x 4
    assert arms["grpo"]["needed"] == {}
    assert found["contrasts"][0]["final"] is None  # one seed has no paired difference
    report = (tmp_path / ".gleaner/runs/gats_smoke/report.md").read_text()
    assert "M_T of gats was set by hand or measured on fewer than 1,000 training episodes" in report


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_comparison_is_tuned_killed_in_the_middle_and_resumed(prefect_api, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "presets").mkdir()
    command = [
        sys.executable,
        "-P",
        "-m",
        "gleaner.flows.cli",
        "compare",
        "gats_smoke",
        "--presets",
        "presets",
    ]
    tuned = subprocess.run([*command, "--tune"], capture_output=True, text=True)
    assert tuned.returncode == 0, tuned.stderr + tuned.stdout
    assert (tmp_path / "presets/compare/tuned/gats_smoke.yaml").is_file()
    runs = tmp_path / ".gleaner/runs"
    searched = json.loads((runs / "gats_smoke-tune-gats-0-seed100/summary.json").read_text())
    assert searched["after"] == {}, "tuning reads no test prompt"

    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = runs / "gats_smoke-grpo-seed0/summary.json"
    _await(lambda: first.is_file() or killed.poll() is not None)
    assert killed.poll() is None, "it ended before it could be killed"
    family = psutil.Process(killed.pid).children(recursive=True)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    _await(lambda: not any(_trains(process) for process in family))
    left = first.stat().st_mtime_ns

    settings = compose(["compare=gats_smoke", f"presets={tmp_path / 'presets'}"], CompareSettings)
    report = compare(settings)
    assert first.stat().st_mtime_ns == left, "a finished run is not started again"
    assert set(report["arms"]) == {"grpo", "gats"}
    for arm in report["arms"].values():
        assert arm["budget"]["rollouts"] == settings.budget_rollouts
        assert arm["budget"]["seconds"] > 0
    assert report["arms"]["gats"]["budget"]["forward_tokens/teacher"] > 0
    assert report["arms"]["gats"]["needed"]["rollouts"] == 16  # the teacher's one step of 4 x 4
    assert report["arms"]["grpo"]["needed"] == {}
    (contrast,) = report["contrasts"]
    assert (contrast["arm"], contrast["against"], contrast["member"]) == ("gats", "grpo", "policy")
    assert len(contrast["final"]["differences_S"]) == 2
    teachers = [
        json.loads((runs / f"gats_smoke-gats-seed{seed}/order.json").read_text())["method"]["teacher"]["run"]
        for seed in (0, 1)
    ]
    assert teachers == ["gats_smoke-teacher-seed0", "gats_smoke-teacher-seed1"]
    folder = Path(".gleaner/runs/gats_smoke")
    assert json.loads((folder / "report.json").read_text())["arms"].keys() == report["arms"].keys()
    for name in ("compare.png", "contrasts.png", "gap.png"):
        assert (folder / name).stat().st_size > 5_000
    assert "update.lr=0.0003" in report["overrides"]["grpo"], "what tuning chose is what ran"


def _trains(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and "forkserver" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def _await(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"nothing came of it in {seconds} s"
        time.sleep(0.2)

"""What a comparison would run: names, placeholders, order, search, and what is refused before anything starts."""

import math
from pathlib import Path

import pytest
import yaml

from gleaner.conf.compose import compose
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.plan import candidates, plan_test, plan_tuning
from gleaner.conf.presets import BUILT_IN, available_presets
from gleaner.conf.schema import ArmSettings, CompareSettings
from gleaner.conf.tuned import apply_tuned, choice, choose, read_tuned, tuned_file, write_tuned

VALIDATED = ["run.steps=10", "evaluation.every=5"]
TEACHER = "method.teacher.run={comparison}-teacher-seed{seed}"


def comparison(**changes) -> CompareSettings:
    given = {
        "name": "trial",
        "common": VALIDATED,
        "before": {"teacher": ["run.steps=3"]},
        "arms": {
            "linear": [
                "method=gats",
                TEACHER,
                "method.teacher.schedule=linear",
                "method.teacher.matched_run={comparison}-gats-seed{seed}",
            ],
            "gats": ArmSettings(overrides=["method=gats", TEACHER], tune={"method.teacher.window": [3, 5]}),
            "grpo": [],
        },
        "seeds": [4, 9],
        "budget_rollouts": 640,
        "tune": {"seeds": [70], "grid": {"update.lr": [1e-4, 1e-3]}},
    }
    return CompareSettings(**(given | changes))


# -------------------------------------------------------------------------------------------------- plan


def test_each_seeds_runs_come_together_and_after_those_that_they_build_on() -> None:
    assert [(run.name, run.needs) for run in plan_test(comparison())] == [
        ("trial-teacher-seed4", ()),
        ("trial-gats-seed4", ("trial-teacher-seed4",)),
        ("trial-linear-seed4", ("trial-gats-seed4", "trial-teacher-seed4")),
        ("trial-grpo-seed4", ()),
        ("trial-teacher-seed9", ()),
        ("trial-gats-seed9", ("trial-teacher-seed9",)),
        ("trial-linear-seed9", ("trial-gats-seed9", "trial-teacher-seed9")),
        ("trial-grpo-seed9", ()),
    ]


def test_placeholders_become_the_runs_own_seed_and_the_comparisons_name() -> None:
    runs = {run.name: run.settings for run in plan_test(comparison())}
    gats = runs["trial-gats-seed9"]
    assert gats.run.seed == 9
    assert gats.method.teacher.run == "trial-teacher-seed9"
    assert gats.run.budget_rollouts == 640
    assert runs["trial-teacher-seed9"].run.budget_rollouts is None, "teachers have a budget of their own"
    assert gats.tracking.experiment == "trial"
    assert gats.tracking.parent_run == "trial"


def test_a_run_that_starts_from_anothers_policy_waits_for_it() -> None:
    arms = {"grpo": ["policy=pretrained", "policy.path=.gleaner/runs/{comparison}-teacher-seed{seed}/policy"]}
    last = plan_test(comparison(arms=arms, seeds=[4], tune=None))[-1]
    assert last.settings.policy.path == ".gleaner/runs/trial-teacher-seed4/policy"
    assert last.needs == ("trial-teacher-seed4",)


@pytest.mark.parametrize(
    ("arm", "complaint"),
    [
        (["run.stesp=1"], r"^arm grpo: run\.stesp is no setting: did you mean run\.steps"),
        (["run.steps=1"], r"arm grpo: 1 steps sample 128 rollouts.*raise run\.steps"),
        (["evaluation.every=0"], r"arm grpo is never validated: set evaluation\.every"),
        (["method=gats", "method.teacher.run={comparison}-techer-seed{seed}"], "builds on trial-techer-seed4"),
        (["method=gats", "method.teacher.run=t-{sed}"], r"placeholder \{sed\}: use one of \{comparison\}, \{seed\}"),
        (
            ["method=gats", "method.teacher.run={comparison}-gats-seed{seed}"],
            r"wait for each other \(trial-grpo-seed4, trial-gats-seed4",
        ),
    ],
)  # fmt: skip
def test_an_arm_that_cannot_run_is_refused(arm: list[str], complaint: str) -> None:
    circle = ["method=gats", "method.teacher.run={comparison}-grpo-seed{seed}"]
    arms = {"grpo": arm, "gats": circle}
    with pytest.raises(ConfigurationError, match=complaint):
        plan_test(comparison(arms=arms, seeds=[4], tune=None))


def test_arms_may_name_presets_of_the_users_own_folder(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("kind: grpo\nclip_high: 0.5\n")
    settings = comparison(arms={"grpo": ["method=mine"]}, presets=str(tmp_path), tune=None)
    assert plan_test(settings)[-1].settings.method.clip_high == 0.5


@pytest.mark.parametrize("preset", available_presets("compare"))
def test_every_comparison_plans_all_its_arms_and_candidates(preset: str) -> None:
    settings = compose([f"compare={preset}"], CompareSettings)
    runs = plan_test(settings)
    assert len(runs) == (len(settings.arms) + len(settings.before)) * len(settings.seeds)
    assert len({run.name for run in runs}) == len(runs)
    for arm in settings.arms:
        members = [run for run in runs if run.part == arm]
        assert [run.seed for run in members] == settings.seeds
        assert {run.settings.run.budget_rollouts for run in members} == {settings.budget_rollouts}
    if settings.tune is not None:
        assert all(run.settings.evaluation.test_prompts == 0 for run in plan_tuning(settings))


# ------------------------------------------------------------------------------------------------ tuning


def test_every_arm_searches_the_common_grid_and_what_it_alone_has() -> None:
    assert candidates(comparison(), "grpo") == [["update.lr=0.0001"], ["update.lr=0.001"]]
    assert candidates(comparison(), "gats") == [
        ["update.lr=0.0001", "method.teacher.window=3"],
        ["update.lr=0.0001", "method.teacher.window=5"],
        ["update.lr=0.001", "method.teacher.window=3"],
        ["update.lr=0.001", "method.teacher.window=5"],
    ]


def test_tuning_has_seeds_and_prompts_of_its_own_at_the_tests_budget() -> None:
    tested = comparison(common=[*VALIDATED, "evaluation.test_prompts=64"])
    runs = plan_tuning(tested)
    assert {run.seed for run in runs} == {70}
    assert {run.settings.tracking.parent_run for run in runs} == {"trial-tune"}
    assert {run.settings.evaluation.test_prompts for run in runs} == {0}, "not even a teacher's test is read"
    assert {run.settings.run.budget_rollouts for run in runs if run.part != "teacher"} == {640}
    assert not {run.name for run in runs} & {run.name for run in plan_test(tested)}
    assert {run.settings.evaluation.test_prompts for run in plan_test(tested)} == {64}


def test_in_tuning_a_matched_arm_follows_the_candidate_of_its_own_learning_rate() -> None:
    runs = {run.name: run.settings for run in plan_tuning(comparison())}
    assert runs["trial-tune-linear-1-seed70"].update.lr == 1e-3
    matched = runs["trial-tune-linear-1-seed70"].method.teacher.matched_run
    assert matched == "trial-tune-gats-2-seed70"
    assert runs[matched].update.lr == 1e-3


def test_the_candidate_of_the_highest_mean_wins_and_the_first_of_equals() -> None:
    assert choose([[0.2, 0.6], [0.5, 0.5], [0.4, 0.4]]) == 1  # means 0.4, 0.5, 0.4
    assert choose([[0.25, 0.75], [0.5, 0.5]]) == 0
    assert choose([[math.nan, 1.0], [0.1, 0.1]]) == 1, "unscored is no score"
    with pytest.raises(ConfigurationError, match="no candidate"):
        choose([[math.nan]])


def test_the_choice_is_a_file_that_the_test_applies(tmp_path: Path) -> None:
    settings = comparison(presets=str(tmp_path))
    with pytest.raises(ConfigurationError, match="not tuned yet: run the same command with --tune"):
        apply_tuned(settings)
    found = {"grpo": [[0.3], [0.2]], "linear": [[0.1], [0.2]], "gats": [[0.1], [0.2], [0.4], [0.3]]}
    assert write_tuned(settings, choice(settings, found)) == tuned_file(settings)
    assert tuned_file(settings) == tmp_path / "compare/tuned/trial.yaml"
    runs = {run.name: run.settings for run in plan_test(apply_tuned(settings))}
    assert runs["trial-grpo-seed4"].update.lr == 1e-4
    assert runs["trial-linear-seed4"].update.lr == 1e-3
    assert runs["trial-gats-seed9"].method.teacher.window == 3
    searched = yaml.safe_load(tuned_file(settings).read_text())["arms"]["gats"]["searched"]
    assert searched[2] == {
        "overrides": ["update.lr=0.001", "method.teacher.window=3"],
        "validation": [0.4],
    }


def test_a_choice_holds_for_the_settings_that_were_tuned_alone(tmp_path: Path) -> None:
    settings = comparison(presets=str(tmp_path))
    found = {"grpo": [[0.3], [0.2]], "linear": [[0.1], [0.2]], "gats": [[0.1], [0.2], [0.4], [0.3]]}
    write_tuned(settings, choice(settings, found))
    apply_tuned(settings.model_copy(update={"seeds": [1, 2, 3], "parallel": 5}))
    with pytest.raises(ConfigurationError, match="chosen for other settings of trial: tune again"):
        apply_tuned(settings.model_copy(update={"budget_rollouts": 128}))


def test_a_comparison_without_a_search_is_not_tuned() -> None:
    plain = comparison(tune=None, arms={"grpo": []})
    assert apply_tuned(plain) is plain
    with pytest.raises(ConfigurationError, match=r"declares no search: set tune\.seeds"):
        plan_tuning(plain)


@pytest.mark.parametrize(
    "file", sorted((BUILT_IN / "compare" / "tuned").glob("*.yaml")), ids=lambda file: file.stem
)
def test_what_was_tuned_and_committed_still_fits_its_comparison(file):
    """A change of the settings' schema must not make a committed choice useless."""
    comparison = compose([f"compare={file.stem}"], CompareSettings)
    chosen = apply_tuned(comparison)
    assert all(
        set(read_tuned(comparison).arms[arm].overrides) <= set(settings.overrides)
        for arm, settings in chosen.arms.items()
    )

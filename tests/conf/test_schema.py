"""Wrong combinations are refused before anything is loaded, each with a sentence that names the fix."""

import pytest
from pydantic import ValidationError

from gleaner.conf.schema import (
    CompareSettings,
    EvaluationSettings,
    GleanerSettings,
    GrpoMethod,
    HouseholdEnvironment,
    LocalStorage,
    MathEnvironment,
    PretrainedPolicy,
    PythonEnvironment,
    ReasoningGymEnvironment,
    RewardSettings,
    S3Storage,
    TinyPolicy,
    TrackingSettings,
    UpdateSettings,
)


def refusal(model: type, **values: object) -> str:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(values)
    return str(caught.value)


def test_the_defaults_are_valid_and_survive_json() -> None:
    settings = GleanerSettings()
    assert GleanerSettings.model_validate_json(settings.model_dump_json()) == settings


def test_the_schema_makes_a_form() -> None:
    schema = GleanerSettings.model_json_schema()
    assert set(schema["properties"]) == set(GleanerSettings.model_fields)
    assert (
        schema["$defs"]["RunSettings"]["properties"]["steps"]["description"] == "Sample-verify-update rounds."
    )


def test_settings_do_not_change_after_validation() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        GleanerSettings().run.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize("sampling", [{"top_p": 0.95}, {"top_k": 50}])
def test_training_with_a_truncated_distribution_is_refused(sampling: dict[str, float]) -> None:
    assert "set sampling.top_p=1 sampling.top_k=0" in refusal(GleanerSettings, sampling=sampling)
    GleanerSettings(evaluation=EvaluationSettings(**sampling))


def test_a_group_of_one_is_refused() -> None:
    assert "set run.group_size to 2 or more" in refusal(GleanerSettings, run={"group_size": 1})
    GleanerSettings.model_validate({"run": {"group_size": 2}})


def test_keeping_more_members_than_a_group_has_is_refused() -> None:
    message = refusal(GleanerSettings, run={"group_size": 4}, verification={"keep_at_least": 5})
    assert "verification.keep_at_least=5 exceeds run.group_size=4" in message


@pytest.mark.parametrize(("minibatches", "accepted"), [(32, True), (33, False)])
def test_a_minibatch_holds_at_least_one_rollout(minibatches: int, accepted: bool) -> None:
    values = {"run": {"prompts_per_step": 8, "group_size": 4}, "update": {"minibatches": minibatches}}
    if accepted:
        GleanerSettings.model_validate(values)
    else:
        assert "update.minibatches=33 exceeds the 32 rollouts of a step: lower it" in refusal(
            GleanerSettings, **values
        )


@pytest.mark.parametrize(("tokens", "accepted"), [(257, True), (256, False)])
def test_a_microbatch_holds_at_least_one_rollout(tokens: int, accepted: bool) -> None:
    values = {"sampling": {"max_new_tokens": 256}, "update": {"tokens_per_microbatch": tokens}}
    if accepted:
        GleanerSettings.model_validate(values)
    else:
        message = refusal(GleanerSettings, **values)
        assert "update.tokens_per_microbatch=256 does not hold one rollout" in message
        assert "raise it" in message


@pytest.mark.parametrize(("new_tokens", "accepted"), [(127, True), (128, False)])
def test_a_turn_leaves_room_for_its_prompt(new_tokens: int, accepted: bool) -> None:
    values = {"policy": {"kind": "tiny", "context": 128}, "sampling": {"max_new_tokens": new_tokens}}
    if accepted:
        GleanerSettings.model_validate(values)
    else:
        assert "lower it, or raise policy.context" in refusal(GleanerSettings, **values)


@pytest.mark.parametrize(("budget", "accepted"), [(128, True), (127, False)])
def test_a_budget_pays_for_one_step(budget: int, accepted: bool) -> None:
    values = {"run": {"prompts_per_step": 16, "group_size": 8, "budget_rollouts": budget}}
    if accepted:
        GleanerSettings.model_validate(values)
    else:
        assert "run.budget_rollouts=127 does not pay for one step of 128 rollouts" in refusal(
            GleanerSettings, **values
        )


def test_rewards_that_all_weigh_nothing_are_refused() -> None:
    message = refusal(GleanerSettings, rewards=[{"weight": 0}, {"function": "a.py:b", "weight": 0}])
    assert "every weight in rewards is 0" in message
    assert "at least 1 item" in refusal(GleanerSettings, rewards=[])
    assert RewardSettings(function="package.module:polite").function == "package.module:polite"
    assert "pattern" in refusal(RewardSettings, function="polite")


def test_evaluating_on_a_split_without_prompts_is_refused() -> None:
    no_validation = {"kind": "math", "path": "x.jsonl", "validation_share": 0}
    assert "environment.validation_share above 0, or evaluation.every=0" in refusal(
        GleanerSettings, environment=no_validation, evaluation={"every": 5}
    )
    no_test = {"kind": "math", "path": "x.jsonl", "test_share": 0}
    assert "environment.test_path or environment.test_share" in refusal(
        GleanerSettings, environment=no_test, evaluation={"test_prompts": 5}
    )
    GleanerSettings.model_validate(
        {"environment": no_test | {"test_path": "y.jsonl"}, "evaluation": {"test_prompts": 5}}
    )


@pytest.mark.parametrize("environment", [MathEnvironment, ReasoningGymEnvironment, HouseholdEnvironment])
def test_shares_leave_training_prompts(environment: type) -> None:
    assert "their sum must stay below 1" in refusal(environment, validation_share=0.5, test_share=0.5)


def test_a_separate_test_file_frees_the_test_share() -> None:
    MathEnvironment(path="x.jsonl", test_path="y.jsonl", validation_share=0.5, test_share=0.5)


def test_method_combinations_without_a_meaning_are_refused() -> None:
    assert "set method.ratio=token" in refusal(GrpoMethod, surrogate="cispo", ratio="sequence")
    assert "method.dual_clip belongs to method.surrogate=clip" in refusal(
        GrpoMethod, surrogate="cispo", dual_clip=3
    )


def test_a_clip_range_given_as_epsilon_is_noticed() -> None:
    assert "the clip range is method.clip_low and method.clip_high" in refusal(GrpoMethod, epsilon=0.2)
    assert GrpoMethod(epsilon=1e-4).epsilon == 1e-4


def test_policies_that_cannot_be_built_are_refused() -> None:
    assert "policy.hidden=30 is not a multiple of policy.heads=4" in refusal(TinyPolicy, hidden=30, heads=4)
    assert "set policy.dtype=bfloat16" in refusal(PretrainedPolicy, attention="flash_attention_2")
    PretrainedPolicy(attention="flash_attention_2", dtype="bfloat16")


def test_dropout_is_refused_since_a_replayed_update_must_see_the_same_forward_pass() -> None:
    assert "less than or equal to 0" in refusal(TinyPolicy, lora={"dropout": 0.1})


@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,)])
def test_betas_outside_their_range_are_refused(betas: tuple[float, ...]) -> None:
    refusal(UpdateSettings, betas=betas)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0, -1e-6])
def test_a_learning_rate_is_a_positive_number(value: float) -> None:
    refusal(UpdateSettings, lr=value)


def test_greedy_evaluation_is_asked_for_by_top_k() -> None:
    assert "evaluation.temperature=1 evaluation.top_k=1" in refusal(EvaluationSettings, temperature=0)


def test_places_are_what_they_say() -> None:
    assert "set storage=s3 storage.bucket=BUCKET" in refusal(LocalStorage, path="s3://bucket/store")
    refusal(S3Storage, bucket="s3://bucket")
    refusal(S3Storage, bucket="bucket/store")
    refusal(TrackingSettings, uri="mlruns")
    assert TrackingSettings(uri="http://localhost:5000").uri == "http://localhost:5000"
    refusal(PythonEnvironment, path="my_world.py")
    assert PythonEnvironment(path="my_world.py:World").path == "my_world.py:World"


def test_a_comparison_names_its_baseline_and_each_seed_once() -> None:
    arms = {"a": [], "b": []}
    assert "name one of a, b" in refusal(CompareSettings, arms=arms, baseline="c", budget_rollouts=1)
    assert "list each once" in refusal(
        CompareSettings, arms=arms, baseline="a", seeds=[1, 1], budget_rollouts=1
    )


def test_a_comparisons_search_contrasts_and_runs_before_are_checked() -> None:
    given = {"arms": {"a": [], "b": {"overrides": ["run.steps=2"]}}, "baseline": "a", "budget_rollouts": 1}
    search = {"seeds": [7], "grid": {"update.lr": [1e-4]}}
    assert CompareSettings(**given).pairs == [("b", "a")]
    assert CompareSettings(**given, contrasts=[("a", "b")]).pairs == [("a", "b")]
    assert "contrasts names c" in refusal(CompareSettings, **given, contrasts=[("a", "c")])
    assert "with itself" in refusal(CompareSettings, **given, contrasts=[("a", "a")])
    assert "rename one" in refusal(CompareSettings, **given, before={"a": []})
    assert "share [7]" in refusal(CompareSettings, **given, tune=search, seeds=[7, 8])
    own = given | {"arms": {"a": [], "b": {"tune": {"update.lr": [1]}}}}
    assert "belongs to a search" in refusal(CompareSettings, **own)
    assert "every arm searches alike" in refusal(CompareSettings, **own, tune=search)
    peer = given | {"arms": {"a": [], "b": {"peer_baseline": "c"}}}
    assert "is not another arm" in refusal(CompareSettings, **peer)

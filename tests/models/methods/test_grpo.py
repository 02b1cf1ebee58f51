"""GRPO: advantages, folded averages, the sampler's correction, and what leaves the denominator."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.schema import GrpoMethod
from gleaner.models.methods.grpo import (
    advantages,
    aggregation_weights,
    correction_metrics,
    grpo_signal,
    informative,
    minibatch_of_groups,
    sampler_correction,
)
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import group_rollouts

rewards = st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=2, max_size=16)


# -------------------------------------------------------------------------------------------- advantages


def test_advantages_by_hand():
    # mean 0.25; squared deviations 0.5625 + 3 * 0.0625 = 0.75; over 3: 0.25; std 0.5
    np.testing.assert_allclose(advantages(np.array([1.0, 0, 0, 0]), "std", 0.0), [1.5, -0.5, -0.5, -0.5])
    np.testing.assert_allclose(
        advantages(np.array([1.0, 0, 0, 0]), "none", 1e-6), [0.75, -0.25, -0.25, -0.25]
    )


@pytest.mark.parametrize("value", [0.1, 1 / 3, 0.95, 0.0, 1e-30, -7.3])
@pytest.mark.parametrize("size", [1, 2, 7, 8])
def test_equal_rewards_give_exactly_zero(value, size):
    for scale in ("std", "none"):
        assert (advantages(np.full(size, value), scale, 1e-6) == 0).all()


def test_one_loser_among_equal_winners_is_no_spike():
    found = advantages(np.array([0.0] + [0.95] * 7), "std", 1e-6)
    # the standard one-against-seven: sqrt(1/8) / ... = (7/8, -1/8 each) / sqrt(1/8), whatever the reward's size
    np.testing.assert_allclose(found, [-7 / math.sqrt(8)] + [1 / math.sqrt(8)] * 7, rtol=1e-5)
    assert (found != 0).all()


@given(rewards)
def test_advantages_sum_to_zero(values):
    for scale in ("std", "none"):
        assert abs(advantages(np.array(values), scale, 1e-6).sum()) < 1e-6


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=16), st.integers(1, 8), st.integers(-4, 4))
def test_scaled_and_shifted_rewards_give_the_same_advantages(values, factor, shift):
    plain = np.array(values, dtype=np.float64)
    np.testing.assert_allclose(
        advantages(plain * factor + shift, "std", 1e-9), advantages(plain, "std", 1e-9), atol=1e-6
    )
    np.testing.assert_allclose(
        advantages(plain + shift, "none", 1e-9), advantages(plain, "none", 1e-9), atol=1e-9
    )
    np.testing.assert_allclose(  # without the deviation they are linear in the rewards
        advantages(plain * factor, "none", 1e-9), factor * advantages(plain, "none", 1e-9), atol=1e-9
    )


# ----------------------------------------------------------------------------------------------- folding


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=10),
    st.randoms(use_true_random=False),
)
def test_folded_weights_equal_the_direct_formulas(episodes, random):
    tokens, steps = (np.array(column) for column in zip(*episodes, strict=True))
    terms = [np.array([random.uniform(-1, 1) for _ in range(n)]) for n in tokens]
    for step in np.unique(steps):
        members = [terms[i] for i in range(len(terms)) if steps[i] == step]
        direct = {
            "token_mean": np.concatenate(members).mean(),
            "sequence_mean": np.mean([term.mean() for term in members]),
            "constant": sum(term.sum() for term in members) / (len(members) * 12),
        }
        for aggregation, expected in direct.items():
            weights = aggregation_weights(aggregation, tokens, steps, 12)
            folded = sum(weights[i] * terms[i].sum() for i in range(len(terms)) if steps[i] == step)
            assert folded == pytest.approx(expected, rel=1e-9, abs=1e-12)


@given(st.integers(0, 40), st.integers(1, 12))
def test_groups_spread_evenly_over_minibatches_and_none_is_empty(groups, minibatches):
    steps = minibatch_of_groups(groups, minibatches)
    counts = np.bincount(steps) if groups else np.zeros(0, dtype=int)
    assert len(counts) == min(groups, minibatches)
    assert len(counts) == 0 or counts.max() - counts.min() <= 1
    assert (np.diff(steps) >= 0).all()


# ------------------------------------------------------------------------------------- sampler's correction


def test_the_correction_is_capped_and_one_where_the_sampler_is_unknown():
    old = np.array([-1.0, -1.0, -1.0, -1.0, -1.0])
    sampler = np.array([-1.0, -3.0, -0.5, np.nan, -np.inf])
    np.testing.assert_allclose(sampler_correction(old, sampler, 2.0), [1.0, 2.0, math.exp(-0.5), 1.0, 2.0])
    np.testing.assert_array_equal(sampler_correction(old, sampler, None), np.ones(5))
    metrics = correction_metrics([sampler_correction(old, sampler, 2.0)], 2.0)
    assert metrics["tis/max"] == 2
    assert metrics["tis/capped"] == pytest.approx(0.4)


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20), st.floats(1, 5))
def test_equal_samplers_need_no_correction(logprobs, cap):
    assert (sampler_correction(np.array(logprobs), np.array(logprobs), cap) == 1).all()


# ------------------------------------------------------------------------------------------------ signal


def make_groups(rewards_by_prompt, lengths=(2, 4), truncated=()):
    segments, verdicts = [], []
    for prompt, values in rewards_by_prompt.items():
        for sample, reward in enumerate(values):
            length = lengths[sample % len(lengths)]
            segments.append(
                Segment(
                    prompt_id=prompt, sample=sample, segment=0, context_ids=[1, 2], sampled_ids=[3] * length,
                    loss_mask=[1] * length, logprobs=[-1.0] * length, policy_version="v", sampling_digest="d", seed=0,
                    finish_reason="length" if (prompt, sample) in truncated else "stop", text="", transcript=[],
                    environment_result={}, images=[],
                )
            )  # fmt: skip
            verdicts.append(Verdict(prompt, sample, "scored", reward > 0.5, reward, {}, "1"))
    return group_rollouts(segments, verdicts, "drop_group", 2)[0]


def signal_of(groups, minibatches=1, **method):
    fields = {name: method.pop(name) for name in ("old_logprobs", "reference_logprobs") if name in method}
    return grpo_signal(
        groups,
        GrpoMethod(**method),
        rollouts="r",
        minibatches=minibatches,
        max_new_tokens=8,
        temperature=1.0,
        **fields,
    )


def test_a_signal_by_hand():
    groups = make_groups({"live": [1.0, 0.0], "dead": [0.0, 0.0]})  # 2 and 4 tokens in each group: 12 in all
    signal, metrics = signal_of(groups, epsilon=1e-12)
    root = math.sqrt(0.5)
    found = [(row.prompt_id, row.pg_coef[0], pytest.approx(row.advantage[0])) for row in signal.rows]
    assert found == [
        ("live", 1 / 12, root),
        ("live", 1 / 12, -root),
        ("dead", 1 / 12, 0.0),
        ("dead", 1 / 12, 0.0),
    ]
    assert metrics["reward/mean"] == 0.25
    assert metrics["groups/zero_std"] == 0.5
    assert metrics["advantage/abs"] == pytest.approx(root / 2)
    assert metrics["response/mean"] == 3
    assert metrics["tis/mean"] == 1
    by_sequence, _ = signal_of(groups, aggregation="sequence_mean")
    assert [row.pg_coef[0] for row in by_sequence.rows] == [1 / 8, 1 / 16, 1 / 8, 1 / 16]
    constant, _ = signal_of(groups, aggregation="constant", scale="none")
    assert [row.pg_coef[0] for row in constant.rows] == [1 / 32] * 4


def test_each_minibatch_has_a_denominator_of_its_own():
    groups = make_groups({f"p{i}": [1.0, 0.0] for i in range(3)})
    signal, _ = signal_of(groups, minibatches=2)
    assert [row.minibatch for row in signal.rows] == [0, 0, 0, 0, 1, 1]
    assert [row.pg_coef[0] for row in signal.rows] == [1 / 12] * 4 + [1 / 6] * 2


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_masked_truncated_rollouts_leave_numerator_and_denominator(aggregation):
    groups = make_groups({"a": [1.0, 0.0], "b": [1.0, 0.0]}, truncated={("a", 1)})
    masked, metrics = signal_of(groups, aggregation=aggregation, overlong="mask")
    assert metrics["response/truncated"] == 0.25
    assert not masked.rows[1].active
    expected = {"token_mean": [1 / 8] * 3, "sequence_mean": [1 / 6, 1 / 6, 1 / 12], "constant": [1 / 24] * 3}
    live = [row.pg_coef[0] for row in masked.rows if row.active]
    assert live == pytest.approx(expected[aggregation])
    # Its reward stays in the group's mean: the other member keeps its advantage.
    assert masked.rows[0].advantage[0] == signal_of(groups)[0].rows[0].advantage[0]


def test_all_truncated_and_masked_is_finite_and_moves_nothing():
    groups = make_groups({"a": [1.0, 0.0]}, truncated={("a", 0), ("a", 1)})
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        signal, _ = signal_of(groups, overlong="mask", aggregation=aggregation)
        assert not any(row.active for row in signal.rows)
        assert all(np.isfinite(row.pg_coef).all() for row in signal.rows)


def test_duplicating_a_responses_tokens_doubles_its_weight_without_length_normalisation():
    short, long = (
        signal_of(make_groups({"a": [1.0, 0.0]}, lengths=lengths), aggregation="constant", scale="none")[0]
        for lengths in ((2, 4), (4, 4))
    )
    assert long.rows[0].pg_weight.sum() == 2 * short.rows[0].pg_weight.sum()


def test_the_correction_is_folded_into_the_coefficient():
    groups = make_groups({"a": [1.0, 0.0]})
    old = {("a", 0, 0): np.array([-1.0, 0.0]), ("a", 1, 0): np.array([-1.0, -1.0, np.log(0.1), -1.0])}
    signal, metrics = signal_of(groups, old_logprobs=old, importance_cap=2.0)
    np.testing.assert_allclose(signal.rows[0].pg_coef * 6, [1.0, 2.0])  # exp(0 - -1) is above the cap
    np.testing.assert_allclose(signal.rows[1].pg_coef * 6, [1, 1, 0.1 * math.e, 1])
    np.testing.assert_array_equal(signal.rows[0].old_logprobs, old["a", 0, 0])
    np.testing.assert_array_equal(signal.rows[0].sampler_logprobs, [-1.0, -1.0])
    assert metrics["tis/capped"] == pytest.approx(1 / 6)


def test_equal_old_logprobs_give_the_uncorrected_signal_bit_for_bit():
    groups = make_groups({"a": [1.0, 0.0]})
    old = {("a", 0, 0): np.full(2, -1.0), ("a", 1, 0): np.full(4, -1.0)}
    corrected, plain = signal_of(groups, old_logprobs=old)[0], signal_of(groups)[0]
    for left, right in zip(corrected.rows, plain.rows, strict=True):
        np.testing.assert_array_equal(left.pg_coef, right.pg_coef)
        np.testing.assert_array_equal(left.old_logprobs, right.old_logprobs)


def test_the_k3_term_reaches_dead_groups_too():
    """Decided: a KL penalty is a pull on the policy, not a reward; groups without a signal feel it like any other."""
    groups = make_groups({"dead": [0.0, 0.0]})
    reference = {("dead", 0, 0): np.zeros(2), ("dead", 1, 0): np.zeros(4)}
    signal, _ = signal_of(groups, kl_coef=0.04, reference_logprobs=reference)
    assert all(row.active and not row.pg_weight.any() for row in signal.rows)
    np.testing.assert_allclose(signal.rows[0].kl_coef, 0.04 / 6)
    assert not any(row.active for row in signal_of(groups)[0].rows)
    with pytest.raises(ValueError, match="reference_logprobs"):
        signal_of(groups, kl_coef=0.04)


def test_dynamic_sampling_looks_at_success_not_at_a_shaped_reward():
    groups = make_groups({"shaped": [0.1, 0.4], "mixed": [1.0, 0.0], "passed": [1.0, 0.9]})
    assert [informative(group) for group in groups] == [False, True, False]


def test_an_episode_without_tokens_has_no_row_but_its_reward_counts():
    groups = make_groups({"a": [1.0, 0.0]}, lengths=(0, 4))
    signal, _ = signal_of(groups)
    assert [(row.sample, row.pg_coef[0]) for row in signal.rows] == [(1, 0.25)]
    assert signal.rows[0].advantage[0] < 0


def test_no_groups_give_an_empty_signal():
    signal, metrics = signal_of([])
    assert signal.rows == []
    assert all(math.isfinite(value) for value in metrics.values())

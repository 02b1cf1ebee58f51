"""Groups, the signal's table and the ledger."""

import time
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.errors import ContractError, CorruptArtifactError, VerifierContractError
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import (
    LearningSignal,
    Objective,
    audit,
    group_rollouts,
    row_of,
    signal_from_frame,
    signal_to_frame,
)


def make_segment(prompt="p", sample=0, segment=0, tokens=3, finish="stop", mask=None) -> Segment:
    mask = mask or [1] * tokens
    return Segment(
        prompt_id=prompt, sample=sample, segment=segment, context_ids=[5, 6],
        sampled_ids=list(range(10, 10 + len(mask))),
        loss_mask=mask, logprobs=[-0.5 - i for i in range(sum(mask))], policy_version="v", sampling_digest="d", seed=0,
        finish_reason=finish, text="", transcript=[], environment_result={}, images=[],
    )  # fmt: skip


def make_verdict(prompt="p", sample=0, reward: float | None = 1.0, status="scored", success=None) -> Verdict:
    scored = status == "scored"
    success = (reward or 0) > 0.5 if success is None else success
    return Verdict(prompt, sample, status, success if scored else None, reward if scored else None, {}, "1")


def make_groups(rewards_by_prompt, on_unscored="drop_group", keep_at_least=2):
    """A reward of None is an unscored episode."""
    segments = [make_segment(p, s) for p, rewards in rewards_by_prompt.items() for s in range(len(rewards))]
    verdicts = [
        make_verdict(p, s, reward, "timeout" if reward is None else "scored")
        for p, rewards in rewards_by_prompt.items()
        for s, reward in enumerate(rewards)
    ]
    return group_rollouts(segments, verdicts, on_unscored, keep_at_least)


# ------------------------------------------------------------------------------------------------ groups


def test_groups_keep_the_order_of_prompts_and_segments_of_an_episode_stay_together():
    segments = [make_segment("b", 0, 1), make_segment("a", 0), make_segment("b", 0, 0), make_segment("b", 1)]
    verdicts = [make_verdict("a", 0), make_verdict("b", 1, 0.0), make_verdict("b", 0, 1.0)]
    groups, counts = group_rollouts(segments, verdicts, "drop_group", 2)
    assert [group.prompt_id for group in groups] == ["b", "a"]
    assert [part.segment for part in groups[0].episodes[0].segments] == [0, 1]
    assert groups[0].episodes[0].tokens == 6
    np.testing.assert_array_equal(groups[0].rewards, [1.0, 0.0])
    assert counts == {"rollouts/unscored": 0, "rollouts/dropped": 0, "groups/kept": 2, "groups/dropped": 0}


def test_the_kind_of_a_group_is_the_verifiers_word_not_the_reward():
    shaped = [make_verdict("p", 0, 0.9, success=False), make_verdict("p", 1, 0.1, success=False)]
    groups, _ = group_rollouts([make_segment("p", 0), make_segment("p", 1)], shaped, "drop_group", 2)
    assert groups[0].kind == "all_fail"
    kinds = [group.kind for group in make_groups({"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [0.0, 0.0]})[0]]
    assert kinds == ["all_pass", "mixed", "all_fail"]


@pytest.mark.parametrize("policy", ["drop_group", "retry"])
def test_an_unscored_member_drops_its_group_and_is_counted(policy):
    groups, counts = make_groups({"a": [1.0, None, 0.0], "b": [0.0, 1.0, 1.0]}, policy)
    assert [group.prompt_id for group in groups] == ["b"]
    assert counts == {"rollouts/unscored": 1, "rollouts/dropped": 2, "groups/kept": 1, "groups/dropped": 1}


def test_scored_members_are_kept_where_there_are_enough():
    groups, counts = make_groups({"a": [1.0, None, 0.0], "b": [None, None, 1.0]}, "keep_if_at_least", 2)
    assert [group.prompt_id for group in groups] == ["a"]
    assert [episode.sample for episode in groups[0].episodes] == [0, 2]
    assert counts == {"rollouts/unscored": 3, "rollouts/dropped": 1, "groups/kept": 1, "groups/dropped": 1}


def test_all_unscored_is_no_group_rather_than_reward_zero():
    groups, counts = make_groups({"a": [None, None]}, "keep_if_at_least", 2)
    assert groups == []
    assert counts["groups/dropped"] == 1


def test_an_episode_that_ended_in_an_error_is_unscored_whatever_the_verifier_says():
    segments = [make_segment("p", 0), make_segment("p", 1, finish="error")]
    groups, counts = group_rollouts(segments, [make_verdict("p", 0), make_verdict("p", 1)], "drop_group", 2)
    assert groups == []
    assert counts["rollouts/unscored"] == 1


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_scored_verdict_without_a_finite_reward_is_refused(reward):
    verdict = replace(make_verdict(), reward=reward)
    with pytest.raises(VerifierContractError, match="finite reward"):
        group_rollouts([make_segment()], [verdict], "drop_group", 2)


def test_rollouts_and_verdicts_must_match_one_to_one():
    with pytest.raises(ContractError, match="no verdict"):
        group_rollouts([make_segment()], [], "drop_group", 2)
    with pytest.raises(ContractError, match="belongs to no rollout"):
        group_rollouts([make_segment()], [make_verdict(), make_verdict(sample=9)], "drop_group", 2)
    with pytest.raises(ContractError, match="twice"):
        group_rollouts([make_segment(), make_segment()], [make_verdict()], "drop_group", 2)
    with pytest.raises(ContractError, match="twice"):
        group_rollouts([make_segment()], [make_verdict(), make_verdict()], "drop_group", 2)


@given(
    st.lists(st.lists(st.sampled_from([None, 0.0, 1.0]), min_size=1, max_size=5), max_size=5),
    st.sampled_from(["drop_group", "retry", "keep_if_at_least"]),
    st.integers(2, 4),
)
def test_no_rollout_is_lost_uncounted(rewards, policy, keep_at_least):
    groups, counts = make_groups({f"p{i}": r for i, r in enumerate(rewards)}, policy, keep_at_least)
    kept = sum(len(group.episodes) for group in groups)
    assert kept + counts["rollouts/unscored"] + counts["rollouts/dropped"] == sum(map(len, rewards))
    assert len(groups) + counts["groups/dropped"] == len(rewards)
    for group in groups:
        whole = len(group.episodes) == len(rewards[int(group.prompt_id[1:])])
        assert whole or (policy == "keep_if_at_least" and len(group.episodes) >= keep_at_least)


# ------------------------------------------------------------------------------------------------- table


def make_signal() -> tuple[LearningSignal, dict]:
    """A row of each kind: plain, peer with k3, sampled distillation, top-K, critic with a context of its own."""
    segments = {("r", "p", i, 0): make_segment("p", i, mask=[1, 0, 1, 1]) for i in range(5)}
    by_sample = {key[2]: segment for key, segment in segments.items()}
    rows = [
        row_of(by_sample[0], "r", 0.1, 1.5),
        row_of(
            by_sample[1], "r", np.array([0.1, 0.2, 0.3]), -1.0, np.array([-1.0, -2.0, -3.0]), origin="peer",
            pg_source="peer", minibatch=3, kl_coef=np.full(3, 0.01), reference_logprobs=np.array([-1.5, -2.5, np.nan]),
        ),
        row_of(
            by_sample[2], "r", 0.1, 0.0, distill_kind="sampled", distill_source="teacher",
            distill_coef=np.full(3, 0.2), teacher_logprobs=np.array([-0.1, -0.2, -0.3]),
        ),
        row_of(
            by_sample[3], "r", 0.1, 0.0, distill_kind="topk", distill_source="experience",
            distill_coef=np.array([0.0, 0.5, 0.5]), support_tokens=np.array([1, 2]),
            support_ids=np.array([[7, 8], [9, 10]]), support_logprobs=np.array([[-0.1, -3.0], [-0.2, -2.0]]),
        ),
        row_of(
            by_sample[4], "r", 0.0, 0.0, slot="critic", context_ids=[1, 2, 3, 4], value_coef=np.full(3, 0.5),
            returns=np.ones(3), old_values=np.full(3, 0.25),
        ),
    ]  # fmt: skip
    return LearningSignal(Objective(surrogate="unclipped", temperature=0.7), rows), segments


def test_a_signal_survives_parquet(tmp_path):
    signal, segments = make_signal()
    frame, header = signal_to_frame(signal)
    frame.write_parquet(tmp_path / "signal.parquet")
    found = signal_from_frame(pl.read_parquet(tmp_path / "signal.parquet"), header, segments)
    assert found.objective == signal.objective
    for left, right in zip(found.rows, signal.rows, strict=True):
        for name, expected in vars(right).items():
            value = getattr(left, name)
            if isinstance(expected, np.ndarray):
                np.testing.assert_array_equal(value, expected)
                assert value.dtype == expected.dtype, name
            else:
                assert value == expected, name


def test_the_stored_signal_repeats_no_token_of_the_rollouts():
    frame, _ = signal_to_frame(make_signal()[0])
    assert not {"sampled_ids", "loss_mask", "context_ids", "sampler_logprobs"} & set(frame.columns)
    assert frame["own_context_ids"].is_null().to_list() == [True] * 4 + [False]
    assert frame["support_ids"].to_list()[3] == [
        7,
        8,
        9,
        10,
    ]  # the token without a coefficient has no support


def test_a_signal_without_rows_survives_too():
    frame, header = signal_to_frame(LearningSignal(Objective(), []))
    assert signal_from_frame(frame, header, {}).rows == []


def test_another_schema_version_is_refused():
    signal, segments = make_signal()
    frame, header = signal_to_frame(signal)
    with pytest.raises(CorruptArtifactError, match="schema version 99"):
        signal_from_frame(frame, {**header, "schema_version": 99}, segments)


def test_a_segment_that_is_missing_or_does_not_fit_is_refused():
    signal, segments = make_signal()
    frame, header = signal_to_frame(signal)
    with pytest.raises(CorruptArtifactError, match="do not hold"):
        signal_from_frame(frame, header, {})
    other = {key: make_segment("p", key[2], tokens=9) for key in segments}
    with pytest.raises(CorruptArtifactError, match="9 learnable tokens"):
        signal_from_frame(frame, header, other)


def test_a_table_that_breaks_its_schema_is_refused_with_the_column():
    signal, segments = make_signal()
    frame, header = signal_to_frame(signal)
    with pytest.raises(ContractError, match="origin is neither self nor peer in row 0"):
        signal_from_frame(frame.with_columns(origin=pl.lit("elsewhere")), header, segments)
    third = pl.int_range(pl.len()) == 2
    with pytest.raises(ContractError, match="advantage is missing in row 2"):
        signal_from_frame(frame.with_columns(advantage=pl.when(~third).then("advantage")), header, segments)
    with pytest.raises(ContractError, match="minibatch is negative in row 2"):
        signal_from_frame(
            frame.with_columns(minibatch=pl.when(third).then(-1).otherwise("minibatch")), header, segments
        )
    with pytest.raises(ContractError, match="old_logprobs"):
        signal_from_frame(
            frame.with_columns(pl.col("old_logprobs").cast(pl.List(pl.Float32))), header, segments
        )


def test_arrays_must_cover_the_learnable_tokens():
    with pytest.raises(ContractError, match="old_logprobs has 2 values for 3"):
        row_of(make_segment(), "r", 0.1, 1.0, np.zeros(2))
    with pytest.raises(ContractError, match="log-probabilities for 3 learnable"):
        row_of(replace(make_segment(), logprobs=[-1.0]), "r", 0.1, 1.0)
    with pytest.raises(ContractError, match="no context"):
        row_of(replace(make_segment(), context_ids=[]), "r", 0.1, 1.0)


def test_a_peers_row_has_no_sampler_of_ours():
    assert row_of(make_segment(), "r", 0.1, 1.0, origin="peer").sampler_logprobs is None


def test_a_step_of_128_rows_is_stored_within_tens_of_milliseconds():
    segments = {("r", "p", i, 0): make_segment("p", i, tokens=100) for i in range(128)}
    best = {"build": 1.0, "store": 1.0, "load": 1.0}
    for _ in range(5):
        started = time.perf_counter()
        signal = LearningSignal(Objective(), [row_of(s, "r", 0.1, 1.0) for s in segments.values()])
        built = time.perf_counter()
        frame, header = signal_to_frame(signal)
        stored = time.perf_counter()
        signal_from_frame(frame, header, segments)
        seconds = {"build": built - started, "store": stored - built, "load": time.perf_counter() - stored}
        best = {name: min(best[name], value) for name, value in seconds.items()}
    assert best["build"] < 0.05, best  # about 5 ms on an idle core
    assert best["store"] < 0.2, best
    assert best["load"] < 0.2, best


# ------------------------------------------------------------------------------------------------ ledger


def test_the_ledger_counts_by_kind_and_source():
    groups, _ = make_groups({"fail": [0.0, 0.0], "mix": [1.0, 0.0], "pass": [1.0, 1.0]})
    zero = {"pg_coef": 0.1, "advantage": 0.0}
    rows = [
        row_of(make_segment("fail", 0), "r", 0.1, 0.0, distill_kind="sampled", distill_source="teacher",
               distill_coef=np.array([0.0, 0.5, 0.5]), teacher_logprobs=np.array([0.0, -1.0, -2.5])),
        row_of(make_segment("fail", 1), "r", **zero),
        row_of(make_segment("mix", 0), "r", 0.1, 2.0, kl_coef=np.full(3, 0.01), reference_logprobs=np.zeros(3)),
        row_of(make_segment("mix", 1), "r", np.array([0.1, 0.0, 0.1]), -1.0),
        row_of(make_segment("pass", 0), "r", **zero),
        row_of(make_segment("pass", 1), "r", **zero),
    ]  # fmt: skip
    ledger = audit(LearningSignal(Objective(), rows), groups)
    found = {(e.kind, e.source): (e.rows, e.tokens, round(e.weight, 9)) for e in ledger.entries}
    assert found == {
        # old log-probabilities are -0.5, -1.5, -2.5: the third token's teacher agrees and moves nothing
        ("all_fail", "teacher"): (1, 1, 0.25),
        ("mixed", "reward"): (2, 5, 0.8),
        ("mixed", "reference"): (1, 3, 0.03),
    }
    assert ledger.metrics["signal/recovered"] == 1.0
    assert ledger.metrics["signal/all_fail_weight"] == pytest.approx(0.25 / 1.05)
    assert ledger.metrics["signal/tokens"] == pytest.approx(6 / 18)
    assert ledger.metrics["groups/mixed"] == pytest.approx(1 / 3)


def test_grpo_recovers_nothing_and_the_k3_term_is_no_recovery():
    groups, _ = make_groups({"fail": [0.0, 0.0]})
    rows = [
        row_of(
            make_segment("fail", 0), "r", 0.1, 0.0, kl_coef=np.full(3, 0.1), reference_logprobs=np.zeros(3)
        )
    ]
    ledger = audit(LearningSignal(Objective(), rows), groups)
    assert ledger.metrics["signal/recovered"] == 0
    assert [(e.source, e.tokens) for e in ledger.entries] == [("reference", 3)]


def test_a_peers_rows_recover_the_group_of_their_prompt():
    groups, _ = make_groups({"fail": [0.0, 0.0], "other": [0.0, 0.0]})
    rows = [row_of(make_segment("fail", 0), "peer-rollouts", 0.1, 1.0, origin="peer", pg_source="peer")]
    ledger = audit(LearningSignal(Objective(), rows), groups)
    assert ledger.metrics["signal/recovered"] == 0.5
    assert ledger.metrics["signal/tokens"] == 0  # a peer's tokens are none of ours


def test_the_ledger_of_no_groups_is_empty_and_finite():
    ledger = audit(LearningSignal(Objective(), []), [])
    assert ledger.entries == []
    assert set(ledger.metrics.values()) == {0.0}

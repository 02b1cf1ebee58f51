"""GRAFT: which groups change hands, the gate, and what a grafted trajectory does to its receiver's update."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gleaner.conf.schema import GraftMethod, GrpoMethod, PeerSettings, UpdateSettings
from gleaner.models.methods.graft import (
    Counts,
    Graft,
    GraftedGroup,
    candidates,
    compatibility,
    gate,
    graft_signal,
    select_with_ties,
)
from gleaner.models.methods.grpo import grpo_signal
from gleaner.models.signal import Episode, audit
from tests.models.methods.test_grpo import make_groups as small_groups
from tests.models.test_training import assert_same_bits, make_groups, make_learner, weights

PEER = PeerSettings(run="peer")
counts = st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda pair: Counts(min(pair), max(pair)))
batches = st.dictionaries(st.sampled_from("abcdefghij"), counts)
solved = st.dictionaries(st.sampled_from("abcdefghij"), st.integers(1, 7))


def method_of(**changes):
    return GraftMethod(**({"peer": PEER, "epsilon": 1e-12} | changes))


def graft_of(episode, score=-1.0, source_mean=-1.0):
    """A trajectory whose receiver gives every token `score`."""
    old = tuple(np.full(len(segment.logprobs), score) for segment in episode.segments)
    return Graft(episode, old, source_mean, "grafts")


def grafted(groups, compatible=None):
    """All trajectories of the groups, with the compatibility of each sample (1 unless given)."""
    return {
        group.prompt_id: GraftedGroup(
            group,
            {
                e.sample: graft_of(e, -1.0 + math.log((compatible or {}).get(e.sample, 1.0)))
                for e in group.episodes
            },
        )
        for group in groups
    }


def signal_of(groups, grafts, method=None, minibatches=1, **fields):
    return graft_signal(
        groups, grafts, method or method_of(), rollouts={group.prompt_id: "own" for group in groups},
        minibatches=minibatches, max_new_tokens=8, temperature=1.0, random=np.random.default_rng(0), **fields,
    )  # fmt: skip


def rows_of(signal, origin):
    return [row for row in signal.rows if row.origin == origin]


# ------------------------------------------------------------------------------------------ candidates, ties


@given(batches, batches)
def test_a_candidate_was_failed_wholly_and_partly_solved_elsewhere(receiver, source):
    found = candidates(receiver, source)
    for prompt in receiver.keys() | source.keys():
        is_one = (
            prompt in receiver
            and prompt in source
            and receiver[prompt].successes == 0
            and 1 <= source[prompt].successes < source[prompt].rollouts
        )
        assert (prompt in found) == is_one
    assert not found.keys() & candidates(source, receiver).keys()


def test_selection_by_hand():
    four = {"a": 1, "b": 3, "c": 3, "d": 2}
    assert select_with_ties(four, 0) == []
    assert select_with_ties(four, 1) == ["b", "c"]  # both tie at 3
    assert select_with_ties(four, 2) == ["b", "c"]
    assert select_with_ties(four, 3) == ["b", "c", "d"]
    assert select_with_ties(four, 9) == ["a", "b", "c", "d"]
    assert select_with_ties({}, 3) == []


@given(solved, st.integers(0, 12), st.randoms(use_true_random=False))
def test_selection_keeps_the_most_solved_and_every_tie(found, count, random):
    chosen = select_with_ties(found, count)
    assert len(chosen) >= min(count, len(found))
    if not count:
        assert chosen == []
    if chosen:
        least = min(found[prompt] for prompt in chosen)
        assert all(found[prompt] < least for prompt in found.keys() - set(chosen))
        assert sum(found[prompt] > least for prompt in chosen) < count  # no more than the ties asked for
    shuffled = list(found.items())
    random.shuffle(shuffled)
    assert set(select_with_ties(dict(shuffled), count)) == set(chosen)


# --------------------------------------------------------------------------------------------------- the gate


def test_compatibility_by_hand():
    # means -1 over two tokens and -1.5 over three: exp(0.5)
    assert compatibility(np.array([-0.5, -1.5]), np.array([-1.5, -1.0, -2.0])) == pytest.approx(math.exp(0.5))


@given(
    st.lists(st.floats(-30, 0), min_size=1, max_size=12), st.lists(st.floats(-30, 0), min_size=1, max_size=12)
)
def test_compatibility_knows_no_length_and_turns_over_with_the_direction(one, two):
    receiver, source = np.array(one), np.array(two)
    found = compatibility(receiver, source)
    assert compatibility(np.tile(receiver, 2), source) == pytest.approx(found)
    assert compatibility(source, receiver) == pytest.approx(1 / found)
    assert compatibility(receiver, receiver) == 1.0


@given(st.floats(0, 1e6), st.floats(0, 0.99))
def test_the_weight_is_the_compatibility_between_floor_and_one(s, floor):
    weight = gate(s, floor)
    assert (weight == 0.0) == (s <= floor)
    if s > floor:
        assert weight == (1.0 if s > 1 else s)


# ------------------------------------------------------------------------------------------------ the signal

OWN = {"mixed": [1.0, 0.0], "dead": [0.0, 0.0]}
PEERS = {"dead": [1.0, 0.0]}


@pytest.mark.parametrize("minibatches", [1, 2])
def test_without_candidates_the_signal_is_grpos_bit_for_bit(minibatches):
    groups = small_groups(OWN | {"won": [1.0, 1.0]})
    signal, metrics = signal_of(groups, {}, minibatches=minibatches)
    plain, plain_metrics = grpo_signal(
        groups, GrpoMethod(epsilon=1e-12), rollouts={group.prompt_id: "own" for group in groups},
        minibatches=minibatches, max_new_tokens=8, temperature=1.0,
    )  # fmt: skip
    assert signal.objective == plain.objective
    assert len(signal.rows) == len(plain.rows)
    for one, two in zip(signal.rows, plain.rows, strict=True):
        assert (one.prompt_id, one.sample, one.minibatch, one.origin) == (
            two.prompt_id, two.sample, two.minibatch, two.origin
        )  # fmt: skip
        for name in ("pg_coef", "advantage", "old_logprobs"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert {name: metrics[name] for name in plain_metrics} == plain_metrics


def test_a_graft_by_hand():
    # Own: 2 + 4 tokens; the grafted group: 2 tokens of s = 0.9 and 4 of s = 3, so of weights 0.9 and 1. 12 tokens.
    groups = small_groups(OWN)
    signal, metrics = signal_of(groups, grafted(small_groups(PEERS), {0: 0.9, 1: 3.0}))
    own, peer = rows_of(signal, "self"), rows_of(signal, "peer")
    assert [row.prompt_id for row in own] == ["mixed", "mixed"]  # the dead group's own rows are replaced
    assert [row.pg_coef.tolist() for row in own] == [pytest.approx([1 / 12] * 2), pytest.approx([1 / 12] * 4)]
    assert [row.pg_coef.tolist() for row in peer] == [
        pytest.approx([0.9 / 12] * 2),
        pytest.approx([1 / 12] * 4),
    ]
    root = math.sqrt(0.5)
    assert [row.advantage[0] for row in peer] == [pytest.approx(root), pytest.approx(-root)]
    assert [row.rollouts for row in peer] == ["grafts", "grafts"]
    assert metrics["graft/groups"] == 1
    assert metrics["graft/rows"] == 2
    assert metrics["graft/admitted"] == 1.0
    assert metrics["graft/weight"] == pytest.approx(0.95)
    assert metrics["graft/tokens"] == 0.5
    assert metrics["graft/compatibility_success"] == pytest.approx(0.9)
    assert metrics["graft/compatibility_failure"] == pytest.approx(3.0)


def test_what_falls_under_the_floor_leaves_the_denominator_and_no_advantage_moves():
    groups, peers = small_groups(OWN), small_groups({"dead": [1.0, 0.0, 0.0, 0.0]})
    every, _ = signal_of(groups, grafted(peers))
    fewer, metrics = signal_of(groups, grafted(peers, {3: 0.8}))  # at the floor is not above it; 4 tokens
    assert [row.sample for row in rows_of(fewer, "peer")] == [0, 1, 2]
    for before, after in zip(rows_of(every, "peer"), rows_of(fewer, "peer"), strict=False):
        np.testing.assert_array_equal(before.advantage, after.advantage)
    assert rows_of(every, "self")[0].pg_coef[0] == pytest.approx(1 / (6 + 12))
    assert rows_of(fewer, "self")[0].pg_coef[0] == pytest.approx(1 / (6 + 8))
    assert metrics["graft/admitted"] == 0.75
    full = [row.advantage[0] for row in rows_of(every, "peer")]
    assert sum(full) == pytest.approx(0.0)  # over the full group, not over what was admitted
    assert sum(row.advantage[0] for row in rows_of(fewer, "peer")) != pytest.approx(0.0)


def test_an_all_fail_group_of_which_nothing_is_admitted_stays():
    groups = small_groups(OWN)
    signal, metrics = signal_of(groups, grafted(small_groups(PEERS), {0: 0.5, 1: 0.1}))
    assert [row.prompt_id for row in signal.rows] == ["mixed", "mixed", "dead", "dead"]
    assert signal.rows[0].pg_coef[0] == pytest.approx(1 / 12)
    assert metrics["graft/groups"] == 0
    assert audit(signal, groups).metrics["signal/recovered"] == 0.0


def test_recovered_signal_is_the_share_of_all_fail_groups_that_took_rows():
    groups = small_groups({"mixed": [1.0, 0.0], "dead": [0.0, 0.0], "lost": [0.0, 0.0]})
    signal, _ = signal_of(groups, grafted(small_groups(PEERS)))
    assert audit(signal, groups).metrics["signal/recovered"] == 0.5


@pytest.mark.parametrize("minibatches", [1, 2, 3, 4])
def test_minibatches_with_grafts_come_after_those_without(minibatches):
    own = {"x": [0.0, 0.0], "a": [1.0, 0.0], "y": [0.0, 0.0], "b": [0.0, 1.0]}
    groups, peers = small_groups(own), small_groups({"x": [1.0, 0.0], "y": [0.0, 1.0]})
    signal, _ = signal_of(groups, grafted(peers), minibatches=minibatches)
    with_grafts = {row.minibatch for row in rows_of(signal, "peer")}
    without = {row.minibatch for row in signal.rows} - with_grafts
    assert all(late > early for late in with_grafts for early in without)
    first, _ = signal_of(groups, grafted(peers), method_of(order="peer_first"), minibatches=minibatches)
    with_grafts = {row.minibatch for row in rows_of(first, "peer")}
    without = {row.minibatch for row in first.rows} - with_grafts
    assert all(late < early for late in with_grafts for early in without)


def test_grafts_get_no_sampler_correction_and_no_kl_term():
    groups, peers = small_groups(OWN), small_groups(PEERS)
    old = {(g.prompt_id, e.sample, 0): np.full(e.tokens, -0.5) for g in groups for e in g.episodes}
    signal, metrics = signal_of(
        groups, grafted(peers), method_of(kl_coef=0.1), old_logprobs=old, reference_logprobs=old
    )
    assert all(row.kl_coef is not None and row.kl_coef.all() for row in rows_of(signal, "self"))
    assert all(row.kl_coef is None and row.sampler_logprobs is None for row in rows_of(signal, "peer"))
    assert metrics["tis/mean"] == pytest.approx(math.exp(0.5))  # of the own rows alone
    assert rows_of(signal, "peer")[0].pg_coef[0] == pytest.approx(1 / 12)


# ------------------------------------------------------------------------------------------------- ablations


def test_without_the_gate_all_trajectories_count_in_full():
    found, _ = signal_of(
        small_groups(OWN), grafted(small_groups(PEERS), {0: 0.1, 1: 0.5}), method_of(gate=False)
    )
    assert [row.pg_coef[0] for row in rows_of(found, "peer")] == pytest.approx([1 / 12, 1 / 12])


def test_without_the_floor_a_small_weight_remains():
    found, _ = signal_of(
        small_groups(OWN), grafted(small_groups(PEERS), {0: 0.1, 1: 0.5}), method_of(floor=0.0)
    )
    assert [row.pg_coef[0] for row in rows_of(found, "peer")] == pytest.approx([0.1 / 12, 0.5 / 12])


def test_success_only_leaves_failures_out_of_numerator_and_denominator():
    found, _ = signal_of(small_groups(OWN), grafted(small_groups(PEERS)), method_of(trajectories="successes"))
    (row,) = rows_of(found, "peer")
    assert row.sample == 0
    assert row.advantage[0] == pytest.approx(math.sqrt(0.5))  # still the full group's
    assert row.pg_coef[0] == pytest.approx(1 / 8)


def test_pooled_advantages_by_hand():
    # Four rewards, one success: mean 1/4 = k_A / 2n, std 1/2. The receiver's own rows stay, and are negative.
    found, _ = signal_of(small_groups(OWN), grafted(small_groups(PEERS)), method_of(advantages="pooled"))
    dead = [row for row in found.rows if row.prompt_id == "dead"]
    assert [(row.origin, row.advantage[0]) for row in dead] == [
        ("self", pytest.approx(-0.5)), ("self", pytest.approx(-0.5)),
        ("peer", pytest.approx(1.5)), ("peer", pytest.approx(-0.5)),
    ]  # fmt: skip


def test_random_admission_takes_as_many_as_the_gate():
    peers = small_groups({"dead": [1.0, 0.0, 0.0, 0.0], "lost": [0.0, 1.0, 0.0, 0.0]})
    own = small_groups(OWN | {"lost": [0.0] * 2})
    compatible = {0: 0.9, 1: 0.2, 2: 0.3, 3: 0.85}
    _, gated = signal_of(own, grafted(peers, compatible))
    signal, random = signal_of(own, grafted(peers, compatible), method_of(admission="random"))
    assert random["graft/rows"] == gated["graft/rows"] == 4
    coefficient = {row.sample: row.pg_coef[0] for row in rows_of(signal, "peer")}
    tokens = sum(len(row.pg_coef) for row in signal.rows)
    for sample, found in coefficient.items():
        assert found == pytest.approx(compatible[sample] / tokens)


# ------------------------------------------------------------------------------------------------ the update


def scored_grafts(learner, groups, source_mean):
    """Grafts of whole groups whose receiver-old scores are the learner's own."""
    segments = [segment for group in groups for e in group.episodes for segment in e.segments]
    scores = {
        (s.prompt_id, s.sample): found
        for s, found in zip(segments, learner.score(segments, temperature=1.0), strict=True)
    }
    return {
        group.prompt_id: GraftedGroup(
            group,
            {
                e.sample: Graft(e, (scores[group.prompt_id, e.sample],), source_mean(scores[group.prompt_id, e.sample]),
                                "grafts")
                for e in group.episodes
            },
        )
        for group in groups
    }  # fmt: skip


def test_a_peer_that_is_the_policy_itself_has_compatibility_one():
    learner = make_learner()
    grafts = scored_grafts(learner, make_groups({"dead": [1.0, 0.0, 0.0, 0.0]}), lambda found: found.mean())
    for graft in grafts["dead"].grafts.values():
        assert graft.compatibility == pytest.approx(1.0, abs=1e-12)


def test_the_first_ratio_of_a_graft_is_one_because_its_old_policy_is_the_receivers():
    def ratio_of(old):
        learner = make_learner(UpdateSettings(lr=1e-3))
        grafts = scored_grafts(
            learner, make_groups({"dead": [1.0, 0.0, 0.0, 0.0]}), lambda found: found.mean()
        )
        if old is not None:
            found = grafts["dead"]
            shifted = {
                sample: replace(graft, old_logprobs=tuple(part + old for part in graft.old_logprobs))
                for sample, graft in found.grafts.items()
            }
            grafts = {"dead": GraftedGroup(found.source, shifted)}
        signal, _ = signal_of(make_groups({"dead": [0.0] * 4}), grafts, method_of(gate=False))
        return learner.apply(signal)["update/ratio"]

    assert ratio_of(None) == pytest.approx(1.0, abs=1e-5)
    assert ratio_of(1.0) == pytest.approx(math.exp(-1.0), rel=1e-3)  # what a peer's denominator would do


def test_an_all_fail_group_teaches_by_its_graft():
    learner = make_learner(UpdateSettings(lr=1e-3, weight_decay=0.0))
    peers = make_groups({"dead": [1.0, 0.0, 0.0, 0.0]})
    grafts = scored_grafts(learner, peers, lambda found: found.mean())
    episode: Episode = peers[0].episodes[0]
    before = learner.score(episode.segments, temperature=1.0)[0].mean()
    learner.apply(signal_of(make_groups({"dead": [0.0] * 4}), grafts)[0])
    assert learner.score(episode.segments, temperature=1.0)[0].mean() > before


def test_a_grafts_gradient_is_linear_in_its_weight():
    def gradient(compatible):
        learner = make_learner(UpdateSettings(lr=1e-3))
        grafts = scored_grafts(
            learner,
            make_groups({"dead": [1.0, 0.0, 0.0, 0.0]}),
            lambda found: found.mean() - math.log(compatible),
        )
        signal, _ = signal_of(make_groups({"dead": [0.0] * 4}), grafts, method_of(floor=0.0))
        return learner.apply(signal)["update/grad_norm"]

    assert gradient(0.5) == pytest.approx(0.5 * gradient(1.0), rel=1e-4)
    assert gradient(2.0) == pytest.approx(gradient(1.0), rel=1e-4)


def test_no_candidates_leave_the_weights_of_grpo():
    plain, graft = make_learner(), make_learner()
    groups = make_groups({"mixed": [1.0, 0.0, 0.0, 1.0], "dead": [0.0] * 4})
    plain.apply(
        grpo_signal(
            groups,
            GrpoMethod(epsilon=1e-12),
            rollouts="own",
            minibatches=2,
            max_new_tokens=8,
            temperature=1.0,
        )[0]
    )
    graft.apply(signal_of(groups, {}, minibatches=2)[0])
    assert_same_bits(weights(plain), weights(graft))
    assert any(
        not torch.equal(one, two)
        for one, two in zip(weights(plain).values(), weights(make_learner()).values(), strict=True)
    )

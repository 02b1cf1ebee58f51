"""piPPO's maths, with numbers worked by hand, and the critic's learner on a real tiny model."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from gleaner.conf.schema import CriticSettings, PippoMethod, UpdateSettings
from gleaner.models.methods.grpo import advantages
from gleaner.models.methods.pippo import CRITIC_SLOT, discounted_returns, gae, pippo_signal
from gleaner.models.records import Segment, Verdict
from gleaner.models.signal import LearningSignal, Objective, group_rollouts, row_of
from gleaner.models.training import Learner

METHOD = PippoMethod(critic=CriticSettings(minibatches=2, value_clip=None))
UPDATE = UpdateSettings(lr=1e-2, tokens_per_microbatch=64)


def make_groups(rewards_by_prompt, length=5):
    segments, verdicts = [], []
    for prompt, rewards in rewards_by_prompt.items():
        for sample, reward in enumerate(rewards):
            random = np.random.default_rng([*prompt.encode(), sample])
            mask = [1] * length if sample % 2 else [1, 1, 0, 0, 1]
            segments.append(
                Segment(
                    prompt, sample, 0, random.integers(0, 50, 4).tolist(), random.integers(0, 50, length).tolist(),
                    mask, [-3.0] * sum(mask), "v", "d", 0, "stop", "", [], {}, [],
                )
            )  # fmt: skip
            verdicts.append(Verdict(prompt, sample, "scored", reward > 0.5, reward, {}, "1"))
    return group_rollouts(segments, verdicts, "drop_group", 2)[0]


def keys_of(groups):
    return [(g.prompt_id, e.sample, 0) for g in groups for e in g.episodes]


def signal_of(groups, values=0.0, method=METHOD, train_policy=True):
    segments = {(g.prompt_id, e.sample, 0): e.segments[0] for g in groups for e in g.episodes}
    return pippo_signal(
        groups,
        method,
        values={
            key: np.full(len(segment.logprobs), values(key) if callable(values) else values)
            for key, segment in segments.items()
        },
        contexts={key: [1, 2, *segment.context_ids] for key, segment in segments.items()},
        train_policy=train_policy,
        rollouts={g.prompt_id: "r" for g in groups},
        minibatches=1,
        max_new_tokens=5,
        temperature=1.0,
    )


GROUPS = make_groups({"p": [1.0, 0.0, 0.0, 1.0], "q": [0.0, 0.0, 0.0, 0.0]})


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=9), st.floats(-1, 1))
def test_at_gamma_and_lambda_one_an_advantage_is_reward_minus_value(values, reward):
    np.testing.assert_allclose(gae(reward, np.array(values), 1.0, 1.0), reward - np.array(values), atol=1e-9)


def test_at_lambda_zero_it_is_the_temporal_difference():
    values = np.array([0.2, 0.5, 0.9])
    np.testing.assert_allclose(gae(1.0, values, 1.0, 0.0), [0.3, 0.4, 0.1])


def test_general_advantages_by_hand():
    # delta = (0.9*0.5 - 0.2, 1 - 0.5) = (0.25, 0.5); A_0 = 0.25 + 0.9*0.5*0.5
    np.testing.assert_allclose(gae(1.0, np.array([0.2, 0.5]), 0.9, 0.5), [0.475, 0.5])
    np.testing.assert_allclose(discounted_returns(1.0, 3, 0.5), [0.25, 0.5, 1.0])


def test_with_the_groups_mean_as_value_it_is_grpos_unscaled_advantage():
    mean = {g.prompt_id: g.rewards.mean() for g in GROUPS}
    signal, _ = signal_of(GROUPS, values=lambda key: mean[key[0]])
    expected = {g.prompt_id: advantages(g.rewards, "none", 1e-6) for g in GROUPS}
    for row in signal.rows:
        if row.slot == "policy":
            np.testing.assert_allclose(row.advantage, expected[row.prompt_id][row.sample], atol=1e-12)


def test_without_values_it_is_reinforce():
    signal, _ = signal_of(GROUPS)
    rewards = {(g.prompt_id, e.sample): e.verdict.reward for g in GROUPS for e in g.episodes}
    for row in signal.rows:
        if row.slot == "policy":
            assert (row.advantage == rewards[row.prompt_id, row.sample]).all()


def test_a_group_that_all_failed_moves_the_policy_where_the_value_is_not_the_reward():
    signal, _ = signal_of(GROUPS, values=0.25)
    failed = [row for row in signal.rows if row.slot == "policy" and row.prompt_id == "q"]
    assert all(row.active for row in failed)
    assert all((row.advantage == -0.25).all() for row in failed)
    model = tiny_model()
    learner = Learner(SimpleNamespace(model=model), UPDATE)
    before = {name: p.clone() for name, p in model.named_parameters()}
    learner.apply(replace(signal, rows=failed))
    assert any((before[name] != p).any() for name, p in model.named_parameters())


def test_no_row_is_left_out_and_each_slots_weights_sum_to_one_a_step():
    signal, _ = signal_of(GROUPS, values=0.25)
    policy = [row for row in signal.rows if row.slot == "policy"]
    critic = [row for row in signal.rows if row.slot == CRITIC_SLOT]
    assert (
        [(r.prompt_id, r.sample, 0) for r in policy]
        == [(r.prompt_id, r.sample, 0) for r in critic]
        == keys_of(GROUPS)
    )
    assert sum(row.pg_coef.sum() for row in policy) == pytest.approx(1)
    for step in (0, 1):
        assert sum(row.value_coef.sum() for row in critic if row.minibatch == step) == pytest.approx(1)
    # Each mini-batch of the critic meets every prompt.
    assert {(row.minibatch, row.prompt_id) for row in critic} == {(0, "p"), (0, "q"), (1, "p"), (1, "q")}


def test_in_the_warm_up_there_are_no_rows_of_the_policy():
    signal, metrics = signal_of(GROUPS, values=0.25, train_policy=False)
    assert {row.slot for row in signal.rows} == {CRITIC_SLOT}
    assert metrics["value/mean"] == pytest.approx(0.25)


def test_whitened_advantages_have_mean_zero_and_unit_deviation():
    signal, _ = signal_of(GROUPS, values=0.1, method=METHOD.model_copy(update={"whiten": True}))
    flat = np.concatenate([row.advantage for row in signal.rows if row.slot == "policy"])
    assert flat.mean() == pytest.approx(0, abs=1e-12)
    assert flat.std(ddof=1) == pytest.approx(1, abs=1e-4)


# ------------------------------------------------------------------------------------------------ the critic


def tiny_model(tied=True):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


def critic_of(model=None, **fields):
    update = UPDATE.model_copy(update=fields)
    return Learner(SimpleNamespace(model=model or tiny_model()), update, slot=CRITIC_SLOT, values=True)


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_starts_at_zero_and_learns_its_returns(tied):
    signal, _ = signal_of(GROUPS)
    critic = critic_of(tiny_model(tied))
    rows = [row for row in signal.rows if row.slot == CRITIC_SLOT]
    assert all((values == 0).all() for values in critic.judge(rows))
    errors = [critic.apply(signal)["update/value_error"] for _ in range(60)]
    assert errors[0] == pytest.approx(0.25, abs=0.05)  # two of eight rollouts have a return of one
    assert errors[-1] < 0.01
    for row, values in zip(rows, critic.judge(rows), strict=True):
        assert len(values) == row.loss_mask.sum()
        np.testing.assert_allclose(values, row.returns, atol=0.4)


def test_the_policys_learner_does_not_see_the_critics_rows():
    signal, _ = signal_of(GROUPS, train_policy=False)
    model = tiny_model()
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert Learner(SimpleNamespace(model=model), UPDATE).apply(signal)["update/rows"] == 0
    assert all((before[name] == p).all() for name, p in model.named_parameters())


def trained_critic():
    critic = critic_of()
    for _ in range(5):
        critic.apply(signal_of(GROUPS)[0])
    return critic


def test_a_value_does_not_depend_on_what_comes_after_it():
    critic = trained_critic()
    row = SimpleNamespace(
        image_places=(), context_ids=[1, 2, 3], sampled_ids=[4, 5, 6, 7, 8], loss_mask=[1, 1, 1, 1, 1]
    )
    suffix_changed = SimpleNamespace(
        image_places=(), context_ids=[1, 2, 3], sampled_ids=[4, 5, 6, 9, 0], loss_mask=[1, 1, 1, 1, 1]
    )
    (one,), (other,) = critic.judge([row]), critic.judge([suffix_changed])
    # V_t is read before the t-th token: the first three tokens are shared, so are four values.
    np.testing.assert_array_equal(one[:4], other[:4])
    assert one[4] != other[4]


def test_padding_changes_no_value():
    critic = trained_critic()
    short = SimpleNamespace(image_places=(), context_ids=[1, 2, 3], sampled_ids=[4, 5], loss_mask=[1, 1])
    long = SimpleNamespace(
        image_places=(), context_ids=[1, 2, 3], sampled_ids=list(range(10, 22)), loss_mask=[1] * 12
    )
    np.testing.assert_allclose(critic.judge([short])[0], critic.judge([short, long])[0], atol=1e-6)


def test_what_stands_before_the_rollout_changes_its_values():
    critic = trained_critic()
    rows = [
        SimpleNamespace(image_places=(), context_ids=context, sampled_ids=[4, 5], loss_mask=[1, 1])
        for context in ([7, 8, 3], [8, 7, 3])
    ]
    one, other = critic.judge(rows)
    assert np.abs(one - other).max() > 1e-4


def test_a_trained_critic_reads_labels_swapping_them_turns_its_values_round():
    """A reference says 4, and is right or wrong; the judged rollout says 4 as well, or 5."""
    right, wrong, says, same, other = 7, 8, 9, 4, 5
    rows, returns = [], []
    for label in (right, wrong):
        for said in (same, other):
            rows.append(([says, same, label, 3], [said, 2]))
            returns.append(float((label == right) == (said == same)))
    signal = LearningSignal(
        Objective(),
        [
            row_of(
                Segment("p", i, 0, [3], sampled, [1, 1], [-1.0, -1.0], "v", "d", 0, "stop", "", [], {}, []),
                "r", 0.0, 0.0, slot=CRITIC_SLOT, context_ids=context, value_coef=np.array([0.0, 0.25]),
                returns=np.full(2, value), old_values=np.zeros(2),
            )
            for i, ((context, sampled), value) in enumerate(zip(rows, returns, strict=True))
        ],
    )  # fmt: skip
    critic = critic_of()
    for _ in range(150):
        critic.apply(signal)
    values = np.array([found[1] for found in critic.judge(signal.rows)])
    np.testing.assert_allclose(values, returns, atol=0.15)
    swapped = [
        replace(row, context_ids=np.array([says, same, wrong if row.context_ids[2] == right else right, 3]))
        for row in signal.rows
    ]
    turned = np.array([found[1] for found in critic.judge(swapped)])
    np.testing.assert_allclose(turned, 1.0 - values, atol=0.3)


def test_a_critics_state_comes_back_bit_for_bit():
    critic = trained_critic()
    tensors = {name: tensor.clone() for name, tensor in critic.state_tensors().items()}
    assert "weights.value_head.weight" in tensors
    again = critic_of()
    again.load_state(tensors, critic.state_json())
    for one in (critic, again):
        one.apply(signal_of(GROUPS)[0])
    mine, theirs = critic.state_tensors(), again.state_tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)

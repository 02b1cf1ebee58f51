"""piPPO: proximal policy optimization with advantages from a critic that read the answer key (arXiv 2609.37825; its
equations after public summaries).

The policy's part is PPO's clipped objective on Â_t; the critic's is a regression of its values on the return. Both are
rows of one signal, in slots of their own, so that neither's gradient reaches the other's weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from gleaner.conf.schema import PippoMethod
from gleaner.models.critic import Judged, value_quality
from gleaner.models.methods.grpo import (
    Contribution,
    EpisodeSegmentKey,
    aggregation_weights,
    correction_metrics,
    fold,
    group_metrics,
    grpo_objective,
    minibatch_of_groups,
)
from gleaner.models.signal import Floats, Group, LearningSignal, SignalRow, row_of

CRITIC_SLOT = "critic"


def gae(reward: float, values_T: Floats, gamma: float, lam: float) -> Floats:
    """(T,) generalized advantage estimates (arXiv 1506.02438) of a rollout whose reward comes with its last token.

    delta_t = r_t + gamma V_{t+1} - V_t, and A_t = delta_t + gamma lam A_{t+1}, over the policy's own tokens: from one
    to the next, whatever an environment said between them. At gamma = lam = 1 this is reward - V_t.
    """
    advantages_T = np.zeros(len(values_T))
    following, next_value = 0.0, 0.0
    for t in range(len(values_T) - 1, -1, -1):
        earned = reward if t == len(values_T) - 1 else 0.0
        following = earned + gamma * next_value - values_T[t] + gamma * lam * following
        advantages_T[t] = following
        next_value = values_T[t]
    return advantages_T


def discounted_returns(reward: float, length: int, gamma: float) -> Floats:
    """(T,) what each value is regressed on: the reward, discounted by the tokens that are still to come."""
    return reward * gamma ** np.arange(length - 1, -1, -1, dtype=np.float64)


def pippo_signal(
    groups: Sequence[Group],
    method: PippoMethod,
    *,
    values: Mapping[EpisodeSegmentKey, Floats],
    contexts: Mapping[EpisodeSegmentKey, Sequence[int]],
    train_policy: bool,
    rollouts: Mapping[str, str],
    minibatches: int,
    max_new_tokens: int,
    temperature: float,
    old_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    reference_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
) -> tuple[LearningSignal, dict[str, float]]:
    """Rows of the policy and of its critic, and their metrics.

    No group is left out, whatever its outcome: in one that all failed, reward - V_t still says which tokens were worse
    than expected. The value term is averaged over the tokens of a mini-batch.

    Args:
        values: (n,) of each segment's learnable tokens, before this update.
        contexts: token ids that the critic read before each segment's own, and reads again in its update.
        train_policy: False in the critic's warm-up: only the critic's rows are made.
        minibatches: of the policy; the critic has its own number.

    Returns:
        the signal, and the metrics of GRPO's and of `value_quality`, and advantage/abs over tokens.
    """
    steps = minibatch_of_groups(len(groups), minibatches).tolist()
    members = [
        Contribution(episode, 0.0, step)
        for group, step in zip(groups, steps, strict=True)
        for episode in group.episodes
    ]
    judged: list[Judged] = []
    advantage_of: dict[EpisodeSegmentKey, Floats] = {}
    for group in groups:
        for episode in group.episodes:
            (segment,) = episode.segments
            key = (segment.prompt_id, segment.sample, segment.segment)
            reward = float(episode.verdict.reward or 0.0)
            judged.append(Judged(group.prompt_id, values[key], reward, bool(episode.verdict.success)))
            advantage_of[key] = gae(reward, values[key], method.gamma, method.lam)
    every_advantage = np.concatenate([*advantage_of.values(), np.zeros(0)])
    if method.whiten and len(every_advantage) > 1:
        mean, deviation = every_advantage.mean(), every_advantage.std(ddof=1)
        advantage_of = {
            key: (found - mean) / (deviation + method.epsilon) for key, found in advantage_of.items()
        }
    rows: list[SignalRow] = []
    corrections: list[Floats] = []
    if train_policy:
        rows, corrections = fold(
            members,
            method,
            rollouts=rollouts,
            max_new_tokens=max_new_tokens,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
        )
        rows = [
            replace(row, advantage=advantage_of[(row.prompt_id, row.sample, row.segment)], pg_source="critic")
            for row in rows
        ]
    rows += _critic_rows(groups, method, values, contexts, rollouts)
    objective = replace(grpo_objective(method, temperature), value_clip=method.critic.value_clip)
    metrics = group_metrics(groups, members) | correction_metrics(corrections, method.importance_cap)
    if len(every_advantage):
        metrics |= {
            "advantage/mean": float(every_advantage.mean()),
            "advantage/abs": float(np.abs(every_advantage).mean()),
        }
    return LearningSignal(objective, rows), metrics | value_quality(judged)


def _critic_rows(
    groups: Sequence[Group],
    method: PippoMethod,
    values: Mapping[EpisodeSegmentKey, Floats],
    contexts: Mapping[EpisodeSegmentKey, Sequence[int]],
    rollouts: Mapping[str, str],
) -> list[SignalRow]:
    """A row of every rollout, in mini-batches that hold rollouts of all groups."""
    episodes = [
        (place, episode) for group in groups for place, episode in enumerate(group.episodes) if episode.tokens
    ]
    if not episodes:
        return []
    # By place within the group first, so that siblings, which read each other, are not one step.
    order = sorted(range(len(episodes)), key=lambda index: (episodes[index][0], index))
    steps_B = np.zeros(len(episodes), dtype=np.int64)
    steps_B[order] = minibatch_of_groups(len(episodes), method.critic.minibatches)
    tokens_B = np.array([episode.tokens for _, episode in episodes], dtype=np.int64)
    weights_B = aggregation_weights("token_mean", tokens_B, steps_B, 1)
    rows: list[SignalRow] = []
    for (_, episode), step, weight in zip(episodes, steps_B.tolist(), weights_B.tolist(), strict=True):
        (segment,) = episode.segments
        key = (segment.prompt_id, segment.sample, segment.segment)
        count = len(segment.logprobs)
        rows.append(
            row_of(
                segment,
                rollouts[segment.prompt_id],
                0.0,
                0.0,
                slot=CRITIC_SLOT,
                minibatch=step,
                context_ids=contexts[key],
                value_coef=np.full(count, weight),
                returns=discounted_returns(float(episode.verdict.reward or 0.0), count, method.gamma),
                old_values=values[key],
            )
        )
    return rows

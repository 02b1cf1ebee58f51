"""GRPO and its relatives: group-relative advantages, and every average folded into the signal's coefficients.

GRPO arXiv 2402.03300, DAPO 2503.14476, Dr.GRPO 2503.20783, GSPO 2507.18071, CISPO 2506.13585; truncated
importance sampling after Yao et al. 2025 (rollout-training mismatch).

Groups without a signal (all rewards equal) keep their tokens in the denominator, as in TRL and verl: a step
in which 7 of 8 equally long groups are dead is 1/8 as large as one with the live group alone. Truncated
rollouts under `overlong="mask"` leave numerator and denominator, though their rewards stay in the group's
mean.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gleaner.conf.schema import GroupRelative
from gleaner.models.records import Segment
from gleaner.models.signal import Episode, Floats, Group, LearningSignal, Objective, SignalRow, row_of

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
EpisodeSegmentKey = tuple[str, int, int]
"""(prompt_id, sample, segment)."""


def advantages(rewards_G: Floats, scale: Literal["std", "none"], epsilon: float) -> Floats:
    """(G,) centred rewards, divided by their standard deviation (ddof 1) plus epsilon when `scale` is std.

    Exactly zero when all rewards are equal: decided by comparing them, never by a rounded standard deviation.
    """
    if len(rewards_G) < 2 or bool((rewards_G == rewards_G[0]).all()):
        return np.zeros(len(rewards_G))
    centred_G = rewards_G - rewards_G.mean()
    return centred_G if scale == "none" else centred_G / (rewards_G.std(ddof=1) + epsilon)


def aggregation_weights(
    aggregation: Aggregation,
    tokens_B: npt.NDArray[np.int64],
    minibatch_B: npt.NDArray[np.int64],
    max_tokens: int,
) -> Floats:
    """(B,) weight of each token of an episode: a mini-batch's loss is the sum of weight * token term.

    token_mean: 1 / tokens of the mini-batch (DAPO).
    sequence_mean: 1 / (episodes * the episode's tokens) (GRPO).
    constant: 1 / (episodes * max_tokens) (Dr.GRPO).

    Args:
        tokens_B: learnable tokens of each episode that counts; an episode that was masked out is not listed.
        minibatch_B: its optimizer step.
    """
    weights_B = np.zeros(len(tokens_B))
    for index in np.unique(minibatch_B):
        members = minibatch_B == index
        tokens = tokens_B[members]
        if aggregation == "token_mean":
            weights_B[members] = 1.0 / max(int(tokens.sum()), 1)
        elif aggregation == "sequence_mean":
            weights_B[members] = 1.0 / (len(tokens) * np.maximum(tokens, 1))
        else:
            weights_B[members] = 1.0 / (len(tokens) * max_tokens)
    return weights_B


def sampler_correction(old_logprobs: Floats, sampler_logprobs: Floats, cap: float | None) -> Floats:
    """Truncated importance weights min(exp(old - sampler), cap) of the trainer over the sampler (TIS); 1
    where the sampler's log-probability is NaN. Ones without a cap."""
    if cap is None:
        return np.ones(len(old_logprobs))
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.minimum(np.exp(old_logprobs - sampler_logprobs), cap)
    return np.where(np.isnan(sampler_logprobs), 1.0, weights)


def minibatch_of_groups(groups: int, minibatches: int) -> npt.NDArray[np.int64]:
    """(P,) optimizer step of each group: consecutive, and equal in number up to one. With fewer groups than
    mini-batches every group is a step of its own, so that none is empty."""
    return np.arange(groups) * min(minibatches, max(groups, 1)) // max(groups, 1)


def informative(group: Group) -> bool:
    """Dynamic sampling keeps the group: the verifier saw both success and failure (not a shaped reward)."""
    return group.kind == "mixed"


def grpo_objective(method: GroupRelative, temperature: float) -> Objective:
    return Objective(
        ratio=method.ratio,
        surrogate=method.surrogate,
        clip_low=method.clip_low,
        clip_high=method.clip_high,
        dual_clip=method.dual_clip,
        cispo_max=method.cispo_max,
        off_policy_delta=method.off_policy_delta,
        temperature=temperature,
    )


def grpo_signal(
    groups: Sequence[Group],
    method: GroupRelative,
    *,
    rollouts: str | Mapping[str, str],
    minibatches: int,
    max_new_tokens: int,
    temperature: float,
    old_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    reference_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    slot: str = "policy",
) -> tuple[LearningSignal, dict[str, float]]:
    """The GRPO signal of verified groups, and its metrics.

    Args:
        rollouts: digest of the Rollouts object that holds the segments, or the digest by prompt_id.
        minibatches: optimizer steps that the groups are spread over.
        max_new_tokens: most tokens that an episode may sample (`constant` aggregation).
        old_logprobs: the trainer's own, where the sampler's are not exact; the TIS weight is then folded in.
        reference_logprobs: of the start policy; needed when method.kl_coef is above zero.

    Returns:
        the signal (a row for every segment with learnable tokens, dead and masked ones included) and metrics:
        reward/mean, success/mean, advantage/mean, advantage/abs, groups/zero_std, response/mean,
        response/max, response/truncated, tis/mean, tis/max, tis/capped.
    """
    members = [
        Contribution(episode, advantage, step)
        for group, step in zip(groups, minibatch_of_groups(len(groups), minibatches).tolist(), strict=True)
        for episode, advantage in zip(
            group.episodes, advantages(group.rewards, method.scale, method.epsilon).tolist(), strict=True
        )
    ]
    rows, corrections = fold(
        members,
        method,
        rollouts=rollouts,
        max_new_tokens=max_new_tokens,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
        slot=slot,
    )
    signal = LearningSignal(grpo_objective(method, temperature), rows)
    return signal, group_metrics(groups, members) | correction_metrics(corrections, method.importance_cap)


@dataclass(frozen=True)
class Contribution:
    """An episode's part in an update.

    Attributes:
        step: its mini-batch.
        weight: factor of its policy-gradient term, in the numerator alone (GRAFT's compatibility).
        peer: a peer's episode in the learner's own tokens; `old_logprobs` are the learner's, and it gets neither the
            sampler's correction, since the sampler was another model, nor a KL term.
        old_logprobs: per segment, for a peer's episode.
    """

    episode: Episode
    advantage: float
    step: int
    weight: float = 1.0
    peer: bool = False
    rollouts: str | None = None
    old_logprobs: Sequence[Floats] = ()


def fold(
    members: Sequence[Contribution],
    method: GroupRelative,
    *,
    rollouts: str | Mapping[str, str],
    max_new_tokens: int,
    old_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    reference_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    slot: str = "policy",
) -> tuple[list[SignalRow], list[Floats]]:
    """Rows with the method's averaging folded in, in the order of `members`, and the sampler's corrections.

    Raises:
        ValueError: a KL term without reference_logprobs.
    """
    if method.kl_coef > 0 and reference_logprobs is None:
        raise ValueError(
            "method.kl_coef is above zero: pass reference_logprobs, scored with the start policy"
        )
    masked_B = np.array(
        [method.overlong == "mask" and member.episode.truncated for member in members], dtype=bool
    )
    tokens_B = np.array([member.episode.tokens for member in members], dtype=np.int64)
    steps_B = np.array([member.step for member in members], dtype=np.int64)
    weights_B = np.zeros(len(members))
    weights_B[~masked_B] = aggregation_weights(
        method.aggregation, tokens_B[~masked_B], steps_B[~masked_B], max_new_tokens
    )
    rows: list[SignalRow] = []
    corrections: list[Floats] = []
    for member, mean in zip(members, weights_B.tolist(), strict=True):
        for index, segment in enumerate(member.episode.segments):
            if not segment.logprobs:
                continue
            pg_coef: float | Floats = mean * member.weight
            if member.peer:
                assert member.rollouts is not None, "a peer's episode names its table"
                rows.append(
                    row_of(
                        segment,
                        member.rollouts,
                        pg_coef,
                        member.advantage,
                        member.old_logprobs[index],
                        origin="peer",
                        pg_source="peer",
                        slot=slot,
                        minibatch=member.step,
                    )
                )
                continue
            old = None if old_logprobs is None else old_logprobs[_key(segment)]
            if old is not None:
                correction = sampler_correction(
                    np.asarray(old), np.asarray(segment.logprobs, dtype=np.float64), method.importance_cap
                )
                corrections.append(correction)
                pg_coef = pg_coef * correction
            rows.append(
                row_of(
                    segment,
                    rollouts if isinstance(rollouts, str) else rollouts[segment.prompt_id],
                    pg_coef,
                    member.advantage,
                    old,
                    slot=slot,
                    minibatch=member.step,
                    kl_coef=np.full(len(segment.logprobs), mean * method.kl_coef) if method.kl_coef else None,
                    reference_logprobs=reference_logprobs[_key(segment)] if reference_logprobs else None,
                )
            )
    return rows, corrections


def _key(segment: Segment) -> EpisodeSegmentKey:
    return (segment.prompt_id, segment.sample, segment.segment)


def group_metrics(groups: Sequence[Group], members: Sequence[Contribution]) -> dict[str, float]:
    """Rewards, success and lengths of the learner's own groups; advantages of all that contributes."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return {}
    rewards_B = np.concatenate([group.rewards for group in groups])
    advantages_B = np.array([member.advantage for member in members])
    tokens_B = np.array([episode.tokens for episode in episodes])
    return {
        "reward/mean": float(rewards_B.mean()),
        "success/mean": float(np.mean([bool(episode.verdict.success) for episode in episodes])),
        "advantage/mean": float(advantages_B.mean()),
        "advantage/abs": float(np.abs(advantages_B).mean()),
        "groups/zero_std": float(
            np.mean([bool((group.rewards == group.rewards[0]).all()) for group in groups])
        ),
        "response/mean": float(tokens_B.mean()),
        "response/max": float(tokens_B.max()),
        "response/truncated": float(np.mean([episode.truncated for episode in episodes])),
    }


def correction_metrics(corrections: Sequence[Floats], cap: float | None) -> dict[str, float]:
    """tis/mean, tis/max and tis/capped (share of tokens at the cap); ones where nothing was corrected."""
    if not corrections or cap is None:
        return {"tis/mean": 1.0, "tis/max": 1.0, "tis/capped": 0.0}
    weights = np.concatenate(corrections)
    return {
        "tis/mean": float(weights.mean()),
        "tis/max": float(weights.max()),
        "tis/capped": float(np.mean(weights >= cap)) if math.isfinite(cap) else 0.0,
    }

"""GRAFT: a peer's trajectories where the policy's whole group failed (arXiv 2609.37868).

With A the source, B the receiver, k the successes in a group of n:

    candidates   prompts with k_B = 0 and 1 <= k_A < n                                                  (eq. 4)
    balance      m = min of both directions' candidates; the m of largest k_A, and all that tie with the last
    compat       s = exp(mean log pi_old^B(o^B) - mean log pi_A(o^A)), each mean over its own tokens    (eqs. 6, 7)
    weight       w = min(s, 1) where s > delta, else the trajectory is left out                         (eq. 8)
    ratio        pi^B / pi_old^B on every row: the receiver's old policy, never the peer's              (eq. 9)
    objective    GRPO's token mean over all admitted tokens, grafted terms times w                      (eq. 10)

Advantages are the source group's own, computed over the full group before anything is left out.

This project's choices, where the paper is silent: an all-fail group is *replaced* (its own rows, which have no
advantage, leave numerator and denominator) as soon as one trajectory is admitted, and stays as it is if none is;
episodes of several turns are compared over all their learnable tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gleaner.conf.schema import GraftMethod
from gleaner.models.methods.grpo import (
    Contribution,
    EpisodeSegmentKey,
    advantages,
    correction_metrics,
    fold,
    group_metrics,
    grpo_objective,
    minibatch_of_groups,
)
from gleaner.models.signal import Episode, Floats, Group, LearningSignal


@dataclass(frozen=True)
class Counts:
    """Successes and scored rollouts of a group."""

    successes: int
    rollouts: int

    @classmethod
    def of(cls, group: Group) -> "Counts":
        return cls(sum(bool(e.verdict.success) for e in group.episodes), len(group.episodes))

    @property
    def mixed(self) -> bool:
        return 1 <= self.successes < self.rollouts


def candidates(receiver: Mapping[str, Counts], source: Mapping[str, Counts]) -> dict[str, int]:
    """prompt_id → k_A of the prompts that the receiver failed wholly and the source partly solved (eq. 4)."""
    return {
        prompt: source[prompt].successes
        for prompt, found in receiver.items()
        if found.successes == 0 and prompt in source and source[prompt].mixed
    }


def select_with_ties(solved: Mapping[str, int], count: int) -> list[str]:
    """The `count` prompts of largest k, and all that tie with the last of them; in the order of `solved`."""
    if count <= 0 or not solved:
        return []
    least = sorted(solved.values(), reverse=True)[min(count, len(solved)) - 1]
    return [prompt for prompt, k in solved.items() if k >= least]


def compatibility(receiver_logprobs: Floats, source_logprobs: Floats) -> float:
    """s (eq. 7): exp of the difference of the two mean log-likelihoods, each over its own tokens."""
    return math.exp(min(float(np.mean(receiver_logprobs)) - float(np.mean(source_logprobs)), 700.0))


def gate(compatible: float, floor: float) -> float:
    """w (eq. 8): min(s, 1) above the floor, else 0. A trajectory of weight 0 is left out."""
    return min(compatible, 1.0) if compatible > floor else 0.0


@dataclass(frozen=True)
class Graft:
    """A peer's trajectory in the receiver's tokens.

    Attributes:
        episode: with the receiver's segments; its verdict is the source's.
        old_logprobs: per segment, of the receiver's old policy.
        source_mean: mean log-likelihood under the source's behaviour policy, over the source's tokens.
        rollouts: digest of the table that holds the segments.
    """

    episode: Episode
    old_logprobs: tuple[Floats, ...]
    source_mean: float
    rollouts: str

    @property
    def compatibility(self) -> float:
        return compatibility(np.concatenate(self.old_logprobs), np.array([self.source_mean]))


@dataclass(frozen=True)
class GraftedGroup:
    """A source's full group, and those of its trajectories that the receiver can learn from (its context holds them).

    Attributes:
        source: the full group, as the source sampled it: advantages come from it.
        grafts: by sample number.
    """

    source: Group
    grafts: Mapping[int, Graft]


def graft_signal(
    groups: Sequence[Group],
    grafted: Mapping[str, GraftedGroup],
    method: GraftMethod,
    *,
    rollouts: Mapping[str, str],
    minibatches: int,
    max_new_tokens: int,
    temperature: float,
    random: np.random.Generator,
    old_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    reference_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
) -> tuple[LearningSignal, dict[str, float]]:
    """The GRPO signal of the receiver's own groups, with grafted trajectories. With none it is GRPO's bit for bit.

    Args:
        groups: the receiver's own.
        grafted: by prompt_id, the groups that were chosen to be exchanged.
        random: draws the admitted trajectories of `admission="random"`.

    Returns:
        the signal and metrics: GRPO's, and graft/groups, graft/rows, graft/admitted (share of the offered),
        graft/weight, graft/compatibility of all offered, of successes and of failures, graft/tokens (share).
    """
    offered = {prompt: list(found.grafts.values()) for prompt, found in grafted.items()}
    weight_of = _weights([graft for grafts in offered.values() for graft in grafts], method, random)
    admitted = {
        prompt: [graft for graft in grafts if weight_of[id(graft)] > 0] for prompt, grafts in offered.items()
    }
    own = [group for group in groups if not admitted.get(group.prompt_id)]
    receiving = [group for group in groups if admitted.get(group.prompt_id)]
    ordered = [*own, *receiving] if method.order == "peer_last" else [*receiving, *own]
    steps = minibatch_of_groups(len(ordered), minibatches).tolist()

    members: list[Contribution] = []
    for group, step in zip(ordered, steps, strict=True):
        grafts = admitted.get(group.prompt_id, [])
        mine, theirs = _advantages(group, grafted.get(group.prompt_id) if grafts else None, method)
        if not grafts or mine.any():
            members += [
                Contribution(episode, float(advantage), step)
                for episode, advantage in zip(group.episodes, mine, strict=True)
            ]
        members += [
            Contribution(
                graft.episode,
                theirs[graft.episode.sample],
                step,
                weight=weight_of[id(graft)],
                peer=True,
                rollouts=graft.rollouts,
                old_logprobs=graft.old_logprobs,
            )
            for graft in grafts
        ]
    rows, corrections = fold(
        members,
        method,
        rollouts=rollouts,
        max_new_tokens=max_new_tokens,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
    )
    metrics = group_metrics(groups, members) | correction_metrics(corrections, method.importance_cap)
    metrics |= _graft_metrics(offered, admitted, weight_of, members)
    return LearningSignal(grpo_objective(method, temperature), rows), metrics


def _weights(offered: Sequence[Graft], method: GraftMethod, random: np.random.Generator) -> dict[int, float]:
    """Weight of each offered trajectory, by identity; 0: left out."""
    floor = method.floor if method.gate else 0.0
    weights = np.array([gate(graft.compatibility, floor) if method.gate else 1.0 for graft in offered])
    if method.admission == "random" and len(offered):
        # As many as the gate admits, whichever they are; each with its own weight, without the floor.
        chosen = random.choice(len(offered), size=int((weights > 0).sum()), replace=False)
        weights = np.zeros(len(offered))
        weights[chosen] = [gate(offered[index].compatibility, 0.0) for index in chosen]
    if method.trajectories == "successes":
        weights = np.array(
            [
                weight if graft.episode.verdict.success else 0.0
                for weight, graft in zip(weights, offered, strict=True)
            ]
        )
    return {id(graft): float(weight) for graft, weight in zip(offered, weights, strict=True)}


def _advantages(
    group: Group, grafted: GraftedGroup | None, method: GraftMethod
) -> tuple[Floats, dict[int, float]]:
    """Advantages of the receiver's own rollouts, and of the source's by sample number."""
    own = advantages(group.rewards, method.scale, method.epsilon)
    if grafted is None:
        return own, {}
    samples = [episode.sample for episode in grafted.source.episodes]
    if method.advantages == "pooled":
        pooled = advantages(
            np.concatenate([group.rewards, grafted.source.rewards]), method.scale, method.epsilon
        )
        own, theirs = pooled[: len(group.episodes)], pooled[len(group.episodes) :]
    else:
        theirs = advantages(grafted.source.rewards, method.scale, method.epsilon)
    return own, dict(zip(samples, theirs.tolist(), strict=True))


def _graft_metrics(
    offered: Mapping[str, Sequence[Graft]],
    admitted: Mapping[str, Sequence[Graft]],
    weight_of: Mapping[int, float],
    members: Sequence[Contribution],
) -> dict[str, float]:
    every = [graft for grafts in offered.values() for graft in grafts]
    kept = [graft for grafts in admitted.values() for graft in grafts]
    tokens = sum(member.episode.tokens for member in members)
    metrics = {
        "graft/groups": float(sum(bool(grafts) for grafts in admitted.values())),
        "graft/rows": float(len(kept)),
        "graft/tokens": sum(graft.episode.tokens for graft in kept) / tokens if tokens else 0.0,
    }
    if every:
        metrics["graft/admitted"] = len(kept) / len(every)
        metrics["graft/compatibility"] = float(np.mean([graft.compatibility for graft in every]))
    for name, success in (("success", True), ("failure", False)):
        some = [graft.compatibility for graft in every if bool(graft.episode.verdict.success) is success]
        if some:
            metrics[f"graft/compatibility_{name}"] = float(np.mean(some))
    if kept:
        metrics["graft/weight"] = float(np.mean([weight_of[id(graft)] for graft in kept]))
    return metrics

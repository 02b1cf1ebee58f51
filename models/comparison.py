"""The figures of a comparison: arms over seeds, contrasts paired by seed, and guidance's gain against the gap.

An arm has one policy, or two where it trains a peer (GRAFT's co-training); then the policy, the peer and the mean of
both are compared, each with its own baseline.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gleaner.models.statistics import (
    Interval,
    PairedComparison,
    area_under_curve,
    compare_paired,
    mean_interval,
)

Member = Literal["policy", "peer", "mean"]


@dataclass(frozen=True)
class Trained:
    """One policy that a run trained.

    Attributes:
        rollouts_N, success_N: validation success by the rollouts that the run had sampled.
        final: test success of the last version; its validation success if there is no test.
    """

    rollouts_N: list[float]
    success_N: list[float]
    final: float


@dataclass(frozen=True)
class Outcome:
    """What one run of an arm came to.

    Attributes:
        budget: rollouts, generated tokens, forward tokens by role, seconds of its steps.
        needed: the same, summed over the runs that it built on (teachers, matched runs).
        recovered: mean share of all-fail groups that moved the policy.
        teacher: M_T, where a teacher guided it.
        teacher_episodes: those that M_T is a mean over; 0 where it was set by hand.
        measured: metric → its mean over the second half of the run's steps; NaN where no step has it.
    """

    policy: Trained
    peer: Trained | None = None
    budget: dict[str, float] = field(default_factory=dict)
    needed: dict[str, float] = field(default_factory=dict)
    recovered: float = 0.0
    teacher: float | None = None
    teacher_episodes: float = 0.0
    measured: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ArmResult:
    """An arm over its seeds: figures of each of its members, and its mean budget."""

    final: dict[Member, Interval]
    area: dict[Member, Interval]
    budget: dict[str, float]
    needed: dict[str, float]
    recovered: float


@dataclass(frozen=True)
class Contrast:
    """One member of an arm minus its counterpart, over the same seeds. Differences are None where one seed was run.

    Attributes:
        against: the second arm; for a peer and the mean, with the arm that the peer is compared with.
    """

    arm: str
    member: Member
    against: str
    final: PairedComparison | None
    area: PairedComparison | None


@dataclass(frozen=True)
class GapPoint:
    """What guidance gained in a contrast, by the gap that there was at the start.

    Attributes:
        gaps_S: M_T minus the student's validation success before the first step, one a seed.
        gains_S: final success minus the other arm's, one a seed.
    """

    arm: str
    against: str
    gap: Interval
    gain: Interval
    gaps_S: tuple[float, ...]
    gains_S: tuple[float, ...]


def shared_budget(outcomes: Mapping[str, Sequence[Outcome]], budget: float) -> float:
    """Rollouts up to which every policy's validation curve reaches, at most `budget`: where areas end."""
    trained = [
        policy
        for members in outcomes.values()
        for outcome in members
        for policy in (outcome.policy, outcome.peer)
        if policy is not None
    ]
    return min(budget, *(policy.rollouts_N[-1] for policy in trained))


def arm_result(outcomes_S: Sequence[Outcome], budget: float) -> ArmResult:
    """Means over seeds with their t intervals.

    Args:
        budget: rollouts up to which the area under the validation curve is taken.
    """
    members: list[Member] = ["policy"]
    if all(outcome.peer is not None for outcome in outcomes_S):
        members += ["peer", "mean"]
    return ArmResult(
        final={member: mean_interval(_finals(outcomes_S, member)) for member in members},
        area={member: mean_interval(_areas(outcomes_S, member, budget)) for member in members},
        budget=_mean([outcome.budget for outcome in outcomes_S]),
        needed=_mean([outcome.needed for outcome in outcomes_S]),
        recovered=math.fsum(outcome.recovered for outcome in outcomes_S) / len(outcomes_S),
    )


def contrasts(
    outcomes: Mapping[str, Sequence[Outcome]],
    pairs: Sequence[tuple[str, str]],
    peer_baselines: Mapping[str, str],
    budget: float,
) -> list[Contrast]:
    """Every pair of arms, first minus second. Where the first trains a peer, the peer is compared with the second's
    peer, or, if that trains none, with the policy of `peer_baselines[first]`; and the mean of both with the mean of
    both counterparts.

    Args:
        outcomes: per arm, one a seed, in the same order of seeds.
        budget: rollouts up to which areas are taken.
    """
    found: list[Contrast] = []
    member: Member
    for first, second in pairs:
        mine, theirs = outcomes[first], outcomes[second]
        final, area = _finals(theirs, "policy"), _areas(theirs, "policy", budget)
        found.append(_contrast(mine, first, "policy", second, final, area, budget))
        if any(outcome.peer is None for outcome in mine):
            continue
        if all(outcome.peer is not None for outcome in theirs):
            name, peers, member = f"{second} (peer)", theirs, "peer"
        elif first in peer_baselines:
            name, peers, member = peer_baselines[first], outcomes[peer_baselines[first]], "policy"
        else:
            continue
        peer_final, peer_area = _finals(peers, member), _areas(peers, member, budget)
        found.append(_contrast(mine, first, "peer", name, peer_final, peer_area, budget))
        both = f"{second} + {name}"
        mean_final, mean_area = _halves(final, peer_final), _halves(area, peer_area)
        found.append(_contrast(mine, first, "mean", both, mean_final, mean_area, budget))
    return found


@dataclass(frozen=True)
class Measured:
    """A metric of steps, per arm, and its differences, paired by seed.

    Attributes:
        arms: those in which every run has the metric.
        differences: (arm, against) → None where one seed was run.
    """

    metric: str
    arms: dict[str, Interval]
    differences: dict[tuple[str, str], PairedComparison | None]


def measures(
    outcomes: Mapping[str, Sequence[Outcome]], pairs: Sequence[tuple[str, str]], metrics: Sequence[str]
) -> list[Measured]:
    """Every metric over the arms that have it (a critic's values say nothing of an arm without a critic)."""
    found = []
    for metric in metrics:
        values = {arm: [outcome.measured[metric] for outcome in runs] for arm, runs in outcomes.items()}
        known = {arm: runs for arm, runs in values.items() if not any(map(math.isnan, runs))}
        differences = {
            (first, second): compare_paired(known[first], known[second]) if len(known[first]) > 1 else None
            for first, second in pairs
            if first in known and second in known
        }
        found.append(Measured(metric, {arm: mean_interval(runs) for arm, runs in known.items()}, differences))
    return found


def late_mean(steps: Sequence[Mapping[str, float]], metric: str) -> float:
    """A metric's mean over the second half of a run's steps, where those that lack it count nothing; NaN if all do."""
    late = [step[metric] for step in steps[len(steps) // 2 :] if metric in step]
    return math.fsum(late) / len(late) if late else math.nan


def gap_points(outcomes: Mapping[str, Sequence[Outcome]], pairs: Sequence[tuple[str, str]]) -> list[GapPoint]:
    """Gain against gap, of every contrast whose first arm had a teacher and whose second had none (GATS, Table 7).

    The paper's gap is between training success rates; the student's here is measured on the validation prompts before
    the first step (this project's choice: a step's own 128 rollouts are few).
    """
    points = []
    for first, second in pairs:
        mine, theirs = outcomes[first], outcomes[second]
        if any(outcome.teacher is None for outcome in mine) or any(o.teacher is not None for o in theirs):
            continue
        gaps = [(outcome.teacher or 0.0) - outcome.policy.success_N[0] for outcome in mine]
        gains = [a.policy.final - b.policy.final for a, b in zip(mine, theirs, strict=True)]
        points.append(
            GapPoint(first, second, mean_interval(gaps), mean_interval(gains), tuple(gaps), tuple(gains))
        )
    return points


def gap_slope(points: Sequence[GapPoint]) -> Interval | None:
    """Gain for each unit of gap: the least-squares slope within every seed, averaged over seeds with a t interval. None
    for fewer than three points, or where the gaps of a seed do not differ."""
    if len(points) < 3:
        return None
    slopes = []
    for gaps, gains in zip(
        zip(*(point.gaps_S for point in points), strict=True),
        zip(*(point.gains_S for point in points), strict=True),
        strict=True,
    ):
        if np.ptp(gaps) == 0:
            return None
        slopes.append(float(np.polyfit(gaps, gains, 1)[0]))
    return mean_interval(slopes)


def _contrast(
    mine: Sequence[Outcome],
    arm: str,
    member: Member,
    against: str,
    final_S: Sequence[float],
    area_S: Sequence[float],
    budget: float,
) -> Contrast:
    if len(mine) < 2:
        return Contrast(arm, member, against, None, None)
    final = compare_paired(_finals(mine, member), final_S)
    return Contrast(arm, member, against, final, compare_paired(_areas(mine, member, budget), area_S))


def _finals(outcomes_S: Sequence[Outcome], member: Member) -> list[float]:
    return _figures(outcomes_S, member, lambda trained: trained.final)


def _areas(outcomes_S: Sequence[Outcome], member: Member, budget: float) -> list[float]:
    return _figures(
        outcomes_S,
        member,
        lambda trained: area_under_curve(trained.rollouts_N, trained.success_N, until=budget),
    )


def _figures(
    outcomes_S: Sequence[Outcome], member: Member, figure: Callable[[Trained], float]
) -> list[float]:
    """(S,) a figure of the arm's policy, of its peer, or their mean."""
    policy_S = [figure(outcome.policy) for outcome in outcomes_S]
    if member == "policy":
        return policy_S
    peer_S = [figure(outcome.peer) for outcome in outcomes_S if outcome.peer is not None]
    return peer_S if member == "peer" else _halves(policy_S, peer_S)


def _halves(first_S: Sequence[float], second_S: Sequence[float]) -> list[float]:
    return [(first + second) / 2 for first, second in zip(first_S, second_S, strict=True)]


def _mean(budgets_S: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for budget in budgets_S for name in budget})
    return {name: math.fsum(budget.get(name, 0.0) for budget in budgets_S) / len(budgets_S) for name in names}

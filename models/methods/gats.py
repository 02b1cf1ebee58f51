"""GATS: a teacher's guidance in proportion to the gap, withdrawn for good at parity (arXiv 2609.37898).

    L_t = L_GRPO + (1 - d_t) * lambda_t * L_OPD                                                        (eq. 10)
    L_OPD = -mean over groups, rollouts, tokens of rho * (log pi_T - log pi)                           (eqs. 4, 5)
    M_S,t = mean of the student's last K training success rates before update t; 0 while there is none (eq. 7)
    lambda_t = max(1 - M_S,t / M_T, 0)                                                                 (eq. 8)
    d_t = 1 for ever once M_S,t >= M_T                                                                 (eq. 9)

This project's choices, where the paper is silent: the whole log-ratio of eq. 4 is detached, and its student is the
current policy in every mini-batch; both distributions are taken at the sampling temperature; L_OPD carries the
baseline's truncated importance weights, and leaves out what the baseline masks; it is averaged as L_GRPO is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gleaner.conf.schema import TeacherSettings
from gleaner.models.methods.grpo import EpisodeSegmentKey
from gleaner.models.signal import Floats, LearningSignal, SignalRow


@dataclass(frozen=True)
class Progress:
    """What GATS carries from step to step.

    Attributes:
        successes: the student's last training success rates, oldest first; at most K.
        withdrawn_at: step from which on the teacher is gone; None while it is there.
    """

    successes: tuple[float, ...] = ()
    withdrawn_at: int | None = None


@dataclass(frozen=True)
class Guidance:
    """The teacher's part in one step.

    Attributes:
        weight: (1 - d) * lambda, in [0, 1]; at 0 the teacher is not asked.
        student, teacher: M_S and M_T.
        withdrawn_at: as in `Progress`, after this step's decision.
        teacher_episodes: training episodes that M_T is a mean over; 0 where it was set by hand and measures nothing.
    """

    weight: float
    student: float
    teacher: float
    withdrawn_at: int | None
    teacher_episodes: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        values = {
            "gats/lambda": self.weight,
            "gats/M_S": self.student,
            "gats/M_T": self.teacher,
            "gats/M_T_episodes": float(self.teacher_episodes),
            "gats/gap": self.teacher - self.student,
            "gats/withdrawn": float(self.withdrawn_at is not None),
        }
        if self.withdrawn_at is not None:
            values["gats/withdraw_step"] = float(self.withdrawn_at)
        return values


def mean_success(successes: Sequence[float], window: int) -> float:
    """Mean of the last `window` rates, or of all where there are fewer; 0 where there is none (eqs. 6 and 7)."""
    recent = successes[-window:]
    return math.fsum(recent) / len(recent) if recent else 0.0


def gap_weight(student: float, teacher: float) -> float:
    """max(1 - M_S / M_T, 0) (eq. 8): the relative gap.

    Raises:
        ValueError: `teacher` is not above 0 and finite, so that there is no gap to speak of.
    """
    if not (math.isfinite(teacher) and teacher > 0):
        raise ValueError(f"the teacher's success rate is {teacher}: it must be above 0")
    return max(1.0 - student / teacher, 0.0)


def guidance(
    settings: TeacherSettings, step: int, before: Progress, teacher: float, horizon: int | None = None
) -> Guidance:
    """The teacher's weight at a step, from what earlier steps showed; the step's own success cannot change it.

    `gap` is the paper's rule. The controls count steps from 1 as the paper's A.4 does (t = step + 1): `linear`
    max(1 - t / N, 0), `cosine` (1 + cos(pi min(t, N) / N)) / 2, `step` 1 while t <= N; `always` 1.

    Args:
        step: counted from 0.
        teacher: M_T.
        horizon: N of the controls that have one.

    Raises:
        ValueError: M_T is not above 0, or a horizon is missing.
    """
    student = mean_success(before.successes, settings.window)
    weight, withdrawn_at = gap_weight(student, teacher), before.withdrawn_at
    if settings.schedule == "gap":
        if withdrawn_at is None and student >= teacher:
            withdrawn_at = step
        return Guidance(0.0 if withdrawn_at is not None else weight, student, teacher, withdrawn_at)
    if settings.schedule == "always":
        return Guidance(1.0, student, teacher, None)
    if horizon is None:
        raise ValueError(f"schedule {settings.schedule} needs a horizon")
    t = step + 1
    if settings.schedule == "step":
        weight = float(t <= horizon)
    elif settings.schedule == "linear":
        weight = max(1.0 - t / horizon, 0.0)
    else:
        weight = 0.5 * (1.0 + math.cos(math.pi * min(t, horizon) / horizon))
    return Guidance(weight, student, teacher, horizon if t > horizon else None)


def after_step(before: Progress, now: Guidance, success: float, window: int) -> Progress:
    """Remember the step's own success rate, which counts from the next step on (the one-step lag of eq. 7)."""
    return Progress((*before.successes, success)[-window:], now.withdrawn_at)


def with_guidance(
    signal: LearningSignal, teacher_logprobs: Mapping[EpisodeSegmentKey, Floats], weight: float
) -> tuple[LearningSignal, dict[str, float]]:
    """Add weight * L_OPD to a GRPO signal, on the learner's own rollouts. At weight 0 it is the same signal.

    The term is averaged like the policy gradient beside it: a token's coefficient is weight * pg_coef, whatever its
    advantage.

    Args:
        teacher_logprobs: (n,) per segment, of its learnable tokens.

    Returns:
        the signal, and gats/teacher_gain: mean over tokens of log pi_T - log pi_old, an estimate of the negative
        reverse KL divergence; gats/opd: L_OPD at the old policy, as it enters the loss.
    """
    if weight == 0:
        return signal, {"gats/opd": 0.0}
    rows: list[SignalRow] = []
    gains: list[Floats] = []
    loss = 0.0
    for row in signal.rows:
        if row.origin != "self":
            rows.append(row)
            continue
        teacher = np.asarray(teacher_logprobs[(row.prompt_id, row.sample, row.segment)], dtype=np.float64)
        gain = teacher - row.old_logprobs
        gains.append(gain)
        loss -= float((row.pg_coef * gain).sum())
        rows.append(
            replace(
                row,
                distill_kind="sampled",
                distill_source="teacher",
                distill_coef=weight * row.pg_coef,
                teacher_logprobs=teacher,
            )
        )
    mean_gain = float(np.concatenate(gains).mean()) if gains else 0.0
    steps = len({row.minibatch for row in rows}) or 1
    return LearningSignal(signal.objective, rows), {"gats/teacher_gain": mean_gain, "gats/opd": loss / steps}

"""VISTA: what the rollouts of one input discovered supervises those of them that failed (arXiv 2609.38086).

    L = [ sum over rows with z = 0 of -u  +  eta * sum over rows with z = 1 of v * D ] / sum of all tokens
    z_i = 1 for a failed rollout with experience for one of its decisions
    D_t = KL(pi_theta(. | h, a_<t) || q_t), renormalised on the K likeliest tokens of the policy before the update
    q_t = pi_old(. | experience + h, a_<t), the experience-conditioned teacher on the rollout's own prefixes, detached
    v_t = exp(-beta_H * H(q_t)), scaled to mean 1 over the distilled tokens

The abstract says that successful trajectories are reinforced and failed ones distilled, and no more: the equations are
this project's reconstruction (methods.md 5), after SRPO (2604.02288) and SDPO (2601.20802). u is GRPO's term, with
advantages over the whole group; the teacher is the policy before the update.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gleaner.conf.schema import VistaMethod
from gleaner.models.methods.grpo import EpisodeSegmentKey, grpo_signal
from gleaner.models.signal import Episode, Floats, Group, Ints, LearningSignal, SignalRow


@dataclass(frozen=True, eq=False)
class Lesson:
    """What the teacher says of a rollout's tokens: m of its learnable tokens, those of decisions with experience.

    Attributes:
        tokens: (m,) their places among the learnable tokens.
        support_ids, support_logprobs: (m, K) the policy's likeliest tokens, and the teacher's log-probabilities,
            renormalised on them.
        entropy: (m,) of the teacher's distribution, in nats.
        teacher_logprobs: (m,) of the sampled tokens.
    """

    tokens: Ints
    support_ids: Ints
    support_logprobs: Floats
    entropy: Floats
    teacher_logprobs: Floats


def distilled(episode: Episode, group: Group, method: VistaMethod) -> bool:
    """z: whether a rollout is taught by experience, if there is any for it."""
    if method.distil == "failures" and episode.verdict.success:
        return False
    return not method.experience.require_success or group.kind != "all_fail"


def entropy_weights(entropy_N: Floats, beta: float) -> Floats:
    """(N,) exp(-beta * H), scaled to mean 1; ones at beta 0."""
    if not len(entropy_N) or beta == 0:
        return np.ones(len(entropy_N))
    # Shifted before exp, so that no entropy is too large.
    weights_N = np.exp(-beta * (entropy_N - entropy_N.min()))
    return weights_N / weights_N.mean()


def vista_signal(
    groups: Sequence[Group],
    method: VistaMethod,
    lessons: Mapping[EpisodeSegmentKey, Lesson],
    *,
    rollouts: str | Mapping[str, str],
    minibatches: int,
    max_new_tokens: int,
    temperature: float,
    old_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
    reference_logprobs: Mapping[EpisodeSegmentKey, Floats] | None = None,
) -> tuple[LearningSignal, dict[str, float]]:
    """GRPO's signal, in which the rollouts that have a lesson are routed to distillation. Without lessons it is
    GRPO's, bit for bit.

    A distilled token's coefficient is eta * v times its policy-gradient coefficient: one denominator for both terms.

    Args:
        lessons: by segment; those of rollouts that `distilled` does not name are not used.

    Returns:
        the signal, and GRPO's metrics with vista/routed (share of rollouts), vista/routed_failures (share of the
        failed ones), vista/tokens (share of sampled tokens that are distilled), vista/teacher_gain (mean of log q -
        log pi_old on them), vista/teacher_entropy, vista/all_fail_taught (share of all-fail groups with a lesson).
    """
    signal, metrics = grpo_signal(
        groups,
        method,
        rollouts=rollouts,
        minibatches=minibatches,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        old_logprobs=old_logprobs,
        reference_logprobs=reference_logprobs,
    )
    episodes = {
        (group.prompt_id, episode.sample): (episode, group) for group in groups for episode in group.episodes
    }
    used = {
        key: lesson
        for key, lesson in lessons.items()
        if len(lesson.tokens) and distilled(*episodes[key[:2]], method)
    }
    entropy_N = np.concatenate([*(lesson.entropy for lesson in used.values()), np.zeros(0)])
    ends = np.cumsum([len(lesson.tokens) for lesson in used.values()])
    weights = dict(
        zip(used, np.split(entropy_weights(entropy_N, method.entropy_weight), ends[:-1]), strict=False)
    )
    rows: list[SignalRow] = []
    gains: list[Floats] = []
    for row in signal.rows:
        key = (row.prompt_id, row.sample, row.segment)
        if key not in used:
            rows.append(row)
            continue
        lesson = used[key]
        coef = np.zeros(len(row.pg_coef))
        coef[lesson.tokens] = method.coef * weights[key] * row.pg_coef[lesson.tokens]
        gains.append(lesson.teacher_logprobs - row.old_logprobs[lesson.tokens])
        rows.append(
            replace(
                row,
                advantage=np.zeros(len(row.advantage)) if method.route == "exclusive" else row.advantage,
                distill_kind="topk",
                distill_source="experience",
                distill_coef=coef,
                support_tokens=lesson.tokens,
                support_ids=lesson.support_ids,
                support_logprobs=lesson.support_logprobs,
            )
        )
    objective = replace(signal.objective, distill_temperature=method.temperature)
    return LearningSignal(objective, rows), metrics | _metrics(groups, used, entropy_N, gains)


def _metrics(
    groups: Sequence[Group],
    used: Mapping[EpisodeSegmentKey, Lesson],
    entropy_N: Floats,
    gains: Sequence[Floats],
) -> dict[str, float]:
    taught = {key[:2] for key in used}
    members = [(group, episode) for group in groups for episode in group.episodes]
    failed = [(group.prompt_id, e.sample) for group, e in members if not e.verdict.success]
    all_fail = [group.prompt_id for group in groups if group.kind == "all_fail"]
    prompts = {prompt for prompt, _ in taught}
    tokens = sum(episode.tokens for _, episode in members)
    return {
        "vista/routed": len(taught) / len(members) if members else 0.0,
        "vista/routed_failures": sum(key in taught for key in failed) / len(failed) if failed else 0.0,
        "vista/tokens": len(entropy_N) / tokens if tokens else 0.0,
        "vista/teacher_gain": float(np.concatenate(gains).mean()) if gains else 0.0,
        "vista/teacher_entropy": float(entropy_N.mean()) if len(entropy_N) else 0.0,
        "vista/all_fail_taught": sum(p in prompts for p in all_fail) / len(all_fail) if all_fail else 0.0,
    }

"""The one loss. It only sums: every average and weight is folded into the signal's coefficients.

Tokens are packed: N learnable tokens of R rows, one after the other, no padding and no observations. A token
    whose coefficient is zero cannot move anything, whatever its log-probabilities are (-inf, NaN): it is left
    out with `where`, never by multiplying.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gleaner.models.signal import Objective


@dataclass(frozen=True)
class TokenBatch:
    """What the loss needs beside the policy's log-probabilities.

    Attributes:
        row_N: index of each token's row; rows: R.
        pg_coef_N, advantage_N, old_logprobs_N: policy-gradient weight, advantage, denominator of the ratio.
        sampler_logprobs_N: NaN where unknown (a peer's rows).
        kl_coef_N, reference_logprobs_N: None without the k3 term.
        sampled_coef_N, teacher_logprobs_N: the sampled-token distillation term, or None.
        support_coef_M, support_logprobs_MK: the top-K distillation term, or None; M tokens with a support.
    """

    row_N: Tensor
    rows: int
    pg_coef_N: Tensor
    advantage_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    kl_coef_N: Tensor | None = None
    reference_logprobs_N: Tensor | None = None
    sampled_coef_N: Tensor | None = None
    teacher_logprobs_N: Tensor | None = None
    support_coef_M: Tensor | None = None
    support_logprobs_MK: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """The loss (a scalar with gradient) and detached sums over tokens, which add up across micro-batches.

    `loss_metrics` turns summed outputs into means.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def row_means(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """(R,) mean of the values of each row; zero for a row without tokens."""
    sums_R = values_N.new_zeros(rows).index_add(0, row_N, values_N)
    counts_R = values_N.new_zeros(rows).index_add(0, row_N, torch.ones_like(values_N))
    return sums_R / counts_R.clamp(min=1)


def policy_loss(
    objective: Objective,
    batch: TokenBatch,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    student_support_MK: Tensor | None = None,
) -> LossOutputs:
    """Sum of the policy-gradient, k3 and distillation terms of a micro-batch.

    Policy gradient, with ratio rho = exp(logp - old), of the token or (GSPO, arXiv 2507.18071) the row's
    geometric mean: `clip` is PPO's min(rho A, clip(rho, 1 - low, 1 + high) A), for A < 0 floored at dual_clip
    * A (arXiv 1912.09729); `cispo` is sg[min(rho, max)] A logp (arXiv 2506.13585); `unclipped` is rho A. Rows
    of negative advantage that the sampler likes `off_policy_delta` more than the policy does, on average per
    token, are left out (arXiv 2512.02556, eq. 9); they stay in the denominators, which were folded before.

    k3 = exp(ref - logp) - (ref - logp) - 1.

    Distillation: `sampled` is -rho * sg[teacher - logp] with the token's ratio, unclipped, and the *current*
    policy in the detached log-ratio (GATS eq. 5; the detaching is this project's choice); `topk` is
    KL(student || teacher), both renormalised on the stored support.

    Args:
        logprobs_N: of the policy, with gradient.
        entropy_N: of the policy's distributions, detached; only measured.
        student_support_MK: the policy's renormalised log-probabilities on the supports, with gradient.
    """
    advantage_N = batch.advantage_N
    active_N = (batch.pg_coef_N != 0) & (advantage_N != 0)
    known_N = torch.isfinite(batch.old_logprobs_N)
    difference_N = logprobs_N - torch.where(known_N | active_N, batch.old_logprobs_N, logprobs_N.detach())

    if objective.ratio == "sequence":
        live_R = row_means(active_N.to(logprobs_N.dtype), batch.row_N, batch.rows) > 0
        in_live_row_N = live_R[batch.row_N]
        log_ratio_N = row_means(torch.where(in_live_row_N, difference_N, 0.0), batch.row_N, batch.rows)[
            batch.row_N
        ]
    else:
        log_ratio_N = torch.where(active_N, difference_N, 0.0)
    ratio_N = torch.exp(log_ratio_N)

    low, high = 1 - objective.clip_low, 1 + objective.clip_high
    if objective.surrogate == "clip":
        surrogate_N = torch.min(ratio_N * advantage_N, ratio_N.clamp(low, high) * advantage_N)
        if objective.dual_clip is not None:
            floor_N = objective.dual_clip * advantage_N
            surrogate_N = torch.where(advantage_N < 0, torch.max(surrogate_N, floor_N), surrogate_N)
    elif objective.surrogate == "cispo":
        surrogate_N = ratio_N.clamp(max=objective.cispo_max).detach() * advantage_N * logprobs_N
    else:
        surrogate_N = ratio_N * advantage_N

    gap_N = batch.sampler_logprobs_N - logprobs_N.detach()
    if objective.off_policy_delta is not None:
        # A row whose sampler is unknown is compared with the policy before the update.
        behaviour_N = torch.where(
            torch.isfinite(batch.sampler_logprobs_N), batch.sampler_logprobs_N, batch.old_logprobs_N
        )
        evidence_N = torch.nan_to_num(behaviour_N - logprobs_N.detach(), nan=0.0)
        far_R = row_means(evidence_N, batch.row_N, batch.rows) > objective.off_policy_delta
        dropped_N = far_R[batch.row_N] & (advantage_N < 0)
        active_N = active_N & ~dropped_N
    loss = -(batch.pg_coef_N * torch.where(active_N, surrogate_N, 0.0)).sum()

    if batch.kl_coef_N is not None and batch.reference_logprobs_N is not None:
        pulled_N = batch.kl_coef_N != 0
        to_reference_N = torch.where(pulled_N, batch.reference_logprobs_N - logprobs_N, 0.0)
        k3_N = torch.exp(to_reference_N) - to_reference_N - 1
        loss = loss + (batch.kl_coef_N * k3_N).sum()
    if batch.sampled_coef_N is not None and batch.teacher_logprobs_N is not None:
        taught_N = batch.sampled_coef_N != 0
        # Not the policy-gradient's ratio: that one is 1 where the advantage is zero.
        taught_ratio_N = torch.exp(torch.where(taught_N, difference_N, 0.0))
        teacher_gain_N = torch.where(taught_N, batch.teacher_logprobs_N - logprobs_N.detach(), 0.0)
        loss = loss - (batch.sampled_coef_N * taught_ratio_N * teacher_gain_N).sum()
    if (
        batch.support_coef_M is not None
        and batch.support_logprobs_MK is not None
        and student_support_MK is not None
    ):
        teacher_MK = torch.log_softmax(batch.support_logprobs_MK, dim=1)
        divergence_M = (student_support_MK.exp() * (student_support_MK - teacher_MK)).sum(1)
        loss = loss + (batch.support_coef_M * divergence_M).sum()

    with torch.no_grad():
        sums = {"tokens": logprobs_N.new_tensor(float(len(logprobs_N))), "entropy": entropy_N.sum()}
        measured_N = known_N & torch.isfinite(logprobs_N)
        # Bounded, so that one absurd token does not make the metric infinite.
        drift_N = torch.where(measured_N, difference_N, 0.0).clamp(-20, 20)
        sums["kl_old"] = (torch.exp(drift_N) - drift_N - 1).sum()
        sums["tokens_old"] = measured_N.sum()
        sampled_N = torch.isfinite(gap_N)
        sums["kl_sampler"] = torch.where(sampled_N, gap_N, 0.0).sum()
        sums["tokens_sampler"] = sampled_N.sum()
        sums["active"] = active_N.sum()
        from_peer_N = active_N & torch.isnan(batch.sampler_logprobs_N)
        sums["active_peer"] = from_peer_N.sum()
        sums["ratio"] = torch.where(active_N, ratio_N, 0.0).sum()
        if objective.surrogate == "clip":
            sums["clipped_low"] = (active_N & (advantage_N < 0) & (ratio_N < low)).sum()
            clipped_high_N = active_N & (advantage_N > 0) & (ratio_N > high)
            sums["clipped_high"] = clipped_high_N.sum()
            clipped_N = clipped_high_N | (active_N & (advantage_N < 0) & (ratio_N < low))
            sums["clipped_peer"] = (clipped_N & from_peer_N).sum()
        elif objective.surrogate == "cispo":
            sums["clipped_high"] = (active_N & (ratio_N > objective.cispo_max)).sum()
        if objective.off_policy_delta is not None:
            sums["off_policy"] = dropped_N.sum()
        if batch.kl_coef_N is not None and batch.reference_logprobs_N is not None:
            sums["kl_reference"] = torch.where(pulled_N, k3_N, 0.0).sum()
            sums["tokens_reference"] = pulled_N.sum()
    return LossOutputs(loss, sums)


def loss_metrics(outputs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Means over tokens of summed `LossOutputs.sums`.

    Returns:
        clip_low, clip_high (shares of the tokens with a gradient whose ratio is clipped away, by side),
        off_policy (share of tokens left out), ratio (mean), approx_kl (k3 estimate of KL(old || policy)),
        clip_peer (the same share of a peer's tokens, both sides), kl_sampler (mean of sampler - policy: KL(sampler ||
        policy)), kl_reference, entropy, tokens. A critic's are value, value_error (mean squared) and tokens. Measured
        before each optimizer step.
    """
    total: dict[str, float] = {}
    for sums in outputs:
        for name, value in sums.items():
            total[name] = total.get(name, 0.0) + value

    def mean(name: str, count: str) -> float:
        return total.get(name, 0.0) / max(total.get(count, 0.0), 1.0)

    if "tokens_value" in total:
        return {
            "value": mean("value", "tokens_value"),
            "value_error": mean("value_error", "tokens_value"),
            "tokens": total["tokens_value"],
        }
    metrics = {
        "clip_low": mean("clipped_low", "active"),
        "clip_high": mean("clipped_high", "active"),
        "ratio": mean("ratio", "active"),
        "approx_kl": mean("kl_old", "tokens_old"),
        "kl_sampler": mean("kl_sampler", "tokens_sampler"),
        "entropy": mean("entropy", "tokens"),
        "tokens": total.get("tokens", 0.0),
    }
    if total.get("active_peer"):
        metrics["clip_peer"] = mean("clipped_peer", "active_peer")
    if "off_policy" in total:
        metrics["off_policy"] = mean("off_policy", "tokens")
    if "kl_reference" in total:
        metrics["kl_reference"] = mean("kl_reference", "tokens_reference")
    return metrics


def value_loss(
    values_N: Tensor, returns_N: Tensor, old_values_N: Tensor, coef_N: Tensor, clip: float | None
) -> Tensor:
    """A critic's regression on returns, summed with folded coefficients: 0.5 * max((V - R)^2, (clipped V -
    R)^2).

    `clip` bounds how far V may move from its value before the update (verl's form, 0.5 there); None: plain
    squares.
    """
    used_N = coef_N != 0
    error_N = torch.where(used_N, values_N - returns_N, 0.0).square()
    if clip is not None:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, torch.where(used_N, near_N - returns_N, 0.0).square())
    return 0.5 * (coef_N * error_N).sum()


def value_sums(values_N: Tensor, returns_N: Tensor, coef_N: Tensor) -> dict[str, Tensor]:
    """What a critic's update measures, as sums over its tokens (`loss_metrics` makes means of them)."""
    used_N = coef_N != 0
    error_N = torch.where(used_N, values_N - returns_N, 0.0)
    return {
        "tokens_value": used_N.sum(),
        "value": torch.where(used_N, values_N, 0.0).sum(),
        "value_error": error_N.square().sum(),
    }


def explained_variance(values_N: Tensor, returns_N: Tensor) -> float | None:
    """1 - Var(R - V) / Var(R); None where returns are constant or too few, so that there is nothing to
    explain."""
    if len(returns_N) < 2 or bool((returns_N == returns_N[0]).all()):
        return None
    return float(1 - (returns_N - values_N).var() / returns_N.var())

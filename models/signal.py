"""The learning signal: which tokens get which advantage, weight and distillation target.

Every method turns verified groups into this one table; the update consumes it without knowing the method. Each
method's own averaging (sequence mean, token mean, nested means) is folded into the coefficients, so the update
only sums:

    L = sum_t  -pg_coef_t * surrogate(ratio_t, advantage_t)  +  kl_coef_t * k3_t  +  distill_coef_t * D_t
"""

from dataclasses import dataclass
from typing import Literal

DistillKind = Literal["none", "sampled", "topk"]
"""none; the sampled-token log-ratio against the teacher (GATS); reverse KL on a stored support (AdviSD, VISTA)."""


@dataclass(frozen=True)
class Objective:
    """How a signal's policy-gradient term is clipped; stored with the signal, so that it can be applied again.

    Attributes:
        ratio: importance ratio per token, or the row's geometric mean on every token (GSPO).
        surrogate: `clip` (PPO), `cispo` (clamped, detached ratio times log-probability), `unclipped`.
    """

    ratio: Literal["token", "sequence"] = "token"
    surrogate: Literal["clip", "cispo", "unclipped"] = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    cispo_max: float = 5.0


@dataclass(frozen=True)
class SignalRow:
    """The signal of one segment. Token lists cover its learnable tokens (n of them).

    Attributes:
        rollouts: digest of the Rollouts object that holds the segment.
        context_ids, sampled_ids, loss_mask: the segment's tokens, joined in when the signal is read.
        origin: whose rollout it is: the learner's own, or a peer's (GRAFT).
        source: what the gradient comes from: reward, teacher, peer, advisor, critic, experience.
        slot: what learns (policy, peer, critic).
        minibatch: index of the optimizer step that takes the row.
        pg_coef, advantage: (n,) policy-gradient weight and advantage.
        kl_coef: (n,) weight of the k3 term against reference_logprobs.
        old_logprobs: (n,) denominator of the ratio.
        distill_coef: (n,); teacher_logprobs (n,) for `sampled`; support_ids and support_logprobs (n, K) for `topk`,
            an empty list at tokens whose coefficient is zero.
    """

    rollouts: str
    prompt_id: str
    sample: int
    segment: int
    origin: Literal["self", "peer"]
    source: str
    slot: str
    minibatch: int
    context_ids: list[int]
    sampled_ids: list[int]
    loss_mask: list[int]
    pg_coef: list[float]
    advantage: list[float]
    old_logprobs: list[float]
    kl_coef: list[float] | None = None
    reference_logprobs: list[float] | None = None
    distill_kind: DistillKind = "none"
    distill_coef: list[float] | None = None
    teacher_logprobs: list[float] | None = None
    support_ids: list[list[int]] | None = None
    support_logprobs: list[list[float]] | None = None


@dataclass(frozen=True)
class LearningSignal:
    """Rows of one update, and how their policy-gradient term is clipped."""

    objective: Objective
    rows: list[SignalRow]

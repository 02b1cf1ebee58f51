"""What a figure is worth: pass@k, intervals that respect how the figures were sampled, paired tests over seeds.

Rollouts of one prompt are alike, so success rates are resampled by prompt, never by rollout. Arms that share seeds are
compared in pairs: a percentile bootstrap over a handful of seeds is too narrow, so pairs get the t interval and the
exact sign-flip test.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from gleaner.conf.errors import ConfigurationError

ENUMERATED_SEEDS = 12
"""Up to so many pairs the sign-flip test runs through all 2^n sign assignments (4,096); beyond, it draws them."""
SIGN_FLIP_DRAWS = 99_999
BOOTSTRAP_RESAMPLES = 4_999


@dataclass(frozen=True)
class Interval:
    """An estimate and its confidence interval; `method` says how it was made, for captions."""

    estimate: float
    low: float
    high: float
    method: str
    confidence: float = 0.95

    def __str__(self) -> str:
        return f"{self.estimate:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def overlaps(self, other: "Interval") -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class PairedComparison:
    """An arm against the baseline, seed by seed.

    Attributes:
        difference: mean of the paired differences (arm - baseline) with its t interval.
        p_sign_flip: two-sided p-value of the sign-flip test; its floor is 2^(1 - seeds), so with 5 seeds it cannot
            reach 0.05.
        differences_S: one per seed.
    """

    difference: Interval
    p_sign_flip: float
    differences_S: tuple[float, ...]


# ------------------------------------------------------------------------------------------------- pass@k


def pass_at_k(successes: int, samples: int, k: int) -> float:
    """Chance that at least one of k rollouts succeeds, from c successes among n: 1 - C(n - c, k) / C(n, k).

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1), as a product so that no binomial
    coefficient is ever formed.

    Raises:
        ConfigurationError: k > n, or counts that cannot be.
    """
    if k < 1:
        raise ConfigurationError(f"pass@{k} has no meaning: choose k of 1 or more")
    if k > samples:
        raise ConfigurationError(
            f"pass@{k} needs at least {k} rollouts per prompt and there are {samples}: raise evaluation.samples to {k}"
        )
    if not 0 <= successes <= samples:
        raise ConfigurationError(
            f"{successes} successes among {samples} rollouts cannot be: count each rollout once"
        )
    if samples - successes < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(samples - successes + 1, samples + 1)))


def pass_at_k_interval(
    successes_P: Sequence[int], samples_P: Sequence[int], k: int, *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean of pass@k over prompts, with an interval by resampling prompts. k = 1 is the success rate.

    Args:
        successes_P, samples_P: per prompt, how many rollouts succeeded and how many were scored.

    Where every prompt has the same value (all solved, none solved) a bootstrap has no width, and with one rollout per
    prompt the rate is a plain proportion: both get Wilson's interval over prompts.

    Raises:
        ConfigurationError: k exceeds the rollouts of a prompt, or there is no prompt.
    """
    if len(successes_P) != len(samples_P) or not len(successes_P):
        raise ConfigurationError(
            f"{len(successes_P)} success counts for {len(samples_P)} prompts: give one of each per prompt, for at "
            "least one prompt"
        )
    values_P = np.array([pass_at_k(c, n, k) for c, n in zip(successes_P, samples_P, strict=True)])
    if np.isin(values_P, (0.0, 1.0)).all():
        return wilson_interval(int(values_P.sum()), len(values_P), confidence=confidence)
    if np.ptp(values_P) == 0:
        # Equal shares in between: the widest binomial that the prompts, as independent draws, allow.
        low, high = _wilson(float(values_P[0]), len(values_P), confidence)
        return Interval(float(values_P[0]), low, high, "wilson", confidence)
    return bootstrap_interval(values_P, confidence=confidence, seed=seed)


def success_interval(
    successes_P: Sequence[int], samples_P: Sequence[int], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean over prompts of the success rate; `pass_at_k_interval` with k = 1."""
    return pass_at_k_interval(successes_P, samples_P, 1, confidence=confidence, seed=seed)


def wilson_interval(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a proportion of independent trials.

    Raises:
        ConfigurationError: no trials, or more successes than trials.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ConfigurationError(
            f"{successes} successes in {trials} trials cannot be: evaluate at least one prompt"
        )
    low, high = stats.binomtest(successes, trials).proportion_ci(confidence_level=confidence, method="wilson")
    return Interval(successes / trials, float(low), float(high), "wilson", confidence)


def bootstrap_interval(
    values_P: Sequence[float] | npt.NDArray[np.float64], *, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """BCa bootstrap (Efron 1987) of the mean of independent units, such as prompts.

    Raises:
        ConfigurationError: fewer than two units.
    """
    values = np.asarray(values_P, dtype=np.float64)
    if len(values) < 2:
        raise ConfigurationError(
            f"a bootstrap over {len(values)} prompts has no spread: evaluate at least two"
        )
    if np.ptp(values) == 0:
        return Interval(float(values[0]), float(values[0]), float(values[0]), "bootstrap", confidence)
    result = stats.bootstrap(
        (values,),
        np.mean,
        confidence_level=confidence,
        n_resamples=BOOTSTRAP_RESAMPLES,
        batch=max(1, 2_000_000 // len(values)),
        method="BCa",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(float(values.mean()), float(low), float(high), "bootstrap", confidence)


def _wilson(share: float, trials: int, confidence: float) -> tuple[float, float]:
    """Wilson's interval for a share that is no whole number of trials."""
    z = float(stats.norm.ppf(0.5 + confidence / 2))
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * float(np.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2)))
    return centre - half, centre + half


# --------------------------------------------------------------------------------------- pairs over seeds


def mean_interval(values_S: Sequence[float], *, confidence: float = 0.95) -> Interval:
    """Mean over seeds with Student's t interval; one seed has no interval (low = high = the value).

    Raises:
        ConfigurationError: no value.
    """
    values = np.asarray(values_S, dtype=np.float64)
    if not len(values):
        raise ConfigurationError("there is no value to average: run at least one seed")
    mean = float(values.mean())
    if len(values) == 1 or np.ptp(values) == 0:
        return Interval(mean, mean, mean, "t", confidence)
    low, high = stats.t.interval(confidence, len(values) - 1, loc=mean, scale=stats.sem(values))
    return Interval(mean, float(low), float(high), "t", confidence)


def compare_paired(
    arm_S: Sequence[float], baseline_S: Sequence[float], *, confidence: float = 0.95, seed: int = 0
) -> PairedComparison:
    """Arm minus baseline over the same seeds, in the same order: t interval and sign-flip test.

    Raises:
        ConfigurationError: the seeds do not pair, or there are fewer than two.
    """
    if len(arm_S) != len(baseline_S):
        raise ConfigurationError(
            f"{len(arm_S)} seeds of the arm do not pair with {len(baseline_S)} of the baseline: run both on the same "
            "seeds"
        )
    if len(arm_S) < 2:
        raise ConfigurationError(
            f"{len(arm_S)} pair gives no interval: run at least two seeds (eight, for a claim)"
        )
    differences = np.asarray(arm_S, dtype=np.float64) - np.asarray(baseline_S, dtype=np.float64)
    return PairedComparison(
        mean_interval([*differences], confidence=confidence),
        sign_flip_p(differences, seed=seed),
        tuple(float(difference) for difference in differences),
    )


def sign_flip_p(differences_S: Sequence[float] | npt.NDArray[np.float64], *, seed: int = 0) -> float:
    """Two-sided p-value that the mean difference is zero, if each difference's sign were a fair coin's.

    Exact up to ENUMERATED_SEEDS pairs: the share of the 2^n sign assignments whose mean is as far from zero as the
    observed one. Beyond, SIGN_FLIP_DRAWS assignments are drawn from `seed`, and the observed one counts as a draw.

    Raises:
        ConfigurationError: fewer than two differences.
    """
    differences = np.asarray(differences_S, dtype=np.float64)
    if len(differences) < 2:
        raise ConfigurationError(
            f"{len(differences)} pair cannot be tested: run at least two seeds (eight, for a claim)"
        )
    enumerate_all = len(differences) <= ENUMERATED_SEEDS
    result = stats.permutation_test(
        (differences,),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=2**ENUMERATED_SEEDS if enumerate_all else SIGN_FLIP_DRAWS,
        batch=4_096,
        alternative="two-sided",
        rng=np.random.default_rng(seed),
    )
    return float(result.pvalue)


# ----------------------------------------------------------------------------------------- area by budget


def area_under_curve(
    budget_N: Sequence[float], success_N: Sequence[float], *, until: float | None = None
) -> float:
    """Mean success over the budget: the trapezoid rule from the first point to `until`, over that length.

    Args:
        budget_N: sampled rollouts (or tokens, or seconds), rising.
        until: end of the budget that all compared arms share; the curve is cut there by interpolation. Empty: the last
            point.

    Raises:
        ConfigurationError: the budget does not rise, or `until` is outside of it.
    """
    budget, success = np.asarray(budget_N, dtype=np.float64), np.asarray(success_N, dtype=np.float64)
    if len(budget) != len(success) or len(budget) < 2:
        raise ConfigurationError(
            f"a curve of {len(budget)} budgets and {len(success)} values has no area: evaluate at least twice"
        )
    if not (np.diff(budget) > 0).all():
        raise ConfigurationError(
            "the budget does not rise from point to point: sort the points, one per budget"
        )
    end = float(budget[-1]) if until is None else until
    if not budget[0] < end <= budget[-1]:
        raise ConfigurationError(
            f"the curve spans {budget[0]:g} to {budget[-1]:g} and cannot be cut at {end:g}: choose a shared budget "
            "within"
        )
    inside = budget < end
    x = np.append(budget[inside], end)
    y = np.append(success[inside], np.interp(end, budget, success))
    return float(np.trapezoid(y, x) / (end - budget[0]))

"""The settings that tuning chose, as a file of their own: written by `gleaner compare NAME --tune`, committed, and
applied by `gleaner compare NAME`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from gleaner.conf.compose import digest, validate
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.plan import candidates
from gleaner.conf.presets import BUILT_IN
from gleaner.conf.schema import ArmSettings, CompareSettings, Tuned, TunedArm, TunedCandidate

BESIDE_TUNING = {"seeds", "parallel", "baseline", "contrasts", "presets", "measures"}
"""What may change after tuning: it concerns the test alone."""


def tuned_file(comparison: CompareSettings) -> Path:
    """Beside the user's presets where there are any, else beside the built-in ones."""
    folder = Path(comparison.presets) if comparison.presets else BUILT_IN
    return folder / "compare" / "tuned" / f"{comparison.name}.yaml"


def choose(validation_CS: Sequence[Sequence[float]]) -> int:
    """The candidate of the highest mean over seeds of what tuning looks at; of equal ones the first. A candidate
    that was not scored on some seed is none.

    Raises:
        ConfigurationError: no candidate was scored on every seed.
    """
    means = [math.fsum(values) / len(values) for values in validation_CS]
    scored = [index for index, mean in enumerate(means) if math.isfinite(mean)]
    if not scored:
        raise ConfigurationError(
            "no candidate has a validation success (or what tune.by names) on every tuning seed: see why its episodes "
            "were not scored, or name a metric of its steps"
        )
    return max(scored, key=lambda index: means[index])


def choice(comparison: CompareSettings, validation: Mapping[str, Sequence[Sequence[float]]]) -> Tuned:
    """Each arm's best candidate.

    Args:
        validation: of each arm, per candidate, one success rate a tuning seed.
    """
    assert comparison.tune is not None, "nothing is chosen without a search"
    arms = {}
    for arm, validation_CS in validation.items():
        tried = candidates(comparison, arm)
        arms[arm] = TunedArm(
            overrides=tried[choose(validation_CS)],
            searched=[
                TunedCandidate(overrides=overrides, validation=list(values))
                for overrides, values in zip(tried, validation_CS, strict=True)
            ],
        )
    return Tuned(
        comparison=comparison.name,
        settings=digest(comparison, BESIDE_TUNING),
        seeds=comparison.tune.seeds,
        arms=arms,
    )


def write_tuned(comparison: CompareSettings, tuned: Tuned) -> Path:
    """Write the choice where `apply_tuned` looks for it; returns the file."""
    file = tuned_file(comparison)
    file.parent.mkdir(parents=True, exist_ok=True)
    head = f"# Chosen by `gleaner compare {comparison.name} --tune`. Commit it before the test runs; do not edit it.\n"
    file.write_text(head + yaml.safe_dump(tuned.model_dump(mode="json"), sort_keys=False))
    return file


def read_tuned(comparison: CompareSettings) -> Tuned | None:
    """The choice for this comparison; None if it was not tuned yet.

    Raises:
        ConfigurationError: the file is of another comparison, or of other settings of this one.
    """
    file = tuned_file(comparison)
    if not file.is_file():
        return None
    tuned = validate(yaml.safe_load(file.read_text(encoding="utf-8")), Tuned)
    if tuned.settings != digest(comparison, BESIDE_TUNING):
        raise ConfigurationError(
            f"{file} was chosen for other settings of {comparison.name}: tune again with --tune (runs that are the "
            "same are not repeated), or give back the settings"
        )
    return tuned


def apply_tuned(comparison: CompareSettings) -> CompareSettings:
    """The comparison with each arm's chosen overrides; itself if it declares no search.

    Raises:
        ConfigurationError: it declares a search that was not made, or one that was made for other settings.
    """
    if comparison.tune is None:
        return comparison
    tuned = read_tuned(comparison)
    if tuned is None:
        raise ConfigurationError(
            f"{comparison.name} is not tuned yet: run the same command with --tune, commit {tuned_file(comparison)}, "
            "then run this again"
        )
    arms = {
        arm: ArmSettings(
            overrides=[*settings.overrides, *tuned.arms[arm].overrides],
            peer_baseline=settings.peer_baseline,
        )
        for arm, settings in comparison.arms.items()
    }
    return comparison.model_copy(update={"arms": arms, "tune": None})

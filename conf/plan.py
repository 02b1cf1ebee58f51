"""What a comparison will run: every run's settings, the runs that it builds on, and an order to start them in."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gleaner.conf.compose import PLACEHOLDER, compose_values, validate
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import CompareSettings, GleanerSettings


@dataclass(frozen=True)
class PlannedRun:
    """A run of a comparison.

    Attributes:
        part: the arm, or the entry of `before`, that it belongs to.
        needs: names of planned runs that must have ended before.
        candidate: in tuning, which of the arm's candidates it tries; None elsewhere.
    """

    part: str
    seed: int
    settings: GleanerSettings
    needs: tuple[str, ...] = ()
    candidate: int | None = None

    @property
    def name(self) -> str:
        return self.settings.run.name or ""

    @property
    def most_rollouts(self) -> int:
        """What its steps sample, or its budget where that is less; refills of dynamic sampling left aside."""
        run = self.settings.run
        sampled = run.steps * run.prompts_per_step * run.group_size
        return sampled if run.budget_rollouts is None else min(sampled, run.budget_rollouts)


def plan_test(comparison: CompareSettings) -> list[PlannedRun]:
    """Every arm on every seed and the runs that they build on, in the order in which they may start.

    Raises:
        ConfigurationError: the overrides of an arm are wrong, its steps cannot spend the common budget, it is never
            validated, or it builds on a run that is not planned.
    """
    parts = [_before(comparison, name, comparison.seeds, test=True) for name in comparison.before]
    parts += [_arm(comparison, arm, f"{{comparison}}-{arm}", [], comparison.seeds) for arm in comparison.arms]
    return _in_order(comparison, parts, comparison.seeds)


def plan_tuning(comparison: CompareSettings) -> list[PlannedRun]:
    """Every candidate of every arm on the tuning seeds, and the runs that they build on. None reads the test split.

    Raises:
        ConfigurationError: as `plan_test`, or the comparison declares no search.
    """
    if comparison.tune is None:
        raise ConfigurationError(
            f"comparison {comparison.name} declares no search: set tune.seeds and tune.grid in its preset, or leave "
            "--tune out"
        )
    seeds = comparison.tune.seeds
    parts = [_before(comparison, name, seeds, test=False) for name in comparison.before]
    for arm in comparison.arms:
        for index, overrides in enumerate(candidates(comparison, arm)):
            name = f"{{comparison}}-tune-{arm}-{index}"
            chosen = [*overrides, "evaluation.test_prompts=0"]
            parts.append(_arm(comparison, arm, name, chosen, seeds, candidate=index))
    return _in_order(comparison, parts, seeds)


def tuning_name(comparison: CompareSettings) -> str:
    """Name of the search: of its folder, and of the MLflow run that its runs nest under."""
    return f"{comparison.name}-tune"


def candidates(comparison: CompareSettings, arm: str) -> list[list[str]]:
    """The overrides that tuning tries for an arm: the common grid crossed with the arm's own, which varies fastest."""
    assert comparison.tune is not None, "asked for the candidates of a comparison without a search"
    grid = {**comparison.tune.grid, **comparison.arms[arm].tune}
    return [
        [f"{name}={_as_text(value)}" for name, value in zip(grid, values, strict=True)]
        for values in itertools.product(*grid.values())
    ]


def _before(comparison: CompareSettings, name: str, seeds: Sequence[int], *, test: bool) -> list[PlannedRun]:
    overrides = [*comparison.before[name], *([] if test else ["evaluation.test_prompts=0"])]
    parent = comparison.name if test else tuning_name(comparison)
    return _part_runs(
        comparison, f"before {name}", name, f"{{comparison}}-{name}", overrides, seeds, parent=parent
    )


def _arm(
    comparison: CompareSettings,
    arm: str,
    name: str,
    chosen: Sequence[str],
    seeds: Sequence[int],
    candidate: int | None = None,
) -> list[PlannedRun]:
    own = comparison.arms[arm].overrides
    if candidate is not None:
        own = [_within_tuning(comparison, arm, override, candidate) for override in own]
    overrides = [*own, *chosen, f"run.budget_rollouts={comparison.budget_rollouts}"]
    parent = comparison.name if candidate is None else tuning_name(comparison)
    runs = _part_runs(
        comparison, f"arm {arm}", arm, name, overrides, seeds, parent=parent, candidate=candidate
    )
    run, evaluation = runs[0].settings.run, runs[0].settings.evaluation
    most = run.steps * run.prompts_per_step * run.group_size
    if most < comparison.budget_rollouts:
        raise ConfigurationError(
            f"arm {arm}: {run.steps} steps sample {most} rollouts, less than budget_rollouts="
            f"{comparison.budget_rollouts}: raise run.steps, or lower the budget"
        )
    if not evaluation.every:
        raise ConfigurationError(
            f"arm {arm} is never validated: set evaluation.every in common, for instance evaluation.every=20"
        )
    return runs


def _within_tuning(comparison: CompareSettings, arm: str, override: str, candidate: int) -> str:
    """A reference to another arm's run means, in tuning, its candidate of the same place in the common grid."""
    common = candidate // _own_candidates(comparison, arm)
    for other in comparison.arms:
        index = common * _own_candidates(comparison, other)
        override = override.replace(
            f"{{comparison}}-{other}-seed{{seed}}", f"{{comparison}}-tune-{other}-{index}-seed{{seed}}"
        )
    return override


def _own_candidates(comparison: CompareSettings, arm: str) -> int:
    """Candidates of an arm at each place of the common grid."""
    return math.prod(len(values) for values in comparison.arms[arm].tune.values())


def _part_runs(
    comparison: CompareSettings,
    what: str,
    part: str,
    name: str,
    overrides: Sequence[str],
    seeds: Sequence[int],
    *,
    parent: str,
    candidate: int | None = None,
) -> list[PlannedRun]:
    """One run a seed. The presets are composed once, and each seed is filled in."""
    presets = Path(comparison.presets) if comparison.presets else None
    everything = [
        *comparison.common,
        *overrides,
        "run.seed={seed}",
        f"run.name={name}-seed{{seed}}",
        "tracking.experiment={comparison}",
        f"tracking.parent_run={parent}",
    ]
    try:
        template = compose_values(everything, presets=presets)
        filled = [fill(template, {"comparison": comparison.name, "seed": str(seed)}) for seed in seeds]
        settings = [validate(values, GleanerSettings) for values in filled]
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error
    return [PlannedRun(part, seed, run, (), candidate) for seed, run in zip(seeds, settings, strict=True)]


def fill(value: Any, words: Mapping[str, str]) -> Any:
    """`value` with {comparison} and {seed} replaced in every text of it.

    Raises:
        ConfigurationError: a text has another placeholder.
    """
    if isinstance(value, dict):
        return {name: fill(item, words) for name, item in value.items()}
    if isinstance(value, list):
        return [fill(item, words) for item in value]
    if not isinstance(value, str):
        return value
    unknown = [word for word in PLACEHOLDER.findall(value) if word not in words]
    if unknown:
        known = ", ".join(f"{{{word}}}" for word in words)
        raise ConfigurationError(f"{value} has the placeholder {{{unknown[0]}}}: use one of {known}")
    return PLACEHOLDER.sub(lambda match: words[match[1]], value)


def _in_order(
    comparison: CompareSettings, parts: Sequence[Sequence[PlannedRun]], seeds: Sequence[int]
) -> list[PlannedRun]:
    """All runs, whole seeds first, each after those that it needs."""
    waiting = [part[place] for place in range(len(seeds)) for part in parts]
    names = {run.name for run in waiting}
    if len(names) < len(waiting):
        raise ConfigurationError(
            f"comparison {comparison.name}: two runs would share a name: rename an arm or an entry of before"
        )
    waiting = [_with_needs(comparison, run, names) for run in waiting]
    ordered: list[PlannedRun] = []
    started: set[str] = set()
    while waiting:
        ready = next((run for run in waiting if started.issuperset(run.needs)), None)
        if ready is None:
            stuck = ", ".join(run.name for run in waiting[:4])
            raise ConfigurationError(f"runs wait for each other ({stuck}): let one of them name no other run")
        waiting.remove(ready)
        ordered.append(ready)
        started.add(ready.name)
    return ordered


def _with_needs(comparison: CompareSettings, run: PlannedRun, names: set[str]) -> PlannedRun:
    """A run needs what its method or policy names: a teacher, a peer, a matched run, a policy's folder."""
    values = run.settings.model_dump(mode="json", include={"method", "policy"})
    words = {word for text in _texts(values) for word in text.split("/")}
    missing = sorted(
        word
        for word in words - names
        if word.startswith(f"{comparison.name}-") and word.endswith(f"-seed{run.seed}")
    )
    if missing:
        here = ", ".join(sorted(name for name in names if name.endswith(f"-seed{run.seed}")))
        raise ConfigurationError(
            f"arm {run.part} builds on {missing[0]}, which this comparison does not run: name one of {here}"
        )
    needs = tuple(sorted(words & names - {run.name}))
    return PlannedRun(run.part, run.seed, run.settings, needs, run.candidate)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _as_text(value: bool | int | float | str) -> str:
    """A value as the command line writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)

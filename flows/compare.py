"""Comparison: arms x seeds at an equal budget of rollouts, paired by seed, with intervals; and the search before it."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from rich.console import Console

from gleaner.conf.plan import PlannedRun, candidates, plan_test, plan_tuning, tuning_name
from gleaner.conf.schema import CompareSettings, GleanerSettings, Tuned
from gleaner.conf.tuned import apply_tuned, choice, write_tuned
from gleaner.flows.children import prepare_children, run_children
from gleaner.flows.console import progress_bars
from gleaner.flows.services import prefect_server
from gleaner.models.comparison import (
    ArmResult,
    Contrast,
    GapPoint,
    Measured,
    Outcome,
    Trained,
    arm_result,
    contrasts,
    gap_points,
    gap_slope,
    late_mean,
    measures,
    shared_budget,
)
from gleaner.models.plots import Bar, compare_plot, contrast_plot, gap_plot
from gleaner.models.statistics import Interval
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.tracking import RunTracker

CLAIM_SEEDS = 8
CLAIM_EPISODES = 1_000
"""What a claim needs at least: seeds, and test episodes for each figure."""

Summaries = Mapping[str, dict[str, Any]]
"""Name of a run, and the summary that it left."""


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Run the comparison under a Prefect server, with the settings that tuning chose, and print its report.

    Raises:
        ConfigurationError: settings are wrong, or a declared search was not made yet.
    """
    plan = plan_test(apply_tuned(settings))
    prepare_children()
    with (
        prefect_server(RUNS_FOLDER / settings.name / "prefect-server.log"),
        progress_bars([run.settings for run in plan]),
    ):
        report: dict[str, Any] = compare_flow(settings)
    text = (RUNS_FOLDER / settings.name / "report.md").read_text()
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    return report


def tune(settings: CompareSettings) -> Tuned:
    """Search every arm's settings on tuning seeds and validation prompts, and write the choice to a file.

    Raises:
        ConfigurationError: settings are wrong, or they declare no search.
    """
    plan = plan_tuning(settings)
    prepare_children()
    with (
        prefect_server(RUNS_FOLDER / settings.name / "prefect-server.log"),
        progress_bars([run.settings for run in plan]),
    ):
        tuned: Tuned = tune_flow(settings)
    file = write_tuned(settings, tuned)
    text = (RUNS_FOLDER / tuning_name(settings) / "tuning.md").read_text()
    Console().print(text, markup=False, highlight=False, soft_wrap=True)
    Console().print(f"Commit {file}, then run the test: gleaner compare {settings.name}", highlight=False)
    return tuned


@flow(name="compare", persist_result=False)
def compare_flow(settings: CompareSettings) -> dict[str, Any]:
    """Arms x seeds as runs of their own, then the paired report."""
    chosen = apply_tuned(settings)
    plan = plan_test(chosen)
    summaries = train_arms(plan, parallel_runs(chosen))
    outcomes = {
        arm: [read_outcome(run, plan, summaries, chosen.measures) for run in plan if run.part == arm]
        for arm in chosen.arms
    }
    return _report(chosen, plan, outcomes)


@flow(name="tune", persist_result=False)
def tune_flow(settings: CompareSettings) -> Tuned:
    """Every candidate of every arm on the tuning seeds, and the best of each by validation success or `tune.by`."""
    plan = plan_tuning(settings)
    summaries = train_arms(plan, parallel_runs(settings))
    assert settings.tune is not None, "there is no plan of tuning without a search"
    by = settings.tune.by
    validation = {
        arm: [
            [
                validation_success(summaries[run.name]) if by is None else late_mean(step_metrics(run), by)
                for run in plan
                if run.part == arm and run.candidate == candidate
            ]
            for candidate in range(len(candidates(settings, arm)))
        ]
        for arm in settings.arms
    }
    tuned = choice(settings, validation)
    text = tuning_markdown(tuned, by or "validation success")
    name = tuning_name(settings)
    create_markdown_artifact(text, key=_artifact_key(name))
    folder = RUNS_FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuning.md").write_text(text)
    tracker = _tracker(settings, name, plan[0].settings)
    tracker.artifact(folder / "tuning.md")
    tracker.finish("FINISHED")
    return tuned


def parallel_runs(settings: CompareSettings) -> int:
    """Runs at a time: as set, or one for each core."""
    return settings.parallel or os.cpu_count() or 1


@task(name="train_arms", persist_result=False)
def train_arms(plan: Sequence[PlannedRun], parallel: int) -> dict[str, dict[str, Any]]:
    """Every run in its own process, after those that it builds on; finished runs are not started again.

    Returns:
        name of the run → the summary that it left.
    """
    needs = {run.name: run.needs for run in plan}
    summaries = run_children([run.settings for run in plan], parallel, needs)
    return {run.name: summary for run, summary in zip(plan, summaries, strict=True)}


def validation_success(summary: Mapping[str, Any]) -> float:
    """By what tuning chooses: the last version's validation success; the mean of both policies where the run trained a
    peer. NaN where nothing was scored."""
    own = summary["validated"].get("validation/success", math.nan)
    peer = summary["validated"].get("peer/validation/success")
    return float(own if peer is None else (own + peer) / 2)


# ------------------------------------------------------------------------------------------------ reading


def read_outcome(
    run: PlannedRun, plan: Sequence[PlannedRun], summaries: Summaries, measured: Sequence[str] = ()
) -> Outcome:
    """A finished run's curves, budget, measures and what it built on, from its journal and summary."""
    summary = summaries[run.name]
    entries = [entry for _, entry in RunContext.of(run.name, run.settings).journal.entries()]
    metrics = [entry["metrics"] for entry in entries]
    starts = [0.0, *(entry["budget"]["rollouts"] for entry in entries)]
    validated = [*metrics, summary["validated"]]
    has_peer = "peer/validation/success" in summary["validated"]
    return Outcome(
        policy=_trained(starts, validated, "validation/success", summary["after"]),
        peer=(
            _trained(starts, validated, "peer/validation/success", summary["peer_after"])
            if has_peer
            else None
        ),
        budget=_spent(run, summary),
        needed=_total(
            [_spent(needed, summaries[needed.name]) for needed in plan if needed.name in _built_on(run, plan)]
        ),
        recovered=sum(found.get("signal/recovered", 0.0) for found in metrics) / max(1, len(metrics)),
        teacher=metrics[0].get("gats/M_T") if metrics else None,
        teacher_episodes=metrics[0].get("gats/M_T_episodes", 0.0) if metrics else 0.0,
        measured={metric: late_mean(metrics, metric) for metric in measured},
    )


def step_metrics(run: PlannedRun) -> list[dict[str, float]]:
    """The metrics of a finished run's steps, in order."""
    return [entry["metrics"] for _, entry in RunContext.of(run.name, run.settings).journal.entries()]


def _trained(
    starts: Sequence[float], validated: Sequence[Mapping[str, float]], name: str, after: Mapping[str, float]
) -> Trained:
    """Args: starts: rollouts spent before each step and at the end; validated: metrics at the same places."""
    points = [(at, found[name]) for at, found in zip(starts, validated, strict=True) if name in found]
    success = [value for _, value in points]
    final = after.get("test/success", success[-1] if success else math.nan)
    return Trained([at for at, _ in points], success, final)


def _spent(run: PlannedRun, summary: Mapping[str, Any]) -> dict[str, float]:
    entries = RunContext.of(run.name, run.settings).journal.entries()
    seconds = sum(entry["metrics"]["seconds/step"] for _, entry in entries)
    return {**summary["budget"], "seconds": seconds}


def _built_on(run: PlannedRun, plan: Sequence[PlannedRun]) -> set[str]:
    """Names of the runs that it needs, and of those that these need."""
    by_name = {other.name: other for other in plan}
    found: set[str] = set()
    waiting = list(run.needs)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += by_name[name].needs
    return found


def _total(budgets: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = sorted({name for budget in budgets for name in budget})
    return {name: sum(budget.get(name, 0.0) for budget in budgets) for name in names}


# ---------------------------------------------------------------------------------------------- reporting


def _report(
    settings: CompareSettings, plan: Sequence[PlannedRun], outcomes: Mapping[str, Sequence[Outcome]]
) -> dict[str, Any]:
    folder = RUNS_FOLDER / settings.name
    folder.mkdir(parents=True, exist_ok=True)
    peers = {arm: own.peer_baseline for arm, own in settings.arms.items() if own.peer_baseline is not None}
    end = shared_budget(outcomes, settings.budget_rollouts)
    arms = {arm: arm_result(members, end) for arm, members in outcomes.items()}
    pairs = contrasts(outcomes, settings.pairs, peers, end)
    points = gap_points(outcomes, settings.pairs)
    slope = gap_slope(points)
    measured = measures(outcomes, settings.pairs, settings.measures)
    plain = {
        "seeds": settings.seeds,
        "overrides": {arm: [*settings.common, *own.overrides] for arm, own in settings.arms.items()},
        "arms": {arm: asdict(result) for arm, result in arms.items()},
        "contrasts": [asdict(pair) for pair in pairs],
        "measures": {
            found.metric: {
                "arms": {arm: asdict(interval) for arm, interval in found.arms.items()},
                "differences": {
                    f"{first} - {second}": asdict(pair) if pair else None
                    for (first, second), pair in found.differences.items()
                },
            }
            for found in measured
        },
        "gap": {"points": [asdict(point) for point in points], "slope": asdict(slope) if slope else None},
    }
    evaluated = next(run.settings.evaluation for run in plan if run.part in outcomes)
    episodes = evaluated.test_prompts * evaluated.samples
    unsteady = sorted(
        arm
        for arm, members in outcomes.items()
        if any(o.teacher is not None and o.teacher_episodes < CLAIM_EPISODES for o in members)
    )
    text = report_markdown(settings, arms, pairs, points, slope, episodes, unsteady, measured)
    (folder / "report.md").write_text(text)
    (folder / "report.json").write_text(json.dumps(plain, indent=1))
    files = ["report.md", "report.json", *_plots(settings, outcomes, pairs, points)]
    create_markdown_artifact(text, key=_artifact_key(f"{settings.name}-report"))
    tracker = _tracker(settings, settings.name, plan[0].settings)
    for arm, result in arms.items():
        for member, final in result.final.items():
            tracker.metrics(
                0,
                {
                    f"{arm}/{member}/final": final.estimate,
                    f"{arm}/{member}/area": result.area[member].estimate,
                },
            )
    for pair in pairs:
        if pair.final is not None and pair.area is not None:
            name = f"{pair.arm}-{pair.against}/{pair.member}".replace(" ", "").replace("+", "-")
            for figure, found in (("final", pair.final.difference), ("area", pair.area.difference)):
                values = {"difference": found.estimate, "low": found.low, "high": found.high}
                tracker.metrics(0, {f"{name}/{figure}_{part}": value for part, value in values.items()})
    for file in files:
        tracker.artifact(folder / file)
    tracker.finish("FINISHED")
    return plain


def _plots(
    settings: CompareSettings,
    outcomes: Mapping[str, Sequence[Outcome]],
    pairs: Sequence[Contrast],
    points: Sequence[GapPoint],
) -> list[str]:
    """Draw what there is to draw; returns the files' names."""
    folder, title = RUNS_FOLDER / settings.name, settings.name
    curves = {
        arm: [(o.policy.rollouts_N, o.policy.success_N) for o in members] for arm, members in outcomes.items()
    }
    for arm, members in outcomes.items():
        peers = [(o.peer.rollouts_N, o.peer.success_N) for o in members if o.peer is not None]
        if peers:
            curves[f"{arm} (peer)"] = peers
    compare_plot(curves, folder / "compare.png", title=title)
    drawn = ["compare.png"]
    differences = {
        _contrast_name(pair): (_bar(pair.final.difference), _bar(pair.area.difference))
        for pair in pairs
        if pair.final is not None and pair.area is not None
    }
    if differences:
        contrast_plot(differences, folder / "contrasts.png", title=title)
        drawn.append("contrasts.png")
    if points:
        gaps = {point.arm: (point.gap.estimate, _bar(point.gain)) for point in points}
        gap_plot(gaps, folder / "gap.png", title=title)
        drawn.append("gap.png")
    return drawn


def report_markdown(
    settings: CompareSettings,
    arms: Mapping[str, ArmResult],
    pairs: Sequence[Contrast],
    points: Sequence[GapPoint],
    slope: Interval | None,
    test_episodes: int,
    unsteady: Sequence[str] = (),
    measured: Sequence[Measured] = (),
) -> str:
    """The report: a table of arms with their budgets, one of contrasts, one of gaps where teachers guided, and those of
    the measures.

    Args:
        test_episodes: behind each run's final success; 0 if it is a validation success.
        unsteady: arms whose M_T was measured on too few episodes, or set by hand.
    """
    seeds = len(settings.seeds)
    final = (
        f"{test_episodes:,} test episodes a run" if test_episodes else "of the validation prompts: no test"
    )
    lines = [
        f"# {settings.name}: {seeds} seeds, {settings.budget_rollouts:,} rollouts a run",
        "",
        f"Means over seeds with 95 % t intervals; final success: {final}; area: mean validation success over the "
        "budget.",
        "",
        "| arm | of | final success | area | rollouts | generated tokens | teacher tokens | other forward tokens "
        "| seconds | rollouts of runs it builds on | recovered |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, result in arms.items():
        for member, success in result.final.items():
            own = _budget_cells(result) if member == "policy" else [""] * 7
            lines.append(_row([arm, member, str(success), str(result.area[member]), *own]))
    lines += [
        "",
        "Differences, paired by seed: 95 % t interval, and p of the sign-flip test.",
        "",
        "| contrast | final success | p (sign flip) | area | p (sign flip) |",
        "|---|---|---|---|---|",
    ]
    for pair in pairs:
        cells = [_contrast_name(pair)]
        for found in (pair.final, pair.area):
            cells += [str(found.difference), f"{found.p_sign_flip:.3f}"] if found else ["", ""]
        lines.append(_row(cells))
    if points:
        lines += ["", "| guided arm | against | gap at the start | gain |", "|---|---|---|---|"]
        ordered = sorted(points, key=lambda point: -point.gap.estimate)
        lines += [_row([point.arm, point.against, str(point.gap), str(point.gain)]) for point in ordered]
    if slope is not None:
        lines += ["", f"Gain for each unit of gap, least squares within every seed: {slope}."]
    for measure in measured:
        lines += [
            "",
            f"{measure.metric}, mean over the second half of the steps:",
            "",
            "| arm | |",
            "|---|---|",
        ]
        lines += [_row([arm, str(interval)]) for arm, interval in measure.arms.items()]
        lines += ["", "| contrast | difference | p (sign flip) |", "|---|---|---|"]
        for (first, second), paired in measure.differences.items():
            cells = [str(paired.difference), f"{paired.p_sign_flip:.3f}"] if paired else ["", ""]
            lines.append(_row([f"{first} - {second}", *cells]))
    if seeds < CLAIM_SEEDS:
        lines += ["", f"{seeds} seeds show mechanics, not a gain: a claim needs at least {CLAIM_SEEDS}."]
    if test_episodes < CLAIM_EPISODES:
        lines += ["", f"{test_episodes:,} test episodes a run: a claim needs at least {CLAIM_EPISODES:,}."]
    if unsteady:
        lines += [
            "",
            f"M_T of {', '.join(unsteady)} was set by hand or measured on fewer than {CLAIM_EPISODES:,} training "
            "episodes: their gate may follow its error.",
        ]
    return "\n".join(lines) + "\n"


def tuning_markdown(tuned: Tuned, by: str = "validation success") -> str:
    """Every candidate and what the choice was made by; the chosen one of each arm is bold."""
    lines = [
        f"# {tuned.comparison}: tuning on seeds {', '.join(map(str, tuned.seeds))}, {by}",
        "",
        "| arm | settings | mean | by seed |",
        "|---|---|---|---|",
    ]
    for arm, found in tuned.arms.items():
        for candidate in found.searched:
            words = " ".join(candidate.overrides)
            mean = sum(candidate.validation) / len(candidate.validation)
            by_seed = ", ".join(f"{value:.3f}" for value in candidate.validation)
            chosen = candidate.overrides == found.overrides
            lines.append(_row([arm, f"**{words}**" if chosen else words, f"{mean:.3f}", by_seed]))
    return "\n".join(lines) + "\n"


def _budget_cells(result: ArmResult) -> list[str]:
    budget = result.budget
    forward = sum(value for name, value in budget.items() if name.startswith("forward_tokens/"))
    teacher = budget.get("forward_tokens/teacher", 0.0)
    figures = [budget.get("rollouts", 0.0), budget.get("generated_tokens", 0.0), teacher, forward - teacher]
    figures += [budget.get("seconds", 0.0), result.needed.get("rollouts", 0.0)]
    return [*(f"{figure:,.0f}" for figure in figures), f"{result.recovered:.0%}"]


def _contrast_name(pair: Contrast) -> str:
    member = "" if pair.member == "policy" else f" ({pair.member})"
    return f"{pair.arm}{member} - {pair.against}"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _bar(interval: Interval) -> Bar:
    return interval.estimate, interval.low, interval.high


def _artifact_key(name: str) -> str:
    """Prefect's artifact keys hold lower case letters, digits and dashes alone."""
    return name.lower().replace(".", "-").replace("_", "-")


def _tracker(settings: CompareSettings, name: str, run: GleanerSettings) -> RunTracker:
    tracking = run.tracking.model_copy(update={"parent_run": None})
    return RunTracker.start(
        tracking, name, yaml.safe_dump(settings.model_dump(mode="json")), storage=run.storage
    )

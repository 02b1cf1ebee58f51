"""Comparison: arms x seeds at an equal budget of rollouts, paired by seed, with intervals."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import yaml
from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from rich.console import Console

from gleaner.conf.compose import compose_arms
from gleaner.conf.errors import ConfigurationError
from gleaner.conf.schema import CompareSettings, GleanerSettings
from gleaner.flows.children import run_children
from gleaner.flows.console import progress_bars
from gleaner.flows.services import prefect_server
from gleaner.models.plots import compare_plot
from gleaner.models.statistics import (
    Interval,
    PairedComparison,
    area_under_curve,
    compare_paired,
    mean_interval,
)
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.tracking import RunTracker


@dataclass(frozen=True)
class Curve:
    """Validation success of one run by its budget of rollouts, and what the run ended with."""

    rollouts_N: list[float]
    success_N: list[float]
    final: float
    recovered: float
    budget: dict[str, float]


@dataclass(frozen=True)
class ArmResult:
    """An arm over its seeds. Differences to the baseline are paired by seed; None for the baseline itself, and where
    one seed alone was run."""

    final: Interval
    area: Interval
    best_validation: Interval
    final_difference: PairedComparison | None
    area_difference: PairedComparison | None
    recovered: float
    budget: dict[str, float]


def compare(settings: CompareSettings) -> dict[str, Any]:
    """Run the comparison under a Prefect server, and print its report."""
    runs = compose_arms(settings)
    require_curves(runs)
    everything = [run for arm in runs.values() for run in arm]
    with prefect_server(RUNS_FOLDER / settings.name / "prefect-server.log"), progress_bars(everything):
        report: dict[str, Any] = compare_flow(settings)
    Console().print((RUNS_FOLDER / settings.name / "report.md").read_text(), markup=False, highlight=False)
    return report


@flow(name="compare", persist_result=False)
def compare_flow(settings: CompareSettings) -> dict[str, Any]:
    """Arms x seeds as runs of their own, then the paired report."""
    require_curves(compose_arms(settings))
    runs = {
        arm: [_as_child(run, settings) for run in members] for arm, members in compose_arms(settings).items()
    }
    train_arms([run for members in runs.values() for run in members], settings.parallel)
    curves = {arm: [read_curve(run) for run in members] for arm, members in runs.items()}
    results = {arm: arm_result(curves, arm, settings.baseline) for arm in settings.arms}
    return _report(settings, runs, curves, results)


def require_curves(runs: dict[str, list[GleanerSettings]]) -> None:
    """
    Raises:
        ConfigurationError: an arm is never validated, so there would be no curve to compare once all had run.
    """
    for arm, members in runs.items():
        if not members[0].evaluation.every:
            raise ConfigurationError(
                f"arm {arm} is never validated: set evaluation.every in common, for instance evaluation.every=20"
            )


@task(name="train_arms", persist_result=False)
def train_arms(runs: list[GleanerSettings], parallel: int) -> list[dict[str, object]]:
    """Every run in its own process; finished runs are read from the store."""
    return run_children(runs, parallel)


def read_curve(run: GleanerSettings) -> Curve:
    """A finished run's validation curve, from its journal and summary."""
    context = RunContext.of(run.run.name or "", run)
    summary = json.loads((RUNS_FOLDER / context.run_id / "summary.json").read_text())
    rollouts, success, recovered, spent = [], [], [], 0.0
    for _, entry in context.journal.entries():
        if "validation/success" in entry["metrics"]:
            rollouts.append(spent)
            success.append(entry["metrics"]["validation/success"])
        spent = entry["budget"]["rollouts"]
        recovered.append(entry["metrics"]["signal/recovered"])
    rollouts.append(spent)
    success.append(summary["validation"]["validation/success"])
    final = summary["after"].get("test/success", success[-1])
    return Curve(rollouts, success, final, sum(recovered) / max(1, len(recovered)), summary["budget"])


def arm_result(curves: dict[str, list[Curve]], arm: str, baseline: str) -> ArmResult:
    """Means over seeds, and paired differences to the baseline."""
    mine, theirs = curves[arm], curves[baseline]
    final_S = [curve.final for curve in mine]
    area_S = [area_under_curve(curve.rollouts_N, curve.success_N) for curve in mine]
    paired = arm != baseline and len(mine) > 1
    budgets = {name for curve in mine for name in curve.budget}
    return ArmResult(
        final=mean_interval(final_S),
        area=mean_interval(area_S),
        best_validation=mean_interval([max(curve.success_N) for curve in mine]),
        final_difference=compare_paired(final_S, [curve.final for curve in theirs]) if paired else None,
        area_difference=(
            compare_paired(area_S, [area_under_curve(c.rollouts_N, c.success_N) for c in theirs])
            if paired
            else None
        ),
        recovered=sum(curve.recovered for curve in mine) / len(mine),
        budget={
            name: sum(curve.budget.get(name, 0.0) for curve in mine) / len(mine) for name in sorted(budgets)
        },
    )


def _as_child(run: GleanerSettings, settings: CompareSettings) -> GleanerSettings:
    tracking = run.tracking.model_copy(update={"experiment": settings.name, "parent_run": settings.name})
    return run.model_copy(update={"tracking": tracking})


def _report(
    settings: CompareSettings,
    runs: dict[str, list[GleanerSettings]],
    curves: dict[str, list[Curve]],
    results: dict[str, ArmResult],
) -> dict[str, Any]:
    folder = RUNS_FOLDER / settings.name
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(runs.values()))[0]
    plain = {arm: asdict(result) for arm, result in results.items()}
    text = report_markdown(settings, results)
    (folder / "report.md").write_text(text)
    (folder / "report.json").write_text(json.dumps(plain, indent=1))
    compare_plot(
        {arm: [(c.rollouts_N, c.success_N) for c in members] for arm, members in curves.items()},
        folder / "compare.png",
    )
    create_markdown_artifact(text, key=f"{settings.name.lower().replace('.', '-').replace('_', '-')}-report")
    tracking = first.tracking.model_copy(update={"parent_run": None})
    tracker = RunTracker.start(
        tracking, settings.name, yaml.safe_dump(settings.model_dump(mode="json")), storage=first.storage
    )
    for arm, result in results.items():
        tracker.metrics(0, {f"{arm}/final": result.final.estimate, f"{arm}/area": result.area.estimate})
    for name in ("report.md", "report.json", "compare.png"):
        tracker.artifact(folder / name)
    tracker.finish("FINISHED")
    return plain


def report_markdown(settings: CompareSettings, results: dict[str, ArmResult]) -> str:
    """The report as a table: one row an arm."""
    lines = [
        f"# {settings.name}: {len(settings.seeds)} seeds, {settings.budget_rollouts:,} rollouts a run",
        "",
        "Means over seeds with 95 % t intervals; area is under the validation curve.",
        f"Differences are to `{settings.baseline}`, paired by seed.",
        "",
        "| arm | final success | difference | p (sign flip) | area | difference | rollouts | tokens | recovered |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, result in results.items():
        final, area = result.final_difference, result.area_difference
        cells = [
            arm,
            str(result.final),
            str(final.difference) if final else "",
            f"{final.p_sign_flip:.3f}" if final else "",
            str(result.area),
            str(area.difference) if area else "",
            f"{result.budget.get('rollouts', 0):,.0f}",
            f"{result.budget.get('generated_tokens', 0):,.0f}",
            f"{result.recovered:.0%}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if len(settings.seeds) < 8:
        lines += ["", f"{len(settings.seeds)} seeds show mechanics, not a gain: a claim needs at least 8."]
    return "\n".join(lines) + "\n"

"""The step loop that every method shares: preflight, start, resume, steps, budget, evaluation, report.

A method gives one function: from where a run stands to the journal entry of its next step. Everything durable happens
inside phases (tasks/), so killing this loop anywhere loses at most the shard in flight.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect import task

from gleaner.conf.compose import run_identity, run_name
from gleaner.conf.schema import GleanerSettings
from gleaner.tasks.context import RunContext
from gleaner.tasks.evaluating import Evaluation, evaluate_version
from gleaner.tasks.faults import fault_point
from gleaner.tasks.phase import GPU_TAGS, inline_phases, is_retryable
from gleaner.tasks.preflight import preflight
from gleaner.tasks.publishing import publish
from gleaner.tasks.reporting import Reporter
from gleaner.tasks.sampling import Rollouts
from gleaner.tasks.scoring import Scores
from gleaner.tasks.signals import Batch, Signal
from gleaner.tasks.starting import start_key, start_policy
from gleaner.tasks.updating import Updated


@dataclass(frozen=True)
class Progress:
    """Where a run stands: what the journal's last line says.

    Attributes:
        step: index of the next step.
        version: of the policy that samples it.
        cursor: place in the run's order of prompts.
        budget: cumulative: rollouts and tokens sampled (lost attempts included), forward tokens by role.
        method_state: what a method carries from step to step (GATS' queue and latch).
    """

    step: int
    version: str
    cursor: int = 0
    budget: dict[str, float] = field(default_factory=dict)
    method_state: dict[str, Any] = field(default_factory=dict)


PHASES = ("sample", "verify", "score", "signal", "update")
"""Whose work is timed; the rest of a step's wall time is orchestration."""

Companions = Callable[[RunContext, Progress], dict[str, tuple[RunContext, str]]]
"""Policies that a method trains beside the run's own, by name: each with its context and its version."""

StepFunction = Callable[[RunContext, Progress], dict[str, Any]]
"""A method's algorithm: samples, scores and updates once, and returns `entry_of(...)`."""


@dataclass(frozen=True)
class RunSummary:
    """What a flow returns: names and figures, never tensors."""

    run_id: str
    version: str
    steps: int
    budget: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    policy_folder: str
    report_folder: str
    mlflow_run: str | None
    validated: dict[str, float] = field(default_factory=dict)
    """The last version on the validation prompts, as steps have it for theirs (a peer's under peer/…); empty where the
    settings ask for no validation."""
    peer_before: dict[str, float] = field(default_factory=dict)
    peer_after: dict[str, float] = field(default_factory=dict)


def alone(_context: RunContext, _progress: Progress) -> dict[str, tuple[RunContext, str]]:
    """The companions of a method that trains one policy."""
    return {}


def train(
    settings: GleanerSettings, step_function: StepFunction, companions: Companions = alone
) -> RunSummary:
    """Run, or take up, a training run.

    Raises:
        ConfigurationError: the settings cannot work, or differ from those that the run was started with.
    """
    context = RunContext.of(run_name(settings), settings)
    checked = preflight(context)
    first = Progress(step=0, version=start_key(context))
    others = companions(context, first)
    for other, _ in others.values():
        preflight(other)
    context.journal.header(run_identity(settings))
    with Reporter(context, checked) as reporter:
        reporter.status("building the policy" if settings.warmstart is None else "warm start")
        start = start_policy(context)
        reporter.warm_start(start["metrics"])
        for name, (other, _) in others.items():
            reporter.status(f"building the {name}")
            start_policy(other)
        before = test(context, start["version"], reporter, step=0)
        others_before = test_companions(others, reporter, step=0)
        reporter.status("training")
        reporter.follow(context.journal)
        progress = standing(context, start["version"])
        while not is_finished(settings, progress):
            if settings.run.steps_per_task == 1:
                take_step(context, step_function, progress, companions)
            else:
                until = min(progress.step + settings.run.steps_per_task, settings.run.steps)
                take_steps(context, step_function, start["version"], until, companions)
            reporter.follow(context.journal)
            progress = standing(context, start["version"])
        validated = validate(context, progress, companions) if settings.evaluation.every else {}
        reporter.tracker.metrics(progress.step, validated)
        after = test(context, progress.version, reporter, step=progress.step)
        others_after = test_companions(companions(context, progress), reporter, progress.step)
        for name, (other, version) in companions(context, progress).items():
            publish(other, version, name)
        return conclude(context, progress, before, after, reporter, validated, others_before, others_after)


def take_step(
    context: RunContext, step_function: StepFunction, before: Progress, companions: Companions = alone
) -> None:
    """One step: the evaluation that is due, the method's algorithm, and its line in the journal."""
    every = context.settings.evaluation.every
    validation = validate(context, before, companions) if every and before.step % every == 0 else {}
    started = time.perf_counter()
    entry = step_function(context, before)
    entry["metrics"] |= validation | _timing(entry["metrics"], time.perf_counter() - started)
    fault_point("journal", before.step, "before_append")
    context.journal.append(before.step, entry)
    fault_point("journal", before.step, "after_append")


def validate(context: RunContext, at: Progress, companions: Companions) -> dict[str, float]:
    """validation/… of the run's policy, and of every companion's under its name."""
    prompts = context.settings.evaluation.validation_prompts
    metrics = dict(evaluate_version(context, at.version, "validation", prompts).metrics)
    for name, (other, version) in companions(context, at).items():
        found = evaluate_version(other, version, "validation", prompts).metrics
        metrics |= {f"{name}/{metric}": value for metric, value in found.items()}
    return metrics


@task(name="steps", tags=GPU_TAGS, retries=2, retry_delay_seconds=5, retry_condition_fn=is_retryable)
def take_steps(
    context: RunContext,
    step_function: StepFunction,
    start: str,
    until: int,
    companions: Companions = alone,
) -> None:
    """Short steps in one task, up to step `until`; each is journalled, so a retry goes on where the last one ended."""
    with inline_phases():
        while (progress := standing(context, start)).step < until:
            if is_finished(context.settings, progress):
                return
            take_step(context, step_function, progress, companions)


def standing(context: RunContext, start: str) -> Progress:
    """Where the run stands, by its journal."""
    last = context.journal.last()
    if last is None:
        return Progress(step=0, version=start)
    step, entry = last
    return Progress(step + 1, entry["version"], entry["cursor"], entry["budget"], entry["method_state"])


def is_finished(settings: GleanerSettings, progress: Progress) -> bool:
    """All steps are journalled, by whichever process, or the budget is spent."""
    limit = settings.run.budget_rollouts
    spent = limit is not None and progress.budget.get("rollouts", 0) >= limit
    return spent or progress.step >= settings.run.steps


def entry_of(
    before: Progress,
    batch: Batch,
    cursor: int,
    signal: Signal,
    updated: Updated,
    scores: list[Scores],
    method_state: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A step's line in the journal."""
    budget = dict(before.budget)
    _add(budget, "rollouts", sum(part.attempted_rollouts for part in batch.rollouts))
    _add(budget, "generated_tokens", sum(part.attempted_tokens for part in batch.rollouts))
    for part in scores:
        _add(budget, f"forward_tokens/{part.role}", part.forward_tokens)
    metrics = {
        **_mean_metrics(batch.rollouts),
        **signal.metrics,
        **{f"update/{name}" if "/" not in name else name: value for name, value in updated.metrics.items()},
        "sampling/rounds": float(len(batch.rollouts)),
        "seconds/sample": sum(part.seconds for part in batch.rollouts),
        "seconds/verify": sum(part.seconds for part in batch.verdicts),
        "seconds/score": sum(part.seconds for part in scores),
        **{f"forward_tokens/{part.role}": float(part.forward_tokens) for part in scores},
        "seconds/signal": signal.seconds,
        "seconds/update": updated.seconds,
    }
    return {
        "prompts": [part.prompts for part in batch.rollouts],
        "rollouts": list(batch.shards),
        "verdicts": [part.table for part in batch.verdicts],
        "signal": signal.ref,
        "parent": before.version,
        "version": updated.version,
        "cursor": cursor,
        "method_state": method_state if method_state is not None else before.method_state,
        "counts": {
            "rollouts": sum(part.rollouts for part in batch.rollouts),
            "scored": sum(part.scored for part in batch.verdicts),
            "successes": sum(part.successes for part in batch.verdicts),
        },
        "ledger": list(signal.ledger),
        "budget": budget,
        "metrics": metrics,
    }


def success_of(batch: Batch) -> float | None:
    """Training success of a step: successes over scored episodes, by the verifier; None if nothing was scored."""
    scored = sum(part.scored for part in batch.verdicts)
    return sum(part.successes for part in batch.verdicts) / scored if scored else None


def test(context: RunContext, version: str, reporter: Reporter, step: int) -> Evaluation | None:
    """Success on the test prompts; None if the settings ask for none."""
    prompts = context.settings.evaluation.test_prompts
    if not prompts:
        return None
    reporter.status("test")
    found = evaluate_version(context, version, "test", prompts)
    reporter.test(step, found)
    return found


def test_companions(
    companions: dict[str, tuple[RunContext, str]], reporter: Reporter, step: int
) -> dict[str, float]:
    """The same test of the policies beside the run's own; metrics of all of them, named after each."""
    metrics: dict[str, float] = {}
    for name, (context, version) in companions.items():
        prompts = context.settings.evaluation.test_prompts
        if not prompts:
            continue
        reporter.status(f"test of the {name}")
        found = evaluate_version(context, version, "test", prompts).metrics
        metrics |= found
        reporter.tracker.metrics(step, {f"{name}/{metric}": value for metric, value in found.items()})
    return metrics


def conclude(
    context: RunContext,
    progress: Progress,
    before: Evaluation | None,
    after: Evaluation | None,
    reporter: Reporter,
    validated: dict[str, float],
    peer_before: dict[str, float],
    peer_after: dict[str, float],
) -> RunSummary:
    """Publish the policy, finish the report, and leave the summary in the run's folder."""
    reporter.status("publishing")
    published = publish(context, progress.version)
    report = reporter.finish(before, after, published)
    summary = RunSummary(
        run_id=context.run_id,
        version=progress.version,
        steps=progress.step,
        budget=progress.budget,
        before=before.metrics if before else {},
        after=after.metrics if after else {},
        policy_folder=published.folder,
        report_folder=report.folder,
        mlflow_run=report.mlflow_run,
        validated=validated,
        peer_before=peer_before,
        peer_after=peer_after,
    )
    (Path(report.folder) / "summary.json").write_text(json.dumps(asdict(summary), indent=1))
    return summary


def _timing(metrics: dict[str, float], wall: float) -> dict[str, float]:
    """What a step spent beside the work of its phases: Prefect, the store, the journal. A step found in the store
    spent nothing."""
    phases = sum(metrics[f"seconds/{name}"] for name in PHASES)
    rest = max(0.0, wall - phases)
    return {
        "seconds/step": wall,
        "seconds/orchestration": rest,
        "orchestration_share": rest / wall if wall else 0.0,
    }


def _mean_metrics(parts: tuple[Rollouts, ...]) -> dict[str, float]:
    """Rollout metrics of a step's rounds, weighted by their rollouts."""
    total = sum(part.rollouts for part in parts)
    names = parts[0].metrics
    return {name: sum(part.metrics[name] * part.rollouts for part in parts) / total for name in names}


def _add(budget: dict[str, float], name: str, value: float) -> None:
    budget[name] = budget.get(name, 0) + value

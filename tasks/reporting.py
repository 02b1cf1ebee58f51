"""What people see of a run: metrics and artifacts in MLflow, progress and tables in Prefect, a folder on this disk."""

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import yaml
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException

from gleaner.models import tables
from gleaner.models.plots import before_after_plot, learning_plot, ledger_plot
from gleaner.models.records import Segment
from gleaner.models.rollout_page import ShownGroup, rollout_page
from gleaner.tasks.context import RunContext
from gleaner.tasks.evaluating import Evaluation, example_rollouts
from gleaner.tasks.journal import Journal
from gleaner.tasks.publishing import RUNS_FOLDER, Published
from gleaner.tasks.sampling import load_rollouts
from gleaner.tasks.tracking import RunTracker

PROGRESS_SECONDS = 3.0
"""A progress artifact is updated at most this often: each update is a call to the Prefect API."""
SHOWN_ROLLOUTS = 8
SHOWN_GROUPS = 6
PREFECT_TROUBLE = (PrefectException, httpx.HTTPError, OSError)
"""A page that cannot be updated is no reason to stop a run."""


@dataclass(frozen=True)
class Report:
    """Folder with plots, summary and sample rollouts; id of the MLflow run (None if MLflow never answered)."""

    folder: str
    mlflow_run: str | None


def read_status(run_id: str) -> str:
    """What the run is doing, in a word or two; empty if it says nothing."""
    try:
        return (RUNS_FOLDER / run_id / "status").read_text()
    except FileNotFoundError:
        return ""


class Reporter:
    """Tells MLflow, Prefect and a local folder what a run does. Nothing here can fail a run but its first lines."""

    def __init__(self, context: RunContext, sizes: dict[str, Any]) -> None:
        self.context = context
        self.folder = RUNS_FOLDER / context.run_id
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = context.settings
        settings_yaml = yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
        (self.folder / "settings.yaml").write_text(settings_yaml)
        self.tracker = RunTracker.start(
            settings.tracking, context.run_id, settings_yaml, storage=settings.storage
        )
        splits = {split: int(sizes[split]) for split in ("train", "validation", "test")}
        self.tracker.data_set(context.environment.name, context.environment_digest, splits)
        self._entries: list[dict[str, Any]] = []
        self._progress: Any = None  # Prefect types its synchronous calls as coroutines, too
        self._last_update = 0.0
        self._finished = False

    def __enter__(self) -> Self:
        self._progress = create_progress_artifact(
            0.0, key=_artifact_key(self.context, "progress"), description="starting"
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._finished:
            self.tracker.finish("FAILED" if kind is not None and issubclass(kind, Exception) else "KILLED")

    def status(self, words: str) -> None:
        """Say what the run is doing now, for whoever watches it."""
        (self.folder / "status").write_text(words)

    def warm_start(self, metrics: dict[str, float]) -> None:
        """Pass on the warm start's metrics."""
        self.tracker.metrics(0, metrics)

    def follow(self, journal: Journal) -> None:
        """Pass on the steps that were journalled since, by whichever process. A step that MLflow already has is not
        told twice."""
        for step, entry in journal.entries(len(self._entries)):
            self._step(step, entry)

    def _step(self, step: int, entry: dict[str, Any]) -> None:
        self._entries.append(entry)
        budget = {f"budget/{name}": value for name, value in entry["budget"].items()}
        self.tracker.metrics(step, {**entry["metrics"], **budget})
        now = time.monotonic()
        if self._progress is not None and now - self._last_update > PROGRESS_SECONDS:
            self._last_update = now
            done, steps = len(self._entries), max(1, self.context.settings.run.steps)
            success = entry["metrics"].get("success/mean", float("nan"))
            self._show(
                update_progress_artifact,
                self._progress,
                progress=min(100.0, 100.0 * done / steps),
                description=f"step {done} of {steps}, training success {success:.3f}",
            )

    def test(self, step: int, evaluation: Evaluation) -> None:
        self.tracker.metrics(step, evaluation.metrics)

    def finish(self, before: Evaluation | None, after: Evaluation | None, published: Published) -> Report:
        """Plots, ledger, sample rollouts and a summary; then MLflow's status."""
        self._write_plots(before, after)
        self._write_tables(before, after)
        self._write_page()
        summary = self._summary(before, after, published)
        (self.folder / "summary.md").write_text(summary)
        self.tracker.artifact(self.folder / "summary.md")
        self._show(
            create_markdown_artifact,
            summary,
            key=_artifact_key(self.context, "summary"),
            description="summary of the run",
        )
        self._finished = True
        self.status("done")
        ended = self.tracker.finish("FINISHED")
        if ended["url"]:
            self._show(
                create_link_artifact,
                ended["url"],
                link_text="MLflow run",
                key=_artifact_key(self.context, "mlflow"),
            )
        if self._progress is not None:
            self._show(update_progress_artifact, self._progress, progress=100.0, description=ended["message"])
        return Report(str(self.folder), ended["mlflow_run_id"])

    def _show(self, artifact: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(*PREFECT_TROUBLE):
            artifact(*args, **kwargs)

    def _write_plots(self, before: Evaluation | None, after: Evaluation | None) -> None:
        if self._entries:
            learning_plot(self._entries, self.folder / "learning.png", title=self.context.run_id)
            ledger_plot(self._entries, self.folder / "ledger.png", title=self.context.run_id)
        if before is not None and after is not None:
            before_after_plot(
                {self.context.run_id: (_bar(before), _bar(after))}, self.folder / "before_after.png"
            )
        for plot in sorted(self.folder.glob("*.png")):
            self.tracker.artifact(plot, "plots")

    def _write_tables(self, before: Evaluation | None, after: Evaluation | None) -> None:
        ledger = [
            {"step": step, **line} for step, entry in enumerate(self._entries) for line in entry["ledger"]
        ]
        self.tracker.table("ledger", ledger)
        shown = [{"when": "before", **row} for row in (before.examples if before else ())]
        shown += [{"when": "after", **row} for row in (after.examples if after else ())]
        shown += [{"when": "training", **row} for row in self._training_rollouts()]
        (self.folder / "rollouts.json").write_text(json.dumps(shown, indent=1, ensure_ascii=False))
        rows = [{**row, "messages": _conversation(row["messages"])} for row in shown]
        self.tracker.table("rollouts", rows)
        self._show(
            create_table_artifact,
            rows,
            key=_artifact_key(self.context, "rollouts"),
            description="sample rollouts and verdicts",
        )

    def _write_page(self) -> None:
        """Groups of the last step side by side, with their images."""
        if not self._entries:
            return
        last, store = self._entries[-1], self.context.store
        verdicts = {
            (verdict.prompt_id, verdict.sample): verdict
            for table in last["verdicts"]
            for verdict in store.get_rows(tables.VERDICTS, table)
        }
        members: dict[str, list[Segment]] = {}
        for segment in load_rollouts(self.context, last["rollouts"]):
            members.setdefault(segment.prompt_id, []).append(segment)
        groups = [
            ShownGroup(
                prompt.prompt_id,
                prompt.messages,
                [(s, verdicts.get((s.prompt_id, s.sample))) for s in members.get(prompt.prompt_id, ())],
            )
            for table in last["prompts"]
            for prompt in store.get_rows(tables.PROMPTS, table)
        ]
        title = f"{self.context.run_id}: rollouts of step {len(self._entries) - 1}"
        page = self.folder / "rollouts.html"
        page.write_text(rollout_page(title, groups[:SHOWN_GROUPS], store.get_bytes))
        self.tracker.artifact(page)

    def _training_rollouts(self) -> list[dict[str, Any]]:
        if not self._entries:
            return []
        last, store = self._entries[-1], self.context.store
        verdicts = store.get_rows(tables.VERDICTS, last["verdicts"][0])
        shards = tuple(last["rollouts"])
        return example_rollouts(self.context, last["prompts"][0], shards, verdicts, SHOWN_ROLLOUTS)

    def _summary(self, before: Evaluation | None, after: Evaluation | None, published: Published) -> str:
        lines = [f"# {self.context.run_id}", ""]
        for name, found in (("before", before), ("after", after)):
            if found is not None:
                lines.append(
                    f"- test success {name}: {found.success:.3f}, 95 % interval {found.low:.3f} to {found.high:.3f} "
                    f"({found.prompts} prompts x {found.samples})"
                )
        if self._entries:
            last = self._entries[-1]
            budget = ", ".join(f"{name} {value:,.0f}" for name, value in sorted(last["budget"].items()))
            lines += [f"- steps: {len(self._entries)}", f"- budget: {budget}"]
            recovered = last["metrics"].get("signal/recovered", 0.0)
            lines.append(f"- all-fail groups that moved the policy in the last step: {recovered:.0%}")
        lines += [
            f"- policy: `{published.folder}`",
            f"- plots and rollouts: `{self.folder}` (`rollouts.html`: groups side by side)",
        ]
        return "\n".join(lines) + "\n"


def _bar(evaluation: Evaluation) -> tuple[float, float, float]:
    return evaluation.success, evaluation.low, evaluation.high


def _conversation(messages: list[dict[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {_in_words(message['content'])}" for message in messages)


def _in_words(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return " ".join("[image]" if part["type"] == "image" else part["text"] for part in content)


def _artifact_key(context: RunContext, name: str) -> str:
    """Prefect's artifact keys hold lower case letters, digits and dashes alone."""
    run = "".join(character if character.isalnum() else "-" for character in context.run_id.lower())
    return f"{run}-{name}"

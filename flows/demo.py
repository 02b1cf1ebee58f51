"""The demonstration: two tiny policies learn by GRPO from a warm start, within minutes on two cores."""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from gleaner.conf.compose import compose, run_name
from gleaner.flows.children import prepare_children, run_children
from gleaner.flows.console import progress_bars
from gleaner.flows.services import prefect_server
from gleaner.models.plots import before_after_plot, learning_plot
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER

EXPERIMENTS = {"demo-household": "household", "demo-reasoning": "number_filtering"}
FOLDER = Path(".gleaner/demo")


def demo() -> None:
    """Train, test before and after, and show where everything is."""
    console = Console()
    started = time.monotonic()
    runs = [
        compose([f"experiment={experiment}", f"run.name={name}", "tracking.experiment=demo"])
        for name, experiment in EXPERIMENTS.items()
    ]
    console.print(
        "Two policies of 0.1 to 0.3 M parameters, each: warm start on weak demonstrations, then GRPO."
    )
    console.print(
        "Starting a Prefect server, then both runs; a run that has finished before is read, not repeated."
    )
    prepare_children()
    with prefect_server(FOLDER / "prefect-server.log"), progress_bars(runs):
        summaries = run_children(runs, parallel=2)
    FOLDER.mkdir(parents=True, exist_ok=True)
    bars = {str(found["run_id"]): (_bar(found["before"]), _bar(found["after"])) for found in summaries}
    before_after_plot(bars, FOLDER / "before_after.png")
    for settings in runs:
        context = RunContext.of(run_name(settings), settings)
        learning_plot(
            [entry for _, entry in context.journal.entries()],
            FOLDER / f"{context.run_id}.png",
            title=context.run_id,
        )
        _show_example(console, context.run_id)
    console.print(_results(bars))
    console.print(f"{(time.monotonic() - started) / 60:.1f} minutes. Plots: {FOLDER}/*.png", highlight=False)
    for settings in runs:
        name = run_name(settings)
        console.print(
            f"{name}: plots and rollouts in {RUNS_FOLDER / name}, policy in {RUNS_FOLDER / name}/policy",
            highlight=False,
        )
    console.print(
        "Rollouts: .venv/bin/gleaner bank show demo-household     Pages (Prefect, MLflow): make ui",
        highlight=False,
    )


def _bar(metrics: Any) -> tuple[float, float, float]:
    return metrics["test/success"], metrics["test/low"], metrics["test/high"]


def _results(bars: dict[str, tuple[tuple[float, float, float], tuple[float, float, float]]]) -> Table:
    table = Table("run", "test success before", "after", "95 % intervals")
    for name, (before, after) in bars.items():
        apart = "do not overlap" if before[2] < after[1] else "overlap"
        cells = [f"{success:.3f} [{low:.3f}, {high:.3f}]" for success, low, high in (before, after)]
        table.add_row(name, *cells, apart)
    return table


def _show_example(console: Console, run_id: str) -> None:
    """A held-out prompt, before and after."""
    rows = json.loads((RUNS_FOLDER / run_id / "rollouts.json").read_text())
    prompts = {row["prompt_id"]: row for row in rows if row["when"] == "before"}
    after = [row for row in rows if row["when"] == "after" and row["prompt_id"] in prompts]
    if not after:
        return
    # One whose verdict changed says the most.
    shown = next(
        (row for row in after if row["success"] and not prompts[row["prompt_id"]]["success"]), after[0]
    )
    for when, row in (("before", prompts[shown["prompt_id"]]), ("after", shown)):
        text = "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
        verdict = "success" if row["success"] else "failure"
        console.print(
            Panel(
                escape(text), title=f"{run_id}, a held-out prompt {when} GRPO: {verdict}", title_align="left"
            )
        )

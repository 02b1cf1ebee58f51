"""What a run looks like in a terminal: bars that follow the journals, and the figures at the end."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from gleaner.conf.compose import run_name
from gleaner.conf.schema import GleanerSettings
from gleaner.flows.loop import RunSummary
from gleaner.flows.services import prefect_server
from gleaner.tasks.context import RunContext
from gleaner.tasks.publishing import RUNS_FOLDER
from gleaner.tasks.reporting import read_status

LOOK_SECONDS = 0.5

console = Console()


def run_in_terminal(flow: Callable[[GleanerSettings], RunSummary], settings: GleanerSettings) -> None:
    """Run a flow under a progress bar, and print what came of it."""
    # A server of its own: two runs that start Prefect's temporary one at once can take the same port.
    with prefect_server(RUNS_FOLDER / "prefect-server.log"), progress_bars([settings]):
        summary = flow(settings)
    print_summary(summary)


@contextlib.contextmanager
def progress_bars(runs: Sequence[GleanerSettings]) -> Iterator[None]:
    """Bars of runs, in this process or in others: they read the journals and the runs' status files."""
    columns = (
        TextColumn("[bold]{task.fields[run]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
    )
    ended = threading.Event()
    with Progress(*columns, console=console) as bars:
        follow = threading.Thread(target=_follow, args=(bars, runs, ended), daemon=True)
        follow.start()
        try:
            yield
        finally:
            ended.set()
            follow.join(timeout=5)


def print_summary(summary: RunSummary) -> None:
    for when, metrics in (("before", summary.before), ("after", summary.after)):
        if metrics:
            success, low, high = (metrics[f"test/{name}"] for name in ("success", "low", "high"))
            console.print(
                f"test success {when}: [bold]{success:.3f}[/bold] (95 % interval {low:.3f} to {high:.3f})"
            )
    console.print(f"policy            {summary.policy_folder}", highlight=False)
    console.print(f"plots, rollouts   {summary.report_folder}", highlight=False)
    console.print(f"bank              gleaner bank show {summary.run_id}", highlight=False)


def _follow(bars: Progress, runs: Sequence[GleanerSettings], ended: threading.Event) -> None:
    contexts = [RunContext.of(run_name(settings), settings) for settings in runs]
    ids = [
        bars.add_task("starting", total=context.settings.run.steps, run=context.run_id)
        for context in contexts
    ]
    finished = False
    while not finished:
        finished = ended.wait(LOOK_SECONDS)  # one last look after the end
        for context, bar in zip(contexts, ids, strict=True):
            done, words = _look(context)
            bars.update(bar, completed=done, description=words)


def _look(context: RunContext) -> tuple[int, str]:
    last: tuple[int, dict[str, Any]] | None = context.journal.last()
    status = read_status(context.run_id)
    if last is None:
        return 0, status
    metrics = last[1]["metrics"]
    success, all_fail = (metrics.get(name, float("nan")) for name in ("success/mean", "groups/all_fail"))
    words = f"success {success:.2f}, all-fail {all_fail:.2f}"
    return last[0] + 1, f"{words} · {status}" if status else words
